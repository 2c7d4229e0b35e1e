"""NeMo RL: a reward model environment with NeMo RL's `EnvironmentInterface`, for `ray.remote` and `register_env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gym_rm.checks import finite
from gym_rm.data.messages import refuse_rendered
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import answer_text, prompt_of_columns
from gym_rm.engine.text.messages import plain_message
from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer, try_score
from gym_rm.scorers.load import acquire_scorer, release_scorer
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
        config: arguments of `load_scorer`, as in `{"reward_model": "org/name", "dtype": "bfloat16"}` or
            `{"kind": "math"}`, and the two below; NeMo RL's `enabled` and `processor` are left out.
        policy_tokenizer: the policy's tokenizer, or its folder or hub id. It is needed if the data processor stores
            prompts as rendered text (as `math_hf_data_processor` does): the messages are parsed from that text.
        fallback_reward: reward of a message log that cannot be scored; None raises ScoringError instead.

    Raises:
        ConfigError: an option is unknown or invalid, such as those of NeMo RL's own environment.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        policy_tokenizer: Any = None,
        fallback_reward: float | None = None,
    ) -> None:
        if "model_name" in config:
            raise ConfigError(
                f"the section is that of NeMo RL's own environment; write reward_model: {config['model_name']}, and "
                "dtype, max_length and the other options of load_scorer beside it."
            )
        own = {"policy_tokenizer": policy_tokenizer, "fallback_reward": fallback_reward}
        options = {key: value for key, value in {**own, **config}.items() if key not in ("enabled", "processor")}
        tokenizer, fallback = options.pop("policy_tokenizer"), options.pop("fallback_reward")
        self.fallback_reward = None if fallback is None else finite("fallback_reward", fallback)
        self._released = False
        self._texts = None if tokenizer is None else PolicyTexts(tokenizer)
        self.scorer: Scorer = acquire_scorer(options.pop("reward_model", None), options)

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any] | None = None) -> EnvironmentReturn:
        """Score B message logs in one call; the batch may be empty.

        Args:
            message_log_batch: B lists of messages.
            metadata: B dicts, or nothing; `ground_truth` is the reference answer for verifiers.

        Returns:
            Rewards float32 `[B]` and terminateds bool `[B]` (all True) on the CPU. Observations are empty messages,
            because NeMo RL appends their text to the sample.

        Raises:
            ConfigError: a prompt is already rendered by a chat template, and `policy_tokenizer` is None.
            ScoringError: a message log has no score, and `fallback_reward` is None.
        """
        import torch

        conversations = [self._conversation(log, row) for row, log in enumerate(message_log_batch)]
        rows = metadata or [None] * len(conversations)
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
        messages[1]["content"] = self._texts.reply(messages[1]["content"])
        return [*self._texts.messages(messages[0]["content"]), messages[1]]


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
