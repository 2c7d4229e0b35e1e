"""A request as frozen records: the components with their sizes, the work of a step, and what is left to choose."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.hardware.devices import Cluster
from gym_rm.planning.lengths import Lengths
from gym_rm.planning.model.shape import ModelShape
from gym_rm.planning.plan import Dtype, Optimizer, Quantization, Role

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True, slots=True)
class Component:
    """A model with its part in a step. None leaves a number to the search.

    Attributes:
        name: name in messages and in the plan.
        role: what it does.
        shape: sizes of the model.
        dtype: dtype of the weights.
        engine: whose memory and speed it has: `gym_rm` (scoring), `vllm`, `transformers` (generation on the policy's
            own weights), `training`.
        others: as in the settings.
    """

    name: str
    role: Role
    shape: ModelShape
    dtype: Dtype
    engine: str
    num_gpus: int | None = None
    tensor_parallel_size: int | None = None
    fsdp_size: int | None = None
    num_replicas: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    sleeps: bool | None = None
    gradient_checkpointing: bool | None = None
    gpu_memory_utilization: float = 0.9
    optimizer: Optimizer = "adamw"
    master_weights: bool = True
    lora: LoRASettings | None = None
    shared_prompts: bool = False
    quantization: Quantization | None = None

    @property
    def path(self) -> str:
        """Its place in the settings of a request."""
        return f"reward_models.{self.name}" if self.role is Role.REWARD_MODEL else self.name

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one parameter that is not quantized."""
        return BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """The work of one step, as in the settings."""

    num_prompts: int
    group_size: int
    turns: int
    turn_tokens: int
    prompts: Lengths
    replies: Lengths
    updates_per_step: int = 1
    epochs: int = 1
    asynchronous: bool = False

    @property
    def conversations(self) -> int:
        """Conversations of a step."""
        return self.num_prompts * self.group_size

    @property
    def growth(self) -> float:
        """Mean tokens after the prompt: all replies and the messages between them."""
        return self.turns * self.replies.mean + (self.turns - 1) * self.turn_tokens

    @property
    def tokens(self) -> float:
        """Tokens of all conversations at their end."""
        return self.conversations * (self.prompts.mean + self.growth)

    @property
    def unique_tokens(self) -> float:
        """The same, where the prompt of a group counts once."""
        return self.num_prompts * self.prompts.mean + self.conversations * self.growth

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that may come."""
        return int(self.prompts.maximum + self.turns * self.replies.maximum + (self.turns - 1) * self.turn_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """How one component runs on the GPUs of its pool.

    The fields are those of the settings; `max_num_seqs` is 0 where nothing is generated. The product of the first three
    is the number of GPUs of the pool. `one_node` is whether a replica must be in one node.
    """

    tensor_parallel_size: int = 1
    fsdp_size: int = 1
    num_replicas: int = 1
    sleeps: bool = False
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 0
    gradient_checkpointing: bool = False
    one_node: bool = False

    @property
    def unit(self) -> int:
        """GPUs that must be in one node."""
        return self.tensor_parallel_size * (self.fsdp_size if self.one_node else 1)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a plan is made from.

    Attributes:
        pools: None for any, or the components of each pool.
        step_seconds: longest step, for the fewest GPUs that reach it; None for the fastest step.
        notes: what the reader should know about the inputs.
    """

    name: str
    cluster: Cluster
    components: tuple[Component, ...]
    workload: StepWorkload
    pools: tuple[tuple[str, ...], ...] | None = None
    step_seconds: float | None = None
    notes: tuple[str, ...] = ()
