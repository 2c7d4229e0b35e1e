"""Samplers of a run: in this process, or a server; and how they get new weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from gym_rm.errors import ConfigError, warn_once
from gym_rm.generation.completions import Sampler
from gym_rm.generation.sampling import FEW_ROWS, LocalSampler, end_tokens
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler


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
        copied = settings.optimizer.fsdp or bool(options.steps_ahead)  # the update changes the learner's own weights
        local = LocalSampler(
            learner.unsharded,
            learner.start.tokenizer,
            max_new_tokens=options.max_new_tokens or 512,
            temperature=options.temperature,
            max_num_seqs=options.max_num_seqs,
            copy_to=learner.device if copied else None,
        )

        def update_copy() -> None:
            if not copied:
                local.version = learner.version
            elif local.version != learner.version or settings.optimizer.fsdp:
                local.update_weights(learner.weights(keep=True), version=learner.version)

        return local, update_copy
    if settings.policy.model is None:
        raise ConfigError("sampling.server needs policy.model, the name by which it knows the policy.")
    key = os.environ.get(options.server_key) if options.server_key else None
    if options.server_key and key is None:
        raise ConfigError(f"sampling.server_key={options.server_key!r}: there is no such environment variable.")
    folder = Path(options.weights_folder or f"{settings.output}/weights")
    server = RemoteSampler(
        options.server,
        model=settings.policy.model,
        tokenizer=learner.start.tokenizer,
        ends=end_tokens(learner.start.model, learner.start.tokenizer),
        save=functools.partial(learner.save, tied_once=False),
        # A rank alone has no sharded policy; the others may not come.
        calibrate=None if learner.fsdp and learner.world > 1 else learner.log_probs_of,
        full_precision=settings.policy.dtype == "float32" and learner.accelerator.mixed_precision == "no",
        weights_folder=folder.resolve(),
        max_new_tokens=options.max_new_tokens or 512,
        temperature=options.temperature,
        api_key=key,
        timeout=options.timeout,
        max_retries=options.max_retries,
    )

    def update_server() -> None:
        version = learner.version
        if server.version != version:
            weights = learner.weights(keep=learner.is_main)
            server.expect(version)
            learner.agreed(lambda: server.update_weights(weights, version=version) if learner.is_main else None)
        else:
            learner.agreed(lambda: server.load_if_lost() if learner.is_main else None)

    return server, update_server
