"""RLlib (new API stack): environments for its runners.

Each runner is a process of its own. Give them the URL of a server (`gym-rm serve`) as the reward model: it scores
concurrent calls of the runners in one batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from gym_rm.adapters import require
from gym_rm.envs.spaces import ConversationSpace, UnicodeText
from gym_rm.errors import ConfigError

tune_registry = require("ray.tune.registry", install="gym-rm[rllib]")


def register(env_id: str, **settings: Any) -> str:
    """Register an environment with RLlib and return its name, the argument of `.environment(...)`.

    A runner gets a vector environment, and RLlib a single one to read the spaces. The algorithm's `env_config`
    overrides the settings. It also needs `.env_runners(gym_env_vectorize_mode="vector_entry_point",
    sample_timeout_s=None)` and, because observations are token ids, the connector `FlattenObservations`. By default
    RLlib restarts a failed runner and continues without its samples; `.fault_tolerance(restart_failed_env_runners=
    False)` makes `build_algo` raise the error of an invalid `env_config`, and `train` raise one if the reward model
    fails.

    Args:
        env_id: id of a numeric view, `"RewardModelCandidates-v0"` or `"RewardModelTokens-v0"`.
        settings: keywords of the environment, such as `reward_model="http://127.0.0.1:5000"`.

    Raises:
        ConfigError: the spaces are not numeric, the autoreset mode is not `NEXT_STEP`, or another setting is invalid.
    """

    def create(context: Mapping[str, Any]) -> Any:
        return _make(env_id, {**settings, **context})

    name = f"{env_id}-{uuid.uuid4().hex[:8]}"
    create({}).close()  # RLlib hides errors of its runners, so invalid settings must raise here
    tune_registry.register_env(name, create)
    return name


def _make(env_id: str, settings: dict[str, Any]) -> Any:
    """Return a vector environment if `num_envs` is set, otherwise a single environment."""
    num_envs = settings.pop("num_envs", None)
    _require_next_step(settings)
    settings.pop("autoreset_mode", None)
    if num_envs is None:
        env: Any = gym.make(env_id, **settings)
        spaces = (env.observation_space, env.action_space)
    else:
        env = gym.make_vec(env_id, num_envs=num_envs, autoreset_mode="NextStep", **settings)
        spaces = (env.single_observation_space, env.single_action_space)
    if any(isinstance(space, ConversationSpace | UnicodeText) for space in spaces):
        raise ConfigError(
            f"env_id must name an environment with numeric spaces, got {env_id!r}; use a numeric view such as "
            "'RewardModelCandidates-v0' or 'RewardModelTokens-v0'."
        )
    return env


def _require_next_step(settings: Mapping[str, Any]) -> None:
    mode = settings.get("autoreset_mode", "NextStep")
    if mode not in ("NextStep", gym.vector.AutoresetMode.NEXT_STEP):
        raise ConfigError(
            f"autoreset_mode must be 'NextStep' for RLlib, got {mode!r}: in other modes RLlib drops the first "
            "transition of every episode after it was scored. Leave autoreset_mode out."
        )
