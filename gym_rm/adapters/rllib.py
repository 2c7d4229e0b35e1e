"""RLlib (new API stack): environments for its runners, and one reward model that all runners share.

Each runner is a process of its own. `SharedScorer` loads the reward model once, in a Ray actor, and scores concurrent
calls of the runners in one batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from gym_rm.adapters import require
from gym_rm.engine.batching import MicroBatchingScorer
from gym_rm.envs.settings import parse_autoreset_mode
from gym_rm.envs.spaces import ConversationSpace, UnicodeText
from gym_rm.errors import ConfigError, RemoteError
from gym_rm.scorer import ScorerLike, load_scorer, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts

ray = require("ray", install="gym-rm[rllib]")
tune_registry = require("ray.tune.registry", install="gym-rm[rllib]")


class ScorerActor:
    """The Ray actor: a scorer that merges concurrent calls into one batch."""

    def __init__(self, reward_model: ScorerLike, options: Mapping[str, Any], batching: Mapping[str, Any]) -> None:
        self._scorer = MicroBatchingScorer(load_scorer(reward_model, **options), **batching)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        """Return the scores of all rows; a failed row has the reward NaN and an error."""
        return try_score(self._scorer, conversations, prompts)

    def counts(self) -> tuple[int, int]:
        """Return the number of calls of the scorer and the number of conversations in them."""
        return self._scorer.num_batches, self._scorer.num_conversations


class SharedScorer:
    """A scorer that runs in a Ray actor; this handle to it can be sent to any number of processes.

    Args:
        reward_model, options: arguments of `load_scorer`; a function is pickled and sent to the actor.
        num_cpus, num_gpus: resources that Ray reserves for the actor.
        concurrency: largest number of concurrent calls.
        max_batch_size, max_wait: see `MicroBatchingScorer`.

    Example:
        >>> scorer = SharedScorer("Skywork/Skywork-Reward-V2-Qwen3-0.6B", num_gpus=1)  # doctest: +SKIP
        >>> envs = gym.make_vec("RewardModel-v0", num_envs=8, reward_model=scorer)  # doctest: +SKIP
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        concurrency: int = 64,
        max_batch_size: int = 1024,
        max_wait: float = 0.005,
        **options: Any,
    ) -> None:
        actor = ray.remote(ScorerActor).options(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=concurrency)
        self._actor = actor.remote(reward_model, options, {"max_batch_size": max_batch_size, "max_wait": max_wait})
        self._ask(self._actor.counts)  # wait for the model, so that a loading error is raised here

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedScorer:
        """Return the handle itself: `gym.make_vec` deep-copies its keywords."""
        return self

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations, in one batch with concurrent calls of other processes.

        Raises:
            ScoringError: some rows have no score.
            RemoteError: the actor died, or its scorer raised an exception.
        """
        scores: Scores = self._ask(self._actor.score, [list(conversation) for conversation in conversations], prompts)
        return scores.raise_for_errors()

    @property
    def counts(self) -> tuple[int, int]:
        """Number of calls of the actor's scorer, and number of conversations in them."""
        counts: tuple[int, int] = self._ask(self._actor.counts)
        return counts

    def close(self) -> None:
        """Stop the actor, for all processes."""
        ray.kill(self._actor)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return ray.get(method.remote(*arguments))
        except ray.exceptions.RayError as error:
            raise RemoteError(f"the call to the Ray actor of the reward model failed: {error}") from error


class EnvCreator:
    """Environment factory for RLlib: a vector environment for each runner, and a single one to read the spaces.

    Args:
        env_id: id of a numeric view, `"RewardModelCandidates-v0"` or `"RewardModelTokens-v0"`.
        settings: keywords of the environment; the algorithm's `env_config` overrides them.

    Raises:
        ConfigError: the autoreset mode is not `NEXT_STEP`, which RLlib requires.
    """

    def __init__(self, env_id: str, **settings: Any) -> None:
        self.env_id = env_id
        self.settings = settings
        _require_next_step(settings)

    def __call__(self, context: Mapping[str, Any]) -> Any:
        """Return a vector environment if the context has `num_envs`, otherwise a single environment."""
        settings = {**self.settings, **context}
        num_envs = settings.pop("num_envs", None)
        _require_next_step(settings)
        settings.pop("autoreset_mode", None)
        if num_envs is None:
            env: Any = gym.make(self.env_id, **settings)
            spaces = (env.observation_space, env.action_space)
        else:
            env = gym.make_vec(self.env_id, num_envs=num_envs, autoreset_mode="NextStep", **settings)
            spaces = (env.single_observation_space, env.single_action_space)
        if any(isinstance(space, ConversationSpace | UnicodeText) for space in spaces):
            raise ConfigError(
                f"env_id must name an environment with numeric spaces, got {self.env_id!r}; use a numeric view such as "
                "'RewardModelCandidates-v0' or 'RewardModelTokens-v0'."
            )
        return env


def register(env_id: str, **settings: Any) -> str:
    """Register an environment with RLlib and return its name, the argument of `.environment(...)`.

    The algorithm also needs `.env_runners(gym_env_vectorize_mode="vector_entry_point", sample_timeout_s=None)` and,
    because observations are token ids, the connector `FlattenObservations`. By default RLlib restarts a failed runner
    and continues without its samples; `.fault_tolerance(restart_failed_env_runners=False)` makes `build_algo` raise the
    error of an invalid `env_config`, and `train` raise one if the reward model fails.

    Args:
        env_id: id of a numeric view.
        settings: keywords of the environment, such as `reward_model=SharedScorer(...)`.

    Raises:
        ConfigError: the spaces are not numeric, the autoreset mode is not `NEXT_STEP`, or another setting is invalid.
    """
    name = f"{env_id}-{uuid.uuid4().hex[:8]}"
    creator = EnvCreator(env_id, **settings)
    creator({}).close()  # RLlib hides errors of its runners, so invalid settings must raise here
    tune_registry.register_env(name, creator)
    return name


def _require_next_step(settings: Mapping[str, Any]) -> None:
    mode = settings.get("autoreset_mode", "NextStep")
    if parse_autoreset_mode(mode) is not gym.vector.AutoresetMode.NEXT_STEP:
        raise ConfigError(
            f"autoreset_mode must be 'NextStep' for RLlib, got {mode!r}: in other modes RLlib drops the first "
            "transition of every episode after it was scored. Leave autoreset_mode out."
        )
