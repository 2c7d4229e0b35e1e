"""The contract of executors: whoever runs the forward owns the model.

An executor builds the model from a `LoadSpec` where the forward runs, finds out by a trial which layout is right there,
and then runs batches. Its caller holds a kind without weights and learns what it must know from `ModelInfo`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gym_rm.engine.kinds.readouts import Readout
from gym_rm.engine.token_tree import Batch, Layout
from gym_rm.scores import FloatArray

if TYPE_CHECKING:  # callers that only plan batches need no torch
    from transformers import PreTrainedModel

    from gym_rm.engine.backbones.low_precision import Quantization
    from gym_rm.engine.loading.checkpoint import Checkpoint

ModelSource: TypeAlias = "Checkpoint | PreTrainedModel"
Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and what to read from it; can be sent to another process unless it holds a live model.

    Attributes:
        model: a checkpoint to load, or a model handed over as it is (one in training, for instance).
        readout: what is computed where a batch is read.
        reference: the second model of a kind that compares two.
        tree: whether prefixes may be merged; False to compare, or to measure.
        quantization: `"int8"` or `"fp8"` computes the backbone's products in 8 bits.
        prefix_cache_tokens: of how many tokens to keep keys and values across calls; 0 for none.
    """

    model: ModelSource
    readout: Readout
    reference: ModelSource | None = None
    tree: bool = True
    quantization: Quantization | None = None
    prefix_cache_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers must know about a model that runs elsewhere.

    Attributes:
        layout: how batches must be laid out.
        fused: whether the fused forward runs.
        num_values: K, numbers for each value read.
        dtype: precision of the backbone, as in `"bfloat16"`.
        device: where it runs.
        max_num_batched_tokens: a good token budget for the free memory there.
        max_positions: longest sequence that the model's positions allow; None where the configuration names no limit.
        num_embeddings: how many token ids it has embeddings for; None where it does not look them up in a table.
        longest_shared: longest sequence whose values do not depend on the length of others in its batch; None for no
            limit.
        revision: commit of the weights, where the hub reported it.
        quantization: in which format the products are computed, if in 8 bits.
    """

    layout: Layout
    fused: bool
    num_values: int
    dtype: str
    device: str
    max_num_batched_tokens: int
    max_positions: int | None = None
    num_embeddings: int | None = None
    longest_shared: int | None = None
    revision: str | None = None
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Values of one batch, or why it has none.

    Attributes:
        values: float32 `[R, K]`, or None.
        error: what went wrong with this batch alone.
        out_of_memory: whether a smaller batch could work.
        reused_tokens: tokens whose keys and values came from the prefix cache.
    """

    values: FloatArray | None = None
    error: str | None = None
    out_of_memory: bool = False
    reused_tokens: int = 0


class Executor(Protocol):
    """Owns a model and runs batches."""

    def load(self, spec: LoadSpec) -> ModelInfo:
        """Build the model and choose its layout.

        Raises:
            ConfigError: the model cannot be loaded, or an option does not fit it.
        """
        ...

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """One result per batch; a batch that fails costs only itself."""
        ...

    def update_weights(self, weights: Weights) -> None:
        """Take other weights of the same shapes: a folder or hub id, or tensors by name.

        Raises:
            ConfigError: they do not fit; the old weights are kept.
        """
        ...

    def sleep(self) -> None:
        """Free the device; `run` wakes by itself."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def clear_cache(self) -> None:
        """Forget everything derived from the weights, as after a step of an optimizer."""
        ...

    def close(self) -> None:
        """Give up the model and everything that was started for it; can be repeated."""
        ...
