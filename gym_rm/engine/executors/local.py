"""Executor that runs the forward in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gym_rm.engine.backbones.devices import pinned_like
from gym_rm.engine.backbones.evaluation import Evaluation, locks_of
from gym_rm.engine.backbones.low_precision import assign_weights
from gym_rm.engine.debugging import replay_command, stage
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, Weights
from gym_rm.engine.executors.failed_batches import save_failed
from gym_rm.engine.executors.loaded_model import LoadedModel, load_and_verify
from gym_rm.engine.loading.checkpoint import ModelFiles, open_weights, require_same_model
from gym_rm.engine.loading.sharding import Sharding
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, brief, warn_once
from gym_rm.scores import FloatArray

NO_MEMORY = "can't allocate memory"  # in a RuntimeError of torch on a CPU
# Threads of torch do not exist in a forked process, which would wait for them forever.
_PROCESS = os.getpid()


class LocalExecutor:
    """Runs batches on the model's device; one copy to the host, after the last batch, returns all values.

    Example:
        >>> from gym_rm.engine.kinds.readouts import ModuleHead
        >>> executor = LocalExecutor()
        >>> info = executor.load(LoadSpec(model, ModuleHead("score")))  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._model: LoadedModel | None = None
        self._asleep: list[tuple[torch.Tensor, torch.device]] | None = None
        self._pinned: list[torch.Tensor] = []
        self._sharding: Sharding | None = None

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`."""
        if self._model is not None:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        _require_threads()
        try:
            self._model = load_and_verify(spec, self._sharding)
        except BaseException:
            self.close()
            raise
        return self._model.info

    def run(self, batches: Iterable[Batch]) -> list[BatchResult]:
        """See `Executor.run`."""
        _require_threads()
        if self._asleep is not None:
            self.wake()
        model = self._loaded()
        model.require_same_parts()
        if model.borrowed:
            model.forget_packed_weights()  # the caller may have changed them in a way that nothing notices
        ran: list[Batch] = []
        results: list[BatchResult] = []
        values: list[torch.Tensor] = []
        first, second = locks_of(model.models)
        evaluation = Evaluation(model.models, rows=model.rows)
        with first, second, evaluation, evaluation:
            evaluation.begin()
            for batch in batches:  # on a GPU, the next one is made while it computes
                ran.append(batch)
                reused = model.reused_tokens
                try:
                    with stage("forward"):
                        values.append(model.reward_model.values(batch))
                except Exception as error:  # the result of this batch
                    results.append(_failed(model, batch, error))
                else:
                    reused = model.reused_tokens - reused
                    results.append(BatchResult(reused_tokens=reused, peak_memory_bytes=_peak(model)))
                if results[-1].error is not None:
                    _free_memory()  # outside of the except block, when the failed forward's tensors are released
            none = np.empty((0, model.info.num_values), dtype=np.float32)
            with stage("copy back"):
                stacked: FloatArray = torch.cat(values).cpu().numpy() if values else none
        if model.borrowed:
            model.forget_packed_weights()  # torch refuses to swap parameters that something refers to
        start = 0
        for index, (batch, result) in enumerate(zip(ran, results, strict=True)):
            if result.error is None:
                of_batch = stacked[start : start + batch.num_reads]
                finite = np.isfinite(of_batch).all()
                saved = None if finite else save_failed(batch, "values that are not finite", model)
                results[index] = replace(result, values=of_batch, saved=saved)
                start += batch.num_reads
        return results

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. The weights of a folder are read and copied to the device one by one."""
        model = self._loaded()
        source = model.spec.model
        if self._asleep is not None:
            self.wake()
        if isinstance(weights, str | os.PathLike) and isinstance(source, ModelFiles):
            other = source.at(weights)
            require_same_model(source.config, other.config, other.source)
            weights = open_weights(other, self._sharding)
        if not isinstance(weights, Mapping):
            folder = " or a folder" if isinstance(source, ModelFiles) else ""
            raise ConfigError(f"weights must be tensors by name (a state dict){folder}; got {weights!r:.200}.")
        first, second = locks_of(model.models)
        with first, second:
            assign_weights(model.models[0] if isinstance(source, ModelFiles) else source, weights)
        self.clear_cache()

    def sleep(self) -> None:
        """Move the weights to host memory, which is allocated once and kept."""
        model = self._loaded()
        self.clear_cache()
        first, second = locks_of(model.models)
        with first, second:
            if self._asleep is not None:
                return
            tensors = [t for each in model.models for t in (*each.parameters(), *each.buffers()) if t.is_cuda]
            if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self._pinned]:
                self._pinned = pinned_like(tensors)
            self._asleep = [(tensor, tensor.device) for tensor in tensors]
            for tensor, host in zip(tensors, self._pinned, strict=True):
                host.copy_(tensor.data)  # copied at every call, because training changes the weights
                tensor.data = host
        _free_memory()

    def wake(self) -> None:
        """Move the weights back to their devices."""
        if self._asleep is None:
            return
        first, second = locks_of(self.models)
        with first, second:
            for tensor, device in self._asleep or ():
                tensor.data = tensor.data.to(device, non_blocking=True)
            self._asleep = None

    def clear_cache(self) -> None:
        """Clear the prefix cache and the packed weights."""
        if self._model is not None:
            self._model.clear_cache()

    def close(self) -> None:
        """Release the model."""
        if self._asleep is not None and self._model is not None and self._model.borrowed:
            self.wake()  # move a model that was passed in back to its device
        self._model = None
        self._asleep, self._pinned = None, []
        _free_memory()

    def __getstate__(self) -> dict[str, Any]:
        """Wake the model, clear the caches and return the state without pinned memory."""
        if self._asleep is not None:
            self.wake()
        self.clear_cache()
        return {**self.__dict__, "_pinned": []}

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The loaded Hugging Face models."""
        return self._loaded().models

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        return self._model


def _failed(model: LoadedModel, batch: Batch, error: Exception) -> BatchResult:
    """Return the result of a batch whose forward raised, after saving it unless memory was lacking."""
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY in str(error)
    saved = None if memory else save_failed(batch, brief(error), model)
    where = "" if saved is None else f"; the batch is saved, see {replay_command(saved)}"
    return BatchResult(error=f"{brief(error)}{where}", out_of_memory=memory, saved=saved)


def _peak(model: LoadedModel) -> int:
    return torch.cuda.max_memory_allocated() if model.models[0].device.type == "cuda" else 0


def _require_threads() -> None:
    """In a forked process, use one thread instead of the threads that torch started in the parent process."""
    if os.getpid() != _PROCESS and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warn_once(
            "this process was forked after torch had started threads, so its reward model runs with one thread; for "
            "more, start processes with context='spawn' or 'forkserver' (AsyncVectorEnv), or use gym.make_vec without "
            "a vectorization_mode, which scores all environments in one call."
        )


def _free_memory() -> None:
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):  # on another device, the call would only take memory
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
