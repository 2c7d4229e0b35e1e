"""Prometheus metrics of a server, in a registry of its own."""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gym_rm.types import Workload

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 150)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters and histograms of a server; labels never have text of a request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "gym_rm_requests", "Answered requests by route and status.", ["route", "status"], registry=registry
        )
        self.latency = Histogram(
            "gym_rm_request_seconds", "Seconds from the headers to the reply.", ["route"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.refusals = Counter("gym_rm_refusals", "Refused requests by reason.", ["reason"], registry=registry)
        self.conversations = Counter("gym_rm_conversations", "Scored conversations.", registry=registry)
        self.failed_rows = Counter("gym_rm_failed_rows", "Conversations without a score.", registry=registry)
        self.work = {
            each.name: Counter(f"gym_rm_{each.name}", f"Sum of Workload.{each.name}.", registry=registry)
            for each in dataclasses.fields(Workload)
        }
        self.batch_size = Histogram(
            "gym_rm_batch_size", "Conversations that were scored together.", buckets=SIZES, registry=registry
        )
        self.queue = Gauge(
            "gym_rm_queue_conversations", "Conversations that are accepted and not yet answered.", registry=registry
        )
        self.weight_updates = Counter("gym_rm_weight_updates", "Updates of the weights.", registry=registry)

    def page(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
