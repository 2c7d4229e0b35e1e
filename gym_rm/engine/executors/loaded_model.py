"""Load a model and verify it: what an executor runs, as one record that does not change."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import BatchInvariant, rows_to_try
from gym_rm.engine.backbones.devices import device_of
from gym_rm.engine.backbones.evaluation import Evaluation, locks_of
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.backbones.llama import MODEL_TYPES
from gym_rm.engine.backbones.low_precision import quantization_of, quantize_layers
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.backbones.reward_model import RewardModel, make_reward_model
from gym_rm.engine.backbones.sharded import difference_to_whole, ranks_of
from gym_rm.engine.backbones.tree_attention import PAGE_SIZE
from gym_rm.engine.batch_planning import plan_layout
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo, ModelSource
from gym_rm.engine.executors.model_info import dtype_of, model_info
from gym_rm.engine.kernels import has_kernels
from gym_rm.engine.loading.checkpoint import ModelFiles, load_model
from gym_rm.engine.loading.fidelity import CheckedConversations, changes_of, load_as_stored, require_fidelity
from gym_rm.engine.loading.sharding import Sharding
from gym_rm.engine.loading.trial import FAILURES, PLAIN, Candidate, Forward, tolerance_of, trial_sequences
from gym_rm.engine.loading.verify import unchanged, verify
from gym_rm.engine.token_tree import BatchPlan
from gym_rm.errors import ConfigError, brief, logger, warn_once
from gym_rm.scores import FloatArray
from gym_rm.types import NOT_CHECKED, Fidelity

INT8_OF_DECODERS = (
    "quantization='int8' is refused for decoders: the scores of SmolLM2-135M have a mean error of 0.09 (HH) and 0.16 "
    "(GSM8K) of their spread, for 1.3 times the speed of float32. dtype='bfloat16' has a smaller one, and is faster on "
    "CPUs that compute it. check=False loads it nevertheless."
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the forward that was verified.

    Attributes:
        spec: what was loaded.
        reward_model: the loaded models, and the values that are read from them.
        info: what callers need to know.
        prefix_cache: keys and values of earlier calls, if they are kept.
        rows: the mode in which the forward runs; None for the plain forward.
        parts: name, class and parameters of each module, for which the verification holds.
        threads: number of torch's threads, for which it holds.
    """

    spec: LoadSpec
    reward_model: RewardModel
    info: ModelInfo
    prefix_cache: PrefixCache | None
    rows: BatchInvariant | None
    parts: list[Any]
    threads: int

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The Hugging Face models."""
        return self.reward_model.models

    @property
    def borrowed(self) -> bool:
        """Whether a model was passed in, so that others may change its weights."""
        return not all(isinstance(source, ModelFiles) for source in self.spec.sources)

    @property
    def reused_tokens(self) -> int:
        """Number of tokens that the prefix cache has given so far."""
        return 0 if self.prefix_cache is None else self.prefix_cache.reused_tokens

    def require_same_parts(self) -> None:
        """Raise ConfigError if modules have changed, and warn of more threads: what was verified does not hold."""
        if torch.get_num_threads() > self.threads:
            warn_once(
                f"torch has {torch.get_num_threads()} threads, and had {self.threads} when the model was loaded; "
                "Provenance.batch_invariance holds for those. Call torch.set_num_threads before loading."
            )
        if (now := parts_of(self.models)) != self.parts:
            at = next(k for k in range(len(now) + 2) if now[:k] != self.parts[:k])
            name = [each for each in now[:at] if isinstance(each, str)][-1]
            raise ConfigError(
                f"modules of the model have changed since the scorer was made, such as {name!r}: from "
                f"{self.parts[at - 1 : at]} to {now[at - 1 : at]}. What was tried then (precision, equal bits) does "
                "not hold for them, so make a new scorer; only the values of weights may change."
            )

    def clear_cache(self) -> None:
        """Clear the prefix cache and the packed weights."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
        self.forget_packed_weights()

    def forget_packed_weights(self) -> None:
        """Clear copies of weights."""
        if self.rows is not None and self.rows.packed is not None:
            self.rows.packed.clear()


def load_and_verify(spec: LoadSpec, sharding: Sharding | None) -> LoadedModel:
    """Load a model and choose its forward; one table in the log has what was compared, and the seconds.

    Raises:
        ConfigError: the model cannot be loaded, an option does not fit it, or its forward fails.
    """
    started = time.perf_counter()
    prefix_cache = PrefixCache(spec.prefix_cache_tokens) if spec.prefix_cache_tokens else None
    table: list[tuple[str, str]] = []
    changes = changes_of(*spec.sources)
    as_stored = _plain_scores(spec, sharding) if changes else None  # before, so that one model is in memory at a time
    models = [_prepare(source, spec, sharding, table) for source in spec.sources]
    loaded, model = time.perf_counter(), models[0]
    reward_model = _reward_model(spec, models, prefix_cache)
    if spec.quantization == "int8" and reward_model.decoders and spec.check is not None:
        raise ConfigError(INT8_OF_DECODERS)
    info = model_info(reward_model, spec)
    trial = _Trial(reward_model, prefix_cache)
    candidate = Candidate(
        name=type(model).__name__,
        config=model.config,
        dtype=info.dtype,
        can_take_trees=bool(reward_model.decoders) and spec.tree,
        can_fuse=bool(reward_model.decoders) and all(decoder.fuse for decoder in reward_model.decoders),
        has_kernels=has_kernels(device_of(model), dtype_of(model)),
        num_values=info.num_values,
        max_width=info.max_width,
        modules=reward_model.models,
        page_size=max((decoder.page_size for decoder in reward_model.decoders), default=PAGE_SIZE),
        table=table,
    )

    def quantize() -> str:
        assert spec.quantization is not None
        for each in reward_model.models:
            quantize_layers(each, spec.quantization, device_of(each))
        return spec.quantization

    with _out_of_memory_is_a_config_error(model):
        expected = _plain_scores(spec, sharding, reward_model) if as_stored is None else as_stored
        forward = verify(
            candidate,
            trial.run_without_cache,
            trial.ladder,
            max_num_batched_tokens=info.max_num_batched_tokens,
            quantize=None if spec.quantization is None else quantize,
            run_cached=None if prefix_cache is None else trial.run,
        )
        fidelity = expected if isinstance(expected, Fidelity) else trial.fidelity(spec, forward, info, expected)
    trial.set_forward(forward)
    _require_prefix_cache(prefix_cache, forward, reward_model.models)
    if forward.layout == "one_by_one":
        warn_once(
            f"{candidate.name} does not return the plain model's values in batches, so it runs one conversation "
            "at a time: scores are correct, but scoring is slow."
        )
    candidate.note("chosen", str(forward))
    candidate.note("fidelity", str(fidelity))
    candidate.note("weights read in", f"{loaded - started:.1f} s")
    candidate.note("verified in", f"{time.perf_counter() - loaded:.1f} s")
    width = max(len(compared) for compared, _ in table)
    lines = "".join(f"\n  {compared:<{width}}  {found}" for compared, found in table)
    logger.info("%s in %s on %s:%s", candidate.name, info.dtype, info.device, lines)
    if spec.quantization is not None:
        changes = {f"quantization={spec.quantization!r}": "leave quantization out"} | changes
    require_fidelity(fidelity, candidate.name, changes)
    info = replace(
        info,
        layout=forward.layout,
        tried_length=candidate.length,
        fused=forward.fuse,
        kernels=forward.kernels,
        quantization=quantization_of(model),
        batch_invariance=forward.batch_invariance,
        rows=str(forward.rows) if forward.invariant else None,
        fidelity=fidelity,
    )
    made = LoadedModel(
        spec, reward_model, info, prefix_cache, trial.rows, parts_of(reward_model.models), torch.get_num_threads()
    )
    if prefix_cache is not None or made.borrowed:
        made.clear_cache()
    return made


def _reward_model(
    spec: LoadSpec, models: Sequence[PreTrainedModel], prefix_cache: PrefixCache | None = None
) -> RewardModel:
    model, *others = models
    first, second = locks_of(models)
    evaluation = Evaluation(models, inference=False)
    with _out_of_memory_is_a_config_error(model), first, second, evaluation, evaluation:
        evaluation.begin()
        return make_reward_model(spec.readout, model, others[0] if others else None, prefix_cache)


def _plain_scores(
    spec: LoadSpec, sharding: Sharding | None, reward_model: RewardModel | None = None
) -> FloatArray | Fidelity:
    """Return what the plain forward scores, or why it is not known; None loads the weights as they are stored."""
    if spec.check is None:
        return NOT_CHECKED
    if reward_model is None and sharding is not None:
        return Fidelity(not_measured="the ranks have no other weights")
    try:
        if reward_model is None:
            reward_model = _reward_model(spec, [load_as_stored(source) for source in spec.sources])
        with unchanged(reward_model.models):
            return _Trial(reward_model).scores(spec.check, PLAIN, model_info(reward_model, spec))
    except (*FAILURES, MemoryError) as error:
        return Fidelity(not_measured=f"the plain forward of the stored weights fails: {brief(error)}")


class _Trial:
    """Runs plans through a model while its forward is chosen."""

    def __init__(self, reward_model: RewardModel, prefix_cache: PrefixCache | None = None) -> None:
        self._reward_model = reward_model
        self._prefix_cache = prefix_cache
        self.rows: BatchInvariant | None = None

    def set_forward(self, forward: Forward) -> None:
        """Let the model run in this way."""
        if not forward.invariant:
            self.rows = None
        elif self.rows is None or self.rows.rows != forward.rows:
            self.rows = BatchInvariant(forward.rows)
        for decoder in self._reward_model.decoders:
            decoder.use(fuse=forward.fuse, kernels=forward.kernels)

    def ladder(self) -> Iterable[GemmRows]:
        """Return the rows to try; all ranks must try the same."""
        models = self._reward_model.models
        ladder: Iterable[GemmRows] = rows_to_try([each.base_model for each in models])
        if (ranks := ranks_of(models[0])) is not None:
            every, ladder = LADDER.get(device_of(models[0]).type, LADDER["cuda"]), [*ladder]
            ladder = [rows for rows in every if ranks.smallest(rows in ladder)]
        return ladder

    def run_without_cache(self, plan: BatchPlan, forward: Forward) -> FloatArray:
        """Return the values of a plan, of which nothing stays in the prefix cache: its positions may be wrong ones."""
        values = self.run(plan, forward)
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        return values

    def scores(self, check: CheckedConversations, forward: Forward, info: ModelInfo) -> FloatArray:
        """Return the scores `[N]` of conversations; NaN where values are not finite, or the model has no position."""
        ids, width = info.num_embeddings or math.inf, info.max_width or math.inf
        fits = np.array([len(s.input_ids) <= width and s.input_ids.max() < ids for s in check.sequences], np.bool_)
        sequences = [*itertools.compress(check.sequences, fits)]
        scores = np.full(len(fits), np.nan, np.float32)
        if sequences:
            budget = max(info.max_num_batched_tokens, *(len(each.input_ids) for each in sequences))
            plan = plan_layout(forward.layout, sequences, max_num_batched_tokens=budget, max_width=info.max_width)
            values = self.run_without_cache(plan, forward)[plan.value_index, -info.num_values :]
            starts = np.cumsum([0, *(len(each.read_positions) for each in sequences)])
            finite = np.logical_and.reduceat(np.isfinite(values).all(axis=1), starts[:-1])
            with np.errstate(all="ignore"):
                scores[fits] = np.where(finite, check.kind.reduce(values, starts).rewards, np.nan)
        return scores

    def fidelity(self, spec: LoadSpec, forward: Forward, info: ModelInfo, expected: FloatArray) -> Fidelity:
        """Return how far the scores of a forward are from those expected."""
        assert spec.check is not None
        dtype = spec.model.reference_dtype if isinstance(spec.model, ModelFiles) else info.dtype
        scores = self.scores(spec.check, forward, info)
        return spec.check.compare(scores, expected, str(dtype).removeprefix("torch."))

    def run(self, plan: BatchPlan, forward: Forward) -> FloatArray:
        """Return the hidden states and values of a plan."""
        self.set_forward(forward)
        models = self._reward_model.models
        parts = []
        first, second = locks_of(models)
        evaluation = Evaluation(models, rows=self.rows)
        with first, second, evaluation, evaluation:
            evaluation.begin()
            for batch in plan.batches:
                try:
                    parts.append(self._reward_model.all_values(batch).float())
                except torch.OutOfMemoryError as error:
                    # Too little memory does not mean that the model does not support the layout.
                    raise MemoryError(f"out of memory with {batch.input_ids.size} tokens.") from error
            values: FloatArray = torch.cat(parts).cpu().numpy()
        return values


def _prepare(
    source: ModelSource, spec: LoadSpec, sharding: Sharding | None, table: list[tuple[str, str]]
) -> PreTrainedModel:
    """Return the model to run; one that is divided is compared with the whole."""
    if isinstance(source, ModelFiles):
        model = load_model(source, sharding=sharding)
        if sharding is not None and sharding.tensor_parallel_size > 1:
            difference = _difference_to_whole(model, sharding.tensor_parallel_size)
            table.append((f"tensor_parallel_size={sharding.tensor_parallel_size}", f"{difference:.1e} from the whole"))
        return model
    if spec.quantization is not None:
        raise ConfigError(
            f"quantization={spec.quantization!r} replaces layers, so it needs a model of its own: "
            "save yours with save_pretrained, and pass its folder to gym_rm.load_scorer."
        )
    return source


def _difference_to_whole(model: PreTrainedModel, size: int) -> float:
    """Return how far the hidden states of a divided model are from the whole one's; refuse more than rounding."""
    (*_, ids) = trial_sequences(model.config)
    input_ids = torch.from_numpy(ids.input_ids.astype(np.int64))[None].to(device_of(model))
    difference = difference_to_whole(model, input_ids)
    if not difference <= tolerance_of(str(dtype_of(model)).removeprefix("torch.")):
        raise ConfigError(
            f"{type(model).__name__} with tensor_parallel_size={size} computes other values than the whole model "
            f"(relative difference {difference:.1e}): its tensor-parallel plan in this version of transformers is "
            f"wrong. Pass fsdp_size={size}."
        )
    return difference


def _require_prefix_cache(
    prefix_cache: PrefixCache | None, forward: Forward, models: Sequence[PreTrainedModel]
) -> None:
    if prefix_cache is None or (forward.layout == "tree" and forward.fuse and len(models) == 1):
        return
    names = " and ".join(type(model).__name__ for model in models)
    names += "" if forward.fuse else " without the fused forward (with adapters, hooks or another activation)"
    raise ConfigError(
        f"prefix_cache_tokens needs one decoder of a type in {sorted(MODEL_TYPES)} with layout 'tree'; got "
        f"{names} with layout {forward.layout!r}."
    )


def parts_of(models: Sequence[PreTrainedModel]) -> list[Any]:
    """Return what the verification holds for: of each module the name, the class, and the kinds of its parameters."""
    found: list[Any] = []
    names, parts = [type(model).__name__ for model in models], list[nn.Module](models)
    for name, part in zip(names, parts, strict=True):  # both grow; `named_modules` takes three times as long
        found += (name, type(part))
        for child, each in part._modules.items():
            if each is not None:
                names.append(f"{name}.{child}")
                parts.append(each)
        for p in part._parameters.values():
            if p is not None:
                found += (type(p), p.dtype, p.shape, p.device)
    return found


@contextlib.contextmanager
def _out_of_memory_is_a_config_error(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{type(model).__name__} fits on {device_of(model)}, but its forward does not: {error} Free memory there, "
            "or pass a smaller dtype, another device, or device_map='auto'."
        ) from error
