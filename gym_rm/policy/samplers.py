"""Samplers of a run: in this process, or a server; and how they get new weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gym_rm.errors import ConfigError
from gym_rm.generation.completions import Completion, Sampler, TokenIds
from gym_rm.generation.sampling import LocalSampler, end_tokens
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.trained_policy import save_policy


@dataclass(frozen=True)
class PolicySampler:
    """A sampler of a run's policy, and how it gets the weights of the learner; see `Sampler`.

    Attributes:
        sampler: what samples.
        has_own_weights: whether it must get the weights after every update; otherwise it reads the learner's.
        is_server: whether it is a server, which gets weights from the main process, for all.
        learner: the policy.
    """

    sampler: Sampler
    has_own_weights: bool
    is_server: bool
    learner: Learner

    def current_weights(self) -> Mapping[str, Tensor] | None:
        """Return the learner's weights, or None if the sampler needs none; all ranks must call this."""
        if not self.has_own_weights:
            return None
        return self.learner.weights(keep=self.learner.is_main or not self.is_server)

    def update_weights(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Give the weights after a number of updates to the sampler; None if it needs none."""
        if weights:
            self.sampler.update_weights(weights, version=version)
        if self.is_server and self.learner.world > 1:
            self.learner.accelerator.wait_for_everyone()

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion for each prompt."""
        return self.sampler.sample(prompts, seeds=seeds)

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()


def make_sampler(settings: GRPOSettings, learner: Learner) -> PolicySampler:
    """Return the sampler of a run. It has a copy of the weights if they are sharded, or change while it samples.

    Raises:
        ConfigError: the server cannot be used.
    """
    options = settings.sampling
    if options.engine != "vllm":
        return _local(settings, learner, own_copy=settings.optimizer.fsdp or settings.max_staleness > 0)
    assert options.server is not None
    if settings.policy.model is None:
        raise ConfigError("sampling.engine='vllm' needs policy.model, the name under which the server serves it.")
    if settings.policy.lora is not None:
        raise ConfigError(f"sampling.engine={options.engine!r} cannot be used with policy.lora; use another engine.")
    if settings.max_staleness and learner.world > 1:
        raise ConfigError(f"sampling.engine={options.engine!r} and several processes need max_staleness=0.")
    key = os.environ.get(options.server_key) if options.server_key else None
    if options.server_key and key is None:
        raise ConfigError(f"sampling.server_key={options.server_key!r}: there is no such environment variable.")
    folder = Path(options.weights_folder or f"{settings.output}/weights")
    server = RemoteSampler(
        options.server,
        model=settings.policy.model,
        tokenizer=learner.start.tokenizer,
        ends=end_tokens(learner.start.model, learner.start.tokenizer),
        save=lambda into, weights: save_policy(learner.start, into, weights),
        # Other ranks, or a policy that learns meanwhile, could not answer.
        calibrate=learner.log_probs_of if learner.world == 1 and not settings.max_staleness else None,
        weights_folder=folder.resolve(),
        max_new_tokens=options.max_new_tokens or 512,
        temperature=options.temperature,
        api_key=key,
    )
    return PolicySampler(server, True, True, learner)


def held_out_sampler(settings: GRPOSettings, learner: Learner) -> PolicySampler:
    """Return a sampler in this process of the policy as it is, beside one that is behind it."""
    return _local(settings, learner, own_copy=settings.optimizer.fsdp)


def _local(settings: GRPOSettings, learner: Learner, *, own_copy: bool) -> PolicySampler:
    options = settings.sampling
    sampler = LocalSampler(
        learner.unsharded,
        learner.start.tokenizer,
        max_new_tokens=options.max_new_tokens or 512,
        temperature=options.temperature,
        max_num_seqs=options.max_num_seqs,
        own_copy=own_copy,
        device=learner.device if own_copy else None,
    )
    return PolicySampler(sampler, own_copy, False, learner)
