"""The contract of executors: an executor owns a model and runs its forward.

An executor builds the model from a `LoadSpec`, chooses the layout by a trial, and runs batches. The caller has a kind
of reward model, but no weights; it gets the properties of the loaded model as `ModelInfo`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from gym_rm.engine.kinds.readouts import Readout
from gym_rm.engine.token_tree import Batch, Layout
from gym_rm.scores import FloatArray
from gym_rm.types import NOT_CHECKED, Fidelity

if TYPE_CHECKING:  # so that planning batches does not import torch
    from transformers import PreTrainedModel

    from gym_rm.engine.backbones.low_precision import Quantization
    from gym_rm.engine.loading.checkpoint import ModelFiles
    from gym_rm.engine.loading.fidelity import CheckedConversations

ModelSource: TypeAlias = "ModelFiles | PreTrainedModel"
Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Model to load and values to read; can be sent to another process unless it contains a loaded model.

    Attributes:
        model: a checkpoint to load, or a loaded model, for example one in training.
        readout: values to compute at the positions that are read.
        reference: the reference model, for kinds that compare two models; otherwise None.
        tree: whether prefixes may be merged; False for comparisons and measurements.
        quantization: `"int8"` or `"fp8"` for 8-bit matrix products in the backbone; None for full precision.
        prefix_cache_tokens: number of tokens whose keys and values are kept across calls; 0 for no prefix cache.
        tensor_parallel_size: number of ranks that share every layer: each has some of its heads and columns.
        fsdp_size: number of ranks that share the weights: each computes the whole layer, with gathered weights.
        check: conversations whose scores are compared with those of the stored weights; None to compare none.
    """

    model: ModelSource
    readout: Readout
    reference: ModelSource | None = None
    tree: bool = True
    quantization: Quantization | None = None
    prefix_cache_tokens: int = 0
    tensor_parallel_size: int = 1
    fsdp_size: int = 1
    check: CheckedConversations | None = None

    @property
    def num_ranks(self) -> int:
        """Number of processes that hold the model together."""
        return self.tensor_parallel_size * self.fsdp_size

    @property
    def sources(self) -> list[ModelSource]:
        """The model, and the reference model if there is one."""
        return [self.model] if self.reference is None else [self.model, self.reference]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model that its callers need.

    Attributes:
        layout: layout that batches must have.
        fused: whether the fused forward runs.
        kernels: whether the kernels of `gym_rm.engine.kernels` run.
        tried_length: number of tokens of the longest text that was compared with the plain forward at load.
        num_values: K, numbers per position that is read.
        dtype: precision of the backbone, such as `"bfloat16"`.
        device: device of the model.
        max_num_batched_tokens: automatic token budget, from the device's free memory.
        max_positions: maximum length of a sequence; None if the configuration has no limit.
        num_embeddings: number of token ids that have an embedding; None if the model has no embedding table.
        num_positions: number of positions in the model's tables; None if it computes them and has no hard limit.
        max_batchable_length: maximum length of sequences that share a batch; the values of longer sequences would
            change with the length of others in the batch. None for no limit.
        sampled_revision: commit of the weights on the hub, or a digest of parts of the files of a folder, which is
            equal in all processes that read the same; None if unknown.
        quantization: format of the 8-bit products; None for full precision.
        torch, transformers: versions that run the model.
        attention: attention implementation of transformers; the layout `"tree"` uses gym_rm's own instead.
        batch_invariance: how equal the values of a sequence were in different batches, see `Forward`.
        rows: numbers of rows of the matrix products, such as `"multiples of 16"` or `"chunks of 1024"`, see `GemmRows`.
        num_replicas: number of copies of the model that run batches at the same time.
        fidelity: what was found on the conversations of `LoadSpec.check`.
    """

    layout: Layout
    fused: bool
    num_values: int
    dtype: str
    device: str
    max_num_batched_tokens: int
    kernels: bool = False
    tried_length: int = 0
    max_positions: int | None = None
    num_embeddings: int | None = None
    num_positions: int | None = None
    max_batchable_length: int | None = None
    sampled_revision: str | None = None
    quantization: Quantization | None = None
    torch: str | None = None
    transformers: str | None = None
    attention: str | None = None
    batch_invariance: str | None = None
    rows: str | None = None
    num_replicas: int = 1
    fidelity: Fidelity = NOT_CHECKED

    @property
    def max_width(self) -> int | None:
        """Maximum width of padded batches; None for no limit."""
        return min(filter(None, (self.max_positions, self.num_positions, self.max_batchable_length)), default=None)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Values of one batch, or its error.

    Attributes:
        values: float32 `[R, K]`; None if the batch failed.
        error: reason of the failure, or None.
        out_of_memory: whether the batch ran out of memory, so that a smaller batch may succeed.
        reused_tokens: number of tokens whose keys and values came from the prefix cache.
        peak_memory_bytes: largest memory of tensors on the GPU so far; 0 on a CPU, where torch does not count it.
        replica: index of the replica that ran the batch.
        saved: file with the batch, if it failed or has values that are not finite and was saved; see `debugging`.
    """

    values: FloatArray | None = None
    error: str | None = None
    out_of_memory: bool = False
    reused_tokens: int = 0
    peak_memory_bytes: int = 0
    replica: int = 0
    saved: str | None = None


@runtime_checkable
class Executor(Protocol):
    """Owns a model and runs batches."""

    def load(self, spec: LoadSpec) -> ModelInfo:
        """Build the model and choose its layout. An executor loads one model.

        Raises:
            ConfigError: the model cannot be loaded, an option does not fit it, or the executor already has a model.
        """

    def run(self, batches: Iterable[Batch]) -> list[BatchResult]:
        """Run batches, which may be made one by one, and return a result for each; a failed one affects no other."""

    def update_weights(self, weights: Weights) -> None:
        """Replace the weights with others of the same shapes: a folder or hub id, or tensors by name.

        Raises:
            ConfigError: the weights do not fit the model; the old weights are kept.
        """

    def sleep(self) -> None:
        """Free the device's memory; the next `run` calls `wake`."""

    def wake(self) -> None:
        """Move the weights back to the device."""

    def clear_cache(self) -> None:
        """Clear everything computed from the weights; needed if a caller changed those of a loaded model."""

    def close(self) -> None:
        """Release the model and everything that was started for it; closing twice is allowed."""
