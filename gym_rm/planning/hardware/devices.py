"""The hardware of a plan: kinds of GPUs with what they reach in practice, nodes, and links between them."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.quantities import GIB, Basis, Quantity, assumed, show_bytes, weakest

MIB = 2**20
Table: TypeAlias = tuple[tuple[int, Quantity], ...]
"""Numbers by a size, in rising order."""


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
        network: bytes/s from a GPU to other nodes, in one direction.
        matmul: share of `flops` that large matrix products reach.
        attention: share of `flops` that attention over whole texts reaches.
        streaming: share of `bandwidth` that small products reach, which read all weights for a few tokens.
        decoding: share of `bandwidth` that attention over the KV cache reaches.
        all_reduce: bytes/s of a large all-reduce (bus bandwidth) by number of GPUs in a node.
        latency: seconds of a small all-reduce by number of GPUs in a node.
        launch: seconds until the host has started one kernel.
        reserved: bytes that the driver, the libraries and their workspaces take of each GPU.
        matmul_rows: share of `flops` that products with this many rows (tokens) reach; empty: `matmul` for all. A row
            of the smallest number takes its time also where there are fewer.
        attention_lengths: share of `flops` that attention over texts of this length reaches; empty: `attention`.
        is_cpu: whether the host itself computes: operations wait for each other's start, every query head reads its
            keys, and tensors of more than 32 MiB are made of new pages each time.
        has_fp8: whether it multiplies numbers of 8 bits.
    """

    name: str
    memory: Quantity
    flops: Quantity
    flops_float32: Quantity
    bandwidth: Quantity
    link: Quantity
    host_link: Quantity
    network: Quantity
    matmul: Quantity
    attention: Quantity
    streaming: Quantity
    decoding: Quantity
    all_reduce: Table
    latency: Table
    launch: Quantity
    reserved: Quantity
    matmul_rows: Table = ()
    attention_lengths: Table = ()
    is_cpu: bool = False
    has_fp8: bool = False

    @property
    def processor(self) -> Literal["GPU", "CPU"]:
        """What it is."""
        return "CPU" if self.is_cpu else "GPU"

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

    @property
    def elementwise(self) -> Quantity:
        """Bytes/s, read and written, of operations on single numbers, such as norms and activations."""
        return Quantity(0.8 * self.bandwidth.value, Basis.ASSUMPTION, "80% of the memory bandwidth")

    def with_quantities(self, changes: Mapping[str, Quantity]) -> Device:
        """Return the device with other numbers, such as those that were measured."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _by_size(table: Table, size: int) -> Quantity:
    return next((value for known, value in table if known >= size), table[-1][1])


def _between(table: Table, at: float, *, proportional: bool = False) -> Quantity:
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
class Cluster:
    """Nodes with GPUs of one kind, and what lies between them.

    Attributes:
        device: the kind of GPU.
        num_nodes, node_gpus: number of machines, and of GPUs of each.
        network: bytes/s from a GPU to other nodes, in one direction.
        disk: bytes/s at which a node reads weights.
    """

    device: Device
    num_nodes: int
    node_gpus: int
    network: Quantity
    disk: Quantity

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of GPUs of each node."""
        return (self.node_gpus,) * self.num_nodes

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.node_gpus

    @property
    def text(self) -> str:
        """The cluster in words: `2 x 8 h100_sxm`, `1 x cpu with 16.0 GiB`."""
        if self.device.is_cpu:
            return f"{self.num_nodes} x {self.device.name} with {show_bytes(self.device.memory.value)}"
        return f"{self.num_nodes} x {self.node_gpus} {self.device.name}"


# --- the table -------------------------------------------------------------------------------------------------------

NODE_SIZES = (2, 4, 8)  # of the all-reduces in the table
# Of the shares in the table: rows of a product with n and k from 2,048 to 32,768, and lengths of texts in causal
# attention with 16 to 64 heads of 128 numbers and fewer key heads.
ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LOWEST_SHARES = {"matmul": 0.62, "attention": 0.38, "streaming": 0.68, "decoding": 0.69}  # of the GPUs in the table


def _known_gpu(name: str, numbers: Mapping[str, Any]) -> Device:
    """Return a GPU of `known_gpus.json`; what nobody has published for it is assumed."""
    measured = f"median of the measured tables of NVIDIA AIConfigurator 0.12 for {name}"
    float32 = f"data sheet of {name}; TF32 is not counted, as it is off by default"
    why = f"the shares of {name} are not published; the lowest of the GPUs in the table"
    # Some products of fewer rows reach a little more, at a rate that longer work does not keep up.
    lasting = [*itertools.accumulate(reversed(numbers.get("matmul_rows", ())), min)][::-1]

    def table(key: str, points: Sequence[int], otherwise: Quantity | None = None) -> Table:
        if key in numbers:
            values = lasting if key == "matmul_rows" else numbers[key]
            return tuple((at, Quantity(value, Basis.TABLE, measured)) for at, value in zip(points, values, strict=True))
        return () if otherwise is None else tuple((at, otherwise) for at in points)

    published: dict[str, Any] = {
        key: Quantity(numbers[key], Basis.TABLE, float32 if key == "flops_float32" else numbers["source"])
        for key in ("memory", "flops", "flops_float32", "bandwidth", "link", "host_link")
    }
    shares: dict[str, Any] = {
        key: Quantity(numbers["shares"][key], Basis.TABLE, measured) if "shares" in numbers else assumed(lowest, why)
        for key, lowest in LOWEST_SHARES.items()
    }
    bus = assumed(0.7 * numbers["link"], "70% of the link, as with GPUs that were measured")
    network = assumed(3e9, "25 Gbit/s Ethernet; set cluster.network")
    if "network" in numbers:
        text = "network of nodes with these GPUs in NVIDIA AIConfigurator 0.12"
        network = Quantity(numbers["network"], Basis.TABLE, text)
    return Device(
        name=name,
        **published,
        **shares,
        network=network,
        all_reduce=table("all_reduce", NODE_SIZES, bus),
        has_fp8=not name.startswith(("a100", "a30", "a10", "rtx_30")),
        latency=table("latency", NODE_SIZES, assumed(0.014e-3, "as of 4 a100_sxm")),
        launch=assumed(5e-6, "a kernel launch from Python takes 3 to 10 microseconds"),
        reserved=assumed(1.25 * GIB, "CUDA context 0.5 GiB, cuBLAS and NCCL workspaces 0.75 GiB"),
        matmul_rows=table("matmul_rows", ROWS),
        attention_lengths=table("attention_lengths", LENGTHS),
    )


_FILE = importlib.resources.files("gym_rm").joinpath("planning", "hardware", "known_gpus.json")
KINDS = {name: _known_gpu(name, numbers) for name, numbers in json.loads(_FILE.read_text(encoding="utf-8")).items()}
NAMES_OF_KINDS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "a100": "a100_sxm"}

CPU = Device(
    name="cpu",
    memory=assumed(16 * GIB, "a laptop with 16 GiB"),
    flops=assumed(0.1e12, "few CPUs multiply bfloat16 faster than float32; many are slower"),
    flops_float32=assumed(0.4e12, "8 cores with 16 multiply-adds a cycle at 2 to 3 GHz reach about half"),
    bandwidth=assumed(40e9, "two channels of DDR4-3200 give 51 GB/s at most"),
    link=assumed(10e9, "one device: nothing is sent"),
    host_link=assumed(10e9, "a copy within memory"),
    network=assumed(3e9, "25 Gbit/s Ethernet; set cluster.network"),
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


TABLES = ("all_reduce", "latency", "matmul_rows", "attention_lengths")
QUANTITIES = tuple(field.name for field in fields(Device) if field.name not in ("name", "is_cpu", "has_fp8", *TABLES))
