"""Which episodes a rank plays in each step, with which prompts and random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.errors import ConfigError
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.policy.rollout_batch import RolloutBatch

TRAINING, HELD_OUT = 0, 1  # streams of random numbers


class RolloutSchedule:
    """The episodes of each step and of the measurements; the same on any number of ranks.

    Args:
        settings, learner: settings of the run, and the policy, for its tokenizer and its ranks.
        num_prompts, num_held_out: numbers of prompts to train on, and to measure on.

    Attributes:
        num_envs, num_held_out_envs: environments of this rank in a step, and in a measurement.

    Raises:
        ConfigError: there is no prompt, or those of a step cannot be divided among the processes.
    """

    def __init__(self, settings: GRPOSettings, learner: Learner, *, num_prompts: int, num_held_out: int) -> None:
        env, rank, world = settings.env, learner.rank, learner.world
        if not num_prompts:
            raise ConfigError("there is no prompt to train on; env.prompts needs at least one.")
        if env.num_prompts % world:
            raise ConfigError(f"env.num_prompts={env.num_prompts} must be a multiple of the {world} processes.")
        self._settings, self._num_prompts = settings, num_prompts
        self._renderer = PolicyRenderer(learner.start.tokenizer, tools_in_system=env.tools_in_system)
        share = env.num_prompts // world
        self._groups = np.arange(rank * share, (rank + 1) * share)
        self._held_out = np.arange(rank, num_held_out, world)
        self.num_envs, self.num_held_out_envs = share * env.group_size, -(-num_held_out // world)

    def training(self, step: int) -> RolloutBatch:
        """Return the episodes of a step, whose prompts are shuffled in every epoch."""
        number, seed = self._settings.env.num_prompts, self._settings.seed
        epochs, places = np.divmod(np.arange((step - 1) * number, step * number), self._num_prompts)
        order = {
            epoch: np.random.default_rng([seed, epoch]).permutation(self._num_prompts)
            for epoch in np.unique(epochs).tolist()
        }
        prompts = np.array([order[epoch][place] for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)])
        return self._batch(prompts[self._groups], np.ones(len(self._groups), bool), step=step, attempt=0)

    def replacing(self, groups: NDArray[Any], *, step: int, attempt: int) -> RolloutBatch:
        """Return episodes of other prompts in place of some groups of a step."""
        fresh = np.random.default_rng([self._settings.seed, step, attempt])
        prompts = fresh.integers(self._num_prompts, size=self._settings.env.num_prompts)
        return self._batch(prompts[self._groups], np.isin(self._groups, groups), step=step, attempt=attempt)

    def held_out(self) -> RolloutBatch:
        """Return one episode of each held-out prompt, always with the same random numbers."""
        padded = np.pad(self._held_out, (0, self.num_held_out_envs - len(self._held_out)))
        rows = np.arange(self.num_held_out_envs) < len(self._held_out)
        seed = (self._settings.seed, HELD_OUT)
        return RolloutBatch(self._renderer, padded, padded, group_size=1, seed=seed, rows=rows)

    def _batch(self, prompts: NDArray[Any], groups: NDArray[Any], *, step: int, attempt: int) -> RolloutBatch:
        size = self._settings.env.group_size
        return RolloutBatch(
            self._renderer,
            np.repeat(prompts, size),
            (self._groups[:, None] * size + np.arange(size)).ravel(),
            group_size=size,
            seed=(self._settings.seed, TRAINING, step, attempt),
            rows=np.repeat(groups, size),
            attempt=attempt,
        )
