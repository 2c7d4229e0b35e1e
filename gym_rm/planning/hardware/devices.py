"""The hardware of a plan: kinds of GPUs with what they reach in practice, nodes, and links between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.quantities import GIB, Basis, Quantity, assumed, weakest

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU (or the CPU of a machine without one), as a plan sees it.

    Attributes:
        name: such as `h100_sxm`.
        memory: bytes.
        flops: FLOP/s of dense matrix products in bfloat16 or float16, as published.
        flops_float32: the same in float32.
        bandwidth: bytes/s of its memory.
        link: bytes/s from one GPU to the others of its node, in one direction.
        host_link: bytes/s from the host's memory, in one direction.
        matmul: share of `flops` that large matrix products reach.
        attention: share of `flops` that attention over whole texts reaches.
        streaming: share of `bandwidth` that small products reach, which read all weights for a few tokens.
        decoding: share of `bandwidth` that attention over the KV cache reaches.
        all_reduce: bytes/s of a large all-reduce (bus bandwidth) by number of GPUs in a node.
        latency: seconds of a small all-reduce by number of GPUs in a node.
        launch: seconds until the host has started one kernel.
        reserved: bytes that the driver, the libraries and their workspaces take of each GPU.
        price: money for one hour; None if it is not known.
        matmul_rows: share of `flops` that products with this many rows (tokens) reach; empty: `matmul` for all. A row
            of the smallest number takes its time also where there are fewer.
        attention_lengths: share of `flops` that attention over texts of this length reaches; empty: `attention`.
        elementwise: bytes/s, read and written, of operations such as norms and activations, by the bytes of one
            tensor; empty: 80% of `bandwidth`.
        disk: bytes/s at which weights are read; None if it was not measured.
        is_cpu: whether the host itself computes: operations wait for each other's start, every query head reads its
            keys, and tensors of more than 32 MiB are made of new pages each time.
    """

    name: str
    memory: Quantity
    flops: Quantity
    flops_float32: Quantity
    bandwidth: Quantity
    link: Quantity
    host_link: Quantity
    matmul: Quantity
    attention: Quantity
    streaming: Quantity
    decoding: Quantity
    all_reduce: tuple[tuple[int, Quantity], ...]
    latency: tuple[tuple[int, Quantity], ...]
    launch: Quantity
    reserved: Quantity
    price: Quantity | None = None
    matmul_rows: tuple[tuple[int, Quantity], ...] = ()
    attention_lengths: tuple[tuple[int, Quantity], ...] = ()
    elementwise: tuple[tuple[int, Quantity], ...] = ()
    disk: Quantity | None = None
    is_cpu: bool = False

    def peak_flops(self, dtype: str) -> Quantity:
        """Return the FLOP/s of matrix products in this dtype."""
        return self.flops_float32 if dtype == "float32" else self.flops

    def all_reduce_bandwidth(self, size: int) -> Quantity:
        """Return bytes/s of a large all-reduce over this many GPUs of a node."""
        return _by_size(self.all_reduce, size)

    def all_reduce_latency(self, size: int) -> Quantity:
        """Return seconds of a small all-reduce over this many GPUs of a node."""
        return _by_size(self.latency, size)

    def matmul_share(self, rows: float) -> Quantity:
        """Return the share of `flops` that products with this many rows reach."""
        return _between(self.matmul_rows, rows, proportional=True) if self.matmul_rows else self.matmul

    def attention_share(self, length: float) -> Quantity:
        """Return the share of `flops` that attention over texts of this length reaches."""
        return _between(self.attention_lengths, length) if self.attention_lengths else self.attention

    def elementwise_bandwidth(self, size: float) -> Quantity:
        """Return bytes/s of operations on single numbers, for tensors of this many bytes."""
        if self.elementwise:
            return _between(self.elementwise, size)
        return Quantity(0.8 * self.bandwidth.value, Basis.ASSUMPTION, "80% of the memory bandwidth")

    def with_quantities(self, changes: Mapping[str, Quantity]) -> Device:
        """Return the device with other numbers, such as those that were measured."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _by_size(table: tuple[tuple[int, Quantity], ...], size: int) -> Quantity:
    return next((value for known, value in table if known >= size), table[-1][1])


def _between(table: tuple[tuple[int, Quantity], ...], at: float, *, proportional: bool = False) -> Quantity:
    """Return the value at a point, linear in logarithms between known points, and that of the nearest one outside.

    With `proportional`, values below the first point fall to 0 with it.
    """
    first, last = table[0], table[-1]
    if at <= first[0]:
        if proportional or at == first[0]:
            return Quantity(first[1].value * max(at, 1e-9) / first[0], first[1].basis, first[1].source)
        return _outside(*first)
    for (low, below), (high, above) in itertools.pairwise(table):
        if at <= high:
            place = math.log(at / low) / math.log(high / low)
            value = math.exp((1 - place) * math.log(below.value) + place * math.log(above.value))
            return Quantity(value, weakest((below.basis, above.basis)), above.source)
    return _outside(*last)


def _outside(point: float, value: Quantity) -> Quantity:
    """Return the value at the end of a table for what lies beyond it."""
    return assumed(value.value, f"{value.source}; beyond {point:,}, where the table ends, the same")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine.

    Attributes:
        gpus: number of its GPUs.
        device: their kind.
        host_memory: bytes of the host's memory; None if unknown, then it bounds nothing.
    """

    gpus: int
    device: Device
    host_memory: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and what lies between them.

    Attributes:
        nodes: the machines.
        network: bytes/s from a GPU to other nodes, in one direction.
        disk: bytes/s at which a node reads weights.
    """

    nodes: tuple[Node, ...]
    network: Quantity
    disk: Quantity

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Kinds of GPUs, by name."""
        return tuple(sorted({node.device for node in self.nodes}, key=lambda device: device.name))

    @property
    def text(self) -> str:
        """The cluster in words: `2 x 8 h100_sxm`."""
        kinds: dict[tuple[int, str], int] = {}
        for node in self.nodes:
            key = (node.gpus, node.device.name)
            kinds[key] = kinds.get(key, 0) + 1
        return " + ".join(f"{count} x {gpus} {name}" for (gpus, name), count in sorted(kinds.items()))


# --- the table -------------------------------------------------------------------------------------------------------

AICONFIGURATOR = "NVIDIA AIConfigurator 0.12, systems/{}.yaml"
MEASURED_THERE = "median of the measured tables of NVIDIA AIConfigurator 0.12 for {}"


def _nvidia(
    name: str,
    *,
    teraflops: float,
    float32: float,
    bandwidth: float,
    memory: float,
    link: float,
    host: float,
    shares: tuple[float, float, float, float] | None,
    busses: tuple[float, float, float] | None = None,
    latencies: tuple[float, float, float] | None = None,
    source: str = AICONFIGURATOR,
) -> Device:
    """Return a device of the table.

    Args:
        name: its name.
        teraflops, float32: 1e12 FLOP/s in bfloat16 and float32.
        bandwidth, link, host: 1e9 bytes/s.
        memory: bytes.
        shares: of matrix products, streaming, attention and decoding; None if nobody has published them.
        busses: bus bandwidth of an all-reduce over 2, 4 and 8 GPUs, 1e9 bytes/s.
        latencies: of a small all-reduce over 2, 4 and 8 GPUs, milliseconds.
        source: where the published numbers are from.
    """
    where = source.format(name)

    def table(value: float, text: str = where) -> Quantity:
        return Quantity(value, Basis.TABLE, text)

    measured = MEASURED_THERE.format(name)
    share_of = [table(value, measured) for value in shares or ()]
    if shares is None:
        why = f"the shares of {name} are not published; the lowest of the GPUs in the table"
        share_of = [assumed(value, why) for value in (0.62, 0.68, 0.38, 0.69)]
    reached = [table(value * 1e9, measured) for value in busses or ()]
    if busses is None:
        reached = [assumed(0.7 * link * 1e9, "70% of the link, as with GPUs that were measured")] * 3
    slow = [table(value / 1e3, measured) for value in latencies or ()]
    if latencies is None:
        slow = [assumed(value / 1e3, "as of a100_sxm") for value in (0.010, 0.014, 0.022)]
    return Device(
        name=name,
        memory=table(memory),
        flops=table(teraflops * 1e12),
        flops_float32=table(float32 * 1e12, f"data sheet of {name}; TF32 is not counted, as it is off by default"),
        bandwidth=table(bandwidth * 1e9),
        link=table(link * 1e9),
        host_link=table(host * 1e9),
        matmul=share_of[0],
        streaming=share_of[1],
        attention=share_of[2],
        decoding=share_of[3],
        all_reduce=tuple(zip((2, 4, 8), reached, strict=True)),
        latency=tuple(zip((2, 4, 8), slow, strict=True)),
        launch=assumed(5e-6, "a kernel launch from Python takes 3 to 10 microseconds"),
        reserved=assumed(1.25 * GIB, "CUDA context 0.5 GiB, cuBLAS and NCCL workspaces 0.75 GiB"),
        matmul_rows=_shares(_ROWS, _BY_ROWS.get(name), name),
        attention_lengths=_shares(_LENGTHS, _BY_LENGTH.get(name), name),
    )


# Medians over the measured tables of AIConfigurator 0.12 (vLLM, bfloat16), by rows of a product with n and k from 2,048
# to 32,768, and by length of texts in causal attention with 16 to 64 heads of 128 numbers and fewer key heads.
_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BY_ROWS = {
    "a100_sxm": (0.0043, 0.066, 0.259, 0.422, 0.601, 0.682, 0.769, 0.825, 0.836, 0.835),
    "h100_sxm": (0.0025, 0.039, 0.151, 0.295, 0.513, 0.746, 0.802, 0.813, 0.799, 0.756),
    "h200_sxm": (0.0033, 0.052, 0.198, 0.380, 0.605, 0.777, 0.803, 0.809, 0.787, 0.733),
    "b200_sxm": (0.0021, 0.033, 0.127, 0.247, 0.414, 0.582, 0.638, 0.676, 0.688, 0.693),
    "b300_sxm": (0.0021, 0.033, 0.129, 0.248, 0.425, 0.620, 0.699, 0.751, 0.761, 0.706),
    "l40s": (0.0020, 0.030, 0.113, 0.214, 0.398, 0.601, 0.639, 0.644, 0.613, 0.546),
    "rtx_pro_6000_server": (0.0031, 0.048, 0.188, 0.341, 0.564, 0.675, 0.754, 0.806, 0.837, 0.852),
}
_BY_LENGTH = {
    "a100_sxm": (0.052, 0.101, 0.180, 0.278, 0.381, 0.463, 0.510, 0.545, 0.564),
    "h100_sxm": (0.028, 0.061, 0.119, 0.205, 0.319, 0.437, 0.531, 0.592, 0.619),
    "h200_sxm": (0.030, 0.062, 0.120, 0.210, 0.325, 0.440, 0.522, 0.583, 0.599),
    "b200_sxm": (0.013, 0.038, 0.089, 0.153, 0.234, 0.334, 0.442, 0.503, 0.545),
    "b300_sxm": (0.015, 0.044, 0.100, 0.174, 0.282, 0.404, 0.539, 0.608, 0.654),
    "l40s": (0.048, 0.086, 0.168, 0.271, 0.352, 0.425, 0.465, 0.486, 0.499),
    "rtx_pro_6000_server": (0.059, 0.110, 0.189, 0.293, 0.406, 0.498, 0.574, 0.612, 0.637),
}


def _shares(points: tuple[int, ...], values: tuple[float, ...] | None, name: str) -> tuple[tuple[int, Quantity], ...]:
    source = MEASURED_THERE.format(name)
    pairs = zip(points, values, strict=True) if values else ()
    return tuple((at, Quantity(value, Basis.TABLE, source)) for at, value in pairs)


_ADA = "NVIDIA Ada GPU architecture whitepaper; no link between cards but PCIe"
_DATA_SHEET = "data sheet of {}"

KINDS: dict[str, Device] = {
    device.name: device
    for device in (
        _nvidia("a100_sxm", teraflops=312, float32=19.5, bandwidth=2039, memory=80 * GIB, link=300, host=32,
                shares=(0.85, 0.68, 0.43, 0.69), busses=(193, 217, 222), latencies=(0.010, 0.014, 0.022)),
        _nvidia("a100_sxm_40gb", teraflops=312, float32=19.5, bandwidth=1555, memory=40 * GIB, link=300, host=32,
                shares=None, source=_DATA_SHEET),
        _nvidia("h100_sxm", teraflops=989, float32=67, bandwidth=3350, memory=80 * GIB, link=450, host=64,
                shares=(0.79, 0.80, 0.38, 0.81), busses=(318, 350, 445), latencies=(0.006, 0.0095, 0.016)),
        _nvidia("h100_pcie", teraflops=756.5, float32=51, bandwidth=2000, memory=80 * GIB, link=64, host=64,
                shares=None),
        _nvidia("h200_sxm", teraflops=989, float32=67, bandwidth=4800, memory=141 * GIB, link=450, host=64,
                shares=(0.79, 0.73, 0.38, 0.74), busses=(315, 348, 460), latencies=(0.006, 0.0096, 0.016)),
        _nvidia("b200_sxm", teraflops=2250, float32=80, bandwidth=7700, memory=180 * GIB, link=900, host=128,
                shares=(0.69, 0.70, 0.31, 0.80), busses=(534, 634, 704), latencies=(0.010, 0.015, 0.026)),
        _nvidia("b300_sxm", teraflops=2250, float32=80, bandwidth=7750, memory=275_040 * MIB, link=900, host=128,
                shares=(0.75, 0.70, 0.37, 0.79), busses=(544, 638, 704)),
        _nvidia("l40s", teraflops=362.05, float32=91.6, bandwidth=864, memory=46_068 * MIB, link=32, host=32,
                shares=(0.62, 0.80, 0.40, 0.78), busses=(20, 5, 1.5)),
        _nvidia("rtx_pro_6000_server", teraflops=467.8, float32=117, bandwidth=1792, memory=97_887 * MIB, link=64,
                host=64, shares=(0.84, 0.80, 0.47, 0.79), busses=(39, 26, 25)),
        _nvidia("a30", teraflops=165, float32=10.3, bandwidth=933, memory=24 * GIB, link=32, host=32, shares=None),
        _nvidia("a10", teraflops=125, float32=31.2, bandwidth=600, memory=24 * GIB, link=32, host=32, shares=None,
                source=_DATA_SHEET),
        _nvidia("l4", teraflops=121, float32=30.3, bandwidth=300, memory=23_034 * MIB, link=32, host=32, shares=None,
                source=_DATA_SHEET),
        _nvidia("rtx_3090", teraflops=71, float32=35.6, bandwidth=936, memory=24 * GIB, link=32, host=32, shares=None,
                source="NVIDIA Ampere GA102 whitepaper, float32 accumulation"),
        _nvidia("rtx_4090", teraflops=165.2, float32=82.6, bandwidth=1008, memory=24 * GIB, link=32, host=32,
                shares=None, source=_ADA),
    )
}  # fmt: skip
NAMES_OF_KINDS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "a100": "a100_sxm"}

CPU = Device(
    name="cpu",
    memory=assumed(16 * GIB, "a laptop with 16 GiB"),
    flops=assumed(0.1e12, "few CPUs multiply bfloat16 faster than float32; many are slower"),
    flops_float32=assumed(0.4e12, "8 cores with 16 multiply-adds a cycle at 2 to 3 GHz reach about half"),
    bandwidth=assumed(40e9, "two channels of DDR4-3200 give 51 GB/s at most"),
    link=assumed(10e9, "one device: nothing is sent"),
    host_link=assumed(10e9, "a copy within memory"),
    matmul=assumed(0.8, "large products in float32"),
    attention=assumed(0.3, "no fused attention as on a GPU"),
    streaming=assumed(0.7, "products with few rows"),
    decoding=assumed(0.3, "reads of the KV cache"),
    all_reduce=((2, assumed(1e9, "gloo between processes")),),
    latency=((2, assumed(1e-4, "gloo between processes")),),
    launch=assumed(5e-6, "an operation of torch from Python"),
    reserved=assumed(2.0 * GIB, "Python with torch and transformers 0.35 GiB, the rest for the system"),
    is_cpu=True,
)


def device_of_kind(name: str) -> Device:
    """Return a kind of the table.

    Raises:
        ConfigError: the table has none of this name.
    """
    if name == "cpu":
        return CPU
    known = name.lower().replace("-", "_").replace(" ", "_")
    known = NAMES_OF_KINDS.get(known, known)
    if known not in KINDS:
        raise ConfigError(
            f"unknown GPU {name!r}.{nearest(known, [*KINDS, *NAMES_OF_KINDS, 'cpu'])} Known: {', '.join(KINDS)}, cpu. "
            "For others write its numbers: gpu: {name: ..., memory: 48 GiB, flops: 180e12, bandwidth: 768e9}."
        )
    return KINDS[known]


TABLES = ("all_reduce", "latency", "matmul_rows", "attention_lengths", "elementwise")
QUANTITIES = tuple(
    field.name for field in fields(Device) if field.name not in ("name", "price", "disk", "is_cpu", *TABLES)
)
