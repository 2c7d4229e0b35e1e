"""Samplers of a run: in this process, or a server; and how they get new weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
        has_own_weights: whether it must get the weights after every update; otherwise it reads the learner's.
        is_server: whether it is a server, which gets weights from the main process, for all.
    """

    sampler: Sampler
    has_own_weights: bool
    is_server: bool
    learner: Learner

    def update_weights(self) -> None:
        """Give the learner's weights to the sampler, if it needs them; all ranks must call this."""
        if not self.has_own_weights:
            return
        if weights := self.learner.weights(keep=self.learner.is_main or not self.is_server):
            self.sampler.update_weights(weights, version=self.learner.version)
        if self.is_server and self.learner.world > 1:
            self.learner.accelerator.wait_for_everyone()

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion for each prompt."""
        return self.sampler.sample(prompts, seeds=seeds)

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()


def make_sampler(settings: GRPOSettings, learner: Learner) -> PolicySampler:
    """Return the sampler of a run: in this process, with a copy of the weights if they are sharded, or a server.

    Raises:
        ConfigError: the server cannot be used.
    """
    options = settings.sampling
    if options.server is None:
        local = LocalSampler(
            learner.unsharded,
            learner.start.tokenizer,
            max_new_tokens=options.max_new_tokens or 512,
            temperature=options.temperature,
            max_num_seqs=options.max_num_seqs,
            copy_to=learner.device if settings.optimizer.fsdp else None,
        )
        return PolicySampler(local, settings.optimizer.fsdp, False, learner)
    if settings.policy.model is None or settings.policy.lora is not None:
        raise ConfigError("sampling.server needs policy.model, the name by which it knows the policy, and no adapters.")
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
        calibrate=learner.log_probs_of if learner.world == 1 else None,  # other ranks could not answer
        weights_folder=folder.resolve(),
        max_new_tokens=options.max_new_tokens or 512,
        temperature=options.temperature,
        api_key=key,
    )
    return PolicySampler(server, True, True, learner)
