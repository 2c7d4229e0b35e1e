"""What a user writes to get a plan: a cluster, the models, the work of a step, and what to make best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic import Field

from gym_rm import checks
from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, one_of
from gym_rm.errors import ConfigError


def _auto_number(value: Any, info: pydantic.ValidationInfo) -> int | str:
    """Return `auto` or an integer of at least 1."""
    if value == "auto":
        return "auto"
    try:
        return checks.integer(str(info.field_name), value, minimum=1)
    except ConfigError as error:
        raise ConfigError(f"{info.field_name} must be auto or an integer of at least 1, got {value!r}.") from error


def _auto_flag(value: Any, info: pydantic.ValidationInfo) -> bool | str:
    """Return `auto`, true or false."""
    if value == "auto" or isinstance(value, bool):
        return value  # type: ignore[no-any-return]
    raise ConfigError(f"{info.field_name} must be auto, true or false, got {value!r}.")


AutoNumber: TypeAlias = Annotated[int | Literal["auto"], pydantic.PlainValidator(_auto_number)]
AutoFlag: TypeAlias = Annotated[bool | Literal["auto"], pydantic.PlainValidator(_auto_flag)]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]


class NodeSettings(Config):
    """Nodes of one kind in a cluster of several kinds."""

    nodes: PositiveInt = 1
    """Number of these nodes."""
    gpus_per_node: PositiveInt = 8
    """GPUs of each."""
    gpu: str | dict[str, Any] = "h100_sxm"
    """As `cluster.gpu`."""


class ClusterSettings(Config):
    """The hardware."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    gpus_per_node: PositiveInt = 1
    """GPUs of each node."""
    gpu: str | dict[str, Any] = "h100_sxm"
    """Kind of the GPUs (`h100_sxm`, `l40s`, `cpu`, ...; `gym-rm plan --gpus` lists them), `here` for what was measured
    on this machine, or a mapping: `like` (a kind) and the numbers that differ, such as `memory: 40 GiB`; without
    `like`, `memory`, `flops` and `bandwidth` are needed."""
    groups: tuple[NodeSettings, ...] = ()
    """For nodes of several kinds; `nodes`, `gpus_per_node` and `gpu` are then not used."""
    network: Finite | None = Field(default=None, gt=0)
    """Bytes/s from one GPU to other nodes, in one direction. null for that of the GPU's kind in NVIDIA's table."""
    disk: Finite | None = Field(default=None, gt=0)
    """Bytes/s at which a node reads weights. null for 2e9."""
    host_memory: str | float | None = None
    """Memory of each node, such as `1 TiB`, for models that sleep. null if it is enough."""
    price_per_gpu_hour: float | dict[str, float] | None = None
    """Price of a GPU for an hour, or one for each kind."""


class ModelSettings(Config):
    """A model, and how it is divided."""

    model: str | None = None
    """Folder, hub id or the name of a known model."""
    config: dict[str, Any] | None = None
    """Sizes, with the names of a `config.json`, instead of a model."""
    dtype: Dtype = "bfloat16"
    """dtype of the weights."""
    num_gpus: AutoNumber = "auto"
    """GPUs of the pool that the model is in."""
    tensor_parallel_size: AutoNumber = "auto"
    """GPUs that share every layer."""
    max_num_batched_tokens: AutoNumber = "auto"
    """Tokens in one forward of one replica; in training, of one forward and backward."""
    sleeps: AutoFlag = "auto"
    """Whether the model is in the host's memory while others of its pool work."""


class InferenceSettings(ModelSettings):
    """A model that only computes forwards: a reward model or the reference."""

    num_replicas: AutoNumber = "auto"
    """Copies that work on different rows."""


class GenerationSettings(Config):
    """The engine that generates the policy's replies."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """vllm (also for SGLang): its own copy of the weights, paged KV cache. transformers: `generate` on the policy's
    weights, as in agents/grpo.py; it has no GPUs of its own."""
    dtype: Dtype | None = None
    """dtype of the weights; null for bfloat16, or float32 on a CPU."""
    num_gpus: AutoNumber = "auto"
    """GPUs of the pool that generation is in."""
    tensor_parallel_size: AutoNumber = "auto"
    """GPUs that share every layer."""
    num_replicas: AutoNumber = "auto"
    """Engines that work on different rows."""
    max_num_seqs: AutoNumber = "auto"
    """Conversations that one engine generates at a time."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that an engine may fill, if nothing else needs it."""
    sleeps: AutoFlag = "auto"
    """Whether weights leave the GPU, and the KV cache is given back, while others of the pool work."""


class TrainingSettings(ModelSettings):
    """A model that is trained."""

    fsdp_size: AutoNumber = "auto"
    """Tensor-parallel groups that share the parameters, gradients and optimizer state of one replica."""
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """Optimizer; it decides the bytes of state for a parameter."""
    master_weights: Flag = True
    """Whether a float32 copy of weights in a smaller dtype is kept for the optimizer, and gradients are float32."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters on all linear layers; 0 trains all weights."""
    gradient_checkpointing: AutoFlag = "auto"
    """Whether activations are computed again in the backward."""
    shared_prompts: Flag = False
    """Whether the replies to one prompt share its forward and backward."""


class WorkloadSettings(Config):
    """The work of one step."""

    num_prompts: PositiveInt = 64
    """Prompts in a step."""
    group_size: PositiveInt = 8
    """Replies to each prompt."""
    turns: PositiveInt = 1
    """Replies in each conversation."""
    prompt_tokens: Any = 512
    """Length of the prompts: a number, or quantiles such as `{p50: 200, p95: 900, max: 2048}`."""
    reply_tokens: Any = 512
    """Length of the replies, in the same form."""
    turn_tokens: NonNegativeInt = 64
    """Tokens of the user's message between two turns."""
    rows: str | None = None
    """File of rows (messages, prompt and response, chosen and rejected, ...) from which the lengths and the share of
    common prefixes are measured instead."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer for `rows`; null for that of the policy or the first reward model if it is a
    folder, else 4 characters count as a token."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates in a step; they divide its conversations."""
    epochs: PositiveInt = 1
    """Times that each conversation of a step is trained on."""
    asynchronous: Flag = False
    """Whether generation and training overlap, one step apart, on separate GPUs."""


class ObjectiveSettings(Config):
    """What to make best."""

    goal: Literal["throughput", "cost", "smallest"] = "throughput"
    """throughput: most conversations/s. cost: least money for a conversation. smallest: fewest GPUs that reach
    `step_seconds`."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Longest step for `smallest`."""


def _kind(value: Any) -> str:
    return "settings" if isinstance(value, Mapping | Config) else "value"


def _kind_of_pools(value: Any) -> str:
    return "lists" if isinstance(value, list | tuple) else "value"


if TYPE_CHECKING:
    ClusterSource: TypeAlias = str | ClusterSettings
    ReferenceSource: TypeAlias = bool | InferenceSettings
    PoolsSource: TypeAlias = Literal["auto", "together", "apart"] | tuple[tuple[str, ...], ...]
else:
    ClusterSource = one_of(_kind, value=str, settings=ClusterSettings)
    ReferenceSource = one_of(_kind, value=Flag, settings=InferenceSettings)
    PoolsSource = one_of(_kind_of_pools, value=Literal["auto", "together", "apart"], lists=tuple[tuple[str, ...], ...])


class PlanSettings(Config):
    """A request for a plan."""

    name: str = "plan"
    """Name of the plan."""
    cluster: ClusterSource = ClusterSettings()
    """The hardware; or `ray` (the running Ray cluster), `torch` (this machine), or a YAML file with these settings."""
    policy: TrainingSettings | None = None
    """The model to train by reinforcement learning; null if none is."""
    generation: GenerationSettings = GenerationSettings()
    """The engine that generates; used if there is a policy."""
    reference: ReferenceSource = False
    """Whether a frozen copy of the policy computes log-probabilities; or its settings (its model is the policy's)."""
    critic: TrainingSettings | None = None
    """The value model of PPO."""
    reward_models: dict[str, InferenceSettings] = Field(default={})
    """Reward models by name."""
    reward_training: TrainingSettings | None = None
    """A reward model to train on pairs: `num_prompts` prompts with `group_size` replies each."""
    workload: WorkloadSettings = WorkloadSettings()
    """The work of one step."""
    pools: PoolsSource = "auto"
    """Which components share GPUs and take turns: names of components in lists, or all, or none."""
    objective: ObjectiveSettings = ObjectiveSettings()
    """What to make best."""
