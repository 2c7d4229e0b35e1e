"""NeMo RL: a reward model environment with NeMo RL's `EnvironmentInterface` and NeMo RL's configuration.

Use `ray.remote(RewardModelEnvironment)` instead of NeMo RL's own environment, with the same configuration section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gym_rm.checks import finite
from gym_rm.data.messages import refuse_rendered
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import answer_text, prompt_of_columns
from gym_rm.engine.text.messages import plain_message
from gym_rm.errors import ConfigError, logger
from gym_rm.scorer import Scorer, try_score
from gym_rm.scorers.load import SCORER_KINDS, acquire_scorer, release_scorer
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


class RewardModelEnvironment:
    """NeMo RL environment that scores message logs; every episode has one reply.

    Args:
        config: the `reward_model` section of NeMo RL's `env` (see `read_config`), a section with the `kind` of another
            scorer and its options (`{"kind": "math"}`), or `{"scorer": scorer}`.
        policy_tokenizer: the policy's tokenizer, or its folder or hub id. It is needed if the data processor stores
            prompts as rendered text (as `math_hf_data_processor` does): the messages are parsed from that text.
        fallback_reward: reward of a message log that cannot be scored; None raises ScoringError instead.

    Raises:
        ConfigError: unsupported keys; the message lists all of them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        policy_tokenizer: Any = None,
        fallback_reward: float | None = None,
    ) -> None:
        self.fallback_reward = None if fallback_reward is None else finite("fallback_reward", fallback_reward)
        self._released = False
        self._texts = None if policy_tokenizer is None else PolicyTexts(policy_tokenizer)
        if set(config) == {"scorer"}:
            self.scorer: Scorer = acquire_scorer(config["scorer"], {})
            return
        if config.get("kind") in SCORER_KINDS:
            options = {key: value for key, value in config.items() if key not in ("enabled", "processor")}
            self.scorer = acquire_scorer(options, {})
            return
        options = read_config(config)
        self.scorer = acquire_scorer(options.pop("reward_model"), options)

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
        return batch, _metrics(rewards)

    def shutdown(self) -> None:
        """Release the scorer; further calls have no effect."""
        if not self._released:
            release_scorer(self.scorer)
        self._released = True

    def _conversation(self, log: Sequence[Mapping[str, Any]], row: int) -> Conversation:
        messages: list[Any] = [
            {key: message[key] for key in TEXT_FIELDS if message.get(key) is not None} | {"content": message["content"]}
            for message in map(plain_message, log)
        ]
        if self._texts is None or len(messages) != 2:
            for message in messages:
                if message["role"] != "assistant" and isinstance(message["content"], str):
                    refuse_rendered(message["content"], f"message log {row}")
            return messages
        prompt, reply = messages[0]["content"], messages[1]["content"]
        return self._texts.conversation(prompt, prompt + reply)


def _metrics(rewards: Any) -> dict[str, float]:
    """Return statistics by NeMo RL's names, with its divisor N - 1 for the standard deviation; those that exist."""
    values = np.asarray(rewards, dtype=np.float64)
    metrics: dict[str, float] = {"num_samples": len(values)}
    if len(values) > 0:
        metrics |= {"mean_reward": values.mean(), "min_reward": values.min(), "max_reward": values.max()}
    if len(values) > 1:
        metrics["std_reward"] = values.std(ddof=1)
    return {f"reward_model_env/{name}": float(value) for name, value in metrics.items()}


def _prompt(conversation: Conversation, metadata: Any, row: int) -> Prompt:
    """Make the prompt of a row: `ground_truth` or `answer` is the reference answer, other keys are metadata."""
    columns = metadata if isinstance(metadata, Mapping) else {}
    answer_column = "answer" if answer_text(columns.get("ground_truth")) is None else "ground_truth"
    return prompt_of_columns(conversation[:-1], columns, None, answer_column=answer_column)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Translate NeMo RL's configuration of its reward model environment into keywords of `load_scorer`.

    Raises:
        ConfigError: a key asks for something that is not supported; the message lists all such keys.
    """
    tokenizer = dict(config.get("tokenizer") or {})
    model = config.get("model_name")
    problems = [
        f"{key} must be {only!r}, got {value!r}"
        for key, only in ONLY.items()
        if (value := _get(config, key, only)) != only
    ]
    if not isinstance(model, str):
        problems.append(f"model_name must be the folder or hub id of the reward model, got {model!r}")
    elif tokenizer.get("name", model) != model:
        problems.append(f"tokenizer.name must be equal to model_name, got {tokenizer['name']!r}")
    if problems:
        raise ConfigError("invalid settings of NeMo RL's reward model environment: " + "; ".join(problems) + ".")
    ignored = sorted(config.keys() - {"model_name", "precision", "max_model_len", "tokenizer"})
    logger.info("NeMo RL's settings %s of the reward model have no effect.", ignored)
    template = tokenizer.get("chat_template", "default")
    if str(template).endswith(".jinja"):
        template = Path(template).read_text(encoding="utf-8")
    options = {
        "dtype": config.get("precision"),
        "max_length": config.get("max_model_len"),
        "chat_template": None if template == "default" else template,
        "chat_template_kwargs": tokenizer.get("chat_template_kwargs"),
    }
    return {"reward_model": model, **{name: value for name, value in options.items() if value is not None}}


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value


ONLY = {
    "checkpoint_path": None,
    "dtensor_cfg.tensor_parallel_size": 1,
    "dtensor_cfg.context_parallel_size": 1,
    "reward_model_cfg.reward_model_type": "bradley_terry",
    "generation": None,
}
"""Keys that would change the scores and have no counterpart, with the one value that is supported."""
