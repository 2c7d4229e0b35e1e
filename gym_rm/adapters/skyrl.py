"""SkyRL-gym: a single conversation as a `BaseTextEnv`.

SkyRL makes one environment per trajectory and steps the environments from many threads. They share one scorer, which
merges concurrent calls into one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import ResetNeeded

from gym_rm.adapters import require
from gym_rm.checks import describe, integer
from gym_rm.config import parse_settings
from gym_rm.data.messages import parse_messages
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.engine.batching import shared_batching_scorer
from gym_rm.envs.settings import EnvSettings
from gym_rm.envs.single import RewardEnv
from gym_rm.errors import ConfigError
from gym_rm.types import Message

BaseTextEnv: Any = require("skyrl_gym.envs.base_text_env", install="skyrl-gym").BaseTextEnv


class RewardModelTextEnv(BaseTextEnv):  # type: ignore[misc]
    """SkyRL environment that scores every reply of a dialogue.

    Register it with `register("reward_model", "gym_rm.adapters.skyrl:RewardModelTextEnv")`.

    Args:
        env_config: keys `reward_model` and `reward_model_kwargs` (arguments of `load_scorer`), `max_turns`, `respond`,
            and `fallback_reward` (reward of a reply that cannot be scored; without it, ScoringError is raised).
        extras: other columns of the data set's row; they become the prompt's metadata. `user_turns` are the user's
            messages after the first, second, ... reply. `reward_spec["ground_truth"]` is the reference answer.
            `max_turns`, which SkyRL's generator adds, also limits the replies: the smaller limit ends the episode.

    Raises:
        ConfigError: unknown key in `env_config`, or invalid value.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        config = dict(env_config or {})
        known = {"reward_model", "reward_model_kwargs", *_SETTINGS}
        unknown = sorted(config.keys() - known)
        if unknown:
            raise ConfigError(f"env_config has unknown keys {unknown}; expected only {sorted(known)}.")
        self._scorer = shared_batching_scorer(config.get("reward_model"), config.get("reward_model_kwargs") or {})
        self._extras = dict(extras or {})
        self._settings = {name: config[name] for name in _SETTINGS if name in config}
        # Check the values here, so that an invalid one is not an error of `init`.
        limit = parse_settings(EnvSettings, self._settings).max_turns
        if (given := self._extras.get("max_turns")) is not None:
            turns = integer("extras['max_turns']", given, minimum=1)
            self._settings["max_turns"] = turns if limit is None else min(turns, limit)
        self._env: RewardEnv | None = None
        self._over = True
        self._metrics: dict[str, float] = {}

    def init(self, prompt: Sequence[Mapping[str, str]]) -> tuple[list[Message], dict[str, Any]]:
        """Start a dialogue from the messages of a prompt."""
        messages = parse_messages(list(prompt), "the prompt", "prompt")
        spec = self._extras.get("reward_spec") or {}
        if not isinstance(spec, Mapping):
            raise ConfigError(f"extras['reward_spec'] must be {{'ground_truth': ...}} or None, got {describe(spec)}.")
        ground_truth = spec.get("ground_truth")
        columns = {**self._extras, "ground_truth": ground_truth}
        start = prompt_of_columns(messages, columns, "prompt", answer_column="ground_truth", where="extras")
        self._env = RewardEnv(prompts=[start], reward_model=self._scorer, **self._settings)
        observation, _ = self._env.reset()
        self._over = False
        self._metrics = {"num_turns": 0.0, "score_ok": 1.0, "num_tokens": 0.0}
        return observation, {}

    def step(self, action: str) -> dict[str, Any]:
        """Append a reply and score the conversation.

        Raises:
            ResetNeeded: `init` was not called, or the episode has ended.
            ScoringError: the reply has no score, and there is no `fallback_reward`.
        """
        if self._env is None or self._over:
            raise ResetNeeded("there is no running episode; call init(prompt) before step.")
        conversation, reward, terminated, truncated, info = self._env.step(action)
        self._over = done = terminated or truncated
        self._metrics = {
            "num_turns": self._metrics["num_turns"] + 1.0,
            "score_ok": min(self._metrics["score_ok"], float(info["score_ok"])),
            "num_tokens": float(info["num_tokens"]),
        }
        user_messages = [] if done else conversation[-1:]
        return {"observations": user_messages, "reward": reward, "done": done, "metadata": dict(self._metrics)}

    def get_metrics(self) -> dict[str, float]:
        """Return the number of replies, whether all of them have a score, and the tokens of the last conversation."""
        return dict(self._metrics)


_SETTINGS = ("max_turns", "respond", "fallback_reward")
