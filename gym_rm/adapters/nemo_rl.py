"""NeMo RL: a reward model environment with NeMo RL's `EnvironmentInterface` and NeMo RL's configuration.

Use `ray.remote(RewardModelEnvironment)` instead of NeMo RL's own environment, with the same configuration section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gym_rm.adapters import check_fallback_reward
from gym_rm.data.messages import plain_content, refuse_rendered
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import answer_text, prompt_of_columns
from gym_rm.errors import ConfigError, logger, nearest
from gym_rm.reports.metrics import reward_metrics
from gym_rm.scorer import SCORER_KINDS, Scorer, acquire_scorer, release_scorer, try_score
from gym_rm.types import Conversation, Prompt

if TYPE_CHECKING:
    from torch import Tensor

# Fields of a message that chat templates write; a log also has tensors, such as token_ids.
TEXT_FIELDS = ("role", "name", "tool_calls", "tool_call_id", "reasoning_content")


class EnvironmentReturn(NamedTuple):
    """NeMo RL's result of a step; every field has one entry per message log."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None] | None = None


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """NeMo RL's configuration of a reward model environment, translated for `load_scorer`.

    Attributes:
        reward_model: folder or hub id.
        options: keywords of `load_scorer`.
        without_effect: ignored keys, each with the reason.
    """

    reward_model: str
    options: Mapping[str, Any]
    without_effect: Mapping[str, str] = field(default_factory=dict)


class RewardModelEnvironment:
    """NeMo RL environment that scores message logs; every episode has one reply.

    Args:
        config: the `reward_model` section of NeMo RL's `env` (see `read_config`), a section with the `kind` of another
            scorer and its options (`{"kind": "math"}`), or `{"scorer": scorer}`.
        policy_tokenizer: the policy's tokenizer, or its folder or hub id. It is needed if the data processor stores
            prompts as rendered text (as `math_hf_data_processor` does): the messages are parsed from that text.
        fallback_reward: reward of a message log that cannot be scored; None raises ScoringError instead.

    Raises:
        ConfigError: unknown or unsupported keys; the message lists all of them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        policy_tokenizer: Any = None,
        fallback_reward: float | None = None,
    ) -> None:
        self.fallback_reward = check_fallback_reward(fallback_reward)
        self._released = False
        self._texts = None if policy_tokenizer is None else PolicyTexts(policy_tokenizer)
        if set(config) == {"scorer"}:
            self.scorer: Scorer = acquire_scorer(config["scorer"], {})
            return
        if config.get("kind") in SCORER_KINDS:
            options = {key: value for key, value in config.items() if key not in ("enabled", "processor")}
            self.scorer = acquire_scorer(options, {})
            return
        read = read_config(config)
        for key, reason in read.without_effect.items():
            logger.info("NeMo RL's setting %s is ignored: %s.", key, reason)
        self.scorer = acquire_scorer(read.reward_model, read.options)

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any] | None = None) -> EnvironmentReturn:
        """Score B message logs in one call; the batch may be empty.

        Args:
            message_log_batch: B lists of messages.
            metadata: B dicts; `ground_truth` is the reference answer for verifiers.

        Returns:
            Rewards float32 `[B]` and terminateds bool `[B]` (all True) on the CPU. Observations are empty messages,
            because NeMo RL appends their text to the sample.

        Raises:
            ConfigError: a prompt is already rendered by a chat template, and `policy_tokenizer` is None.
            ScoringError: a message log has no score, and `fallback_reward` is None.
        """
        import torch

        conversations = [self._conversation(log, row) for row, log in enumerate(message_log_batch)]
        rows = metadata if metadata is not None else [None] * len(conversations)
        if len(rows) != len(conversations):
            raise ConfigError(
                f"metadata must have one entry for each of the {len(conversations)} message logs, got {len(rows)}."
            )
        prompts = [_prompt(c, each, row) for row, (c, each) in enumerate(zip(conversations, rows, strict=True))]
        rewards = try_score(self.scorer, conversations, prompts).rewards_or_fallback(self.fallback_reward)
        size = len(conversations)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in range(size)],
            metadata=[None] * size,
            next_stop_strings=[None] * size,
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(size, dtype=torch.bool),
            answers=[log[-1]["content"] for log in message_log_batch],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch unchanged, and the metrics `reward_model_env/{num_samples, mean_reward, ...}`.

        The metrics are computed from `batch["total_reward"]`, which NeMo RL's rollouts write, or `batch["rewards"]`.
        """
        rewards = batch.get("total_reward", batch.get("rewards"))
        if rewards is None:
            return batch, {"reward_model_env/num_samples": len(batch.get("message_log", ()))}
        return batch, reward_metrics(rewards).as_nemo_rl()

    def shutdown(self) -> None:
        """Release the scorer; further calls have no effect."""
        if not self._released:
            release_scorer(self.scorer)
        self._released = True

    def _conversation(self, log: Sequence[Mapping[str, Any]], row: int) -> Conversation:
        messages: list[Any] = [
            {key: message[key] for key in TEXT_FIELDS if message.get(key) is not None}
            | {"content": plain_content(message["content"])}
            for message in log
        ]
        if self._texts is None or len(messages) != 2:
            for message in messages:
                if message["role"] != "assistant" and isinstance(message["content"], str):
                    refuse_rendered(message["content"], f"message log {row}")
            return messages
        prompt, reply = messages[0]["content"], messages[1]["content"]
        return self._texts.conversation(prompt, prompt + reply)


def _prompt(conversation: Conversation, metadata: Any, row: int) -> Prompt:
    """Make the prompt of a row: `ground_truth` or `answer` is the reference answer, other keys are metadata."""
    columns = metadata if isinstance(metadata, Mapping) else {}
    answer_column = "answer" if answer_text(columns.get("ground_truth")) is None else "ground_truth"
    return prompt_of_columns(conversation[:-1], columns, row, answer_column=answer_column)


def read_config(config: Mapping[str, Any]) -> ReadConfig:
    """Translate NeMo RL's configuration of its reward model environment into options of `load_scorer`.

    Raises:
        ConfigError: unknown or unsupported keys; the message lists all of them.
    """
    options: dict[str, Any] = {}
    without_effect: dict[str, str] = {}
    problems: list[str] = []
    if not isinstance(config.get("model_name"), str):
        found = config.get("model_name")
        problems.append(f"model_name: expected the folder or hub id of the reward model, got {found!r}")
    for key, value in _leaves(config):
        if key in WITHOUT_EFFECT:
            without_effect[key] = WITHOUT_EFFECT[key]
        elif key in REFUSED:
            allowed, reason = REFUSED[key]
            if value not in allowed:
                problems.append(f"{key}={value!r}: {reason}")
        elif key == "precision":
            options["dtype"] = value
        elif key == "max_model_len":
            options["max_length"] = value
        elif key == "tokenizer.chat_template_kwargs":
            options["chat_template_kwargs"] = value
        elif key == "tokenizer.chat_template":
            _read_template(value, options, problems)
        elif key == "tokenizer.name":
            if value != config.get("model_name"):
                problems.append(f"{key}={value!r}: must equal model_name, which the tokenizer is loaded from")
        elif key != "model_name":
            problems.append(f"{key}: unknown.{nearest(key, [*TRANSLATED, *WITHOUT_EFFECT, *REFUSED])}")
    if problems:
        raise ConfigError("invalid settings of NeMo RL's reward model environment:\n  " + "\n  ".join(problems))
    given = {name: value for name, value in options.items() if value is not None}
    return ReadConfig(config["model_name"], given, without_effect)


def _read_template(value: Any, options: dict[str, Any], problems: list[str]) -> None:
    if value is None:
        problems.append("tokenizer.chat_template=None: must be a chat template; leave the key out for the tokenizer's")
    elif str(value).endswith(".jinja"):
        try:
            options["chat_template"] = Path(value).read_text()
        except OSError as error:
            problems.append(f"tokenizer.chat_template={value!r}: {error}")
    elif value != "default":
        options["chat_template"] = value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """List the settings as dotted keys with their values; dicts of free keys, such as `generation`, stay values."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in ("chat_template_kwargs", "generation", "custom_parallel_plan"):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


TRANSLATED = (
    "model_name",
    "precision",
    "max_model_len",
    "tokenizer.name",
    "tokenizer.chat_template",
    "tokenizer.chat_template_kwargs",
)
"""Keys that become options of `load_scorer`."""

WITHOUT_EFFECT: dict[str, str] = {
    "enabled": "the environment is used if the data set selects it",
    "processor": "the processor is set in the data section",
    "batch_size": "batches have a token budget, max_num_batched_tokens",
    "logprob_batch_size": "no log-probabilities are computed",
    "offload_optimizer_for_logprob": "there is no optimizer",
    "max_grad_norm": "the reward model is not trained",
    "resources.gpus_per_node": "the reward model uses the device that Ray gives to the actor",
    "resources.num_nodes": "the reward model uses the device that Ray gives to the actor",
    "dtensor_cfg.enabled": "the forward does not use DTensor",
    "dtensor_cfg._v2": "the forward does not use DTensor",
    "dtensor_cfg.sequence_parallel": "the forward does not use DTensor",
    "dtensor_cfg.custom_parallel_plan": "the forward does not use DTensor",
    "dtensor_cfg.activation_checkpointing": "there is no backward pass",
    "dtensor_cfg.cpu_offload": "use sleep() and wake() of the scorer to move the weights",
    "dynamic_batching.enabled": "batches always have a token budget",
    "sequence_packing.enabled": "sequences are always packed where the model supports it",
}
"""Ignored keys, each with the reason."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint_path": ((None,), "DCP checkpoints cannot be loaded; set model_name to a Hugging Face folder"),
    "dtensor_cfg.tensor_parallel_size": (
        (1,),
        "not supported; pass load_scorer an executor that has tensor parallelism",
    ),
    "dtensor_cfg.context_parallel_size": ((1,), "not supported; must be 1"),
    "reward_model_cfg.enabled": ((True,), "must be true"),
    "reward_model_cfg.reward_model_type": (
        ("bradley_terry",),
        "not supported; the kind is detected from the checkpoint",
    ),
    "generation": ((None,), "not supported; nothing is generated"),
}
"""Keys with the values that they accept, and the error for any other value."""
