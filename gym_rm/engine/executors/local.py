"""Executor that runs the forward in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import BatchInvariant, rows_to_try
from gym_rm.engine.backbones.devices import device_of, pinned_like
from gym_rm.engine.backbones.evaluation import Evaluation, locks_of
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.backbones.llama import MODEL_TYPES
from gym_rm.engine.backbones.low_precision import assign_weights, quantization_of, quantize_layers
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.backbones.reward_model import RewardModel, make_reward_model
from gym_rm.engine.backbones.sharded import difference_to_whole, ranks_of
from gym_rm.engine.backbones.tree_attention import PAGE_SIZE
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo, ModelSource, Weights
from gym_rm.engine.executors.model_info import dtype_of, model_info
from gym_rm.engine.loading.checkpoint import ModelFiles, load_model, open_weights, require_same_model
from gym_rm.engine.loading.sharding import Sharding
from gym_rm.engine.loading.trial import (
    PLAIN,
    Candidate,
    Forward,
    agreeing_forwards,
    check_invariance,
    tolerance_of,
    trial_sequences,
)
from gym_rm.engine.token_tree import Batch, BatchPlan
from gym_rm.errors import ConfigError, warn_once
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
        self._model: RewardModel | None = None
        self._spec: LoadSpec | None = None
        self._prefix_cache: PrefixCache | None = None
        self._asleep: list[tuple[torch.Tensor, torch.device]] | None = None
        self._pinned: list[torch.Tensor] = []
        self._threads = 0
        self._parts: dict[str, Any] = {}
        self._rows: BatchInvariant | None = None
        self._sharding: Sharding | None = None

    def load(self, spec: LoadSpec) -> ModelInfo:
        """See `Executor.load`."""
        if self._model is not None:
            raise ConfigError("this executor already has a model; make another executor, or close() this one first.")
        try:
            return self._load(spec)
        except BaseException:
            self.close()
            raise

    def _load(self, spec: LoadSpec) -> ModelInfo:
        _require_threads()
        self._spec = spec
        self._prefix_cache = PrefixCache(spec.prefix_cache_tokens) if spec.prefix_cache_tokens else None
        model, *others = (self._prepare(source) for source in spec.sources)
        reference = others[0] if others else None
        first, second = locks_of([model, *others])
        evaluation = Evaluation([model, *others], inference=False)
        with _out_of_memory_is_a_config_error(model), first, second, evaluation, evaluation:
            evaluation.begin()
            self._model = make_reward_model(spec.readout, model, reference, self._prefix_cache)
        info = model_info(self._model, spec)
        candidate = Candidate(
            name=type(model).__name__,
            config=model.config,
            dtype=info.dtype,
            can_take_trees=bool(self._model.decoders) and spec.tree,
            can_fuse=bool(self._model.decoders) and all(decoder.fuse for decoder in self._model.decoders),
            num_values=info.num_values,
            max_width=info.max_width,
            modules=self._model.models,
            page_size=max((decoder.page_size for decoder in self._model.decoders), default=PAGE_SIZE),
        )
        budget = info.max_num_batched_tokens
        with _out_of_memory_is_a_config_error(model), _unchanged(self._model.models):
            forwards = agreeing_forwards(candidate, self._try, self._ladder(), max_num_batched_tokens=budget)
            forward = next(forwards)
            agreed = [] if spec.quantization is None else [forward, *forwards]  # before products change
        if spec.quantization is not None:
            for each in self._model.models:
                quantize_layers(each, spec.quantization, device_of(each))
            candidate, ladder = replace(candidate, dtype=spec.quantization), [*self._ladder()]
        with _out_of_memory_is_a_config_error(model):
            for each in agreed:
                forward = check_invariance(candidate, each, self._try, ladder, max_num_batched_tokens=budget)
                if forward != PLAIN:
                    break
            if self._prefix_cache is not None:
                forward = check_invariance(
                    candidate, forward, self._run_trial, [forward.rows], max_num_batched_tokens=budget
                )
        self._set_forward(forward)
        self._require_prefix_cache(forward)
        if self._prefix_cache is not None or self._borrowed:
            self.clear_cache()
        self._threads = torch.get_num_threads()
        self._parts = _parts_of(self._model.models)
        if forward.layout == "one_by_one":
            warn_once(
                f"{candidate.name} does not return the plain model's values in batches, so it runs one conversation "
                "at a time: scores are correct, but scoring is slow."
            )
        return replace(
            info,
            layout=forward.layout,
            tried_length=candidate.length,
            fused=forward.fuse,
            quantization=quantization_of(model),
            batch_invariance=forward.batch_invariance,
            rows=str(forward.rows) if forward.invariant else None,
        )

    def run(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """See `Executor.run`."""
        _require_threads()
        if self._asleep is not None:
            self.wake()
        if torch.get_num_threads() > self._threads:
            warn_once(
                f"torch has {torch.get_num_threads()} threads, and had {self._threads} when the model was loaded; "
                "Provenance.batch_invariance holds for those. Call torch.set_num_threads before loading."
            )
        model = self._loaded()
        _require_same_parts(self._parts, _parts_of(model.models))
        if self._borrowed:
            self._forget_packed_weights()  # the caller may have changed them in a way that nothing notices
        results: list[BatchResult] = []
        values: list[torch.Tensor] = []
        first, second = locks_of(model.models)
        evaluation = Evaluation(model.models, rows=self._rows)
        with first, second, evaluation, evaluation:
            evaluation.begin()
            for batch in batches:
                reused = self._reused_tokens()
                try:
                    values.append(model.values(batch))
                    results.append(BatchResult(reused_tokens=self._reused_tokens() - reused))
                except Exception as error:  # returned as the result of this batch
                    memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY in str(error)
                    results.append(BatchResult(error=f"{type(error).__name__}: {error}", out_of_memory=memory))
                if results[-1].error is not None:
                    _free_memory()  # after the except block, when the failed forward's tensors are released
            none = np.empty((0, model.num_values), dtype=np.float32)
            stacked: FloatArray = torch.cat(values).cpu().numpy() if values else none
        if self._borrowed:
            self._forget_packed_weights()  # torch refuses to swap parameters that something refers to
        start = 0
        for index, (batch, result) in enumerate(zip(batches, results, strict=True)):
            if result.error is None:
                of_batch = stacked[start : start + batch.num_reads]
                results[index] = BatchResult(of_batch, reused_tokens=result.reused_tokens)
                start += batch.num_reads
        return results

    def update_weights(self, weights: Weights) -> None:
        """See `Executor.update_weights`. The weights of a folder are read and copied to the device one by one."""
        model, spec = self._loaded(), self._spec
        assert spec is not None
        if self._asleep is not None:
            self.wake()
        if isinstance(weights, str | os.PathLike) and isinstance(spec.model, ModelFiles):
            other = spec.model.at(weights)
            require_same_model(spec.model.config, other.config, other.source)
            weights = open_weights(other, self._sharding)
        if not isinstance(weights, Mapping):
            folder = " or a folder" if isinstance(spec.model, ModelFiles) else ""
            raise ConfigError(f"weights must be tensors by name (a state dict){folder}; got {weights!r:.200}.")
        first, second = locks_of(model.models)
        with first, second:
            target = model.models[0] if isinstance(spec.model, ModelFiles) else spec.model
            assign_weights(target, weights)
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
        first, second = locks_of(self._loaded().models)
        with first, second:
            for tensor, device in self._asleep or ():
                tensor.data = tensor.data.to(device, non_blocking=True)
            self._asleep = None

    def clear_cache(self) -> None:
        """Clear the prefix cache and the packed weights."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        self._forget_packed_weights()

    def _forget_packed_weights(self) -> None:
        if self._rows is not None and self._rows.packed is not None:
            self._rows.packed.clear()

    def close(self) -> None:
        """Release the model."""
        if self._asleep is not None and self._spec is not None and not isinstance(self._spec.model, ModelFiles):
            self.wake()  # move a model that was passed in back to its device
        self._model = self._spec = self._prefix_cache = self._rows = None
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

    @property
    def _borrowed(self) -> bool:
        return self._spec is not None and not all(isinstance(source, ModelFiles) for source in self._spec.sources)

    def _loaded(self) -> RewardModel:
        if self._model is None:
            raise ConfigError(
                "the executor has no model, because it is closed or was not loaded; make a new scorer, or call load()."
            )
        return self._model

    def _prepare(self, source: ModelSource) -> PreTrainedModel:
        """Return the model to run."""
        assert self._spec is not None
        if isinstance(source, ModelFiles):
            model = load_model(source, sharding=self._sharding)
            if self._sharding is not None and self._sharding.tensor_parallel_size > 1:
                _require_same_values(model, self._sharding.tensor_parallel_size)
            return model
        if self._spec.quantization is not None:
            raise ConfigError(
                f"quantization={self._spec.quantization!r} replaces layers, so it needs a model of its own: "
                "save yours with save_pretrained, and pass its folder to gym_rm.load_scorer."
            )
        return source

    def _ladder(self) -> Iterable[GemmRows]:
        """Return the rows to try; all ranks must try the same."""
        models = self._loaded().models
        ladder: Iterable[GemmRows] = rows_to_try([each.base_model for each in models])
        if (ranks := ranks_of(models[0])) is not None:
            every, ladder = LADDER.get(device_of(models[0]).type, LADDER["cuda"]), [*ladder]
            ladder = [rows for rows in every if ranks.smallest(rows in ladder)]
        return ladder

    def _try(self, plan: BatchPlan, forward: Forward) -> FloatArray:
        """Return the hidden states and values of a plan, without what plans before it left in the prefix cache."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        return self._run_trial(plan, forward)

    def _run_trial(self, plan: BatchPlan, forward: Forward) -> FloatArray:
        self._set_forward(forward)
        models = self._loaded().models
        parts = []
        first, second = locks_of(models)
        evaluation = Evaluation(models, rows=self._rows)
        with first, second, evaluation, evaluation:
            evaluation.begin()
            for batch in plan.batches:
                try:
                    parts.append(self._loaded().all_values(batch).float())
                except torch.OutOfMemoryError as error:
                    # Too little memory does not mean that the model does not support the layout.
                    raise MemoryError(f"out of memory with {batch.input_ids.size} tokens.") from error
            values: FloatArray = torch.cat(parts).cpu().numpy()
        return values

    def _reused_tokens(self) -> int:
        return 0 if self._prefix_cache is None else self._prefix_cache.reused_tokens

    def _set_forward(self, forward: Forward) -> None:
        if not forward.invariant:
            self._rows = None
        elif self._rows is None or self._rows.rows != forward.rows:
            self._rows = BatchInvariant(forward.rows)
        for decoder in self._loaded().decoders:
            decoder.fuse = forward.fuse

    def _require_prefix_cache(self, forward: Forward) -> None:
        if self._prefix_cache is None or (forward.layout == "tree" and forward.fuse and len(self.models) == 1):
            return
        models = " and ".join(type(model).__name__ for model in self.models)
        models += "" if forward.fuse else " without the fused forward (with adapters, hooks or another activation)"
        raise ConfigError(
            f"prefix_cache_tokens needs one decoder of a type in {sorted(MODEL_TYPES)} with layout 'tree'; got "
            f"{models} with layout {forward.layout!r}."
        )


def _require_threads() -> None:
    """In a forked process, use one thread instead of the threads that torch started in the parent process."""
    if os.getpid() != _PROCESS and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        warn_once(
            "this process was forked after torch had started threads, so its reward model runs with one thread; for "
            "more, start processes with context='spawn' or 'forkserver' (AsyncVectorEnv), or use gym.make_vec without "
            "a vectorization_mode, which scores all environments in one call."
        )


def _parts_of(models: Sequence[PreTrainedModel]) -> dict[str, Any]:
    """Return what the trial at load holds for: the class of each module, and the kinds of its parameters."""
    parts = ((f"{type(model).__name__}.{name}", part) for model in models for name, part in model.named_modules())
    return {
        name: [type(part), *((type(p), p.dtype, p.shape, p.device) for p in part._parameters.values() if p is not None)]
        for name, part in parts
    }


def _require_same_parts(before: dict[str, Any], now: dict[str, Any]) -> None:
    if changed := [name for name in before | now if before.get(name) != now.get(name)]:
        raise ConfigError(
            f"{len(changed)} modules of the model have changed since the scorer was made, such as {changed[0]!r}: from "
            f"{before.get(changed[0])} to {now.get(changed[0])}. What was tried then (precision, equal bits) does not "
            "hold for them, so make a new scorer; only the values of weights may change."
        )


@contextlib.contextmanager
def _unchanged(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Undo what a forward changes in the modules of models, and refuse it: values would depend on earlier texts."""
    parts = [part for whole in models for part in whole.modules()]
    before = [(part, {k: v for k, v in vars(part).items() if isinstance(v, str)} | part._modules) for part in parts]
    changed: set[str] = set()
    try:
        yield
    finally:
        for part, state in before:
            for name, value in state.items():
                if getattr(part, name, None) != value:
                    changed.add(f"{type(part).__name__}.{name}")
                    setattr(part, name, value)
    if changed:
        raise ConfigError(
            f"the forward of {type(models[0]).__name__} changes {sorted(changed)[:3]}, so its values depend on the "
            "texts before; for a BigBird, load it with attention_type='original_full' in its config.json."
        )


@contextlib.contextmanager
def _out_of_memory_is_a_config_error(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{type(model).__name__} fits on {device_of(model)}, but its forward does not: {error} Free memory there, "
            "or pass a smaller dtype, another device, or device_map='auto'."
        ) from error


def _free_memory() -> None:
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device):  # on another device, the call would only take memory
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def _require_same_values(model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError if a tensor-parallel model computes something else than the whole model."""
    (*_, ids) = trial_sequences(model.config)
    input_ids = torch.from_numpy(ids.input_ids.astype(np.int64))[None].to(device_of(model))
    difference = difference_to_whole(model, input_ids)
    if not difference <= tolerance_of(str(dtype_of(model)).removeprefix("torch.")):
        raise ConfigError(
            f"{type(model).__name__} with tensor_parallel_size={size} computes other values than the whole model "
            f"(relative difference {difference:.1e}): its tensor-parallel plan in this version of transformers is "
            f"wrong. Pass fsdp_size={size}."
        )
