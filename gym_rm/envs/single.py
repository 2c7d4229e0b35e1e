"""A vector environment of one, as a single environment."""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from gym_rm.envs.infos import Infos, infos_of_row
from gym_rm.envs.transcripts import RENDERING
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.errors import ConfigError
from gym_rm.reports.metrics import RewardMetrics
from gym_rm.types import Message

Observation = TypeVar("Observation")
Action = TypeVar("Action")


class SingleEnv(gym.Env[Observation, Action]):
    """The only row of a vector environment with autoreset disabled.

    There is one implementation of everything, so that single and vector environments cannot differ; what is left
    to a test is that rows do not depend on each other.

    Args:
        envs: one environment, in `DISABLED`.
    """

    metadata = RENDERING

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        self._envs = envs
        self.observation_space = envs.single_observation_space
        self.action_space = envs.single_action_space
        self.render_mode = envs.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Infos]:
        """Start the next episode; `seed` starts the order of prompts anew."""
        observations, infos = self._envs.reset(seed=[seed], options=options)  # type: ignore[arg-type]
        # The generator that orders the prompts is this environment's generator.
        (self._np_random,), (self._np_random_seed,) = self._envs.np_random, self._envs.np_random_seed  # type: ignore
        return self._first(observations), infos_of_row(infos, 0)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Infos]:
        """One step; raises what the vector environment raises."""
        observations, rewards, terminations, truncations, infos = self._envs.step([action])
        row = infos_of_row(infos, 0)
        return self._first(observations), float(rewards[0]), bool(terminations[0]), bool(truncations[0]), row

    def render(self) -> str | None:
        """The transcript in `"ansi"`; None in `"human"`, which has printed it."""
        transcripts = self._envs.render()
        return None if transcripts is None else str(transcripts[0])

    def close(self) -> None:
        """Close the vector environment."""
        self._envs.close()

    @property
    def metrics(self) -> RewardMetrics:
        """Statistics of the last step."""
        metrics: RewardMetrics = self._envs.unwrapped.metrics  # type: ignore[attr-defined]
        return metrics

    def _first(self, observations: Any) -> Observation:
        first: Observation = next(iter(iterate(self._envs.observation_space, observations)))
        return first


class RewardEnv(SingleEnv[list[Message], str]):
    """One conversation: `RewardVectorEnv` for libraries and tools that take a single environment.

    `check_env`, `SyncVectorEnv` and `AsyncVectorEnv` use it. To score many conversations together, use the vector
    environment.

    Args:
        **settings: the fields of `EnvSettings`, except for `group_size` and `autoreset_mode`.

    Raises:
        ConfigError: an unknown or invalid setting, or one that only a vector environment has.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> env = gym.make("RewardModel-v0", reward_model=lambda conversations: [1.0] * len(conversations))
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step("four")
        >>> reward, terminated
        (1.0, True)
    """

    def __init__(self, **settings: Any) -> None:
        if settings.get("group_size", 1) != 1:
            raise ConfigError(
                f"a group needs neighbours, got group_size={settings['group_size']} for a single environment; "
                "use gym.make_vec(..., num_envs=..., group_size=...) without a vectorization_mode."
            )
        for name in ("num_envs", "autoreset_mode"):
            if name in settings:
                raise ConfigError(
                    f"{name}={settings[name]!r} is a setting of vector environments; use gym.make_vec instead."
                )
        super().__init__(RewardVectorEnv(1, **settings, autoreset_mode=AutoresetMode.DISABLED))
