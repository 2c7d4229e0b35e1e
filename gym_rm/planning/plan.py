"""A plan: where every component goes, what it takes of each GPU's memory, and how long a step takes.

Only records, and their JSON. `search` makes plans; `gym_rm.reports.plan_pictures` draws them.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from pydantic import Field, PositiveInt

from gym_rm.documents import read_mapping, to_yaml
from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.quantities import Basis

FORMAT = 3  # of the file
Item = TypeVar("Item")
Filled = Annotated[tuple[Item, ...], Field(min_length=1)]
Optimizer: TypeAlias = Literal["adamw", "adamw_8bit", "sgd"]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]  # of weights
Quantization: TypeAlias = Literal["int8", "fp8"]  # of the matrices in the layers of a reward model
SIZES_OF = "sizes of "  # how the model of a component is called that was given by its sizes


class Role(enum.StrEnum):
    """What a component does in a step."""

    POLICY = "policy"
    GENERATION = "generation"
    REFERENCE = "reference"
    REWARD_MODEL = "reward_model"
    CRITIC = "critic"
    REWARD_TRAINING = "reward_training"

    @property
    def trains(self) -> bool:
        """Whether the component has gradients and an optimizer."""
        return self in (Role.POLICY, Role.CRITIC, Role.REWARD_TRAINING)


class Phase(enum.StrEnum):
    """Parts of a step, in their order. Components in one phase on separate GPUs run at the same time."""

    WAKE = "wake"
    """Weights come back from the host's memory, and go there."""
    GENERATE = "generate"
    SCORE = "score"
    """Reward models score; the policy, the reference and the critic compute log-probabilities and values."""
    UPDATE = "update"
    SYNC = "sync"
    """New weights go from the policy to generation."""


@dataclass(frozen=True, slots=True)
class Address:
    """A GPU: number of its node, and its number in the node, both from 0."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes on one GPU.

    Attributes:
        name: what they hold, such as `weights`, `gradients`, `optimizer`, `activations`, `logits`, `kv_cache`,
            `communication`, `fragmentation`, `reserved`.
        component: whose they are.
        bytes: how many.
        basis, source: where the number is from.
    """

    name: str
    component: str
    bytes: float
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment of a phase, such as `backward` or `optimizer step`, and what it adds to the persistent memory."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def bytes(self) -> float:
        """Bytes of all items."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory of one GPU while one component works.

    Attributes:
        phase, component: the phase, and the component that works.
        persistent: what lies there for the whole phase, also of components that wait.
        instants: moments of the phase; only one of them is at a time.
    """

    phase: Phase
    component: str
    persistent: tuple[MemoryItem, ...]
    instants: Filled[Instant]

    @property
    def persistent_bytes(self) -> float:
        """Bytes of all persistent items."""
        return sum(item.bytes for item in self.persistent)

    @property
    def peak_instant(self) -> Instant:
        """The instant that needs the most memory."""
        return max(self.instants, key=lambda instant: instant.bytes)

    @property
    def peak(self) -> float:
        """Most bytes at any moment of the phase."""
        return self.persistent_bytes + self.peak_instant.bytes


@dataclass(frozen=True, slots=True)
class TimePart:
    """Seconds of one sort of work within a phase: `matrix products`, `memory bandwidth`, `network`, ..."""

    name: str
    seconds: float
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds that a component works in a phase of one step. Its parts add up to them.

    Attributes:
        phase, component, pool: which work it is.
        seconds: duration.
        parts: what the time is spent on.
    """

    phase: Phase
    component: str
    pool: str
    seconds: float
    parts: tuple[TimePart, ...]

    @property
    def bottleneck(self) -> str:
        """The name of the largest part."""
        return max(self.parts, key=lambda part: part.seconds).name if self.parts else "nothing"


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """A component and how it is spread over GPUs.

    The fields are those of a request (`gym_rm.planning.request_settings`), with what the search chose. `parameters` are
    all of the model; `max_num_seqs` is None where nothing is generated, `gradient_checkpointing` and `optimizer` where
    nothing is trained; `master_weights` says whether gradients and the optimizer's states are float32.
    """

    name: str
    role: Role
    model: str
    parameters: int
    dtype: Dtype
    tensor_parallel_size: PositiveInt
    fsdp_size: PositiveInt
    num_replicas: PositiveInt
    max_num_batched_tokens: PositiveInt
    max_num_seqs: int | None
    gradient_checkpointing: bool | None
    sleeps: bool
    quantization: Quantization | None = None
    optimizer: Optimizer | None = None
    lora: LoRASettings | None = None
    master_weights: bool = True
    shared_prompts: bool = False

    @property
    def num_gpus(self) -> int:
        """GPUs of the component."""
        return self.tensor_parallel_size * self.fsdp_size * self.num_replicas


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """GPUs that work together, and the components that take turns on them.

    Attributes:
        name: such as `policy+generation`.
        gpu: kind of the GPUs.
        gpu_memory: bytes of one GPU.
        gpus: their addresses; those of a tensor-parallel group follow each other.
        components: the components.
        memory: memory of each GPU, one entry for each phase and component; all GPUs of a pool have the same.
        busy_seconds: time that a step takes of each GPU.
    """

    name: str
    gpu: str
    gpu_memory: float
    gpus: Filled[Address]
    components: Filled[ComponentPlan]
    memory: Filled[PhaseMemory]
    busy_seconds: float

    @property
    def peak(self) -> float:
        """Most bytes of a GPU at any time."""
        return max(phase.peak for phase in self.memory)


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement, memory and time of a request on a cluster.

    Attributes:
        name, cluster: name of the request, and the cluster in words.
        nodes: number of GPUs of each node.
        times: the work of each component in each phase of one step.
        phase_seconds: duration of each phase: the largest sum over pools.
        step_seconds: duration of one step.
        conversations: conversations of one step.
        unique_tokens, tokens: tokens of one step that differ, and all of them.
        load_seconds: time until the first step can begin.
        objective: what the search made best.
        exact: whether no placement, division or batch size is better; a search over more than 64 GPUs tries their
            numbers in steps, and for an engine that runs experts only the most conversations that fit.
        notes: what the reader should know, such as assumptions about models.
        num_prompts, group_size: prompts of a step, and replies to each.
        prompt_tokens, reply_tokens: the longest prompt and reply that memory was planned for.
        turns, turn_tokens, updates_per_step, epochs, asynchronous: of the work of a step, as in the request.
        processor: what its GPUs are, for people.

    Example:
        >>> from gym_rm.planning.planner import plan
        >>> found = plan({"cluster": {"gpu": "h100_sxm"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-8B"}}})
        >>> found.pools[0].components[0].tensor_parallel_size
        1
    """

    name: str
    cluster: str
    nodes: tuple[int, ...]
    pools: tuple[PoolPlan, ...]
    times: Filled[PhaseTime]
    phase_seconds: Filled[tuple[Phase, float]]
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    conversations: PositiveInt
    unique_tokens: float
    tokens: float
    load_seconds: float
    objective: str
    exact: bool
    notes: tuple[str, ...]
    num_prompts: int = 0
    group_size: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    turns: int = 1
    turn_tokens: int = 0
    updates_per_step: int = 1
    epochs: int = 1
    asynchronous: bool = False
    processor: Literal["GPU", "CPU"] = "GPU"

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(self.nodes)

    @property
    def used_gpus(self) -> int:
        """GPUs that a pool uses."""
        return sum(len(pool.gpus) for pool in self.pools)

    @property
    def conversations_per_second(self) -> float:
        """Conversations per second."""
        return self.conversations / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """All tokens of prompts and replies, per second and GPU of the plan."""
        return self.tokens / self.step_seconds / self.used_gpus

    @property
    def bottleneck(self) -> PhaseTime:
        """The work that takes the largest share of the step, among the pools that the others wait for."""
        longest = max(self.phase_seconds, key=lambda item: item[1])[0]
        return max((time for time in self.times if time.phase is longest), key=lambda time: time.seconds)

    def component(self, name: str) -> ComponentPlan:
        """Return a component.

        Raises:
            ConfigError: the plan has none of this name.
        """
        found = {each.name: each for pool in self.pools for each in pool.components}
        if name not in found:
            raise ConfigError(f"the plan has no component {name!r}; it has {', '.join(found)}.")
        return found[name]

    def pool_of(self, name: str) -> PoolPlan:
        """Return the pool of a component."""
        self.component(name)
        return next(pool for pool in self.pools if any(each.name == name for each in pool.components))

    @property
    def overlaps(self) -> bool:
        """Whether phases of one step run at the same time, as generation and training one step apart."""
        return self.step_seconds < 0.999 * sum(seconds for _, seconds in self.phase_seconds)

    def idle_share(self, pool: PoolPlan) -> float:
        """Return the share of a step in which the GPUs of a pool wait."""
        return max(1.0 - pool.busy_seconds / self.step_seconds, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, after the plain options that `gym_rm.plan_file` reads."""
        values: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return {"format": FORMAT, "options": _options(self), **values}

    def save(self, path: str | Path) -> Path:
        """Write the plan to a `.json`, `.yaml` or `.yml` file, and return its path."""
        path = Path(path)
        if path.suffix not in (".json", ".yaml", ".yml"):
            raise ConfigError(f"a plan is written to a .json, .yaml or .yml file, got {str(path)!r}.")
        values = self.to_dict()
        text = json.dumps(values, indent=1) if path.suffix == ".json" else to_yaml(values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path


_ADAPTER = pydantic.TypeAdapter(Plan)
SIZES = ("tensor_parallel_size", "fsdp_size", "num_replicas", "max_num_batched_tokens")


def _options(plan: Plan) -> dict[str, Any]:
    """Return the options that environments and agents take from a plan: of a step, and of each component by role."""
    steps = ("conversations", "num_prompts", "group_size", "prompt_tokens", "reply_tokens")
    options: dict[str, Any] = {name: getattr(plan, name) for name in steps}
    for pool in plan.pools:
        for part in pool.components:
            values = {
                "model": None if part.model.startswith(SIZES_OF) else part.model,
                "dtype": part.dtype,
                **({} if part.quantization is None else {"quantization": part.quantization}),
                **{name: getattr(part, name) for name in SIZES},
            }
            if part.role is Role.REWARD_MODEL:
                options.setdefault("reward_models", {})[part.name] = values
                continue
            if part.role is Role.GENERATION:
                values |= {"max_num_seqs": part.max_num_seqs or plan.conversations}
                values |= {"with_policy": any(other.role is Role.POLICY for other in pool.components)}
            if part.role.trains:
                names = ("gradient_checkpointing", "optimizer", "master_weights")
                values |= {name: getattr(part, name) for name in names}
                values |= {} if part.lora is None else {"lora": part.lora.model_dump(mode="json")}
            options[part.role.value] = values
    return options


def load_plan(source: str | Path | dict[str, Any] | Plan) -> Plan:
    """Return the plan in a file, or in the values of `Plan.to_dict`.

    Raises:
        ConfigError: it is not a plan.
    """
    if isinstance(source, Plan):
        return source
    name = "the plan" if isinstance(source, dict) else str(source)
    values = dict(source) if isinstance(source, dict) else read_mapping(source, "a plan")
    if "pools" not in values:
        raise ConfigError(f"{name} is not a plan; make one with `gym-rm plan REQUEST -o plan.json`.")
    values.pop("options", None)  # they follow from the rest
    if values.pop("format", None) != FORMAT:
        raise ConfigError(f"{name} has another format than {FORMAT}; make it again with `gym-rm plan`.")
    try:
        plan: Plan = _ADAPTER.validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{name} is not a plan: {place}: {first['msg'].lower()}.") from error
    return plan
