"""Settings of a training run of a reward model."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic import Field

from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, ThreadCount
from gym_rm.lora_settings import LoRASettings

Paths: TypeAlias = Annotated[
    tuple[str, ...], pydantic.BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
Beta: TypeAlias = Annotated[Finite, Field(ge=0, lt=1)]


class StartSettings(Config):
    """The model that training starts from."""

    path: str | None = None
    """Folder or hub id of a reward model, or of a chat or base model with `new_head`; null for the embedded one."""
    new_head: Flag = False
    """Replace the head by a new one (or make one): normal with the standard deviation `1 / sqrt(hidden_size + 1)`
    (arXiv 2009.01325, appendix B.1), without bias."""
    outputs: PositiveInt | tuple[str, ...] = 1
    """Number of outputs of a new head, or the names of its objectives."""
    reward_model_kwargs: dict[str, Any] = Field(default={})
    """Options of `gym_rm.load_scorer`: kind, step_token, weights, chat_template, max_length, overlong, ... Comparisons
    longer than `max_length` are left out and counted, unless `overlong` cuts them."""
    lora: LoRASettings | None = None
    """Train low-rank adapters instead of all weights (needs the extra `lora`)."""


class DataSettings(Config):
    """The comparisons to learn from; see `gym_rm.data.comparisons.load_comparisons` for the shapes of rows."""

    train: Paths = ()
    """Files or data set names."""
    validation: dict[str, str] = Field(default={})
    """Files or data set names to measure on, by name."""
    validation_share: Finite = Field(default=0.0, ge=0, lt=1)
    """Share of the prompts of `train` to keep for a validation set named `held_out`. Rows with the same prompt stay
    together."""
    columns: dict[str, str] = Field(default={})
    """Columns of `train` and `validation` that have other names, as in `data.columns.prompt=Question`."""
    on_error: Literal["raise", "drop"] = "raise"
    """What to do with a malformed row: stop, or leave it out and count it."""


class RewardLossSettings(Config):
    """What is learned. Pairs are learned from ranks; ratings and steps need a head and rows that have them."""

    objective: Literal["auto", "preferences", "ratings", "steps"] = "auto"
    """`auto` is `steps` for a process reward model, `ratings` if the head has several outputs, else `preferences`."""
    preferences: Literal["bradley_terry", "margin_bradley_terry", "rao_kupper", "plackett_luce"] = "bradley_terry"
    """Loss of preferences, see `gym_rm.training.losses`. Only `rao_kupper` and `plackett_luce` learn from ties."""
    tie_parameter: Finite = Field(default=0.5, gt=0)
    """`log_theta` of `rao_kupper`: the difference of rewards below which replies are called equal."""
    centring: Finite = Field(default=0.0, ge=0)
    """Weight of the square of the mean reward of a comparison, which keeps rewards near 0 (arXiv 2312.09244)."""


class OptimizerSettings(Config):
    """Settings of the optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` is Muon (`torch.optim.Muon`) for the matrices inside the layers, and AdamW for everything else."""
    learning_rate: Finite = Field(default=2e-6, gt=0)
    """Learning rate of AdamW after the warm-up."""
    muon_learning_rate: Finite = Field(default=0.01, gt=0)
    """Learning rate of Muon after the warm-up."""
    weight_decay: Finite = Field(default=0.0, ge=0)
    """Decoupled weight decay; vectors (norms, biases) have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's averages."""
    eps: Finite = Field(default=1e-8, gt=0)
    """Added to AdamW's divisor."""
    max_grad_norm: Finite = Field(default=1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up, down to 0."""
    warmup_share: Finite = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""


class BatchSettings(Config):
    """How much runs at a time."""

    batch_size: PositiveInt = 64
    """Number of comparisons in a step, over all processes."""
    max_num_batched_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward and backward pass, counted once where replies share them; null for 2,048
    on a CPU and 16,384 on a GPU. A comparison that is larger runs alone."""
    shuffle: Flag = True
    """Read the comparisons in a new random order every epoch. The first step then has the longest ones, so that a
    run that does not fit into memory stops at once."""
    precision: Literal["auto", "no", "bf16"] = "auto"
    """Mixed precision; weights stay in float32. `auto` is bf16 if the GPU supports it, else `no`."""
    gradient_checkpointing: Flag = False
    """Keep only the input of each layer, and run the layer again in the backward (arXiv 1604.06174)."""
    tree: Flag = True
    """Merge shared prefixes into token trees; false pads instead, for comparisons and measurements."""
    fsdp: Flag = False
    """Shard weights, gradients and optimizer states over the processes (FSDP2) instead of copying them (DDP)."""


class CheckpointSettings(Config):
    """What is kept."""

    save_every: PositiveInt | None = None
    """Steps between checkpoints to resume from; null for the steps between measurements. A run also saves on SIGTERM
    and Ctrl-C."""
    keep_best: Flag = True
    """Keep the best model by `metric`, besides the last one."""


class RewardCheckpointSettings(CheckpointSettings):
    """What is kept."""

    metric: str | None = None
    """Metric of a validation set, such as `held_out/accuracy`; null for the loss of the first set."""


class RewardModelTraining(Config):
    """All settings of a run."""

    output: str | None = None
    """Folder of the run; null for outputs/reward-model-<date>-<time>. A run that was stopped resumes if the same
    command is repeated with the same folder."""
    seed: NonNegativeInt = 1
    """Seed of the order of the data, of a new head and of dropout."""
    epochs: PositiveInt = 1
    """Number of times that every comparison is used."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps; null for all epochs. A run that is resumed may have more, to which the schedule of
    the learning rate is then stretched."""
    evaluate_every: PositiveInt = 50
    """Steps between measurements on the validation sets, which are also measured before the first and after the last
    step."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Where to send metrics, besides `metrics.csv`."""
    threads: ThreadCount | None = None
    """Number of CPU threads; null for torch's default."""
    model: StartSettings = StartSettings()
    data: DataSettings = DataSettings()
    loss: RewardLossSettings = RewardLossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    batch: BatchSettings = BatchSettings()
    checkpoint: RewardCheckpointSettings = RewardCheckpointSettings()

    def with_output(self) -> RewardModelTraining:
        """Return the settings with a folder."""
        name = self.output or f"outputs/reward-model-{time.strftime('%Y%m%d-%H%M%S')}"
        return self.model_copy(update={"output": name})


FREE_IN_RESUMING: Any = {
    **dict.fromkeys(("output", "report_to", "threads", "checkpoint", "evaluate_every", "max_steps"), True),
    "batch": {"max_num_batched_tokens", "fsdp", "gradient_checkpointing"},
}
"""Settings that a resumed run may change; all others change its curve."""
