"""How the batches of a model run with gradients: the fastest layout that equals the plain forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.engine.backbones.decoder import DecoderBackbone, num_positions
from gym_rm.engine.backbones.tree_attention import PAGE_SIZE, attending_to_trees
from gym_rm.engine.batch_planning import plan_layout
from gym_rm.engine.kernels import has_kernels
from gym_rm.engine.loading.trial import (
    MOST_TOLERANCE,
    PLAIN,
    Candidate,
    Forward,
    choose_forward,
    did_not_compile,
    is_failure,
    short_windows_and_low_caps,
    tolerance_of,
    trial_sequences,
)
from gym_rm.engine.token_tree import Batch, BatchPlan
from gym_rm.errors import ConfigError, logger
from gym_rm.scores import FloatArray

SMALL = 0.02  # gradients of less than this, relative to the largest, can be rounding, such as those of biases of keys
GRADIENT_TOLERANCE = 1e-4  # maximum difference of gradients in the trial, relative to the largest


class Trainable(Protocol):
    """What `choose_layout` needs of a module: its decoders, and the values that layouts are compared by."""

    decoders: tuple[DecoderBackbone, ...]
    has_unused: bool

    def trial_values(self, batch: Batch) -> Tensor:
        """Return values `[R, ...]` with gradients, if enabled."""


def choose_layout(trained: Trainable, model: PreTrainedModel, *, tree: bool, fuse: bool) -> Forward:
    """Return the fastest layout whose values and gradients equal those of the plain forward, on a few short texts.

    Sets how the decoder of `trained` runs. Dropout is off meanwhile.
    """
    decoders, dtype = trained.decoders, str(model.dtype).removeprefix("torch.")
    tolerance = GRADIENT_TOLERANCE if dtype == "float32" else tolerance_of(dtype)
    candidate = Candidate(
        name=type(model).__name__,
        config=model.config,
        dtype=dtype,
        # flex_attention has no dropout.
        can_take_trees=bool(decoders) and tree and (_no_dropout(model) or model.device.type != "cuda"),
        can_fuse=bool(decoders) and fuse and decoders[0].code is not None and _no_dropout(model),
        has_kernels=has_kernels(model.device, model.dtype) and _no_dropout(model),
        max_width=num_positions(model),
        modules=(model,),
        page_size=decoders[0].page_size if decoders else PAGE_SIZE,
    )

    def values(plan: BatchPlan, forward: Forward) -> Tensor:
        for decoder in decoders:
            decoder.use(fuse=forward.fuse, kernels=forward.kernels)
        with torch.enable_grad():
            return torch.cat([trained.trial_values(batch).float() for batch in plan.batches])

    def run(plan: BatchPlan, forward: Forward) -> FloatArray:
        return values(plan, forward).detach().cpu().numpy()

    def gradients(forward: Forward) -> list[Tensor]:
        sequences = trial_sequences(model.config, candidate.length, candidate.page_size)
        plan = plan_layout(forward.layout, sequences, max_num_batched_tokens=10**6)
        read = values(plan, forward)[torch.from_numpy(plan.value_index)]
        factors = torch.from_numpy(np.random.default_rng(0).standard_normal(tuple(read.shape)).astype(np.float32))
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad((read * factors.to(read.device)).sum(), parameters, allow_unused=True)
        if forward == PLAIN:  # the trial does not run the head
            inside = {id(parameter) for parameter in model.base_model.parameters()}
            trained.has_unused = any(g is None and id(p) in inside for p, g in zip(parameters, grads, strict=True))
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]

    with _evaluating(model):
        chosen = choose_forward(candidate, run)
        plain_gradients = gradients(PLAIN)
        with short_windows_and_low_caps(candidate) as changed:
            of_short_windows = gradients(PLAIN) if changed else []
        torch_alone = dataclasses.replace(chosen, kernels=False)
        own = dataclasses.replace(torch_alone, fuse=False)
        options = [chosen, torch_alone, own, Forward("padded", fuse=False)]
        for forward in dict.fromkeys(options):
            try:
                difference = _difference(gradients(forward), plain_gradients, forward)
                with short_windows_and_low_caps(candidate) as changed:
                    if changed:
                        difference = max(difference, _difference(gradients(forward), of_short_windows, forward))
            except Exception as error:
                if not is_failure(error, forward):
                    raise
                level = logging.WARNING if did_not_compile(error, forward) else logging.INFO
                logger.log(level, "%s cannot be trained with %s: %s", candidate.name, forward, error)
                continue
            if difference <= tolerance:
                break
            message = "%s: gradients with %s differ from the plain ones by %.1e, so it is not used; training is slower."
            logger.warning(message, candidate.name, forward, difference)
        else:
            forward = Forward("one_by_one", fuse=False)
    for decoder in decoders:
        decoder.use(fuse=forward.fuse, kernels=forward.kernels)
    return forward


def enable_checkpointing(trained: Trainable, model: PreTrainedModel, layout: Forward) -> None:
    """Let the layers keep only their input, and run again in the backward (arXiv 1604.06174).

    Raises:
        ConfigError: the model does not support it.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if layout.layout == "tree":  # the backward runs the layers again, which then attend to trees again
        options["context_fn"] = lambda: (contextlib.nullcontext(), attending_to_trees(model.base_model))
    try:
        model.gradient_checkpointing_enable(options)
        model.disable_input_require_grads()  # a hook for reentrant checkpoints, with which nothing could be fused
    except ValueError as error:
        raise ConfigError(f"gradient_checkpointing: {error}") from error
    for decoder in trained.decoders:
        decoder.checkpointing = True


def _difference(got: list[Tensor], expected: list[Tensor], forward: Forward) -> float:
    """Return the largest difference of gradients, relative to the largest gradient.

    It is infinite if the backward of a kernel, by hand, leaves out most of a parameter's gradient.
    """
    largest = [float(each.abs().max()) for each in expected]
    differences = [float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)]
    scale = max(*largest, 1e-12)
    own = (d / max(one, SMALL * scale) for d, one in zip(differences, largest, strict=True))
    if forward.kernels and not max(own) <= MOST_TOLERANCE:
        return float("inf")
    return max(differences) / scale


def _no_dropout(model: PreTrainedModel) -> bool:
    return not any(getattr(part, "attention_dropout", 0.0) for part in model.modules())


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
