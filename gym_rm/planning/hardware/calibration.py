"""A device with the rates that were measured on this machine, and the file that keeps them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.devices import CPU, KINDS, Device, Table
from gym_rm.planning.quantities import Basis, Quantity, assumed

if TYPE_CHECKING:
    import torch

BLOCKS = 7  # of calls, whose median counts: the best block is what longer work does not get
SECONDS = 0.2  # of one measurement

_ADAPTER = pydantic.TypeAdapter(Device)


def calibrate() -> Device:
    """Measure products, memory and the overhead of operations, store the numbers and return them: about ten seconds.

    The first GPU is measured if torch sees any, else the CPU with the threads that torch uses now. Everything else,
    such as attention and the links between GPUs, stays as in the table. The caller's random numbers stay as they are.

    Raises:
        ConfigError: the file cannot be written.
    """
    import torch

    hardware = fingerprint()
    with torch.inference_mode(), torch.random.fork_rng():
        device = replace(_base(hardware), **_measure(hardware))
    file = calibration_path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_ADAPTER.dump_json(device, indent=1))
    except OSError as error:
        raise ConfigError(f"cannot write the calibration to {str(file)!r}: {error}.") from error
    return device


def stored_device() -> Device:
    """Return what `calibrate` measured on this hardware.

    Raises:
        ConfigError: nothing was measured, or its file cannot be read.
    """
    file = calibration_path()
    if not file.exists():
        raise ConfigError("cluster.gpu=here: nothing was measured on this machine; run gym-rm plan --calibrate.")
    try:
        return _ADAPTER.validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is not a calibration ({str(error)[:200]}); measure again with `gym-rm plan --calibrate`."
        ) from error


def calibration_path() -> Path:
    """Return the file in the user's cache folder; its name has a hash of the hardware, the threads and torch."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # As the XDG specification says.
    folder = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    if not folder.is_absolute():
        raise ConfigError("this user has no home folder; set XDG_CACHE_HOME to a folder for measurements.")
    digest = hashlib.sha256(json.dumps(fingerprint(), sort_keys=True).encode()).hexdigest()
    return folder / "gym_rm" / f"calibration-{digest[:16]}.json"


def fingerprint() -> dict[str, Any]:
    """Return what the numbers depend on: the hardware, the threads and the version of torch."""
    import torch

    known: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return known | {"gpu": torch.cuda.get_device_name(0), "memory": memory}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = platform.processor() or platform.machine()
    return known | {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "memory": memory}


def _base(hardware: dict[str, Any]) -> Device:
    """Return the device with what is not measured: numbers of the same kind in the table, as assumptions."""
    if (gpu := hardware.get("gpu")) is None:
        return replace(CPU, name="here")
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    base = next((device for kind, device in KINDS.items() if kind.split("_")[0] in words), KINDS["a100_sxm"])
    text = f"not measured on {gpu}; as of {base.name} in the table"
    others = {name: assumed(getattr(base, name).value, text) for name in ("link", "host_link", "attention", "decoding")}
    tables: dict[str, Any] = {
        name: tuple((size, assumed(number.value, text)) for size, number in getattr(base, name))
        for name in ("all_reduce", "latency", "attention_lengths")
    }
    return replace(base.with_quantities(others), name="here", **tables)


# --- measurements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bench:
    """The device that is measured: a GPU in bfloat16, or a CPU in float32; `where` is what sources say about it."""

    gpu: bool
    where: str

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median seconds of one call. With one thread of a CPU, other processes do not count."""
        import torch

        clock = time.process_time if not self.gpu and torch.get_num_threads() == 1 else time.perf_counter

        def timed(count: int) -> float:
            self._wait()
            started = clock()
            for _ in range(count):
                run()
            self._wait()
            return (clock() - started) / count

        timed(1)
        count = max(1, min(round(SECONDS / BLOCKS / max(timed(1), 1e-6)), 10_000))
        return max(statistics.median(timed(count) for _ in range(BLOCKS)), 1e-9)

    def measured(self, value: float, what: str) -> Quantity:
        return Quantity(value, Basis.MEASURED, f"{what}; {self.where}")

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return random numbers; products of zeros are faster on some GPUs."""
        import torch

        numbers = torch.randn(*shape, device="cuda" if self.gpu else "cpu")
        return numbers.to(dtype or (torch.bfloat16 if self.gpu else torch.float32))

    def _wait(self) -> None:
        import torch

        if self.gpu:
            torch.cuda.synchronize()


def _measure(hardware: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a `Device` that are measured, by name."""
    import torch

    gpu = "gpu" in hardware
    bench = _Bench(gpu, f"torch {hardware['torch']}, {hardware.get('gpu') or str(hardware['threads']) + ' threads'}")
    flops, flops_float32 = (_product(bench, dtype) for dtype in (torch.bfloat16, torch.float32))
    peak = (flops if gpu else flops_float32).value
    rows = _rows(bench, peak)
    small = bench.random(16)
    launch = bench.seconds(lambda: [small.mul(1.0) for _ in range(50)]) / 50
    return {
        "memory": bench.measured(float(hardware["memory"]), "memory of the GPU" if gpu else "of the machine"),
        "flops": flops,
        "flops_float32": flops_float32,
        "matmul": rows[-1][1],
        "matmul_rows": rows,
        **_memory_rates(bench),
        "launch": bench.measured(launch, "operations of torch on 16 numbers, from Python"),
    }


def _product(bench: _Bench, dtype: torch.dtype) -> Quantity:
    """Return FLOP/s of a large product."""
    from torch.nn.functional import linear

    size = 8192 if bench.gpu else 1024
    square = bench.random(size, size, dtype=dtype)
    seconds = bench.seconds(lambda: linear(square, square))
    return bench.measured(2.0 * size**3 / seconds, f"product of {size} x {size} matrices in {str(dtype)[6:]}")


def _rows(bench: _Bench, peak: float) -> Table:
    """Return the share of `peak` that products of few and many rows reach, with weights that no cache holds."""
    from torch.nn.functional import linear

    hidden, inner, copies = (4096, 12288, 6) if bench.gpu else (1024, 3072, 12)
    weights = itertools.cycle([bench.random(inner, hidden) for _ in range(copies)])
    best, table = float("inf"), []
    for count in (16384, 1024, 256, 64, 16, 1) if bench.gpu else (2048, 512, 128, 32, 8, 1):
        tokens = bench.random(count, hidden)
        seconds = bench.seconds(lambda tokens=tokens: linear(tokens, next(weights)))  # type: ignore[misc]
        best = min(best, seconds)  # fewer rows never take longer: noise must not say otherwise
        text = f"products of {count} rows with matrices of {hidden} x {inner}, weights from memory"
        table.append((count, bench.measured(2.0 * count * hidden * inner / best / peak, text)))
    return tuple(reversed(table))


def _memory_rates(bench: _Bench) -> dict[str, Quantity]:
    """Return the bandwidth of copies that no cache holds, and the share of it that products of one row reach."""
    import torch
    from torch.nn.functional import linear

    row, weights = bench.random(1, 4096), bench.random(2**17 if bench.gpu else 2**13, 4096)
    size = weights.numel() * weights.element_size()
    target = torch.empty_like(weights)
    bandwidth = 2.0 * size / bench.seconds(lambda: target.copy_(weights))
    streaming = size / bench.seconds(lambda: linear(row, weights)) / bandwidth
    return {
        "bandwidth": bench.measured(bandwidth, f"copy of {size >> 20} MiB, read and written"),
        "streaming": bench.measured(streaming, f"product of one row with {size >> 20} MiB of weights"),
    }
