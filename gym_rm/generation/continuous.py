"""Sampling with the continuous batching of transformers: rows enter the batch as others leave it (CUDA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from gym_rm.errors import ConfigError, brief
from gym_rm.generation.completions import TokenIds

PAGE = 256  # tokens of a block of the cache


def sample_continuously(
    model: Any,
    prompts: Sequence[TokenIds],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    ends: Sequence[int],
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Return token ids and log-probabilities at the temperature (at 1 if it is 0) of one completion for each prompt.

    One seed is made of all seeds, so a completion depends on everything that is sampled with it. The state of torch's
    generators does not change.

    Args:
        model: causal language model with `generate_batch`.
        prompts: B prompts.
        seeds: B seeds.
        max_new_tokens: most tokens in a completion.
        temperature: sampling temperature; 0 takes the most likely token.
        ends: ids of the tokens that end a completion.

    Raises:
        ConfigError: the model does not support it.
    """
    greedy = temperature == 0
    options = GenerationConfig(
        do_sample=not greedy,
        temperature=1.0 if greedy else temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends) or -1,
        pad_token_id=0,
    )
    on_cuda = model.device.type == "cuda"
    needed = sum(-(-(len(prompt) + max_new_tokens) // PAGE) for prompt in prompts) + 8
    seed = int(np.random.SeedSequence([int(seed) for seed in seeds]).generate_state(1)[0])
    batching = ContinuousBatchingConfig(return_logprobs=True, seed=seed, num_blocks=None if on_cuda else needed)
    try:
        with torch.random.fork_rng(devices=[model.device] if on_cuda else []):
            outputs = model.generate_batch(
                [prompt.tolist() for prompt in prompts], generation_config=options, continuous_batching_config=batching
            )
    except (AttributeError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(model).__name__} has no continuous batching ({brief(error)}); use generation='auto'."
        ) from error
    found = list(outputs.values())  # in the order of the prompts
    failed = [output.error for output in found if output.error is not None]
    if failed or len(found) != len(prompts):
        raise ConfigError(
            f"continuous batching finished {len(found) - len(failed)} of {len(prompts)} completions of "
            f"{type(model).__name__} ({failed[0] if failed else 'its thread stopped; see the log'}); use "
            "generation='auto'."
        )
    return [
        (np.array(output.generated_tokens, dtype=np.int64), np.array(output.logprobs, dtype=np.float32))
        for output in found
    ]
