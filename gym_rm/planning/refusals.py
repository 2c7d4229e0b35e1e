"""Why a request has no plan, and the settings with which it has one."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from gym_rm.errors import ConfigError
from gym_rm.planning.component_options import Layout, divisors_violated, layouts, places
from gym_rm.planning.hardware.devices import KINDS, Cluster, Device
from gym_rm.planning.plan import Role
from gym_rm.planning.plan_request import Component, PlanRequest, StepWorkload
from gym_rm.planning.quantities import GIB, show_bytes, show_seconds
from gym_rm.planning.request_settings import PlanSettings
from gym_rm.planning.search import pool_sizes, search

MOST_COMPONENTS = 8  # more have too many partitions to search
MOST_MEMORY = 2048  # GiB of a CPU in a fix, and of a GPU where the missing memory is computed
MOST_GPUS = 64  # of a cluster in a fix
FIXED = ("num_gpus", "num_replicas", "fsdp_size", "tensor_parallel_size", "quantization")
CHOICES = (*FIXED[:4], "max_num_batched_tokens", "max_num_seqs", "sleeps", "gradient_checkpointing")  # may be auto

Changes: TypeAlias = tuple[str, ...]
"""Settings such as `policy.lora.rank=16`, which are changed together."""


class BrokenRule(NamedTuple):
    """A rule that a request breaks, in words with the values, and the settings that keep it; empty if none do."""

    text: str
    changes: Changes


class Infeasible(ConfigError):
    """No plan exists. `reasons` says why; with each of `fixes` there is one, the smallest change first."""

    def __init__(self, reasons: Sequence[str], fixes: Sequence[Changes], *, name: str) -> None:
        self.reasons, self.fixes = tuple(reasons), tuple(fixes)
        count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
        lines = [f"{name} has no plan, for {count}:", *(f"  {reason}" for reason in reasons)]
        if fixes:
            lines += ["There is a plan with any of:", *(f"  {shlex.join(fix)}" for fix in fixes)]
        else:
            lines.append("No change of the settings that was tried is enough: use smaller models or more memory.")
        super().__init__("\n".join(lines))


# --- why -------------------------------------------------------------------------------------------------------------


def broken_rules(request: PlanRequest) -> Iterator[BrokenRule]:
    """Yield the rules that a request breaks, before any search."""
    for component in request.components:
        yield from _tensor_parallel(component, request.cluster)
        yield from _lengths(component, request.workload)
        yield from _device(component, request.cluster.device)
    yield from _step(request)


def _tensor_parallel(component: Component, cluster: Cluster) -> Iterator[BrokenRule]:
    size, name, node_gpus = component.tensor_parallel_size, f"{component.path}.tensor_parallel_size", cluster.node_gpus
    if size is None:
        return
    wrong = [f"divide the {number:,} {what} of {component.shape.name}" for what, number in
             divisors_violated(component, size)]  # fmt: skip
    wrong += [f"stay in a node of {node_gpus} {cluster.device.processor}s"] if size > node_gpus else []
    if wrong:
        allowed = [number for number in range(1, node_gpus + 1) if not divisors_violated(component, number)]
        nearest = min(allowed, key=lambda number: (abs(number - size), number))
        text = f"{name}={size} does not {', '.join(wrong)}; possible: {', '.join(map(str, allowed))}."
        yield BrokenRule(text, (f"{name}={nearest}",))


def _device(component: Component, device: Device) -> Iterator[BrokenRule]:
    """Say which savings of memory a device does not have."""
    name, given = component.path, component.quantization
    possible = "int8" if device.is_cpu else "fp8" if device.has_fp8 else "null"
    if given not in (None, possible):
        text = f"{name}.quantization={given} does not run on {device.name}."
        yield BrokenRule(text, (f"{name}.quantization={possible}",))
    if device.is_cpu and component.sleeps:
        text = f"{name}.sleeps=true frees nothing on a CPU, where weights that sleep are in the same memory."
        yield BrokenRule(text, (f"{name}.sleeps=false",))
    if device.is_cpu and component.role.trains and component.optimizer == "adamw_8bit":
        text = f"{name}.optimizer=adamw_8bit needs a GPU: bitsandbytes has no 8-bit optimizer for CPUs."
        yield BrokenRule(text, (f"{name}.optimizer=adamw",))


def _lengths(component: Component, work: StepWorkload) -> Iterator[BrokenRule]:
    name, budget = component.path, component.max_num_batched_tokens
    if budget is not None and component.role is not Role.GENERATION and budget < work.longest:
        text = (
            f"{name}.max_num_batched_tokens={budget:,} is less than the longest conversation, {work.longest:,} tokens."
        )
        yield BrokenRule(text, (f"{name}.max_num_batched_tokens={work.longest}",))
    limit = component.shape.max_length
    if limit is not None and work.longest > limit:
        text = f"{name}: the longest conversation has {work.longest:,} tokens, {component.shape.name} reads {limit:,}."
        fewer = int(work.replies.maximum) - math.ceil((work.longest - limit) / work.turns)
        yield BrokenRule(text, (f"workload.reply_tokens={fewer}",) if fewer > 0 else ())


def _step(request: PlanRequest) -> Iterator[BrokenRule]:
    """Say what is wrong with the work of a step, or with the number of components."""
    work, roles = request.workload, {component.role for component in request.components}
    compares = Role.REWARD_TRAINING in roles or (Role.POLICY in roles and Role.CRITIC not in roles)
    if work.group_size < 2 and compares:
        text = f"workload.group_size={work.group_size}: without a critic, replies to one prompt are compared."
        yield BrokenRule(text, ("workload.group_size=2",))
    if work.updates_per_step > work.conversations:
        text = f"workload.updates_per_step={work.updates_per_step} is more than the conversations of a step, "
        yield BrokenRule(f"{text}{work.conversations}.", (f"workload.updates_per_step={work.conversations}",))
    if request.pools is None and len(request.components) > MOST_COMPONENTS:
        count = len(request.components)
        text = f"{count} components can share {request.cluster.device.processor}s in too many ways to try them all; "
        yield BrokenRule(f"{text}say in pools which do.", ("pools=together",))


def _shortages(request: PlanRequest) -> list[str]:
    """Say which components do not fit, each alone or all together, if the request keeps all rules."""
    texts, device = [], request.cluster.device
    for component in request.components:
        peak = _peak_alone(component, request)
        if peak is None:
            fixed = [f"{field}={value}" for field in FIXED if (value := getattr(component, field)) is not None]
            work = f"{request.cluster.num_gpus} {device.processor}s and {request.workload.conversations} conversations"
            texts.append(f"{component.path}: {', '.join(fixed)} cannot be kept with {work} of a step.")
            continue
        needed, share = peak + device.reserved.value, component.gpu_memory_utilization
        size = f"{component.name} ({component.shape.name}, {component.shape.parameters / 1e9:.2f}B parameters)"
        if needed > device.memory.value:
            short = f"of {show_bytes(device.memory.value)}: {show_bytes(needed - device.memory.value)} are missing"
            texts.append(
                f"{size} does not fit: spread as well as it can be, it needs {show_bytes(needed)} of each "
                f"{device.processor} {short}."
            )
        elif component.engine == "vllm" and needed > share * device.memory.value:
            text = f"{size} needs {show_bytes(needed)} of a {device.processor} for its weights and one conversation, "
            texts.append(f"{text}which is more than {component.path}.gpu_memory_utilization={share:g} of it.")
    return texts or ["the components fit one by one, but not together."]


def _peak_alone(component: Component, request: PlanRequest) -> float | None:
    """Return the fewest bytes of a GPU that a component alone can need; None if its fixed numbers allow nothing."""
    memory = replace(request.cluster.device.memory, value=math.inf)
    large = replace(request.cluster, device=request.cluster.device.with_quantities({"memory": memory}))
    found = _layouts_alone(component, replace(request, cluster=large))
    return min((layout.peak for layout in found), default=None)


def _layouts_alone(component: Component, request: PlanRequest) -> Iterator[Layout]:
    """Yield the layouts of a component with GPUs of its own."""
    for size in pool_sizes(request):
        if component.num_gpus in (None, size):
            where = next(places(size, request.cluster.node_gpus))
            yield from layouts(component, where, request, together=True, known={})


@functools.lru_cache(maxsize=4096)
def _fits_alone(component: Component, others: tuple[Component, ...], cluster: Cluster, work: StepWorkload) -> bool:
    request = PlanRequest("", cluster, (component, *others), work)
    return next(_layouts_alone(component, request), None) is not None


def has_plan(request: PlanRequest) -> bool:
    """Return whether a request keeps all rules and fits, without looking for the best plan."""
    inside = tuple(component for component in request.components if component.engine == "transformers")
    return (
        next(broken_rules(request), None) is None
        and all(_fits_alone(each, inside, request.cluster, request.workload) for each in request.components)
        and search(request, best=False) is not None
    )


# --- what helps ------------------------------------------------------------------------------------------------------


def refusal(
    settings: PlanSettings, request: PlanRequest, rules: Sequence[BrokenRule], fits: Callable[[Changes], bool]
) -> Infeasible:
    """Return why a request has no plan, with the changes of its settings that were tried and are enough.

    Args:
        settings, request: what has no plan.
        rules: the rules that it breaks.
        fits: returns whether there is a plan with some changes.
    """
    reasons = list(dict.fromkeys(rule.text for rule in rules))
    base = tuple(dict.fromkeys(change for rule in rules for change in rule.changes))
    seconds: Changes = ()
    timed = not rules and request.step_seconds is not None
    if timed and (fastest := search(replace(request, step_seconds=None))) is not None:
        seconds = (f"step_seconds={math.ceil(fastest.step_seconds * 10) / 10:g}",)
        took = f"the fastest plan on {request.cluster.text} takes {show_seconds(fastest.step_seconds)}"
        reasons = [f"step_seconds={request.step_seconds:g}: {took}."]
    elif timed:
        base = ("step_seconds=null",)
    reasons = reasons or _shortages(request)
    if base and fits(base):
        return Infeasible(reasons, [base], name=request.name)
    savings = [[seconds]] if seconds else [[change] for change in _savings(request)]
    savings += [[("step_seconds=null",)]] if rules and request.step_seconds is not None else []
    savings.append(_shorter(settings))
    return Infeasible(reasons, _fixes(base, savings, _larger(settings, request), fits), name=request.name)


def _fixes(
    base: Changes, savings: list[list[Changes]], larger: list[list[Changes]], fits: Callable[[Changes], bool]
) -> list[Changes]:
    """Return the changes that fit: single ones, then pairs; of those that differ in a size, the smallest.

    Larger hardware is only paired where nothing less is enough.
    """

    def first(*ladders: Sequence[Changes]) -> list[Changes]:
        tried = ((*base, *itertools.chain(*steps)) for steps in itertools.product(*ladders))
        return list(itertools.islice(filter(fits, tried), 1))

    singles = [(ladder, first(ladder)) for ladder in savings]
    small = [ladder for ladder, found in singles if not found]
    found = [fix for _, fixes in singles for fix in fixes]
    found += [fix for pair in itertools.combinations(small, 2) for fix in first(*pair)]
    found += [fix for ladder in larger for fix in first(ladder)]
    return found or [fix for ladder in small for hardware in larger for fix in first(ladder, hardware)]


def _savings(request: PlanRequest) -> Iterator[Changes]:
    """Yield the changes of models that may save memory, those that change the least first."""
    device, parts = request.cluster.device, [each for each in request.components if each.engine != "transformers"]
    for part in parts:
        yield from ((f"{part.path}.{name}=auto",) for name in CHOICES if getattr(part, name) is not None)
    if request.pools is not None:
        yield ("pools=auto",)
    for part in parts:
        if part.engine == "vllm" and part.gpu_memory_utilization < 0.9:
            yield (f"{part.path}.gpu_memory_utilization=0.9",)
        if part.dtype == "float32":
            yield (f"{part.path}.dtype=bfloat16",)
        if part.role.trains and part.master_weights and part.dtype != "float32":
            yield (f"{part.path}.master_weights=false",)
        if part.role.trains and part.optimizer == "adamw" and not device.is_cpu:
            yield (f"{part.path}.optimizer=adamw_8bit",)
        if part.role is Role.REWARD_MODEL and part.quantization is None and device.has_fp8:
            yield (f"{part.path}.quantization=fp8",)
        if part.role.trains and part.lora is None:
            yield (f"{part.path}.lora.rank=16",)
        if part.role is Role.REFERENCE:
            yield ("reference=false",)
        if part.role is Role.GENERATION:
            yield ("generation.engine=transformers",)
    if len(parts) < len(request.components):
        yield ("generation.engine=vllm",)


def _shorter(settings: PlanSettings) -> list[Changes]:
    """Return replies of half and a quarter of the length."""
    given = settings.workload.reply_tokens
    values = [
        f"{{{', '.join(f'{key}: {max(int(size // by), 1)}' for key, size in given.items())}}}"
        if isinstance(given, Mapping)
        else f"{max(given // by, 1)}"
        for by in (2, 4)
    ]
    return [(f"workload.reply_tokens={value}",) for value in values]


def _larger(settings: PlanSettings, request: PlanRequest) -> list[list[Changes]]:
    """Return larger memories, and larger numbers of GPUs, each from the smallest."""
    cluster, device = settings.cluster, request.cluster.device
    given = {"like": cluster.gpu} if isinstance(cluster.gpu, str) else cluster.gpu
    memories: list[Changes]
    if device.is_cpu:
        others = ", ".join(f"{key}: {value}" for key, value in given.items() if key != "memory")
        sizes = [1 << power for power in range(4, MOST_MEMORY.bit_length()) if GIB << power > device.memory.value]
        memories = [(f"cluster.gpu={{{others}, memory: {size} GiB}}",) for size in sizes]
    else:
        kinds = sorted(KINDS.values(), key=lambda kind: kind.memory.value)
        memories = [(f"cluster.gpu={kind.name}",) for kind in kinds if kind.memory.value > device.memory.value]
    nodes, per_node = cluster.nodes, cluster.gpus_per_node
    numbers: list[Changes] = []
    if nodes == 1 and not device.is_cpu:
        numbers = [(f"cluster.gpus_per_node={size}",) for size in (2, 4, 8) if size > per_node]
    full = numbers[-1] if numbers else ()
    most = min(MOST_GPUS, max(4 * nodes * per_node, 16)) // (8 if full else per_node)
    numbers += [(*full, f"cluster.nodes={nodes << power}") for power in range(1, 7) if nodes << power <= most]
    return [memories, numbers]
