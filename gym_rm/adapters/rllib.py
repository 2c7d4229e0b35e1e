"""RLlib (new API stack): environments for its runners, and one reward model for all of them.

A runner is a process of its own. With a `SharedScorer` the reward model is loaded once, in a Ray actor, and what the
runners ask for at the same time is scored together.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from gym_rm.adapters import require
from gym_rm.envs.settings import parse_autoreset_mode
from gym_rm.envs.spaces import ConversationSpace, UnicodeText
from gym_rm.errors import ConfigError, RemoteError
from gym_rm.scorer import ScorerLike, load_scorer, try_score
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts

ray = require("ray", install="gym-rm[rllib]")
tune_registry = require("ray.tune.registry", install="gym-rm[rllib]")


class ScorerActor:
    """What runs in the actor: a scorer, behind a queue that merges the calls of its threads."""

    def __init__(self, reward_model: ScorerLike, options: Mapping[str, Any], batching: Mapping[str, Any]) -> None:
        self._scorer = MicroBatchingScorer(load_scorer(reward_model, **options), **batching)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        """Scores of all rows, NaN and a reason in those that failed."""
        return try_score(self._scorer, conversations, prompts)

    def counts(self) -> tuple[int, int]:
        """How many score calls were made of the scorer, and with how many conversations."""
        return self._scorer.num_batches, self._scorer.num_conversations


class SharedScorer:
    """A scorer in a Ray actor, for any number of processes: a handle that can be sent to all of them.

    Args:
        reward_model: what `load_scorer` takes, `options` with it; a function is sent to the actor.
        num_cpus, num_gpus: what Ray sets aside for the actor.
        concurrency: calls that can wait to be merged.
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
        self._ask(self._actor.counts)  # an error in loading is an error here

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedScorer:
        """Itself: `gym.make_vec` deep-copies its keywords."""
        return self

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations, together with what other processes ask for.

        Raises:
            ScoringError: some rows have no score.
            RemoteError: the actor died, or its scorer raised.
        """
        scores: Scores = self._ask(self._actor.score, [list(conversation) for conversation in conversations], prompts)
        return scores.raise_for_errors()

    @property
    def counts(self) -> tuple[int, int]:
        """How many score calls the actor has made of its scorer, and with how many conversations."""
        counts: tuple[int, int] = self._ask(self._actor.counts)
        return counts

    def close(self) -> None:
        """End the actor, for all processes."""
        ray.kill(self._actor)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return ray.get(method.remote(*arguments))
        except ray.exceptions.RayError as error:
            raise RemoteError(f"the actor with the reward model did not answer: {error}") from error


class EnvCreator:
    """What RLlib makes environments with: a vector environment for each runner, and a single one to see the spaces.

    Args:
        env_id: a numeric view, `"RewardModelCandidates-v0"` or `"RewardModelTokens-v0"`.
        settings: its keywords; the algorithm's `env_config` goes over them.

    Raises:
        ConfigError: an autoreset mode other than `NEXT_STEP`: RLlib would drop every transition after an end.
    """

    def __init__(self, env_id: str, **settings: Any) -> None:
        self.env_id = env_id
        self.settings = settings
        _require_next_step(settings)

    def __call__(self, context: Mapping[str, Any]) -> Any:
        """The vector environment if the context names `num_envs`, else the single one."""
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
                f"RLlib's networks need numbers, and {self.env_id} has texts; use a numeric view such as "
                "'RewardModelCandidates-v0' or 'RewardModelTokens-v0'."
            )
        return env


def register(env_id: str, **settings: Any) -> str:
    """Register an environment with RLlib; the name to give to `.environment(...)`.

    Beside it the algorithm needs `.env_runners(gym_env_vectorize_mode="vector_entry_point")` and, for the views' token
    ids, the connector `FlattenObservations`.

    Args:
        env_id: a numeric view.
        settings: its keywords, `reward_model=SharedScorer(...)` among them.

    Raises:
        ConfigError: an environment of texts, another autoreset mode, or whatever else the environment refuses.
    """
    name = f"{env_id}-{uuid.uuid4().hex[:8]}"
    creator = EnvCreator(env_id, **settings)
    creator({}).close()  # what is wrong is told here: RLlib swallows the errors of its runners
    tune_registry.register_env(name, creator)
    return name


def _require_next_step(settings: Mapping[str, Any]) -> None:
    mode = settings.get("autoreset_mode", "NextStep")
    if parse_autoreset_mode(mode) is not gym.vector.AutoresetMode.NEXT_STEP:
        raise ConfigError(
            f"RLlib counts on autoreset_mode='NextStep', got {mode!r}: it would throw the first transition of every "
            "episode away after it has been scored. Leave autoreset_mode out."
        )
