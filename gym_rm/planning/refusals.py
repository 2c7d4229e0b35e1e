"""Why a request has no plan: every rule that it breaks, each with a change that keeps it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gym_rm.errors import ConfigError
from gym_rm.planning.component_options import awake_options, divisors_violated, places
from gym_rm.planning.hardware.devices import Cluster, Device
from gym_rm.planning.plan import Role
from gym_rm.planning.plan_request import Component, PlanRequest
from gym_rm.planning.quantities import GIB, show_bytes, show_seconds
from gym_rm.planning.search import coarse_sizes, fixed_sizes, search

MOST_COMPONENTS = 8  # more have too many partitions to search
MOST_MEMORY = 2048  # GiB of a GPU in a suggestion
MOST_GPUS = 64  # of a cluster in a suggestion
FIXED = ("num_gpus", "num_replicas", "fsdp_size", "tensor_parallel_size", "quantization")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a request breaks, in words with the values, and the smallest change that keeps it."""

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
    """Return the rules that a request breaks, before any search."""
    violations: list[Violation] = []
    for component in request.components:
        violations += [*_tensor_parallel(component, request.cluster.node_gpus), *_lengths(component, request)]
        violations += _device(component, request.cluster.device)
    return [*violations, *_step(request)]


def _tensor_parallel(component: Component, node_gpus: int) -> Iterator[Violation]:
    size, name = component.tensor_parallel_size, f"{component.path}.tensor_parallel_size"
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
        larger = f", or {component.path}.fsdp_size for a larger group" if component.role.trains else ""
        yield Violation(
            f"{name}={size} is more than the {node_gpus} GPUs of a node; a tensor-parallel group stays in one node.",
            f"Set {name}={nearest}{larger}.",
        )


def _device(component: Component, device: Device) -> Iterator[Violation]:
    """Say which savings of memory a device does not have."""
    name, given = component.path, component.quantization
    possible = "int8" if device.is_cpu else "fp8" if device.has_fp8 else None
    if given not in (None, possible):
        text = f"{name}.quantization={given} does not run on {device.name}."
        yield Violation(text, f"Set {name}.quantization={possible or 'null'}.")
    if device.is_cpu and component.sleeps:
        text = f"{name}.sleeps=true frees nothing on a CPU, where weights that sleep are in the same memory."
        yield Violation(text, f"Set {name}.sleeps=false.")
    if device.is_cpu and component.role.trains and component.optimizer == "adamw_8bit":
        text = f"{name}.optimizer=adamw_8bit needs a GPU: bitsandbytes has no 8-bit optimizer for CPUs."
        yield Violation(text, f"Set {name}.optimizer=adamw, and {name}.lora_rank=16 if it does not fit.")


def _lengths(component: Component, request: PlanRequest) -> Iterator[Violation]:
    work, name, budget = request.workload, component.path, component.max_num_batched_tokens
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
    compares = Role.REWARD_TRAINING in roles or (Role.POLICY in roles and Role.CRITIC not in roles)
    if work.group_size < 2 and compares:
        yield Violation(
            f"workload.group_size={work.group_size}: GRPO and training on pairs compare replies to one prompt.",
            "Set workload.group_size=2 or more, or train the policy with a critic (PPO).",
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


# --- after the search ------------------------------------------------------------------------------------------------


def explain(request: PlanRequest) -> Infeasible:
    """Return why the search found nothing, with the memory that is missing and the smallest change that is enough."""
    if request.step_seconds is not None and (fastest := search(replace(request, step_seconds=None))) is not None:
        seconds = math.ceil(fastest.step_seconds * 10) / 10
        gpus = _more_gpus(request)
        text = f"the fastest plan on {request.cluster.text} takes {show_seconds(fastest.step_seconds)}."
        more = f" or more, or use {gpus} {request.cluster.device.processor}s" if gpus else ""
        fix = f"Set step_seconds={seconds:g}{more}."
        violations = [Violation(f"step_seconds={request.step_seconds:g}: {text}", fix)]
    else:
        violations = _contradictions(request) or _too_large(replace(request, step_seconds=None))
    return Infeasible(violations, name=request.name)


def _contradictions(request: PlanRequest) -> list[Violation]:
    """Say which components have fixed numbers that leave no number of GPUs, however large the GPUs are."""
    violations = []
    for component in request.components:
        fixed = [f"{field}={value}" for field in FIXED if (value := getattr(component, field)) is not None]
        if fixed and _peak_alone(component, request) is None:
            work = f"{request.cluster.num_gpus} GPUs and {request.workload.conversations} conversations of a step"
            text = f"{component.path}: {', '.join(fixed)} cannot be kept with {work}."
            violations.append(Violation(text, f"Leave one of {component.path}'s numbers auto, or change it."))
    return violations


def _too_large(request: PlanRequest) -> list[Violation]:
    """Say by how much components are too large for the cluster, each alone or all together."""
    change, device = _change(request), request.cluster.device
    texts = []
    for component in request.components:
        needed = (_peak_alone(component, request) or 0.0) + device.reserved.value
        short = needed - device.memory.value
        if component.engine == "vllm" and component.gpu_memory_utilization < needed / device.memory.value < 1:
            share = math.ceil(100 * needed / device.memory.value) / 100
            text = f"{component.path}: the engine needs {show_bytes(needed)} of a GPU for its weights and at least the "
            text += f"longest conversation, {component.gpu_memory_utilization:g} of it are less."
            return [Violation(text, f"Set {component.path}.gpu_memory_utilization={share:g}.")]
        if short > 0:
            texts.append(
                f"{component.name} ({component.shape.name}, {component.shape.parameters / 1e9:.2f}B parameters) does "
                f"not fit: spread as well as it can be, each {device.processor} is {show_bytes(short)} short."
            )
    return [Violation(text, change) for text in texts or ["the components fit one by one, but not together."]]


def _peak_alone(component: Component, request: PlanRequest) -> float | None:
    """Return the fewest bytes of a GPU that a component alone can need; None if its fixed numbers allow nothing."""
    cluster = request.cluster
    large = replace(request, cluster=_with_memory(cluster, MOST_MEMORY))
    sizes = {*coarse_sizes(cluster.num_gpus), *fixed_sizes(request, cluster.num_gpus)}
    wheres = [next(places(size, cluster.node_gpus)) for size in sizes if component.num_gpus in (None, size)]
    options = [awake_options(component, where, large, together=True, known={}) for where in wheres]
    return min((option.peak for found in options for option in found), default=None)


def _change(request: PlanRequest) -> str:
    """Return the smallest change of the hardware with which the whole request has a plan."""
    changes, processor = [], request.cluster.device.processor
    if _fits(request, _with_memory(request.cluster, MOST_MEMORY)):
        gib = _least(1, MOST_MEMORY, lambda size: _fits(request, _with_memory(request.cluster, size)))
        changes.append(f"{processor}s with {gib} GiB")
    if gpus := _more_gpus(request):
        changes.append(f"{gpus} {processor}s")
    if not changes:
        return (
            f"No size of {processor} up to 2 TiB is enough: use a smaller model, shorter texts or fewer fixed numbers."
        )
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
    return low + bisect.bisect_left(range(low, high), True, key=enough)


def _fits(request: PlanRequest, cluster: Cluster) -> bool:
    return search(replace(request, cluster=cluster)) is not None


def _with_memory(cluster: Cluster, gib: int) -> Cluster:
    memory = replace(cluster.device.memory, value=float(gib * GIB))
    return replace(cluster, device=cluster.device.with_quantities({"memory": memory}))


def _with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """Return the cluster with at least so many GPUs: one node grows to 8 before there are more; a CPU is a node."""
    grows = len(cluster.nodes) == 1 and not cluster.device.is_cpu
    if grows and gpus <= 8:
        return replace(cluster, nodes=(gpus,))
    size = max(cluster.node_gpus, 8) if grows else cluster.node_gpus
    return replace(cluster, nodes=(size,) * math.ceil(gpus / size))
