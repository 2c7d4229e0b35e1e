"""TorchRL: our spaces as specs, so that `GymWrapper` takes the environments, and a reward transform for `ChatEnv`.

Importing this module registers the conversion of the spaces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium import Env
from gymnasium.vector import AutoresetMode, VectorEnv

from gym_rm.adapters import require
from gym_rm.envs.spaces import ConversationSpace, UnicodeText
from gym_rm.errors import ConfigError
from gym_rm.scorer import ScorerLike, load_scorer, try_score
from gym_rm.types import Conversation

torch = require("torch", install="gym-rm[torchrl]")
tensordict = require("tensordict", install="gym-rm[torchrl]")
specs = require("torchrl.data", install="gym-rm[torchrl]")
gym_backend = require("torchrl.envs.libs.gym", install="gym-rm[torchrl]")
NonTensor: Any = specs.NonTensor
Transform: Any = require("torchrl.envs", install="gym-rm[torchrl]").Transform


class ObjectPerElement(NonTensor):  # type: ignore[misc]
    """A spec of Python objects, one for each element of its shape: what `NonTensor` holds once for all of them.

    Args:
        shape: as of any spec.
        example_data: what `rand`, `zero` and `one` put everywhere.
    """

    def __init__(
        self, shape: Any = (), device: Any = None, dtype: Any = None, example_data: Any = None, **kwargs: Any
    ) -> None:
        # Copies of a NonTensor forget that they are batched; this one always is.
        super().__init__(shape, device=device, dtype=dtype, example_data=example_data, batched=True)

    def rand(self, shape: Any = None) -> Any:
        """The example everywhere."""
        full = (*(shape or ()), *self.shape)
        return _stack([self.example_data] * math.prod(full), full)

    def _encode_eager(self, val: Any, *, ignore_device: bool = False) -> Any:
        return _stack([val] if not self.shape else list(val), tuple(self.shape))


def wrap(env: Env[Any, Any] | VectorEnv[Any, Any, Any], **options: Any) -> Any:
    """A TorchRL `GymWrapper` around an environment of this package, numeric view or not.

    Args:
        env: a single environment, or a vector environment with autoreset `"Disabled"`.
        options: of `GymWrapper`.

    Raises:
        ConfigError: a vector environment in another autoreset mode.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> reward_model = lambda conversations: [len(c[-1]["content"]) for c in conversations]
        >>> envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=reward_model, autoreset_mode="Disabled")
        >>> envs = wrap(envs)
        >>> step = envs.step(envs.reset().set("action", tensordict.NonTensorStack("four", "it is four")))
        >>> step["next", "reward"].flatten().tolist()
        [4.0, 10.0]
    """
    if isinstance(env, VectorEnv):
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"TorchRL resets environments by itself, and this one has {mode}; make it with "
                "autoreset_mode='Disabled'."
            )
    return gym_backend.GymWrapper(env, **options)


class RewardModelTransform(Transform):  # type: ignore[misc]
    """The reward of a `ChatEnv` in history mode: `TransformedEnv(ChatEnv(...), RewardModelTransform(...))`.

    One score call a step, over the whole batch; `("next", "reward")` is float32 `[*batch, 1]`.

    Args:
        reward_model: what `load_scorer` takes, `scorer_options` with it.
        tokenizer: the policy's; its end tokens are taken off the end of a reply, where the policy's history keeps them.
        ends_episode: whether the reply ends the episode (one turn), or the dialogue goes on.
        fallback_reward: reward of a conversation without a score; None raises.

    Raises:
        ScoringError: at a step, conversations without a score, where there is no `fallback_reward`.
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        tokenizer: Any = None,
        ends_episode: bool = True,
        fallback_reward: float | None = None,
        **scorer_options: Any,
    ) -> None:
        super().__init__(in_keys=[("history", "full")], out_keys=["reward"])
        self.scorer = load_scorer(reward_model, **scorer_options)
        self.ends_episode = ends_episode
        self.fallback_reward = fallback_reward
        ends = {tokenizer.eos_token, tokenizer.pad_token} - {None} if tokenizer is not None else set()
        self._ends = re.compile(f"(?:{'|'.join(map(re.escape, sorted(ends)))})+$") if ends else None

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        history = tensordict.get(("history", "full"), None)
        if history is None:
            raise ConfigError(
                "no ('history', 'full') to score; use ChatEnv(input_mode='history') and a policy that fills it."
            )
        conversations = [self._conversation(each) for each in _each(history, next_tensordict.ndim)]
        scores = try_score(self.scorer, conversations)
        rewards = torch.tensor(scores.rewards_or_fallback(self.fallback_reward), device=next_tensordict.device)
        next_tensordict.set("reward", rewards.reshape(*next_tensordict.batch_size, 1))
        if self.ends_episode:
            for name in ("done", "terminated"):
                next_tensordict.set(name, torch.ones_like(next_tensordict.get(name)))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """A reward for each element of the batch."""
        reward_spec["reward"] = specs.Unbounded((*reward_spec.shape, 1))
        return reward_spec

    def _conversation(self, history: Any) -> Conversation:
        messages: list[Any] = [{"role": turn.role, "content": turn.content} for turn in history.unbind(0)]
        for message, turn in zip(messages, history.unbind(0), strict=True):
            if turn.tool_calls is not None:
                message["tool_calls"] = turn.tool_calls  # which the scorer refuses, rather than not see
        reply = messages[-1]
        if self._ends is not None and reply["role"] == "assistant" and isinstance(reply["content"], str):
            reply["content"] = self._ends.sub("", reply["content"])
        return messages


def _each(history: Any, dims: int) -> Iterator[Any]:
    """The histories of a batch with this many dimensions; their last one, the turns, may be ragged."""
    if dims == 0:
        yield history
    else:
        for part in history.unbind(0):
            yield from _each(part, dims - 1)


def _stack(values: Sequence[Any], shape: Sequence[int]) -> Any:
    """Objects as a non-tensor of this shape."""
    if not shape:
        return tensordict.NonTensorData(values[0])
    size = len(values) // shape[0] if shape[0] else 0
    parts = [_stack(values[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0])]
    return tensordict.lazy_stack(parts)


def _spec(example_data: Any) -> Any:
    def convert(space: Any, *, device: Any = None, batch_size: Any = (), **kwargs: Any) -> ObjectPerElement:
        return ObjectPerElement(batch_size, device=device, example_data=example_data)

    return convert


gym_backend.register_gym_spec_conversion(UnicodeText)(_spec(""))
gym_backend.register_gym_spec_conversion(ConversationSpace)(_spec([{"role": "user", "content": ""}]))
