"""A cluster from settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gym_rm import checks
from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.hardware.devices import KINDS, QUANTITIES, Cluster, Device, device_of_kind
from gym_rm.planning.quantities import Basis, Quantity, assumed, parse_quantity
from gym_rm.planning.request_settings import ClusterSettings

NVME = assumed(2e9, "an NVMe disk; set cluster.disk")
KINDS_OF_NUMBERS = {
    **dict.fromkeys(("memory", "reserved"), "size"),
    **dict.fromkeys(("bandwidth", "link", "host_link", "network"), "bandwidth"),
    **dict.fromkeys(("flops", "flops_float32"), "speed"),
    "launch": "time",
}  # the others are shares
MOST_GPUS = 100_000  # of a cluster


def read_cluster(settings: ClusterSettings) -> Cluster:
    """Return the hardware that settings describe.

    Raises:
        ConfigError: a kind of GPU is unknown, or a number is wrong.
    """
    if settings.nodes * settings.gpus_per_node > MOST_GPUS:
        raise ConfigError(
            f"cluster.nodes={settings.nodes} x gpus_per_node={settings.gpus_per_node} is more than {MOST_GPUS:,}."
        )
    device = read_device(settings.gpu)
    if device.is_cpu and settings.gpus_per_node > 1:
        raise ConfigError(
            f"cluster.gpus_per_node={settings.gpus_per_node}: processes on one machine's CPU share its memory; write "
            "cluster.nodes for several machines."
        )
    network = _bandwidth("network", settings.network, device.network)
    disk = _bandwidth("disk", settings.disk, NVME)
    return Cluster(device, settings.nodes, settings.gpus_per_node, network, disk)


def _bandwidth(name: str, given: float | str | None, known: Quantity) -> Quantity:
    if given is None:
        return known
    return Quantity(parse_quantity(f"cluster.{name}", given, "bandwidth"), Basis.FORMULA, "given")


def read_device(gpu: str | Mapping[str, Any]) -> Device:
    """Return a kind of GPU: a name of the table, `here`, or a mapping with `like` and numbers that differ.

    Raises:
        ConfigError: the kind is unknown, or a number is missing or wrong.
    """
    if isinstance(gpu, str):
        if gpu != "here":
            return device_of_kind(gpu)
        from gym_rm.planning.hardware.calibration import stored_device

        return stored_device()
    known = ("name", "like", *QUANTITIES)
    if unknown := [key for key in gpu if key not in known]:
        raise ConfigError(
            f"cluster.gpu.{unknown[0]}: unknown number.{nearest(str(unknown[0]), known)} Known: {', '.join(known)}."
        )
    numbers = {key: _number(key, value) for key, value in gpu.items() if key in QUANTITIES}
    if "like" in gpu:
        base = read_device(str(gpu["like"]))
    elif missing := [key for key in ("memory", "flops", "bandwidth") if key not in numbers]:
        raise ConfigError(
            f"cluster.gpu has no {missing[0]}; write memory, flops and bandwidth, or `like` with a kind such as "
            f"{next(iter(KINDS))}."
        )
    else:  # a GPU without a fast link stands for what is not known
        base, why = KINDS["l40s"], "as of l40s, as nothing else is known"
        base = base.with_quantities({key: assumed(getattr(base, key).value, why) for key in QUANTITIES})
    if "link" in numbers:
        bus = assumed(0.7 * numbers["link"], "70% of the link")
        base = replace(base, all_reduce=tuple((size, bus) for size, _ in base.all_reduce))
    given = {key: Quantity(value, Basis.FORMULA, "given") for key, value in numbers.items()}
    return replace(base.with_quantities(given), name=str(gpu.get("name") or f"{base.name} changed"))


def _number(key: str, value: Any) -> float:
    name = f"cluster.gpu.{key}"
    if key in KINDS_OF_NUMBERS:
        return parse_quantity(name, value, KINDS_OF_NUMBERS[key])
    share = checks.positive(name, value)
    if share > 1:
        raise ConfigError(f"{name} is a share of the peak, at most 1; got {share:g}.")
    return share
