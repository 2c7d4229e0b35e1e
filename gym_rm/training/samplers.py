"""Samplers of a run: in this process, or a server; and how they get new weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gym_rm.errors import ConfigError
from gym_rm.generation.completions import Sampler
from gym_rm.generation.sampling import LocalSampler, end_tokens
from gym_rm.training.learner import Learner
from gym_rm.training.policy_model import save_policy
from gym_rm.training.policy_settings import GRPOSettings
from gym_rm.training.remote_sampler import RemoteSampler


@dataclass(frozen=True)
class Source:
    """A sampler, and what it needs before it samples.

    Attributes:
        sampler: the sampler.
        has_own_weights: whether it must get the weights after every update; otherwise it reads the learner's.
        is_server: whether it is a server, which gets weights from the main process, for all.
        learner: the policy.
    """

    sampler: Sampler
    has_own_weights: bool
    is_server: bool
    learner: Learner

    def current_weights(self) -> Mapping[str, Tensor] | None:
        """Return the learner's weights for `take`, or None if it needs none; all ranks must call this."""
        if not self.has_own_weights:
            return None
        return self.learner.weights(keep=self.learner.is_main or not self.is_server)

    def take(self, weights: Mapping[str, Tensor] | None, *, version: int) -> None:
        """Give weights to the sampler."""
        if weights:
            self.sampler.update_weights(weights, version=version)
        if self.is_server and self.learner.world > 1:
            self.learner.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()


def make_sampler(settings: GRPOSettings, learner: Learner) -> Source:
    """Return the sampler of a run. It has a copy of the weights if they are sharded, or change while it samples.

    Raises:
        ConfigError: the server cannot be used.
    """
    options, name = settings.sampling, settings.sampling.engine
    if name != "vllm" and name != "sglang":
        return local_source(settings, learner, own_copy=settings.optimizer.fsdp or settings.max_staleness > 0)
    assert options.server is not None
    if settings.policy.lora is not None:
        raise ConfigError(f"sampling.engine={name!r} cannot be used with policy.lora; use another engine.")
    if settings.max_staleness and learner.world > 1:
        raise ConfigError(f"sampling.engine={name!r} and several processes need max_staleness=0.")
    key = os.environ.get(options.server_key) if options.server_key else None
    if options.server_key and key is None:
        raise ConfigError(f"sampling.server_key={options.server_key!r}: there is no such environment variable.")
    folder = Path(options.weights_folder or f"{settings.output}/weights")
    server = RemoteSampler(
        options.server,
        engine=name,
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
    return Source(server, True, True, learner)


def local_source(settings: GRPOSettings, learner: Learner, *, own_copy: bool) -> Source:
    """Return a sampler in this process."""
    options, name = settings.sampling, settings.sampling.engine
    sampler = LocalSampler(
        learner.unsharded,
        learner.start.tokenizer,
        max_new_tokens=options.max_new_tokens or 512,
        temperature=options.temperature,
        max_num_seqs=options.max_num_seqs,
        generation="auto" if name == "vllm" or name == "sglang" else name,
        own_copy=own_copy,
        device=learner.device if own_copy else None,
    )
    return Source(sampler, own_copy, False, learner)
