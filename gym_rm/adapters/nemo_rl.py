"""NeMo RL: an environment with its `EnvironmentInterface`, and its reward model environment's configuration as ours.

`ray.remote(RewardModelEnvironment)` takes the place of NeMo RL's own, with the same configuration section.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gym_rm.data.messages import plain_content, refuse_rendered
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import answer_text, prompt_of_columns
from gym_rm.errors import ConfigError, logger, nearest
from gym_rm.reports.metrics import reward_metrics
from gym_rm.scorer import Scorer, acquire_scorer, release_scorer, try_score
from gym_rm.types import Conversation, Prompt

if TYPE_CHECKING:
    from torch import Tensor


class EnvironmentReturn(NamedTuple):
    """NeMo RL's fields, all of them batched."""

    observations: list[dict[str, str]]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None] | None = None


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """What a configuration of NeMo RL's reward model environment means here.

    Attributes:
        reward_model: folder or hub id.
        options: of `load_scorer`.
        without_effect: keys that change nothing here, and why.
    """

    reward_model: str
    options: Mapping[str, Any]
    without_effect: Mapping[str, str] = field(default_factory=dict)


class RewardModelEnvironment:
    """Scores message logs; one turn an episode.

    Args:
        config: the `reward_model` section of NeMo RL's `env`, see `read_config`; or a dict with a `scorer`.
        policy_tokenizer: where the data processor stores prompts as rendered text (`math_hf_data_processor` does), the
            policy's tokenizer, or the folder or hub id of it: the messages are read back from that text.
        fallback_reward: reward of a log that cannot be scored; None raises.

    Raises:
        ConfigError: keys that cannot be honoured, all of them named.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        policy_tokenizer: Any = None,
        fallback_reward: float | None = None,
    ) -> None:
        self.fallback_reward = fallback_reward
        self._released = False
        self._texts = None if policy_tokenizer is None else PolicyTexts(policy_tokenizer)
        if set(config) == {"scorer"}:
            self.scorer: Scorer = acquire_scorer(config["scorer"], {})
            return
        read = read_config(config)
        for key, reason in read.without_effect.items():
            logger.info("NeMo RL's %s has no effect: %s", key, reason)
        self.scorer = acquire_scorer(read.reward_model, read.options)

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any] | None = None) -> EnvironmentReturn:
        """Score B logs in one call; any B, an empty batch included.

        Args:
            message_log_batch: B lists of messages.
            metadata: B dicts; `ground_truth` is the reference answer for verifiers.

        Returns:
            Rewards float32 `[B]` and terminateds bool `[B]` (all True) on the CPU. Observations are empty messages, for
            their text would be appended to the sample.

        Raises:
            ConfigError: a prompt that is rendered already, without `policy_tokenizer`.
            ScoringError: logs without a score, where there is no `fallback_reward`.
        """
        import torch

        conversations = [self._conversation(log, row) for row, log in enumerate(message_log_batch)]
        rows = metadata if metadata is not None else [None] * len(conversations)
        if len(rows) != len(conversations):
            raise ConfigError(f"expected one metadata for each of the {len(conversations)} logs, got {len(rows)}.")
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
        """The batch as it came, and `reward_model_env/{num_samples, mean_reward, ...}` over its rewards.

        The rewards are the batch's `total_reward`, as rollouts store them, or `rewards`.
        """
        rewards = batch.get("total_reward", batch.get("rewards"))
        if rewards is None:
            return batch, {"reward_model_env/num_samples": len(batch.get("message_log", ()))}
        return batch, reward_metrics(rewards).as_nemo_rl()

    def shutdown(self) -> None:
        """Release the scorer; can be repeated."""
        if not self._released:
            release_scorer(self.scorer)
        self._released = True

    def _conversation(self, log: Sequence[Mapping[str, Any]], row: int) -> Conversation:
        messages: list[Any] = [
            {"role": message["role"], "content": plain_content(message["content"])} for message in log
        ]
        if self._texts is None or len(messages) != 2:
            for message in messages:
                if message["role"] != "assistant" and isinstance(message["content"], str):
                    refuse_rendered(message["content"], f"message log {row}")
            return messages
        prompt, reply = messages[0]["content"], messages[1]["content"]
        return self._texts.conversation(prompt, prompt + reply)


def _prompt(conversation: Conversation, metadata: Any, row: int) -> Prompt:
    """NeMo RL's metadata of a row: its `ground_truth` is the reference answer, the rest goes with it."""
    columns = metadata if isinstance(metadata, Mapping) else {}
    answer_column = "answer" if answer_text(columns.get("ground_truth")) is None else "ground_truth"
    messages = list(itertools.takewhile(lambda message: message["role"] != "assistant", conversation))
    return prompt_of_columns(messages, columns, row, answer_column=answer_column)


def read_config(config: Mapping[str, Any]) -> ReadConfig:
    """NeMo RL's configuration of its reward model environment as options of `load_scorer`.

    Raises:
        ConfigError: keys that are unknown or ask for something that is not done here; lists all of them.
    """
    options: dict[str, Any] = {}
    without_effect: dict[str, str] = {}
    problems: list[str] = []
    if not isinstance(config.get("model_name"), str):
        problems.append("model_name: expected the folder or hub id of the reward model")
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
                problems.append(f"{key}={value!r}: the tokenizer is read from model_name")
        elif key != "model_name":
            known = [*WITHOUT_EFFECT, *REFUSED, "model_name", "precision", "max_model_len", "tokenizer.chat_template"]
            problems.append(f"{key}: unknown.{nearest(key, known)}")
    if problems:
        raise ConfigError("NeMo RL's reward model environment cannot be taken over:\n  " + "\n  ".join(problems))
    given = {name: value for name, value in options.items() if value is not None}
    return ReadConfig(config["model_name"], given, without_effect)


def _read_template(value: Any, options: dict[str, Any], problems: list[str]) -> None:
    if value is None:
        problems.append("tokenizer.chat_template=None: contents are never joined without a template")
    elif str(value).endswith(".jinja"):
        try:
            options["chat_template"] = Path(value).read_text()
        except OSError as error:
            problems.append(f"tokenizer.chat_template={value!r}: {error}")
    elif value != "default":
        options["chat_template"] = value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys with dots and their values; `chat_template_kwargs` and `generation` stay whole."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in ("chat_template_kwargs", "generation", "custom_parallel_plan"):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


WITHOUT_EFFECT: dict[str, str] = {
    "enabled": "the environment is used when the data names it",
    "processor": "the processor of the data section is used",
    "batch_size": "batches are made by a token budget, max_num_batched_tokens",
    "logprob_batch_size": "nothing here computes log-probabilities",
    "offload_optimizer_for_logprob": "there is no optimizer",
    "max_grad_norm": "nothing is trained",
    "resources.gpus_per_node": "the device is the one that the actor was given",
    "resources.num_nodes": "the device is the one that the actor was given",
    "dtensor_cfg.enabled": "the forward is not DTensor's",
    "dtensor_cfg._v2": "the forward is not DTensor's",
    "dtensor_cfg.sequence_parallel": "the forward is not DTensor's",
    "dtensor_cfg.custom_parallel_plan": "the forward is not DTensor's",
    "dtensor_cfg.activation_checkpointing": "there is no backward pass",
    "dtensor_cfg.cpu_offload": "weights are moved by the scorer's sleep() and wake()",
    "dynamic_batching.enabled": "batches are always made by tokens",
    "sequence_packing.enabled": "shared prefixes are always merged, and nothing is padded",
}
"""Keys that may hold anything."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint_path": ((None,), "a DCP folder cannot be loaded; name a Hugging Face folder in model_name"),
    "dtensor_cfg.tensor_parallel_size": ((1,), "give load_scorer an executor for tensor parallelism instead"),
    "dtensor_cfg.context_parallel_size": ((1,), "context parallelism is not supported"),
    "reward_model_cfg.enabled": ((True,), "a reward model cannot be off"),
    "reward_model_cfg.reward_model_type": (("bradley_terry",), "the kind is told by the checkpoint"),
    "generation": ((None,), "scores are not divided by a sampling temperature"),
}
"""Keys that may hold only what they do by default: these values, and what to do about others."""
