"""Seconds of a device by class of kernel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

# The first class whose pattern is in the name of a kernel, or on a CPU of an operation.
CLASSES = {
    "attention": r"flex_attention|triton_tem|gym_rm::attend|fmha|flash|_forward\b|_backward_(queries|keys)",
    "products": r"gemm|cublas|cutlass|nvjet|xmma|splitk|::(add)?mm|::linear|scaled_mm|int_mm|onednn|mkldnn",
    "norms and rotation": r"norm|rotate|rotary",
    "activation": r"silu|swiglu",
    "copies": r"copy|memcpy|memset|index|gather|scatter|cat\b|CatArray|fill|arange|::(to|contiguous|pad|clone)\b",
    "elementwise": r"elementwise|::(add|mul|neg|sub|div|sum|addc)",
}
LONGEST = 12  # kernels that are named
STAGE, OPERATION = re.compile(r"gym_rm: |ProfilerStep|Optimizer\.|Activity Buffer|Context Sync"), re.compile(r"\w+::")


def kernels_of(device: torch.device, work: Callable[[], Any], trace: Path | None = None) -> list[tuple[str, float]]:
    """Return name and seconds of each kernel that runs in `work`; on a CPU, of each operation without those within.

    `trace` is a file for the trace, or None.
    """
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        if cuda:
            torch.cuda.synchronize()
    events: Any = profile.events() or []
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    if cuda:  # without the stages of the package, which torch shows on the device too
        kernels = [
            each
            for each in events
            if each.device_type == DeviceType.CUDA and not (each.is_user_annotation or STAGE.match(each.name))
        ]
        return [(each.name, 1e-6 * each.time_range.elapsed_us()) for each in kernels]
    return [(each.name, 1e-6 * each.self_cpu_time_total) for each in events if OPERATION.match(each.name)]


def class_of(name: str) -> str:
    return next((each for each, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def by_class(kernels: list[tuple[str, float]], batches: int, layers: int) -> dict[str, Any]:
    """Return launches (on a CPU, operations), and seconds by class and of the longest kernels, of a batch."""
    classes: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, seconds in kernels:
        classes[class_of(name)] += seconds / batches
        names[name[:100]] += seconds / batches
    return {
        "launches_of_a_batch": len(kernels) / batches,
        "launches_of_a_layer": len(kernels) / batches / layers,
        "kernel_seconds": sum(classes.values()),
        "seconds_by_class": {name: classes[name] for name in (*CLASSES, "other")},
        "longest_kernels": dict(names.most_common(LONGEST)),
    }
