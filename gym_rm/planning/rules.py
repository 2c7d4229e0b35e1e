"""Why a request has no plan: every rule that it breaks, each with the smallest change that keeps it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.devices import Cluster, Node
from gym_rm.planning.options import Place as Pool
from gym_rm.planning.options import awake_options, divisors_violated, tensor_parallel_sizes
from gym_rm.planning.plan import Role
from gym_rm.planning.quantities import GIB, show_bytes, show_seconds
from gym_rm.planning.request import Component, Request
from gym_rm.planning.search import search

MOST_MEMORY = 2048 * GIB  # of a GPU in a suggestion
MOST_GPUS = 64  # of a cluster in a suggestion


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a request breaks.

    Attributes:
        text: the rule, with the values.
        fix: the smallest change that keeps it.
    """

    text: str
    fix: str


class Infeasible(ConfigError):
    """No plan exists. `violations` has all reasons that were found."""

    def __init__(self, violations: Sequence[Violation], *, name: str = "the request") -> None:
        self.violations = tuple(violations)
        count = "1 reason" if len(self.violations) == 1 else f"{len(self.violations)} reasons"
        lines = "".join(f"\n  {each.text}\n    {each.fix}" for each in self.violations)
        super().__init__(f"{name} has no plan, for {count}:{lines}")


def check(request: Request) -> list[Violation]:
    """Return the rules that the fixed numbers of a request break, before any search."""
    found: list[Violation] = []
    node_gpus = max((node.gpus for node in request.cluster.nodes), default=0)
    for component in request.components:
        found += _tensor_parallel(component, node_gpus)
        found += _world_size(component, request)
        found += _batch(component, request)
    found += [*_own_weights(request), *_groups(request), *_pools(request)]
    return found or list(_common_sizes(request))


def _tensor_parallel(component: Component, node_gpus: int) -> Iterator[Violation]:
    size = component.tensor_parallel_size
    if size is None:
        return
    allowed = [each for each in range(1, node_gpus + 1) if not divisors_violated(component, each)]
    nearest = min(allowed, key=lambda each: (abs(each - size), each))
    listed = ", ".join(map(str, allowed))
    for name, number in divisors_violated(component, size):
        yield Violation(
            f"{component.name}.tensor_parallel_size={size} does not divide the {number:,} {name} of "
            f"{component.shape.name}.",
            f"Set {component.name}.tensor_parallel_size={nearest} (possible: {listed}).",
        )
    if size > node_gpus:
        yield Violation(
            f"{component.name}.tensor_parallel_size={size} is more than the {node_gpus} GPUs of a node; a "
            "tensor-parallel group stays in one node.",
            f"Set {component.name}.tensor_parallel_size={nearest}"
            + (f", or {component.name}.fsdp_size for a larger group." if component.role.trains else "."),
        )


def _world_size(component: Component, request: Request) -> Iterator[Violation]:
    n, name = component.num_gpus, component.name
    total = request.cluster.num_gpus
    if n is not None and n > total:
        yield Violation(
            f"{name}.num_gpus={n} is more than the {total} GPUs of the cluster.", f"Set {name}.num_gpus={total}."
        )
    fixed = {
        key: value
        for key in ("tensor_parallel_size", "fsdp_size", "num_replicas")
        if (value := getattr(component, key)) is not None
    }
    product = math.prod(fixed.values())
    written = " x ".join(f"{key}={value}" for key, value in fixed.items())
    all_fixed = {"tensor_parallel_size", "num_replicas"} <= fixed.keys()
    if n is not None and fixed and (n % product or (all_fixed and not component.role.trains and n != product)):
        number = max(product, n // product * product)
        yield Violation(
            f"{name}: {written} is {product}, which does not make up num_gpus={n}.",
            (f"Set {name}.num_gpus={number}, or leave" if number <= total else "Leave") + " one of them auto.",
        )
    if n is None and product > total:
        yield Violation(
            f"{name}: {written} needs {product} GPUs, the cluster has {total}.",
            f"Make one of them smaller, or add {product - total} GPUs.",
        )


def _batch(component: Component, request: Request) -> Iterator[Violation]:
    work, name = request.workload, component.name
    if component.role.trains and component.num_gpus is not None:
        node_gpus = max((node.gpus for node in request.cluster.nodes), default=1)
        ranks = component.num_gpus // max(tensor_parallel_sizes(component, node_gpus), default=1)
        rows = work.conversations // work.updates_per_step
        if rows < ranks:
            yield Violation(
                f"{name}: {rows} conversations of an update are fewer than its {ranks} data-parallel ranks.",
                f"Set workload.num_prompts={math.ceil(ranks * work.updates_per_step / work.group_size)}, or take fewer "
                "GPUs.",
            )
    if component.num_replicas is not None and component.num_replicas > work.conversations:
        yield Violation(
            f"{name}.num_replicas={component.num_replicas} is more than the {work.conversations} conversations of a "
            "step.",
            f"Set {name}.num_replicas={work.conversations}, or workload.num_prompts="
            f"{math.ceil(component.num_replicas / work.group_size)}.",
        )
    budget = component.max_num_batched_tokens
    if budget is not None and component.role is not Role.GENERATION and budget < work.longest:
        yield Violation(
            f"{name}.max_num_batched_tokens={budget:,} is less than the longest conversation, {work.longest:,} tokens.",
            f"Set {name}.max_num_batched_tokens={work.longest}.",
        )
    limit = component.shape.max_length
    if limit is not None and work.longest > limit:
        over = work.longest - limit
        yield Violation(
            f"{name}: the longest conversation has {work.longest:,} tokens, {component.shape.name} reads {limit:,}.",
            f"Make prompts or replies {math.ceil(over / work.turns):,} tokens shorter.",
        )


def _groups(request: Request) -> list[Violation]:
    work, roles = request.workload, {each.role for each in request.components}
    found = []
    if Role.POLICY in roles and Role.CRITIC not in roles and work.group_size < 2:
        found.append(
            Violation(
                f"workload.group_size={work.group_size}: GRPO compares the replies to one prompt.",
                "Set workload.group_size=2 or more, or add a critic (PPO).",
            )
        )
    if Role.REWARD_TRAINING in roles and work.group_size < 2:
        found.append(
            Violation(
                f"workload.group_size={work.group_size}: a reward model is trained on two replies to a prompt or more.",
                "Set workload.group_size=2.",
            )
        )
    if work.updates_per_step > work.conversations:
        found.append(
            Violation(
                f"workload.updates_per_step={work.updates_per_step} is more than the {work.conversations} "
                "conversations of a step.",
                f"Set workload.updates_per_step={work.conversations}.",
            )
        )
    return found


def _own_weights(request: Request) -> Iterator[Violation]:
    """Say what a policy that generates with its own weights cannot have."""
    if not any(each.engine == "transformers" for each in request.components):
        return
    for component in request.components:
        for field in ("tensor_parallel_size", "fsdp_size"):
            size = getattr(component, field) or 1
            if component.role is Role.POLICY and size > 1:
                yield Violation(
                    f"{component.name}.{field}={size}: generation by transformers needs the whole weights on each GPU.",
                    f"Set {component.name}.{field}=1, or generation.engine=vllm.",
                )


def _common_sizes(request: Request) -> Iterator[Violation]:
    """Say where fixed numbers leave no size for a pool."""
    possible = {each.name: _possible_sizes(each, request) for each in request.components}
    for name, sizes in possible.items():
        if not sizes:
            yield Violation(
                f"{name}: no number of GPUs up to {request.cluster.num_gpus} agrees with its fixed numbers.",
                f"Leave one of {name}'s numbers auto.",
            )
    for group in request.pools or ():
        common = functools.reduce(operator.and_, (possible[name] for name in group))
        if all(possible[name] for name in group) and not common:
            written = "; ".join(f"{name} can have {_listed(possible[name])}" for name in group)
            yield Violation(
                f"no number of GPUs agrees with all fixed numbers of the pool {', '.join(group)}: {written} GPUs.",
                "List them in different pools, or leave a number auto.",
            )


def _possible_sizes(component: Component, request: Request) -> set[int]:
    """Return the numbers of GPUs that agree with the fixed numbers of a component."""
    node_gpus = max((node.gpus for node in request.cluster.nodes), default=0)
    return {
        size
        for size in range(1, request.cluster.num_gpus + 1)
        if component.num_gpus in (None, size)
        for tp in tensor_parallel_sizes(component, node_gpus)
        if size % tp == 0
        and component.num_replicas in (None, size // tp)
        and (size // tp) % (component.fsdp_size or 1) == 0
    }


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    return ", ".join(map(str, shown[:6])) + (", ..." if len(shown) > 6 else "")


def _pools(request: Request) -> Iterator[Violation]:
    if request.pools is None:
        return
    components = {each.name: each for each in request.components}
    total, fixed_total = request.cluster.num_gpus, 0
    for group in request.pools:
        numbers = {name: components[name].num_gpus for name in group if components[name].num_gpus is not None}
        if len(set(numbers.values())) > 1:
            written = ", ".join(f"{name}.num_gpus={value}" for name, value in numbers.items())
            largest = max(value for value in numbers.values() if value)
            yield Violation(
                f"{written}, but they share one pool.",
                f"Set all of them to {largest}, or list them in different pools.",
            )
        fixed_total += max((value or 1 for value in numbers.values()), default=1)
    if fixed_total > total:
        yield Violation(
            f"the pools need at least {fixed_total} GPUs, the cluster has {total}.",
            f"Add {fixed_total - total} GPUs, or let components share a pool (pools: auto).",
        )


# --- after the search ------------------------------------------------------------------------------------------------


def explain(request: Request) -> Infeasible:
    """Return why the search found nothing, with the memory that is missing and the smallest change that is enough."""
    if request.goal == "smallest" and request.step_seconds is not None:
        fastest = search(replace(request, goal="throughput"))
        if fastest is not None:
            return Infeasible(
                [
                    Violation(
                        f"objective.step_seconds={request.step_seconds:g}: the fastest plan on {request.cluster.text} "
                        f"takes {show_seconds(fastest.step_seconds)}.",
                        f"Set objective.step_seconds={math.ceil(fastest.step_seconds * 10) / 10:g}"
                        + _more_gpus(request, " or more, or use {} GPUs."),
                    )
                ],
                name=request.name,
            )
    if host := _host_memory(request):
        return Infeasible([host], name=request.name)
    free = replace(request, goal="throughput")
    change = _change(free)
    found = [Violation(text, change) for component in request.components for text, _ in _too_large(component, request)]
    return Infeasible(
        found or [Violation("the components fit one by one, but not together.", change)], name=request.name
    )


def memory_of_others(request: Request, violations: Sequence[Violation]) -> Iterator[Violation]:
    """Say which of the components that break no rule are too large for the cluster."""
    for component in request.components:
        if not any(each.text.startswith((f"{component.name}.", f"{component.name}:")) for each in violations):
            for text, needed in _too_large(component, request):
                size = math.ceil(needed / GIB)
                yield Violation(text, f"Use GPUs with {size} GiB, or a smaller dtype, LoRA, or shorter texts.")


def _host_memory(request: Request) -> Violation | None:
    """Say that only the memory of the hosts is too small for what sleeps."""
    given = min((node.host_memory for node in request.cluster.nodes if node.host_memory is not None), default=None)
    if given is None:
        return None
    nodes = tuple(replace(node, host_memory=None) for node in request.cluster.nodes)
    found = search(replace(request, cluster=replace(request.cluster, nodes=nodes)))
    if found is None:
        return None
    used = dict.fromkeys(range(len(nodes)), 0.0)
    for pool, addresses in zip(found.pools, found.gpus, strict=True):
        for address in addresses:
            used[address.node] += pool.host / len(addresses)
    return Violation(
        f"cluster.host_memory={show_bytes(given)} is too small for the models that sleep.",
        f"Set cluster.host_memory={math.ceil(max(used.values()) / GIB)} GiB, or sleeps=false where it is fixed.",
    )


def _too_large(component: Component, request: Request) -> Iterator[tuple[str, float]]:
    """Yield by how much a component alone is too large for the cluster, and the bytes that a GPU would need."""
    alone = [(device, sum(node.gpus for node in request.cluster.nodes if node.device == device))
             for device in request.cluster.devices]  # fmt: skip
    shortest, least = math.inf, math.inf
    for device, gpus in alone:
        node_gpus = max(node.gpus for node in request.cluster.nodes if node.device == device)
        large = device.with_quantities({"memory": replace(device.memory, value=MOST_MEMORY)})
        sizes = range(1, gpus + 1) if component.num_gpus is None else [component.num_gpus]
        for size in sizes if gpus <= 64 else [gpus]:
            place = Pool(large, size, node_gpus, size > node_gpus)
            for option in awake_options(component, place, request, together=True):
                needed = option.working + option.largest + device.reserved.value
                shortest, least = min((shortest, least), (needed - device.memory.value, needed))
    if 0 < shortest < math.inf:
        yield (
            f"{component.name} ({component.shape.name}, {component.shape.parameters / 1e9:.2f}B parameters) does not "
            f"fit: divided as well as it can be, each GPU is {show_bytes(shortest)} short.",
            least,
        )


def _change(request: Request) -> str:
    """Return the smallest change of the hardware with which the whole request has a plan."""
    memory = _least_memory(request)
    texts = [] if memory is None else [f"GPUs with {math.ceil(memory / GIB)} GiB"]
    more = _more_gpus(request, "{} GPUs")
    texts += [more] if more else []
    if not texts:
        return "No size of GPU up to 2 TiB is enough: use a smaller model, shorter texts or fewer fixed numbers."
    return "It fits on " + ", or on ".join(texts) + "; or use a smaller dtype, LoRA, or shorter texts."


def _least_memory(request: Request) -> float | None:
    """Return the least memory of each GPU, to 1 GiB, with which there is a plan."""

    def fits(gib: int) -> bool:
        nodes = tuple(
            replace(node, device=node.device.with_quantities({"memory": replace(node.device.memory, value=gib * GIB)}))
            for node in request.cluster.nodes
        )
        return search(replace(request, cluster=replace(request.cluster, nodes=nodes))) is not None

    low, high = 1, MOST_MEMORY // GIB
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return float(low * GIB)


def _more_gpus(request: Request, text: str) -> str:
    """Return the text with the fewest GPUs, in nodes like the largest, with which there is a plan; empty if none is."""
    nodes = request.cluster.nodes
    largest = max(nodes, key=lambda node: node.gpus)
    cluster = request.cluster

    def with_gpus(gpus: int) -> Cluster:
        if len(nodes) == 1 and gpus <= 8:
            return replace(cluster, nodes=(Node(gpus, largest.device, largest.host_memory),))
        size = max(largest.gpus, 8) if len(nodes) == 1 else largest.gpus
        return replace(cluster, nodes=(Node(size, largest.device, largest.host_memory),) * math.ceil(gpus / size))

    @functools.cache
    def fits(changed: Cluster) -> bool:
        return search(replace(request, cluster=changed)) is not None

    gpus = failed = cluster.num_gpus
    most = min(MOST_GPUS, 4 * gpus) if gpus >= 4 else 16
    while gpus < most:
        gpus = gpus + 1 if len(nodes) == 1 and gpus < 8 else gpus * 2
        if fits(with_gpus(gpus)):
            break
        failed = gpus
    else:
        return ""
    # More GPUs are never worse, so the fewest are between the last that failed and the first that is enough.
    while gpus - failed > 1:
        middle = (failed + gpus) // 2
        failed, gpus = (failed, middle) if fits(with_gpus(middle)) else (middle, gpus)
    return text.format(with_gpus(gpus).num_gpus)
