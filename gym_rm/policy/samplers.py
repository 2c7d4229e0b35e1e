"""Samplers of a run: in this process, or a server; and how they get new weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gym_rm.errors import ConfigError, warn_once
from gym_rm.generation.completions import Sampler
from gym_rm.generation.sampling import FEW_ROWS, LocalSampler, end_tokens
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.trained_policy import save_policy


def make_sampler(settings: GRPOSettings, learner: Learner) -> tuple[Sampler, Callable[[], None]]:
    """Return the sampler of a run, in this process or a server, and what gives it the weights of the learner.

    All ranks must call the function. A sampler in this process reads the learner's own weights unless they are sharded;
    a server gets them from the main process.

    Raises:
        ConfigError: the server cannot be used.
    """
    options = settings.sampling
    if options.server is None:
        rows = settings.env.num_prompts * settings.env.group_size // learner.world
        rows = min(rows, options.max_num_seqs or rows)
        if learner.device.type == "cuda" and rows < FEW_ROWS:
            warn_once(
                f"a GPU samples {rows} completions at a time, and fewer than {FEW_ROWS} leave it mostly idle; take "
                "more (env.num_prompts, sampling.max_num_seqs), or try a server of vLLM (sampling.server)."
            )
        local = LocalSampler(
            learner.unsharded,
            learner.start.tokenizer,
            max_new_tokens=options.max_new_tokens or 512,
            temperature=options.temperature,
            max_num_seqs=options.max_num_seqs,
            copy_to=learner.device if settings.optimizer.fsdp else None,
        )

        def update_copy() -> None:
            if settings.optimizer.fsdp:
                local.update_weights(learner.weights(keep=True), version=learner.version)

        return local, update_copy
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

    def update_server() -> None:
        weights = learner.weights(keep=learner.is_main)
        if learner.is_main:
            server.update_weights(weights, version=learner.version)
        learner.accelerator.wait_for_everyone()

    return server, update_server
