"""Short measurements of this machine: rates of products and attention, bandwidths, and times of small operations.

Every number is the median over several blocks of calls. The best block would be what the machine can reach; the median
is what longer work gets. With one thread of a CPU the processor's time counts, so that the turns of other processes do
not.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_rm.errors import logger
from gym_rm.planning.quantities import Basis, Quantity

BLOCKS = 7
TIMEOUT = 60  # seconds that processes may take for an all-reduce
Table = tuple[tuple[int, Quantity], ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """The device that is measured, and for how long.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: dtype of the tables: float32 on a CPU, bfloat16 on a GPU.
        seconds: of one measurement.
        where: what a source text says about the machine: versions and threads.
    """

    device: str
    dtype: Any
    seconds: float
    where: str

    def typical(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call: the median of `BLOCKS` blocks."""
        return self.typical_of([run])[0]

    def typical_of(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Return the seconds of one call of each, in blocks that take turns: a change of the machine meets them all."""
        clock = self._clock()
        calls = []
        for run in runs:
            run()
            self._wait()
            started = clock()
            run()
            self._wait()
            once = max(clock() - started, 1e-6)
            calls.append(max(1, min(round(self.seconds / BLOCKS / once), 10_000)))
        blocks: list[list[float]] = [[] for _ in runs]
        for _ in range(BLOCKS):
            for run, count, times in zip(runs, calls, blocks, strict=True):
                self._wait()
                started = clock()
                for _ in range(count):
                    run()
                self._wait()
                times.append((clock() - started) / count)
        return [max(statistics.median(times), 1e-9) for times in blocks]

    def measured(self, value: float, what: str) -> Quantity:
        """Return a measured number."""
        return Quantity(value, Basis.MEASURED, f"{what}; {self.where}")

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """Return random numbers; products of zeros are faster on some GPUs."""
        import torch

        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def _clock(self) -> Callable[[], float]:
        import torch

        return time.process_time if self.device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def _wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def products(bench: Bench) -> tuple[Quantity, Quantity, Table]:
    """Return FLOP/s of large products in bfloat16 and float32, and which share products reach by their rows.

    Weights are read from memory, as in a model: there are more of them than the caches hold.
    """
    import torch

    wide = bench.device == "cuda"
    dtypes = (torch.bfloat16, torch.float32)
    sizes = (8192, 4096) if wide else (1024, 1024)
    squares = [bench.random(size, size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    hidden, inner = (4096, 12288) if wide else (1024, 3072)
    copies = max(4, (2**29 if wide else 2**27) // (hidden * inner * bench.dtype.itemsize))
    up = bench.random(inner, hidden).repeat(copies, 1, 1)
    down = bench.random(hidden, inner).repeat(copies, 1, 1)
    rows = (1, 4, 16, 64, 256, 1024, 4096, 16384) if wide else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
    place = 0

    def layer(tokens: Any) -> object:
        nonlocal place
        place = (place + 1) % copies
        return torch.nn.functional.linear(torch.nn.functional.linear(tokens, up[place]), down[place])

    runs = [functools.partial(torch.nn.functional.linear, square, square) for square in squares]
    seconds = bench.typical_of(runs + [functools.partial(layer, bench.random(count, hidden)) for count in rows])
    bfloat16, float32 = (
        bench.measured(2.0 * size**3 / once, f"product of {size} x {size} matrices in {str(dtype)[6:]}")
        for size, dtype, once in zip(sizes, dtypes, seconds[:2], strict=True)
    )
    peak = (bfloat16 if bench.dtype is torch.bfloat16 else float32).value
    best, table = float("inf"), []
    for count, once in reversed(list(zip(rows, seconds[2:], strict=True))):
        best = min(best, once)  # fewer rows never take longer: noise must not say otherwise
        text = f"products of {count} rows with matrices of {hidden} x {inner}, weights from memory"
        table.append((count, bench.measured(4.0 * count * hidden * inner / best / peak, text)))
    return bfloat16, float32, tuple(reversed(table))


def attention_by_length(bench: Bench, peak: float) -> Table:
    """Return the share of `peak` that causal attention reaches, by length of the texts."""
    import torch

    wide = bench.device == "cuda"
    heads, width, tokens = (32, 128, 16384) if wide else (8, 64, 512)
    table = []
    for length in (256, 512, 1024, 2048, 4096, 8192) if wide else (32, 64, 128, 256, 512, 1024, 2048):
        texts = max(1, tokens // length)
        query, key, value = (bench.random(texts, heads, length, width) for _ in range(3))

        def run(query: Any = query, key: Any = key, value: Any = value) -> object:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        pairs = texts * heads * length * (length + 1) / 2
        text = f"causal attention over texts of {length} tokens, {heads} heads of {width}"
        table.append((length, bench.measured(4.0 * pairs * width / bench.typical(run) / peak, text)))
    return tuple(table)


def memory_bandwidth(bench: Bench) -> Quantity:
    """Return bytes/s, read and written, of copies that no cache holds."""
    import torch

    size = 2**30 if bench.device == "cuda" else 2**28
    source = torch.ones(size // 4, device=bench.device)
    target = torch.zeros_like(source)
    seconds = bench.typical(lambda: target.copy_(source))
    return bench.measured(2.0 * size / seconds, f"copy of {size >> 20} MiB, read and written")


def weights_bandwidth(bench: Bench, bandwidth: float) -> Quantity:
    """Return the share of `bandwidth` at which a product with one row reads weights."""
    import torch

    wide = bench.device == "cuda"
    rows = (2**30 if wide else 2**27) // (4096 * bench.dtype.itemsize)
    weights, row = bench.random(rows // 8, 4096).repeat(8, 1), bench.random(1, 4096)
    seconds = bench.typical(lambda: torch.nn.functional.linear(row, weights))
    size = weights.numel() * bench.dtype.itemsize
    return bench.measured(size / seconds / bandwidth, f"product of one row with {size >> 20} MiB of weights")


def cache_bandwidth(bench: Bench, bandwidth: float) -> Quantity:
    """Return the share of `bandwidth` at which attention of one token a text reads keys and values.

    Two query heads share a key head. A GPU reads it once; on a CPU each of them reads it, and both count.
    """
    import torch

    wide = bench.device == "cuda"
    texts, heads, length, width = (64, 16, 2048, 128) if wide else (8, 8, 256, 64)
    key, value = (bench.random(texts, heads // 2, length, width) for _ in range(2))
    query = bench.random(texts, heads, 1, width)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, enable_gqa=True)
    size = (2 if wide else 4) * key.numel() * bench.dtype.itemsize
    text = f"attention of one token in each of {texts} texts of {length}, {heads} heads of {width}"
    return bench.measured(size / bench.typical(attend) / bandwidth, text)


def elementwise_bandwidth(bench: Bench) -> Table:
    """Return bytes/s, read and written, of a multiplication, a sum and an activation into new tensors, by size."""
    import torch

    table = []
    for size in (2**20, 2**23, 2**26, 2**29) if bench.device == "cuda" else (2**16, 2**20, 2**22, 2**24, 2**26):
        left = torch.ones(size // bench.dtype.itemsize, device=bench.device, dtype=bench.dtype)
        right = torch.ones_like(left)

        def run(left: Any = left, right: Any = right) -> object:
            return torch.nn.functional.silu(left * right + left)

        text = f"a product, a sum and an activation of tensors of {size >> 10} KiB, into new memory"
        table.append((size, bench.measured(8.0 * size / bench.typical(run), text)))
    return tuple(table)


def launch_seconds(bench: Bench) -> Quantity:
    """Return the seconds until the host has started one operation on a small tensor."""
    import torch

    small = torch.ones(16, device=bench.device)

    def run() -> None:
        for _ in range(50):
            small.mul(1.0)

    return bench.measured(bench.typical(run) / 50, "operations of torch on 16 numbers, from Python")


def host_bandwidth(bench: Bench) -> Quantity:
    """Return bytes/s of copies from the host to a GPU, or within the memory of a CPU."""
    import torch

    if bench.device == "cpu":
        source = torch.ones(2**26)
        target = torch.zeros_like(source)
        seconds = bench.typical(lambda: target.copy_(source))
        return bench.measured(2**28 / seconds, "copy of 256 MiB within memory")
    source = torch.ones(2**26, pin_memory=True)
    target = torch.empty(2**26, device="cuda")
    seconds = bench.typical(lambda: target.copy_(source, non_blocking=True))
    return bench.measured(2**28 / seconds, "copy of 256 MiB of pinned memory to the GPU")


def read_bandwidth(bench: Bench) -> Quantity:
    """Return bytes/s of reading weights from a safetensors file that was just written."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_file({f"layer{i}": torch.ones(2**22) for i in range(8)}, file)

        def run() -> None:
            for tensor in load_file(file).values():
                tensor.clone().to(bench.device)

        run()
        times = []
        for _ in range(3):  # wall time: waiting for a disk takes no processor
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    text = "128 MiB of safetensors just written: from the page cache, so a first read of a disk is slower"
    return bench.measured(2**27 / statistics.median(times), text)


# --- collectives, in processes of their own --------------------------------------------------------------------------


def all_reduces(bench: Bench, sizes: tuple[int, ...]) -> tuple[Table, Table]:
    """Return bus bandwidth and latency of all-reduces over these numbers of processes; none that failed."""
    large, small = [], []
    for size in sizes:
        try:
            bandwidth, latency = _ranks(bench.device, size)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.warning("an all-reduce over %d processes could not be measured: %s", size, error)
            continue
        how = "GPUs with NCCL" if bench.device == "cuda" else "processes of one thread with gloo"
        large.append((size, bench.measured(bandwidth, f"all-reduce of 64 MiB over {size} {how}")))
        small.append((size, bench.measured(latency, f"all-reduce of 4 bytes over {size} {how}")))
    return tuple(large), tuple(small)


def _ranks(device: str, size: int) -> tuple[float, float]:
    """Start a process for each rank, and return what the first one prints."""
    program = "from gym_rm.planning.hardware.measure import run_rank; run_rank()"
    package = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(size):
                arguments = [sys.executable, "-c", program, device, str(rank), str(size), f"{folder}/store"]
                environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
                ranks.append(
                    subprocess.Popen(
                        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
                    )
                )
            printed, errors = ranks[0].communicate(timeout=TIMEOUT)
        finally:
            for process in ranks:
                _end(process)
    if ranks[0].returncode != 0:
        raise ValueError(errors.strip().splitlines()[-1] if errors.strip() else "the first process failed")
    bandwidth, latency = printed.split()[-2:]
    return float(bandwidth), float(latency)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def run_rank() -> None:
    """Measure all-reduces as one of several processes; the first one prints bytes/s and seconds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    times = []
    for numbers, repeats in ((2**24, 5), (1, 50)):
        values = torch.ones(numbers, device=device)
        blocks = []
        for _ in range(4):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats):
                dist.all_reduce(values)
            values[0].item()
            blocks.append((time.perf_counter() - started) / repeats)
        times.append(statistics.median(blocks[1:]))
    if rank == 0:
        sys.stdout.write(f"{2.0 * (size - 1) / size * 2**26 / times[0]} {times[1]}\n")
    dist.destroy_process_group()
