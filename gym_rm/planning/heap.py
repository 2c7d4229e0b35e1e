"""Memory of a CPU's process beside its tensors: libraries, and what the heap of the C library cannot give back.

All numbers were fitted to measured peaks (`python benchmarks/planner.py memory`; benchmarks/README.md says on what).
With `MALLOC_MMAP_THRESHOLD_=65536`, which gives every block back when it is freed, the peaks are those of the tensors
and the libraries alone, within 10 MiB. By default glibc keeps freed blocks below 32 MiB in its heap, where blocks of
other sizes often do not fit into their holes.
"""

from __future__ import annotations

from gym_rm.planning.hardware.devices import MIB

BLOCK = 32 * MIB  # larger blocks are mapped apart (glibc, DEFAULT_MMAP_THRESHOLD_MAX), and given back when freed
# Code, kernels and buffers that torch, oneDNN, transformers and the tokenizer load when the work begins.
LIBRARIES = {"scoring": 54 * MIB, "low precision": 96 * MIB, "training": 26 * MIB, "generation": 12 * MIB}
CONVERTED_LOAD = 32 * MIB  # of the libraries of low precision, what is there while weights are converted


def after_load(weights: float, *, low: bool) -> float:
    """Return the holes at the end of the load of a scorer; `low` is whether its weights are in 16 bits."""
    return (8 * MIB if low else min(60 * MIB, 0.5 * weights)) + 0.02 * weights


def beside_scoring(weights: float) -> float:
    """Return what stays of the load of a scorer while other components work."""
    return 0.6 * min(60 * MIB, 0.5 * weights)


def in_forward(weights: float, tensors: float, *, low: bool, encoder: bool, widest: float, hidden: float) -> float:
    """Return the holes of forwards without gradients that run again and again.

    Args:
        weights, tensors: bytes of the weights, and of the tensors of a forward.
        low: whether they are in 16 bits, which oneDNN converts in buffers of its own.
        encoder: whether batches are padded.
        widest, hidden: bytes of the largest tensor in an MLP, and of the hidden states.
    """
    fixed = min(45 * MIB, 0.35 * weights) + 0.02 * weights
    if hidden >= BLOCK:
        return fixed + 0.1 * tensors
    if low:
        return fixed + 2.2 * tensors
    return fixed + tensors * (0.85 if encoder else min(1.0, widest / (8 * MIB)))


def in_heap(hidden: float, widest: float) -> float:
    """Return the share of a layer's tensors that are in the heap, from the bytes of its tensors."""
    if hidden >= BLOCK:
        return 0.0
    return 0.6 if widest >= BLOCK else 1.0


def in_training(
    activations: float,
    there: float,
    gradients: float,
    logits: float,
    *,
    recomputed: bool,
    frozen: bool,
    policy: bool,
    encoder: bool,
) -> float:
    """Return the holes in an instant of training.

    The heap does not give the room of freed activations to gradients, nor that of gradients to activations, so that
    the largest activations count in every instant.

    Args:
        activations: bytes of the largest activations, of those in the heap.
        there: bytes of activations of this instant.
        gradients: bytes of all gradients; with float32 weights and two states of AdamW, a quarter of what stays.
        logits: bytes of one copy of the logits times the copies of this instant.
        recomputed: whether activations are computed again in the backward.
        frozen: whether only adapters are trained.
        policy: whether batches have other shapes from step to step, as in GRPO.
        encoder: whether the model is an encoder.
    """
    size = max(0.0, activations - there)
    if frozen:
        return size + (4.5 if recomputed else 0.92) * activations
    if recomputed:
        size += min(2 * activations, activations + gradients)
    share, holes = (0.08, 0.45) if policy else (0.075, 0.16) if encoder else (0.042, 0.16)
    size += share * (activations + 4 * gradients) + max(0.0, holes * activations - gradients)
    return size + 0.3 * logits * (logits < 4.25 * BLOCK)
