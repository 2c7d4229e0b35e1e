"""Measure the server: one post after the other, many at the same time, and the load at which it starts to refuse.

    python benchmarks/server.py [--size 25M] [--clients 256] [--rounds 3]

Every request is one `POST /v1/rewards` with one conversation of ../shared/data, over a kept connection of its client.
The server is a process of its own. The workloads differ in how many conversations share their beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import results
import workloads
from rich.console import Console
from rich.table import Table

HEADERS = {"content-type": "application/json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25M", choices=list(workloads.SHAPES))
    parser.add_argument("--clients", type=int, default=256, help="number of requests at the same time")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each workload")
    parser.add_argument("--singles", type=int, default=32, help="number of posts one after the other")
    parser.add_argument("--max-queue", type=int, default=1024, help="limit of the server, for the search of its load")
    parser.add_argument("--growing", action="store_true", help="also double the load until the server refuses")
    parser.add_argument("--only", default="", help="part of the name of a workload")
    args = workloads.parse_args(parser)
    console = Console(width=120)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.size)
        process, url = start(folder, args.max_queue)
        try:
            results.save(args.save, {"clients": args.clients} | asyncio.run(measure(url, args, console)))
        finally:
            process.terminate()
            process.wait(60)


def save_model(folder: Path, size: str) -> None:
    tokenizer = workloads.tokenizer()
    workloads.reward_model(size, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start(folder: str, max_queue: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "gym_rm", "serve", folder, "--port", "0", "--option", f"max_queue={max_queue}"]
    command += ["--option", "request_timeout=3600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def conversations(name: str, count: int) -> list[workloads.Conversation]:
    if name == "nothing shared":
        return workloads.gsm8k_singles(count)
    source, _, size = name.rpartition(" groups of ")
    make = workloads.gsm8k_groups if source == "GSM8K" else workloads.hh_groups
    first = 0 if source != "HH, long" else 40
    return make(-(-count // int(size)), int(size), first=first)[:count]


NAMES = [
    "nothing shared",
    "GSM8K groups of 8",
    "HH, long groups of 8",
    "HH, long groups of 16",
    "HH, long groups of 64",
]


async def measure(url: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as client:
        table = Table("workload", "one by one /s", "together /s", "speed-up", "mean batch", "p50 s", "p95 s", "p99 s")
        for name in NAMES:
            if args.only not in name:
                continue
            bodies = [json.dumps({"conversations": [each]}).encode() for each in conversations(name, args.clients)]
            await together(client, bodies[:8])
            found[name.replace(" groups", ", groups")] = of = await compare(client, bodies, args)
            table.add_row(name, *(f"{value:.2f}" for value in of.values()))
        console.print(table)
        if args.only or not args.growing:
            return found
        bodies = [json.dumps({"conversations": [each]}).encode() for each in conversations(NAMES[1], 1024)]
        table = Table(
            "clients at a time", "answered /s", "refused", "p50 s", "p99 s", title="growing load, GSM8K groups of 8"
        )
        load, refused = args.clients, 0
        while not refused and load <= 16 * args.max_queue:
            wanted = [bodies[k % len(bodies)] for k in range(load)]
            seconds, latencies, statuses = await together(client, wanted)
            refused = statuses[429] + statuses[503]
            latencies = latencies or [float("nan")]
            table.add_row(
                f"{load}", f"{statuses[200] / seconds:.1f}", f"{refused}", f"{quantile(latencies, 50):.2f}",
                f"{quantile(latencies, 99):.2f}",
            )  # fmt: skip
            load *= 2
        console.print(table)
    return found


async def compare(client: httpx.AsyncClient, bodies: list[bytes], args: argparse.Namespace) -> dict[str, float]:
    """Return the numbers of a workload: medians over the rounds."""
    rates: list[tuple[float, float]] = []
    sizes, latencies = [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        for body in bodies[:: max(1, len(bodies) // args.singles)][: args.singles]:
            await post(client, body)
        alone = args.singles / (time.perf_counter() - start)
        before = await batches(client)
        seconds, times, statuses = await together(client, bodies)
        assert set(statuses) == {200}, statuses
        after = await batches(client)
        rates.append((alone, len(bodies) / seconds))
        sizes.append((after[1] - before[1]) / (after[0] - before[0]))
        latencies += times
    alone, many = (statistics.median(column) for column in zip(*rates, strict=True))
    found = {"one by one": alone, "together": many, "times": many / alone, "mean batch": statistics.median(sizes)}
    return found | {f"p{percent}": quantile(latencies, percent) for percent in (50, 95, 99)}


async def together(client: httpx.AsyncClient, bodies: list[bytes]) -> tuple[float, list[float], Counter[int]]:
    """Post all bodies at the same time; return the seconds, the latencies of the answered ones, and the statuses."""
    start = time.perf_counter()
    results = await asyncio.gather(*(post(client, body) for body in bodies))
    seconds = time.perf_counter() - start
    return seconds, [each for each, status in results if status == 200], Counter(status for _, status in results)


async def post(client: httpx.AsyncClient, body: bytes) -> tuple[float, int]:
    start = time.perf_counter()
    reply = await client.post("/v1/rewards", content=body, headers=HEADERS)
    return time.perf_counter() - start, reply.status_code


async def batches(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return how many batches the server has scored, and how many conversations."""
    text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("gym_rm_batch_size"))
    return float(values["gym_rm_batch_size_count"]), float(values["gym_rm_batch_size_sum"])


def quantile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


if __name__ == "__main__":
    main()
