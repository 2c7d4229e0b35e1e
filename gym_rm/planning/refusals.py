"""Why a request has no plan: every rule that it breaks, each with a change that keeps it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gym_rm.errors import ConfigError
from gym_rm.planning.component_options import (
    PoolPlace,
    awake_options,
    divisors_violated,
    generates_with_policy,
    tensor_parallel_sizes,
)
from gym_rm.planning.hardware.devices import Cluster
from gym_rm.planning.plan import Role
from gym_rm.planning.plan_request import Component, PlanRequest
from gym_rm.planning.quantities import GIB, show_bytes, show_seconds
from gym_rm.planning.search import search

MOST_COMPONENTS = 8  # more have too many partitions to search
MOST_MEMORY = 2048  # GiB of a GPU in a suggestion
MOST_GPUS = 64  # of a cluster in a suggestion
FIXED = ("num_gpus", "num_replicas", "fsdp_size", "tensor_parallel_size")


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
        lines = "".join(f"\n  {violation.text}\n    {violation.fix}" for violation in self.violations)
        super().__init__(f"{name} has no plan, for {count}:{lines}")


def check(request: PlanRequest) -> list[Violation]:
    """Return the rules that the fixed numbers of a request break, before any search."""
    violations: list[Violation] = []
    for component in request.components:
        violations += list(_tensor_parallel(component, request.cluster.node_gpus)) or _num_gpus(component, request)
        violations += _batch(component, request)
    violations += [*_step(request), *_own_weights(request)]
    return violations or list(_pools(request))


def _tensor_parallel(component: Component, node_gpus: int) -> Iterator[Violation]:
    size, name = component.tensor_parallel_size, f"{component.name}.tensor_parallel_size"
    if size is None:
        return
    allowed = [number for number in range(1, node_gpus + 1) if not divisors_violated(component, number)]
    nearest = min(allowed, key=lambda number: (abs(number - size), number))
    for what, number in divisors_violated(component, size):
        yield Violation(
            f"{name}={size} does not divide the {number:,} {what} of {component.shape.name}.",
            f"Set {name}={nearest} (possible: {', '.join(map(str, allowed))}).",
        )
    if size > node_gpus:
        larger = f", or {component.name}.fsdp_size for a larger group" if component.role.trains else ""
        yield Violation(
            f"{name}={size} is more than the {node_gpus} GPUs of a node; a tensor-parallel group stays in one node.",
            f"Set {name}={nearest}{larger}.",
        )


def _batch(component: Component, request: PlanRequest) -> Iterator[Violation]:
    work, name, budget = request.workload, component.name, component.max_num_batched_tokens
    if component.role.trains and component.num_gpus is not None:
        ranks = component.num_gpus // max(tensor_parallel_sizes(component, request.cluster.node_gpus), default=1)
        if (rows := work.conversations // work.updates_per_step) < ranks:
            prompts = math.ceil(ranks * work.updates_per_step / work.group_size)
            yield Violation(
                f"{name}: {rows} conversations of an update are fewer than its {ranks} data-parallel ranks.",
                f"Set workload.num_prompts={prompts}, or take fewer GPUs.",
            )
    if component.num_replicas is not None and component.num_replicas > work.conversations:
        yield Violation(
            f"{name}.num_replicas={component.num_replicas} is more than the {work.conversations} conversations of a "
            "step.",
            f"Set {name}.num_replicas={work.conversations}.",
        )
    if budget is not None and component.role is not Role.GENERATION and budget < work.longest:
        yield Violation(
            f"{name}.max_num_batched_tokens={budget:,} is less than the longest conversation, {work.longest:,} tokens.",
            f"Set {name}.max_num_batched_tokens={work.longest}.",
        )
    limit = component.shape.max_length
    if limit is not None and work.longest > limit:
        over = math.ceil((work.longest - limit) / work.turns)
        yield Violation(
            f"{name}: the longest conversation has {work.longest:,} tokens, {component.shape.name} reads {limit:,}.",
            f"Make prompts or replies {over:,} tokens shorter.",
        )


def _step(request: PlanRequest) -> Iterator[Violation]:
    """Say what is wrong with the work of a step, or with the number of components."""
    work, roles = request.workload, {component.role for component in request.components}
    if work.group_size < 2 and Role.POLICY in roles and Role.CRITIC not in roles:
        yield Violation(
            f"workload.group_size={work.group_size}: GRPO compares the replies to one prompt.",
            "Set workload.group_size=2 or more, or add a critic (PPO).",
        )
    elif work.group_size < 2 and Role.REWARD_TRAINING in roles:
        yield Violation(
            f"workload.group_size={work.group_size}: a reward model is trained on two replies to a prompt or more.",
            "Set workload.group_size=2.",
        )
    if work.updates_per_step > work.conversations:
        yield Violation(
            f"workload.updates_per_step={work.updates_per_step} is more than the {work.conversations} conversations "
            "of a step.",
            f"Set workload.updates_per_step={work.conversations}.",
        )
    if request.pools is None and len(request.components) > MOST_COMPONENTS:
        yield Violation(
            f"{len(request.components)} components can share GPUs in too many ways to try; up to {MOST_COMPONENTS} "
            "are tried.",
            "Say which share GPUs: pools: together, pools: apart, or pools: [[policy, generation], [...]].",
        )


def _own_weights(request: PlanRequest) -> Iterator[Violation]:
    """Say what a policy that generates with its own weights cannot have."""
    policy = next((component for component in request.components if component.role is Role.POLICY), None)
    for field in ("tensor_parallel_size", "fsdp_size"):
        size = getattr(policy, field, None) or 1
        if size > 1 and generates_with_policy(request):
            yield Violation(
                f"policy.{field}={size}: generation by transformers needs the whole weights on each GPU.",
                f"Set policy.{field}=1, or generation.engine=vllm.",
            )


def _num_gpus(component: Component, request: PlanRequest) -> list[Violation]:
    """Say that the fixed numbers of a component leave no number of GPUs."""
    if _possible_sizes(component, request):
        return []
    fixed = {field: value for field in FIXED if (value := getattr(component, field)) is not None}
    written = ", ".join(f"{field}={value}" for field, value in fixed.items())
    changes: dict[str, dict[str, Any]] = {field: {field: None} for field in fixed}
    free = next((field for field in fixed if _possible_sizes(replace(component, **changes[field]), request)), "")
    return [
        Violation(
            f"{component.name}: no number of GPUs up to {request.cluster.num_gpus} agrees with {written}.",
            f"Leave {component.name}.{free} auto." if free else "Leave all of them auto.",
        )
    ]


def _pools(request: PlanRequest) -> Iterator[Violation]:
    """Say where the fixed numbers of components leave no number of GPUs for their pool."""
    total, needed = request.cluster.num_gpus, 0
    possible = {component.name: _possible_sizes(component, request) for component in request.components}
    for group in request.pools or ():
        common = functools.reduce(operator.and_, (possible[name] for name in group))
        needed += min(common, default=0)
        if not common:
            written = "; ".join(f"{name} can have {_listed(possible[name])}" for name in group)
            yield Violation(
                f"no number of GPUs agrees with all fixed numbers of the pool {', '.join(group)}: {written} GPUs.",
                "List them in different pools, or leave a number auto.",
            )
    if needed > total:
        yield Violation(
            f"the pools need at least {needed} GPUs, the cluster has {total}.",
            f"Add {needed - total} GPUs, or let components share a pool (pools: auto).",
        )


def _possible_sizes(component: Component, request: PlanRequest) -> set[int]:
    """Return the numbers of GPUs that agree with the fixed numbers of a component."""
    return {
        size
        for size in range(1, request.cluster.num_gpus + 1)
        if component.num_gpus in (None, size)
        for tp in tensor_parallel_sizes(component, request.cluster.node_gpus)
        for groups in (size // tp,)
        if size % tp == 0 and groups % (component.fsdp_size or 1) == 0
        and (component.num_replicas is None or groups % component.num_replicas == 0)
        and (component.role.trains or component.num_replicas in (None, groups))
    }  # fmt: skip


def _listed(sizes: set[int]) -> str:
    shown = sorted(sizes)
    return ", ".join(map(str, shown[:6])) + (", ..." if len(shown) > 6 else "")


# --- after the search ------------------------------------------------------------------------------------------------


def explain(request: PlanRequest) -> Infeasible:
    """Return why the search found nothing, with the memory that is missing and the smallest change that is enough."""
    if request.step_seconds is not None and (fastest := search(replace(request, step_seconds=None))) is not None:
        seconds = math.ceil(fastest.step_seconds * 10) / 10
        gpus = _more_gpus(request)
        violations = [
            Violation(
                f"step_seconds={request.step_seconds:g}: the fastest plan on {request.cluster.text} "
                f"takes {show_seconds(fastest.step_seconds)}.",
                f"Set step_seconds={seconds:g}" + (f" or more, or use {gpus} GPUs." if gpus else "."),
            )
        ]
    else:
        request = replace(request, step_seconds=None)
        change = _change(request)
        texts = [text for component in request.components if (text := _too_large(component, request))]
        texts = texts or ["the components fit one by one, but not together."]
        violations = [Violation(text, change) for text in texts]
    return Infeasible(violations, name=request.name)


def _too_large(component: Component, request: PlanRequest) -> str:
    """Return by how much a component alone is too large for the cluster; empty if it fits."""
    cluster = request.cluster
    large = replace(request, cluster=_with_memory(cluster, MOST_MEMORY))
    sizes = range(1, cluster.num_gpus + 1) if component.num_gpus is None else [component.num_gpus]
    peaks = [
        option.peak
        for size in (sizes if cluster.num_gpus <= 64 else [cluster.num_gpus])
        for option in awake_options(
            component, PoolPlace(size, cluster.node_gpus, size > cluster.node_gpus), large, together=True, known={}
        )
    ]
    short = min(peaks, default=0.0) + cluster.device.reserved.value - cluster.device.memory.value
    if not peaks or short <= 0:
        return ""
    return (
        f"{component.name} ({component.shape.name}, {component.shape.parameters / 1e9:.2f}B parameters) does not "
        f"fit: spread as well as it can be, each GPU is {show_bytes(short)} short."
    )


def _change(request: PlanRequest) -> str:
    """Return the smallest change of the hardware with which the whole request has a plan."""
    changes = []
    if _fits(request, _with_memory(request.cluster, MOST_MEMORY)):
        gib = _least(1, MOST_MEMORY, lambda size: _fits(request, _with_memory(request.cluster, size)))
        changes.append(f"GPUs with {gib} GiB")
    if gpus := _more_gpus(request):
        changes.append(f"{gpus} GPUs")
    if not changes:
        return "No size of GPU up to 2 TiB is enough: use a smaller model, shorter texts or fewer fixed numbers."
    return "It fits on " + ", or on ".join(changes) + "; or use a smaller dtype, LoRA, or shorter texts."


def _more_gpus(request: PlanRequest) -> int:
    """Return the fewest GPUs, in nodes like the largest, with which there is a plan; 0 if none is."""
    now = request.cluster.num_gpus
    most = min(MOST_GPUS, 4 * now) if now >= 4 else 16
    if now >= most or not _fits(request, _with_gpus(request.cluster, most)):
        return 0
    gpus = _least(now + 1, most, lambda number: _fits(request, _with_gpus(request.cluster, number)))
    return _with_gpus(request.cluster, gpus).num_gpus


def _least(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the least number that is enough. `high` is, and more is never worse."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _fits(request: PlanRequest, cluster: Cluster) -> bool:
    return search(replace(request, cluster=cluster)) is not None


def _with_memory(cluster: Cluster, gib: int) -> Cluster:
    memory = replace(cluster.device.memory, value=float(gib * GIB))
    return replace(cluster, device=cluster.device.with_quantities({"memory": memory}))


def _with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with at least so many GPUs: one node grows to 8 before there are more."""
    if len(cluster.nodes) == 1 and gpus <= 8:
        return replace(cluster, nodes=(gpus,))
    size = max(cluster.node_gpus, 8) if len(cluster.nodes) == 1 else cluster.node_gpus
    return replace(cluster, nodes=(size,) * math.ceil(gpus / size))
