"""SkyRL-gym: one conversation as a `BaseTextEnv`.

SkyRL makes an environment for every trajectory and steps them from many threads; they share one scorer, which merges
what they ask for at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.adapters import require
from gym_rm.data.messages import rewards_or_fallback, score_rows
from gym_rm.scorers.batching import shared_scorer
from gym_rm.data.prompts import parse_messages
from gym_rm.envs.episodes import DialogueRules, Episode
from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt

BaseTextEnv: Any = require("skyrl_gym.envs.base_text_env", install="skyrl-gym").BaseTextEnv


class RewardModelTextEnv(BaseTextEnv):  # type: ignore[misc]
    """`register("reward_model", "gym_rm.adapters.skyrl:RewardModelTextEnv")`; scores every reply of a dialogue.

    Args:
        env_config: keys `reward_model` (what `load_scorer` takes), `reward_model_kwargs`, `max_turns`,
            `fallback_reward` (reward of a reply that cannot be scored; without it the error is raised).
        extras: of the dataset's row; `user_turns` are what the user says after the first, second, ... reply.

    Raises:
        ConfigError: an unknown key.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        config = dict(env_config or {})
        self._scorer = shared_scorer(config.pop("reward_model", None), config.pop("reward_model_kwargs", {}))
        self._fallback_reward = config.pop("fallback_reward", None)
        self._rules = DialogueRules(max_turns=config.pop("max_turns", None))
        if config:
            raise ConfigError(f"unknown keys of env_config: {sorted(config)}.")
        self._user_turns = tuple((extras or {}).get("user_turns", ()))
        self._episode: Episode | None = None
        self._metrics: dict[str, float] = {}

    def init(self, prompt: Sequence[Mapping[str, str]]) -> tuple[list[Message], dict[str, Any]]:
        """Start from the messages of a prompt."""
        start = Prompt(parse_messages(list(prompt), "the prompt", "prompt"), "prompt", self._user_turns)
        self._episode = Episode(start, 0, list(start.messages))
        self._metrics = {"num_turns": 0.0, "score_ok": 1.0, "num_tokens": 0.0}
        return list(start.messages), {}

    def step(self, action: str) -> dict[str, Any]:
        """Append a reply and score the conversation."""
        if self._episode is None:
            raise ConfigError("call init(prompt) before step(action).")
        turn = self._rules.turn(self._episode, action)
        scores = score_rows(self._scorer, [turn.messages])
        (reward,) = rewards_or_fallback(scores, self._fallback_reward)
        self._rules.commit(self._episode, turn)
        self._metrics = {
            "num_turns": float(self._episode.num_replies),
            "score_ok": min(self._metrics["score_ok"], float(scores.errors[0] is None)),
            "num_tokens": float(scores.num_tokens[0]),
        }
        said = [] if turn.user is None else [Message(role="user", content=turn.user)]
        return {"observations": said, "reward": reward, "done": turn.ended, "metadata": dict(self._metrics)}

    def get_metrics(self) -> dict[str, float]:
        """Of this trajectory: turns taken, whether all of them have a score, tokens of the last one."""
        return dict(self._metrics)
