"""TorchRL: a transform that rewards the replies of `ChatEnv`, TorchRL's environment for language models.

TorchRL's own `GymWrapper` takes the numeric views, made with `autoreset_mode="Disabled"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gym_rm.adapters import require
from gym_rm.checks import boolean, finite
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.errors import ConfigError
from gym_rm.scorer import ScorerLike, try_score
from gym_rm.scorers.load import load_scorer
from gym_rm.types import Conversation

torch = require("torch", install="gym-rm[torchrl]")
specs = require("torchrl.data", install="gym-rm[torchrl]")
Transform: Any = require("torchrl.envs", install="gym-rm[torchrl]").Transform


class RewardModelTransform(Transform):  # type: ignore[misc]
    """Transform that adds rewards to a `ChatEnv`: `TransformedEnv(ChatEnv(...), RewardModelTransform(...))`.

    The input mode of the `ChatEnv` must be `"history"`. A step scores the whole batch in one call.
    `("next", "reward")` is float32 `[*batch, 1]`.

    Args:
        reward_model, scorer_options: arguments of `load_scorer`.
        columns: keys of the tensordict, for example columns of `DatasetChatEnv`'s data set, that reach the scorer as
            fields of the `Prompt`: `answer` as its reference answer, the others as metadata. Missing keys are ignored.
        tokenizer: the policy's tokenizer. The tokens that end its turns are removed from the ends of
            replies, because the policy keeps them in the history.
        ends_episode: True ends the episode after one reply; False continues the dialogue.
        fallback_reward: reward of a conversation without a score; None raises ScoringError instead.

    Raises:
        ScoringError: (during a step) a conversation has no score, and `fallback_reward` is None.
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        columns: Sequence[str] = ("answer",),
        tokenizer: Any = None,
        ends_episode: bool = True,
        fallback_reward: float | None = None,
        **scorer_options: Any,
    ) -> None:
        super().__init__(in_keys=[("history", "full")], out_keys=["reward"])
        if isinstance(columns, str):
            raise ConfigError(f"columns must be a list of keys, got the text {columns!r}.")
        self.columns = tuple(columns)
        self.ends_episode = boolean("ends_episode", ends_episode)
        self.fallback_reward = None if fallback_reward is None else finite("fallback_reward", fallback_reward)
        self.scorer = load_scorer(reward_model, **scorer_options)
        self._texts = None if tokenizer is None else PolicyTexts(tokenizer, apply_chat_template=False)

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        history = tensordict.get(("history", "full"), None)
        if history is None:
            raise ConfigError(
                "('history', 'full') is missing; use ChatEnv(input_mode='history') and a policy that writes this key."
            )
        conversations = [self._conversation(each) for each in _each(history, next_tensordict.ndim)]
        found = {name: tensordict.get(name, None) for name in self.columns}
        columns = {name: _flat(values, tensordict.ndim) for name, values in found.items() if values is not None}
        prompts = [
            prompt_of_columns(conversation[:-1], {name: values[row] for name, values in columns.items()}, None)
            for row, conversation in enumerate(conversations)
        ]
        scores = try_score(self.scorer, conversations, prompts)
        rewards = torch.tensor(scores.rewards_or_fallback(self.fallback_reward), device=next_tensordict.device)
        next_tensordict.set("reward", rewards.reshape(*next_tensordict.batch_size, 1))
        if self.ends_episode:
            for name in ("done", "terminated"):
                next_tensordict.set(name, torch.ones_like(next_tensordict.get(name)))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Return a spec with one reward per element of the batch."""
        reward_spec["reward"] = specs.Unbounded((*reward_spec.shape, 1))
        return reward_spec

    def _conversation(self, history: Any) -> Conversation:
        messages: list[Any] = [{"role": turn.role, "content": turn.content} for turn in history.unbind(0)]
        for message, turn in zip(messages, history.unbind(0), strict=True):
            if turn.tool_calls is not None:
                message["tool_calls"] = turn.tool_calls  # written by the chat template, or refused by the scorer
            if self._texts is not None and turn.role == "assistant" and isinstance(turn.content, str):
                message["content"] = self._texts.reply(turn.content)
        return messages


def _each(history: Any, dims: int) -> Iterator[Any]:
    """Yield the histories of a batch that has `dims` batch dimensions; histories may differ in length."""
    if dims == 0:
        yield history
    else:
        for part in history.unbind(0):
            yield from _each(part, dims - 1)


def _flat(values: Any, dims: int) -> list[Any]:
    """Return a column of a batch that has `dims` batch dimensions as a flat list."""
    listed: list[Any] = values.tolist()
    for _ in range(dims - 1):
        listed = [each for part in listed for each in part]
    return [each[0] if isinstance(each, list) and len(each) == 1 else each for each in listed]
