"""A vector environment with one row, as a single environment."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from gym_rm.envs.infos import Infos, infos_of_row
from gym_rm.envs.settings import RENDERING, VECTOR_ONLY, divide_known, keywords
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.errors import ConfigError
from gym_rm.reports.transcripts import Frame
from gym_rm.types import Message

Observation = TypeVar("Observation")
Action = TypeVar("Action")


class SingleEnv(gym.Env[Observation, Action]):
    """The only row of a vector environment with autoreset disabled.

    Single and vector environments share one implementation, so that they cannot differ.

    Args:
        make: class of the vector environment.
        **settings: its settings.

    Raises:
        ConfigError: a setting is unknown, invalid, or only for vector environments.
    """

    metadata = RENDERING

    def __init__(self, make: type[RewardVectorEnv], **settings: Any) -> None:
        divide_known(settings, type(self).__name__, keywords(make), refused=VECTOR_ONLY)
        for name in VECTOR_ONLY:
            if name in settings and (name, settings[name]) != ("group_size", 1):
                raise ConfigError(
                    f"{name} must not be set for a single environment, got {settings[name]!r}; use gym.make_vec "
                    "without a vectorization_mode."
                )
        self._envs: Any = make(1, **settings, autoreset_mode=AutoresetMode.DISABLED)
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.render_mode = self._envs.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Infos]:
        """Start the next episode; `seed` restarts the order of prompts."""
        observations, infos = self._envs.reset(seed=[seed], options=options)
        return self._first(observations), infos_of_row(infos, 0)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Infos]:
        """Take one step; raises the same exceptions as the vector environment."""
        observations, rewards, terminations, truncations, infos = self._envs.step([action])
        row = infos_of_row(infos, 0)
        return self._first(observations), float(rewards[0]), bool(terminations[0]), bool(truncations[0]), row

    def render(self) -> Frame | None:
        """Return the conversation as the vector environment renders it."""
        frames: tuple[Frame, ...] | None = self._envs.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Close the vector environment."""
        self._envs.close()

    # `gym.Env.np_random` and `np_random_seed` read these two: the generator that orders the prompts, and its seed.

    @property
    def _np_random(self) -> np.random.Generator:  # type: ignore[override]
        (generator,) = self._envs.np_random
        return cast(np.random.Generator, generator)

    @property
    def _np_random_seed(self) -> int:  # type: ignore[override]
        (seed,) = self._envs.np_random_seed
        return int(seed)

    def _first(self, observations: Any) -> Observation:
        first: Observation = next(iter(iterate(self._envs.observation_space, observations)))
        return first


class RewardEnv(SingleEnv[list[Message], str | Message]):
    """One conversation: `RewardVectorEnv` with one row, for libraries and tools that need a single environment.

    `check_env`, `SyncVectorEnv` and `AsyncVectorEnv` use it. In `AsyncVectorEnv` (with `shared_memory=False`) every
    process loads its own reward model; use `context="spawn"` or `"forkserver"`, because a forked process has only one
    thread for it. To score many conversations together, use the vector environment.

    Args:
        **settings: the fields of `EnvSettings`, except for `group_size` and `autoreset_mode`.

    Raises:
        ConfigError: a setting is unknown, invalid, or only for vector environments.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> env = gym.make("RewardModel-v0", reward_model=lambda conversations: [1.0] * len(conversations))
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step("four")
        >>> reward, terminated
        (1.0, True)
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(RewardVectorEnv, **settings)
