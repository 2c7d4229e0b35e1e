"""What a user writes to get a plan: a cluster, the models, and the work of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic import Field

from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, one_of
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.plan import Dtype, Optimizer, Quantization

AUTO: Any = "auto"  # in a request; None in the settings that were read


def _auto(value: Any) -> Any:
    return None if value == "auto" else value


AutoNumber: TypeAlias = Annotated[PositiveInt | None, pydantic.BeforeValidator(_auto)]
AutoFlag: TypeAlias = Annotated[Flag | None, pydantic.BeforeValidator(_auto)]


class ClusterSettings(Config):
    """The hardware: nodes with GPUs of one kind."""

    nodes: PositiveInt = 1
    """Number of nodes."""
    gpus_per_node: PositiveInt = Field(default=1, le=1024)
    """GPUs of each node."""
    gpu: str | dict[str, Any] = "h100_sxm"
    """Kind of the GPUs (`h100_sxm`, `l40s`, `cpu`, ...; `gym-rm plan --gpus` lists them), `here` for what was measured
    on this machine, or a mapping: `like` (a kind) and the numbers that differ, such as `memory: 40 GiB`,
    `flops: 989 TFLOPS` or `bandwidth: 3.35 TB/s`; without `like`, these three are needed."""
    network: float | str | None = None
    """Bytes/s, or a text such as `400 Gb/s`, from one GPU to other nodes, in one direction. null for that of the GPU's
    kind in NVIDIA's table."""
    disk: float | str | None = None
    """Bytes/s, or a text such as `2 GB/s`, at which a node reads weights. null for 2e9."""


class ComponentSettings(Config):
    """A model, and how it is divided."""

    model: str | None = None
    """Folder, hub id or the name of a known model."""
    config: dict[str, Any] | None = None
    """Sizes, with the names of a `config.json`, instead of a model."""
    dtype: Dtype = "bfloat16"
    """dtype of the weights."""
    num_gpus: AutoNumber = AUTO
    """GPUs of the pool that the model is in."""
    tensor_parallel_size: AutoNumber = AUTO
    """GPUs that share every layer."""
    max_num_batched_tokens: AutoNumber = AUTO
    """Tokens in one forward of one replica; in training, of one forward and backward."""
    sleeps: AutoFlag = AUTO
    """Whether the model is in the host's memory while others of its pool work."""


class InferenceSettings(ComponentSettings):
    """A model that only computes forwards: a reward model or the reference."""

    num_replicas: AutoNumber = AUTO
    """Copies that work on different rows."""
    fsdp_size: AutoNumber = AUTO
    """GPUs of a node that share the parameters of one copy, and gather those of a layer before it runs."""


class RewardModelSettings(InferenceSettings):
    """A reward model that scores."""

    quantization: Quantization | None = None
    """`int8` on a CPU (encoders), `fp8` on a GPU (Ada, Hopper or newer): matrices in 8 bits, which no time counts."""


class GenerationSettings(Config):
    """The engine that generates the policy's replies."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """vllm (also for SGLang): its own copy of the weights, paged KV cache. transformers: `generate` on the policy's
    weights, as in agents/grpo.py; it has no GPUs of its own."""
    dtype: Dtype | None = None
    """dtype of the weights; null for bfloat16, or float32 on a CPU."""
    num_gpus: AutoNumber = AUTO
    """GPUs of the pool that generation is in."""
    tensor_parallel_size: AutoNumber = AUTO
    """GPUs that share every layer."""
    num_replicas: AutoNumber = AUTO
    """Engines that work on different rows."""
    max_num_seqs: AutoNumber = AUTO
    """Conversations that one engine generates at a time."""
    gpu_memory_utilization: Finite = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that an engine may fill, if nothing else needs it."""
    sleeps: AutoFlag = AUTO
    """Whether weights leave the GPU, and the KV cache is given back, while others of the pool work."""


class TrainingSettings(ComponentSettings):
    """A model that is trained."""

    fsdp_size: AutoNumber = AUTO
    """Tensor-parallel groups that share the parameters, gradients and optimizer state of one replica."""
    optimizer: Optimizer = "adamw"
    """Optimizer; it decides the bytes of state for a parameter."""
    master_weights: Flag = True
    """Whether a float32 copy of weights in a smaller dtype is kept for the optimizer, and gradients are float32."""
    lora: LoRASettings | None = None
    """Train low-rank adapters instead of all weights; they are planned for all linear layers."""
    gradient_checkpointing: AutoFlag = AUTO
    """Whether activations are computed again in the backward."""
    shared_prompts: AutoFlag = AUTO
    """Whether the replies to one prompt share its forward and backward. `auto`: as `gym-rm grpo` and `gym-rm train` do
    it, so not with a critic, nor for GPUs with generation by vllm."""


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
    updates_per_step: PositiveInt = 1
    """Optimizer updates in a step; they divide its conversations."""
    epochs: PositiveInt = 1
    """Times that each conversation of a step is trained on."""
    asynchronous: Flag = False
    """Whether generation and training overlap, one step apart, on separate GPUs."""


def _kind(value: Any) -> str:
    return "settings" if isinstance(value, Mapping | Config) else "value"


def _kind_of_pools(value: Any) -> str:
    return "lists" if isinstance(value, list | tuple) else "value"


if TYPE_CHECKING:
    ReferenceSource: TypeAlias = bool | InferenceSettings
    PoolsSource: TypeAlias = Literal["auto", "together", "apart"] | tuple[tuple[str, ...], ...]
else:
    ReferenceSource = one_of(_kind, value=Flag, settings=InferenceSettings)
    PoolsSource = one_of(_kind_of_pools, value=Literal["auto", "together", "apart"], lists=tuple[tuple[str, ...], ...])


class PlanSettings(Config):
    """A request for a plan."""

    name: str = "plan"
    """Name of the plan."""
    cluster: ClusterSettings = ClusterSettings()
    """The hardware."""
    policy: TrainingSettings | None = None
    """The model to train by reinforcement learning; null if none is."""
    generation: GenerationSettings = GenerationSettings()
    """The engine that generates; used if there is a policy."""
    reference: ReferenceSource = False
    """Whether a frozen copy of the policy computes log-probabilities; or its settings (its model is the policy's)."""
    critic: TrainingSettings | None = None
    """The value model of PPO."""
    reward_models: dict[str, RewardModelSettings] = Field(default={})
    """Reward models by name."""
    reward_training: TrainingSettings | None = None
    """A reward model to train on pairs: `num_prompts` prompts with `group_size` replies each."""
    workload: WorkloadSettings = WorkloadSettings()
    """The work of one step."""
    pools: PoolsSource = "auto"
    """Which components share GPUs and take turns: names of components in lists, or all, or none."""
    step_seconds: Finite | None = Field(default=None, gt=0)
    """Longest step: the plan has the fewest GPUs that reach it. null for the fastest step on all GPUs."""
