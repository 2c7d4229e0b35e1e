"""A cluster from settings, a file, this machine, or Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_rm import checks
from gym_rm.config import load_config
from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.hardware.devices import KINDS, QUANTITIES, Cluster, Device, Node, device_of_kind
from gym_rm.planning.quantities import Basis, Quantity, assumed, parse_bytes
from gym_rm.planning.settings import ClusterSettings, NodeSettings

# Bytes/s from a GPU to other nodes (NVIDIA AIConfigurator 0.12, systems/*.yaml: `inter_node_bw`).
NETWORKS = {"a100_sxm": 25e9, "b200_sxm": 100e9, "b300_sxm": 100e9, "a30": 25e9}
NETWORKS |= dict.fromkeys(("h100_sxm", "h100_pcie", "h200_sxm", "l40s", "rtx_pro_6000_server"), 50e9)
ETHERNET = 3e9  # 25 Gbit/s
MOST_GPUS = 100_000  # of a cluster
MOST_NODE_GPUS = 1024  # of a node


def read_cluster(settings: str | ClusterSettings) -> Cluster:
    """Return the hardware that settings describe.

    Raises:
        ConfigError: a kind of GPU is unknown, a number is wrong, or Ray or a GPU cannot be found.
    """
    if isinstance(settings, str):
        match settings:
            case "ray":
                return _ray_cluster()
            case "torch":
                return _torch_cluster()
        if not Path(settings).suffix:
            raise ConfigError(
                f"cluster must be settings, 'ray', 'torch' or a YAML file, got {settings!r}."
                f"{nearest(settings, ['ray', 'torch'])}"
            )
        return read_cluster(load_config(ClusterSettings, settings))
    groups = settings.groups or (
        NodeSettings(nodes=settings.nodes, gpus_per_node=settings.gpus_per_node, gpu=settings.gpu),
    )
    host = None if settings.host_memory is None else parse_bytes("cluster.host_memory", settings.host_memory)
    nodes: list[Node] = []
    for group in groups:
        if group.gpus_per_node > MOST_NODE_GPUS:
            raise ConfigError(f"cluster.gpus_per_node={group.gpus_per_node} is more than {MOST_NODE_GPUS}.")
        if group.nodes * group.gpus_per_node > MOST_GPUS:
            raise ConfigError(
                f"cluster.nodes={group.nodes} with {group.gpus_per_node} GPUs each is more than {MOST_GPUS:,} GPUs."
            )
        device = _with_price(read_device(group.gpu), settings.price_per_gpu_hour)
        nodes += [Node(group.gpus_per_node, device, host)] * group.nodes
    return _cluster(nodes, network=settings.network, disk=settings.disk)


def _cluster(nodes: list[Node], *, network: float | None = None, disk: float | None = None) -> Cluster:
    kinds = [node.device.name.split(" ")[0] for node in nodes]
    if network is not None:
        between = Quantity(network, Basis.FORMULA, "given")
    elif all(kind in NETWORKS for kind in kinds):
        text = "network of nodes with these GPUs in NVIDIA AIConfigurator 0.12"
        between = Quantity(min(NETWORKS[kind] for kind in kinds), Basis.TABLE, text)
    else:
        between = assumed(ETHERNET, "25 Gbit/s Ethernet; set cluster.network")
    reading = (
        Quantity(disk, Basis.FORMULA, "given") if disk is not None else assumed(2e9, "an NVMe disk; set cluster.disk")
    )
    return Cluster(_told_apart(nodes), between, reading)


def _told_apart(nodes: list[Node]) -> tuple[Node, ...]:
    """Return the nodes with a name of its own for every kind of GPU: of equal names, the later ones get a number."""
    names: dict[Device, str] = {}
    for node in nodes:
        same = [device for device in names if device.name == node.device.name and device != node.device]
        names.setdefault(node.device, f"{node.device.name} {len(same) + 1}" if same else node.device.name)
    return tuple(replace(node, device=replace(node.device, name=names[node.device])) for node in nodes)


def _with_price(device: Device, prices: float | dict[str, float] | None) -> Device:
    price = prices.get(device.name) if isinstance(prices, dict) else prices
    if isinstance(prices, dict) and price is None:
        raise ConfigError(
            f"cluster.price_per_gpu_hour has no price for {device.name!r}; it has {', '.join(map(repr, prices))}."
        )
    if price is None:
        return device
    if checks.finite("cluster.price_per_gpu_hour", price) <= 0:
        raise ConfigError(f"cluster.price_per_gpu_hour must be more than 0, got {price!r}.")
    return replace(device, price=Quantity(price, Basis.FORMULA, "given"))


def read_device(gpu: str | Mapping[str, Any]) -> Device:
    """Return a kind of GPU: a name of the table, `here`, or a mapping with `like` and numbers that differ.

    Raises:
        ConfigError: the kind is unknown, or a number is missing or wrong.
    """
    if isinstance(gpu, str):
        if gpu == "here":
            from gym_rm.planning.hardware.calibrate import stored_device

            found: Device | None = stored_device()
            if found is None:
                raise ConfigError(
                    "cluster.gpu=here: nothing was measured on this machine; run gym-rm plan --calibrate."
                )
            return found
        return device_of_kind(gpu)
    known = ("name", "like", *QUANTITIES)
    if unknown := [key for key in gpu if key not in known]:
        raise ConfigError(
            f"cluster.gpu.{unknown[0]}: unknown number.{nearest(str(unknown[0]), known)} Known: {', '.join(known)}."
        )
    numbers = {
        key: (parse_bytes if key in ("memory", "reserved") else _positive)(f"cluster.gpu.{key}", value)
        for key, value in gpu.items()
        if key in QUANTITIES
    }
    for key in ("matmul", "attention", "streaming", "decoding"):
        if numbers.get(key, 0.0) > 1.0:
            raise ConfigError(f"cluster.gpu.{key} is a share of the peak, at most 1; got {numbers[key]:g}.")
    if not isinstance(gpu.get("name", ""), str):
        raise ConfigError(f"cluster.gpu.name must be a text, got {gpu['name']!r}.")
    if "like" in gpu:
        base = read_device(str(gpu["like"]))
    elif missing := [key for key in ("memory", "flops", "bandwidth") if key not in numbers]:
        raise ConfigError(
            f"cluster.gpu has no {missing[0]}; write memory, flops and bandwidth, or `like` with a kind such as "
            f"{next(iter(KINDS))}."
        )
    else:
        base = _guessed(numbers)
    name = str(gpu.get("name") or (f"{base.name} changed" if numbers else base.name))
    given = {key: Quantity(value, Basis.FORMULA, "given") for key, value in numbers.items()}
    if "link" in given:
        changed = tuple((size, assumed(0.7 * given["link"].value, "70% of the link")) for size, _ in base.all_reduce)
        base = replace(base, all_reduce=changed)
    return replace(base.with_quantities(given), name=name)


def _guessed(numbers: Mapping[str, float]) -> Device:
    """Return a GPU of which only some numbers are known; the others are those of l40s, which has no fast link."""
    base = KINDS["l40s"]
    text = "as of l40s, as nothing else is known"
    return base.with_quantities(
        {key: assumed(getattr(base, key).value, text) for key in QUANTITIES if key not in numbers}
    )


def _positive(name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {value!r}.") from None
    if checks.finite(name, value) <= 0:
        raise ConfigError(f"{name} must be more than 0, got {value!r}.")
    return float(value)


def kind_from_name(name: str, memory: float) -> Device:
    """Return the kind of a GPU from the name that its driver gives it; memory is what the driver says.

    Raises:
        ConfigError: the name is not known.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [
        device
        for kind, device in KINDS.items()
        if set(kind.split("_")) - {"sxm", "server", "40gb"} <= words and ("pcie" in kind) == ("pcie" in words)
    ]
    if not fitting:
        raise ConfigError(
            f"the GPU {name!r} is not in the table; write its numbers as cluster.gpu, or run gym-rm plan --calibrate "
            "and use cluster.gpu=here."
        )
    return _with_memory(min(fitting, key=lambda device: abs(device.memory.value - memory)), memory)


def _with_memory(device: Device, memory: float) -> Device:
    return device.with_quantities({"memory": Quantity(memory, Basis.MEASURED, "what the machine says")})


def _torch_cluster() -> Cluster:
    """Return this machine: its GPUs, or its CPU."""
    import torch

    if not torch.cuda.is_available():
        from gym_rm.planning.hardware.calibrate import stored_device

        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return _cluster([Node(1, stored_device() or _with_memory(device_of_kind("cpu"), memory))])
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = {kind_from_name(each.name, float(each.total_memory)) for each in devices}
    return _cluster([Node(sum(kind_from_name(each.name, float(each.total_memory)) == kind for each in devices), kind)
                     for kind in sorted(kinds, key=lambda kind: kind.name)])  # fmt: skip


def _ray_cluster() -> Cluster:
    """Return the nodes of the running Ray cluster; Ray names the kind of GPU of a node as a resource.

    Raises:
        ConfigError: Ray is not installed or not running, or a node's GPUs are not in the table.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("cluster=ray needs Ray: pip install 'gym-rm[ray]'.") from error
    if not ray.is_initialized():
        raise ConfigError(
            "cluster=ray needs a connection: call ray.init(address='auto') before, or describe the cluster."
        )
    nodes = []
    for each in ray.nodes():
        resources = each["Resources"]
        gpus = int(resources.get("GPU", 0))
        if not each["Alive"] or not gpus:
            continue
        names = [key.removeprefix("accelerator_type:") for key in resources if key.startswith("accelerator_type:")]
        device = kind_from_ray(names[0] if names else "")
        nodes.append(Node(gpus, device, float(resources.get("memory", 0)) or None))
    if not nodes:
        raise ConfigError("the Ray cluster has no node with GPUs; write cluster: {nodes: ..., gpu: ...}.")
    return _cluster(nodes)


def kind_from_ray(name: str) -> Device:
    """Return the kind that Ray's resource `accelerator_type` names, such as `H100` or `A100-40G`."""
    known = {"A100-40G": "a100_sxm_40gb", "A100-80G": "a100_sxm", "A100": "a100_sxm"}
    try:
        return device_of_kind(known.get(name, name))
    except ConfigError as error:
        raise ConfigError(f"Ray says that the GPUs of a node are {name!r}. {error}") from error
