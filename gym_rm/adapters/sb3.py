"""Stable-Baselines3: any Gymnasium vector environment as a `VecEnv`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from gym_rm.adapters import require
from gym_rm.envs.infos import infos_of_row
from gym_rm.errors import ConfigError

VecEnv: Any = require("stable_baselines3.common.vec_env", install="gym-rm[sb3]").VecEnv

NUMERIC = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class VecEnvBridge(VecEnv):  # type: ignore[misc]
    """A Gymnasium vector environment in autoreset mode `SAME_STEP` as a `VecEnv` of Stable-Baselines3.

    All environments are stepped in one call. SB3 needs numeric spaces: use `RewardModelCandidates-v0`,
    `RewardModelTokens-v0`, or your own numeric view of `RewardModel-v0`. `VecMonitor` and
    `VecNormalize(norm_obs=False)` can wrap the bridge.

    Args:
        envs: the vector environment.

    Raises:
        MissingExtraError: (on import of this module) stable-baselines3 is not installed.
        ConfigError: SB3 does not support the observation or action space, or the autoreset mode is not `SAME_STEP`.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> envs = VecEnvBridge(gym.make_vec("RewardModelCandidates-v0", num_envs=4))
        >>> observations = envs.reset()
        >>> observations, rewards, dones, infos = envs.step(np.array([0, 1, 2, 3]))
        >>> dones.tolist(), infos[0]["terminal_observation"].shape
        ([True, True, True, True], (96,))
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        if not isinstance(envs, VectorEnv):
            raise ConfigError(f"envs must be a gymnasium vector environment (gym.make_vec), got {type(envs).__name__}.")
        for what, space in (("observation", envs.single_observation_space), ("action", envs.single_action_space)):
            if not isinstance(space, NUMERIC):
                raise ConfigError(
                    f"the {what} space must be numeric for Stable-Baselines3, got {space}; use a numeric view such as "
                    "gym.make_vec('RewardModelCandidates-v0') or gym.make_vec('RewardModelTokens-v0')."
                )
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"the autoreset mode must be SAME_STEP for Stable-Baselines3, got {mode}; make the environment with "
                "autoreset_mode='SameStep'."
            )
        self.envs = envs
        self._actions: NDArray[Any] | None = None
        observation_space = copy.deepcopy(envs.single_observation_space)
        if isinstance(observation_space, spaces.MultiDiscrete):
            # RecurrentPPO gives the sum of these sizes to torch, which refuses an int64.
            observation_space.nvec = observation_space.nvec.astype(object)
        super().__init__(envs.num_envs, observation_space, envs.single_action_space)

    def reset(self) -> NDArray[Any]:
        """Start new episodes; the seeds set by `seed()` apply to this reset only."""
        if any(self._options):
            raise ConfigError("reset options are not supported by this adapter: SB3 always resets all environments.")
        observations, infos = self.envs.reset(seed=None if None in self._seeds else list(self._seeds))  # type: ignore[arg-type]
        self.reset_infos = [infos_of_row(infos, row) for row in range(self.num_envs)]
        self._reset_seeds()
        return np.asarray(observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Return observations, rewards, dones and infos; where an episode ended, the info is that of its last step."""
        observations, rewards, terminations, truncations, infos = self.envs.step(self._actions)
        dones = terminations | truncations
        final_observations, final_infos = infos.pop("final_obs", None), infos.pop("final_info", {})
        rows: list[dict[str, Any]] = [infos_of_row(infos, row) for row in range(self.num_envs)]
        for row in np.flatnonzero(dones).tolist():
            self.reset_infos[row] = rows[row]
            rows[row] = {**infos_of_row(final_infos, row), "terminal_observation": final_observations[row]}
        for row, info in enumerate(rows):
            info["TimeLimit.truncated"] = bool(truncations[row] and not terminations[row])
        return np.asarray(observations), rewards.astype(np.float32), dones, rows

    def close(self) -> None:
        """Close the vector environment."""
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the vector environment, for each index."""
        value = getattr(self.envs, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raise ConfigError: the environments are one object, whose settings are fixed."""
        raise ConfigError(f"set_attr cannot set {attr_name!r}; make a new environment, or set it on `envs` directly.")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Return the rows of `envs.action_masks()`, as MaskablePPO needs; any other method raises ConfigError."""
        if method_name != "action_masks":
            raise ConfigError(f"env_method cannot call {method_name!r} for one environment; call it on `envs`.")
        masks = self.get_attr(method_name, 0)[0]()
        return [masks[row] for row in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """Return False for each index: the vector environment holds no single environments."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[None]:
        """Return None for each environment: conversations have no images."""
        return [None] * self.num_envs
