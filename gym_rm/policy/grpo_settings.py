"""Settings of a GRPO run."""

from __future__ import annotations

import textwrap
from typing import Any, Literal

import pydantic
from pydantic import Field

from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, ThreadCount, settings_of
from gym_rm.lora_settings import LoRASettings
from gym_rm.training.reward_model_settings import Beta, CheckpointSettings, OptimizerSettings


class PolicySettings(Config):
    """The model to train."""

    model: str | None = None
    """Folder or hub id of a chat model; null for the embedded policy."""
    lora: LoRASettings | None = None
    """Train low-rank adapters instead of all weights (needs the extra `lora`). The reference policy is then the model
    without its adapters, which takes no memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights. With bfloat16 the optimizer keeps float32 copies, which collect small updates."""
    gradient_checkpointing: Flag = False
    """Keep only the input of each layer, and run the layer again in the backward (arXiv 1604.06174)."""
    precision: Literal["auto", "no", "bf16"] = "auto"
    """Mixed precision of the update; `auto` is bf16 for float32 weights if the GPU supports it, else `no`."""


class SamplingSettings(Config):
    """How completions are sampled, in training and evaluation."""

    max_new_tokens: PositiveInt | None = None
    """Most tokens in a completion; longer completions are cut here and scored. null for 24 (embedded policy) or 512."""
    temperature: Finite = Field(default=1.0, gt=0)
    """Sampling temperature; log-probabilities are computed at this temperature too."""
    max_num_seqs: PositiveInt | None = None
    """Number of completions sampled at a time; null for all."""
    server: str | None = None
    """Address of a server of vLLM that samples, such as http://127.0.0.1:8000. It gets new weights through files in
    `weights_folder`, so both must see this folder. null samples in this process, for Llama-like models with the
    package's own decoding where it equals the model's own."""
    server_key: str | None = None
    """Name of the environment variable with the key of the server."""
    timeout: Finite = Field(default=3600.0, gt=0)
    """Seconds for the completions of a server, for loading weights, and to wait for a server that was lost."""
    max_retries: NonNegativeInt = 5
    """How often a request to a server is sent again before the server counts as lost."""
    steps_ahead: Literal[0, 1] = 0
    """1 writes and scores the replies of the next step while the policy is updated, with the weights before the update;
    `loss.importance_cap` corrects for them. Worth it where generation runs elsewhere (`server`)."""
    weights_folder: str | None = None
    """Folder of this run alone through which a server gets new weights; null for one in the run's own."""


class RolloutEnvSettings(Config):
    """The environment, `gym.make_vec("RewardModel-v0", ...)`."""

    reward_model: str | dict[str, Any] | None = None
    """Folder, hub id, URL, `module:function` or dict for `gym_rm.load_scorer`; null for the embedded reward model."""
    reward_model_kwargs: dict[str, Any] = Field(default={})
    """Options of the reward model: dtype, device, num_replicas, tensor_parallel_size, max_num_batched_tokens, ..."""
    sleep: Flag = False
    """Move the reward model to the CPU's memory while the policy is updated, so that both fit on one device."""
    prompts: str | None = None
    """File or data set name for `gym_rm.data.prompts.load_prompts`; null for the embedded prompts."""
    num_prompts: PositiveInt = 32
    """Number of prompts in a step, over all processes."""
    group_size: PositiveInt = Field(default=8, ge=2)
    """Number of completions per prompt; advantages compare the completions of one prompt."""
    max_turns: PositiveInt = 1
    """Most replies in an episode. With more than one, the user's next turns come from `respond`, from the method
    `respond` of the scorer, or from `user_turns` of the prompts."""
    respond: str | dict[str, Any] | None = None
    """User simulator, `module:function`, or a chat model as user, `{model: ..., instructions: ...}`; see
    docs/episodes.md and docs/judges.md."""
    tools: list[str] | None = None
    """Tools that the policy may call: `calculator`, `python`, or `module:function`. A reply with calls is a turn, and
    so is the answer after it."""
    tool_options: dict[str, Any] = Field(default={})
    """Options of the tools: call_format, max_calls, timeout, max_result_length; see docs/tools.md."""
    tools_in_system: Flag | None = None
    """Write tools and calls as text into the messages, for a policy whose chat template does not write them. null for
    an error then, false to go without, for a policy that knows its tools."""
    reward_on: Literal["turn", "improvement", "end"] = "turn"
    """`turn` rewards every reply by its score, `end` only the last one of an episode. `improvement` rewards each by its
    score less that of the reply before, the last score in sum: for `advantage.per_turn`, without which it is `end`."""
    fallback_reward: Finite | None = None
    """null stops the run if a conversation cannot be scored. With a number the run continues: the episode gets
    advantage 0 and is left out of its group."""
    audit: str | None = None
    """File of `gym-rm audit -o FILE.json`: a warning is printed if the audit found a weakness of the reward model. null
    for no file; the embedded reward model has its own."""


class AdvantageSettings(Config):
    """How rewards become advantages."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "leave_one_out", "gdpo"] = "grpo"
    """Estimator, see `gym_rm.policy.advantages`. `gdpo` needs a scorer with several components."""
    std_floor: Finite = Field(default=0.1, gt=0)
    """Lower bound on the standard deviation that divides advantages, so that groups whose rewards differ only by noise,
    such as the rounding of a reward model in bfloat16, get small advantages."""
    component_weights: dict[str, Finite] | None = None
    """Weights of the components for `gdpo`, by name; null for 1 each."""
    steps: Literal["min", "sum", "last"] | None = None
    """Compare the rewards of the steps in replies, which a process reward model gives, instead of those of replies, see
    `gym_rm.policy.advantages.step_advantages`; `sum` pays for more steps. null for no steps."""
    reward_weight: Finite = Field(default=0.0, ge=0)
    """With `steps`: weight of the advantage of the reply's reward, which is added to that of each step. For a reward
    that says more than the steps, such as that of a verifier."""
    per_turn: Flag = False
    """In episodes of several turns, compare the rewards from each turn on, instead of the sum of the episode."""
    dynamic_sampling: NonNegativeInt = 0
    """Most times in a step that groups whose rewards are all equal are replaced by groups of other prompts (DAPO, arXiv
    2503.14476, section 3.2); then those that are left have no weight. 0 to learn from all groups as they are."""
    overlong: Literal["keep", "filter"] = "keep"
    """`filter` gives completions that were cut at `max_new_tokens` no weight in the loss."""
    overlong_buffer: NonNegativeInt = 0
    """Number of tokens before `max_new_tokens` over which `overlong_penalty` rises from 0; 0 for no penalty."""
    overlong_penalty: Finite = Field(default=1.0, ge=0)
    """Largest penalty, subtracted from the reward (DAPO, arXiv 2503.14476, section 3.4)."""


class PolicyLossSettings(Config):
    """The loss, see `gym_rm.policy.losses`."""

    normalisation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """Mean over all tokens of an update, over completions of their means, or division by `max_new_tokens`."""
    clip_low: Finite = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped to at least 1 - clip_low."""
    clip_high: Finite = Field(default=0.2, ge=0)
    """The probability ratio is clipped to at most 1 + clip_high."""
    kl_coef: Finite = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy, which is the initial one. It is measured also with 0."""
    measure_kl: Flag = True
    """Measure the divergence if `kl_coef` is 0, which takes a copy of the initial policy and a forward pass."""
    importance_cap: Finite | None = Field(default=2.0, gt=0)
    """Weights of tokens are multiplied by min(probability in training / in sampling, importance_cap), where the sampler
    computes other probabilities than the trainer; null for no correction."""
    entropy_coef: Finite = 0.0
    """Weight of the entropy of the policy, which is added to the objective."""


class PolicyOptimizerSettings(OptimizerSettings):
    """The optimizer."""

    learning_rate: Finite | None = Field(default=None, gt=0)  # type: ignore[assignment]
    """Learning rate after the warm-up. null for 5e-4 (embedded policy) or 1e-6."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's averages."""
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    """How the learning rate falls after the warm-up, down to 0."""
    updates_per_step: PositiveInt = 1
    """Number of optimizer updates per step and epoch; the groups of the step are divided among them."""
    epochs: PositiveInt = 1
    """Number of times that an update uses each completion."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens in one forward and backward pass, counted once where completions share them; null for 2,048 on a CPU
    and 16,384 on a GPU."""
    tree: Flag = True
    """Compute shared prompts once (token trees); false pads instead."""
    fsdp: Flag = False
    """Shard weights, gradients and optimizer states over the processes (FSDP2) instead of copying them (DDP)."""


class HeldOutSettings(Config):
    """Measurements on prompts that are not trained on."""

    prompts: str | None = None
    """File or data set name of the held-out prompts; null to keep some of `env.prompts` for this."""
    num_prompts: NonNegativeInt = 256
    """Number of held-out prompts; without `eval.prompts` at most a quarter of all. 0 for no measurements."""
    every: PositiveInt = 10
    """Number of steps between measurements. The policy is always measured before the first and after the last step."""


class PolicyCheckpointSettings(CheckpointSettings):
    """What is kept."""

    metric: Literal["reward_mean", "accuracy"] | None = None
    """Metric of the held-out prompts; null for accuracy if the prompts have answers, else reward_mean."""


class GRPOSettings(Config):
    """All settings of a run."""

    output: str | None = None
    """Folder of the run; null for outputs/grpo-<date>-<time>. A run that was stopped resumes if the same command is
    repeated with the same folder."""
    seed: NonNegativeInt = 1
    """Seed of the prompt order, of sampling and of adapters; it repeats a run exactly on the same machine."""
    steps: PositiveInt = 60
    """Number of steps. A step samples completions, scores them and updates the policy."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Where to send metrics, besides `metrics.csv`."""
    threads: ThreadCount | None = None
    """Number of CPU threads. null for 1 (embedded policy, which is too small to gain from more) or torch's default."""
    policy: PolicySettings = PolicySettings()
    sampling: SamplingSettings = SamplingSettings()
    env: RolloutEnvSettings = RolloutEnvSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    loss: PolicyLossSettings = PolicyLossSettings()
    optimizer: PolicyOptimizerSettings = PolicyOptimizerSettings()
    eval: HeldOutSettings = HeldOutSettings()
    checkpoint: PolicyCheckpointSettings = PolicyCheckpointSettings()

    @pydantic.model_validator(mode="after")
    def _require_consistent(self) -> GRPOSettings:
        if self.optimizer.updates_per_step > self.env.num_prompts:
            raise ValueError(
                f"optimizer.updates_per_step={self.optimizer.updates_per_step} is more than env.num_prompts="
                f"{self.env.num_prompts}, and every update needs a group"
            )
        if self.sampling.steps_ahead and (self.loss.importance_cap is None or self.env.sleep):
            raise ValueError(
                f"sampling.steps_ahead={self.sampling.steps_ahead} scores replies of older weights during the update: "
                "it needs loss.importance_cap, and a reward model that is awake; got loss.importance_cap="
                f"{self.loss.importance_cap} and env.sleep={self.env.sleep}"
            )
        if self.env.tools and self.env.max_turns == 1:
            raise ValueError(
                f"env.tools={self.env.tools} with env.max_turns=1: a call is a reply, after which none is left for the "
                "answer; set env.max_turns to 2 or more"
            )
        if self.env.tools_in_system and (form := self.env.tool_options.get("call_format", "hermes")) != "hermes":
            raise ValueError(f"env.tools_in_system=true asks for calls of call_format='hermes', not {form!r}")
        if self.advantage.estimator == "gdpo" and (self.advantage.per_turn or self.advantage.overlong_buffer):
            raise ValueError(
                "advantage.estimator='gdpo' compares the components of whole episodes, so advantage.per_turn and "
                "advantage.overlong_buffer cannot be used with it; use another estimator"
            )
        penalty_without_effect = self.advantage.overlong_buffer > 0 and not self.advantage.reward_weight
        of_replies = self.advantage.estimator == "gdpo" or self.advantage.per_turn or penalty_without_effect
        if self.advantage.steps is not None and of_replies:
            raise ValueError(
                f"advantage.steps={self.advantage.steps!r} compares steps instead of the rewards of replies, so "
                "estimator='gdpo', per_turn and (without reward_weight) overlong_buffer cannot be used with it"
            )
        if self.advantage.reward_weight and self.advantage.steps is None:
            raise ValueError("advantage.reward_weight is for advantage.steps; without steps only the reward counts")
        return self


def settings_help(settings: type[Config] = GRPOSettings) -> str:
    """Return a text with every setting, its type, its default and what it does."""
    kinds = {name: field.annotation for name, field in settings.model_fields.items()}
    groups = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Config)}
    lines = ["settings:"]
    for prefix, schema in {"": settings, **{f"{name}.": group for name, group in groups.items()}}.items():
        for each in settings_of(schema):
            if each.name not in groups or prefix:
                words = textwrap.fill(each.text, 79, initial_indent=" " * 6, subsequent_indent=" " * 6)
                lines += [f"  {prefix}{each.name}  [{each.type}; default: {each.default}]", words]
    return "\n".join(lines)
