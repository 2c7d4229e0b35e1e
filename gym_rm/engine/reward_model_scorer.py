"""The reward-model scorer: render, plan, run, scatter.

A `score` call renders its conversations to token sequences, runs them through the scheduler (prefix trees under a token
budget) and the executor (which owns the model), and turns the values that were read into rewards. Here the steps are
put in order, results are remembered, and failures are kept to their rows.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from transformers import PreTrainedModel

from gym_rm.config import Config, Flag, NonNegativeInt, divide_settings
from gym_rm.engine.backbones.prefix_cache import CACHE_BLOCK_SIZE
from gym_rm.engine.executors.executor import Executor, LoadSpec, ModelSource, Weights
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds import KINDS, Kind, ModelFacts, detect_kind
from gym_rm.engine.kinds.implicit import ImplicitKind
from gym_rm.engine.loading.checkpoint import Checkpoint, LoadOptions, open_checkpoint
from gym_rm.engine.loading.headed_models import outputs_of_modules
from gym_rm.engine.schedule import Budget, RunResult, Scheduler, checked_budget
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.renderer import Renderer, TextOptions, Turns
from gym_rm.engine.token_tree import Layout, TokenSequence
from gym_rm.errors import ConfigError, ConversationError, logger, nearest, warn_once
from gym_rm.scorer import SCORER_KINDS
from gym_rm.scores import FloatArray, Provenance, Scores, Workload
from gym_rm.types import Conversation, Prompts


class EngineOptions(Config):
    """How a reward model runs."""

    max_num_batched_tokens: Annotated[Budget, pydantic.PlainValidator(checked_budget)] = "auto"
    """Most tokens in one forward, padding included; `"auto"` by the device's free memory."""
    quantization: Literal["int8", "fp8"] | None = None
    """`"int8"` (CPU) or `"fp8"` (GPU) computes the backbone's products in 8 bits: faster, and not exactly the plain
    model's numbers (see `benchmarks/README.md`)."""
    batch_invariant: Flag = False
    """Run every distinct conversation alone, so that its score is bit-equal in any batch. Only exact duplicates are
    shared then; by default a score may differ in its last bits, in float32 by up to 1e-5."""
    tree: Flag = True
    """False never merges prefixes (to compare, or to measure)."""
    cache_size: NonNegativeInt = 0
    """How many scored sequences to remember across calls, by their token ids; 0 for none."""
    prefix_cache_tokens: NonNegativeInt = 0
    """Of how many tokens to keep keys and values across calls, so that the next turn of a dialogue computes only what
    is new; 0 for none. Scores may then differ in their last bits from call to call."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoredSequence:
    """The reward of one token sequence, its components `[H]` and single steps, or why it has none."""

    reward: float
    components: FloatArray
    error: str | None = None
    steps: FloatArray | None = None


class RewardModelScorer:
    """Scores conversations with a reward model: the plain model's numbers, every shared token computed once.

    `gym_rm.load_scorer(path, ...)` loads a checkpoint and makes one. The constructor takes a model that is loaded
    already, such as one in training: it is used as it is, its weights are read at every call, and it is left as it was.
    After the weights change, `clear_cache` forgets what was remembered.

    Args:
        model: a Hugging Face model with its head.
        tokenizer: its tokenizer, with the chat template.
        kind: which kind of reward model it is; `"auto"` detects it from the configuration.
        executor: where the forward runs; None for this process.
        name: what `Scores.provenance` calls the model.
        **options: the fields of `EngineOptions`, of `TextOptions` and of the kind's `Options`.

    Raises:
        ConfigError: an unknown or invalid option, or the model is not a reward model.

    Example:
        >>> import gym_rm
        >>> scorer = gym_rm.load_scorer()
        >>> question = {"role": "user", "content": "What is 12 + 30?"}
        >>> scores = scorer.score([[question, {"role": "assistant", "content": reply}] for reply in ("42", "43")])
        >>> scores.rewards.shape
        (2,)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        kind: str = "auto",
        executor: Executor | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"expected a Hugging Face model (PreTrainedModel), got {type(model).__name__}; load_scorer(path) loads "
                "a folder or hub id."
            )
        name = name or model.name_or_path or type(model).__name__
        facts = ModelFacts(name, model.config, outputs_of_modules(model), tokenizer)
        self._start(model, facts, kind, executor, options)

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, *, executor: Executor | None = None, **options: Any
    ) -> RewardModelScorer:
        """The scorer of a checkpoint, whose weights only the executor reads; see `load_reward_model`."""
        scorer = cls.__new__(cls)
        facts = dataclasses.replace(checkpoint.facts, name=checkpoint.name)
        scorer._start(checkpoint, facts, checkpoint.family.kind, executor, {**checkpoint.kind_options, **options})
        return scorer

    def _start(
        self, source: ModelSource, facts: ModelFacts, kind: str, executor: Executor | None, options: dict[str, Any]
    ) -> None:
        kind = detect_kind(facts) if kind == "auto" else kind
        _check_kind(kind)
        schemas = (EngineOptions, TextOptions, KINDS[kind].Options)
        engine, text, of_kind = divide_settings(options, *schemas, owner=f"a reward model of kind {kind!r}")
        if 0 < engine.prefix_cache_tokens < CACHE_BLOCK_SIZE:
            raise ConfigError(
                f"prefix_cache_tokens must be 0 or at least {CACHE_BLOCK_SIZE}; got {engine.prefix_cache_tokens}."
            )
        if engine.prefix_cache_tokens and engine.batch_invariant:
            raise ConfigError("prefix_cache_tokens needs the token tree, which batch_invariant=True turns off.")
        self.kind: Kind = KINDS[kind].of(facts, of_kind)
        self.renderer = Renderer(facts.tokenizer, input_format=self.kind.input_format, **dict(text))
        self.executor: Executor = executor or LocalExecutor()
        self.info = self.executor.load(
            LoadSpec(
                source,
                self.kind.readout,
                _reference(of_kind, source),
                engine.tree,
                engine.quantization,
                engine.prefix_cache_tokens,
            )
        )
        if text.max_length is None:
            self.renderer.max_length = self.info.max_positions
        self.layout: Layout = "one_by_one" if engine.batch_invariant else self.info.layout
        self._scheduler = Scheduler(self.info, layout=self.layout, budget=engine.max_num_batched_tokens)
        self._cache: OrderedDict[bytes, ScoredSequence] = OrderedDict()
        self._cache_size = engine.cache_size
        self._lock = threading.RLock()
        self.provenance = Provenance(
            scorer=type(self).__name__,
            model=facts.name,
            revision=self.info.revision,
            template_hash=self.renderer.template_hash,
            dtype=self.info.dtype,
            device=self.info.device,
            layout=self.layout,
            settings={
                "kind": kind,
                "max_length": self.renderer.max_length,
                "overlong": self.renderer.overlong,
                "batch_invariant": engine.batch_invariant,
                **({} if self.info.quantization is None else {"quantization": self.info.quantization}),
                **({} if self.renderer.date is None else {"date": str(self.renderer.date)}),
                **self.kind.settings,
            },
        )
        logger.info("scoring with %s", self.provenance)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock, and what is remembered."""
        self.clear_cache()
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> RewardModelScorer:
        """Itself: `gym.make_vec` deep-copies its keywords, and a reward model must not be loaded twice."""
        return self

    def __repr__(self) -> str:
        made = self.provenance
        return f"RewardModelScorer({made.model!r}, {self.kind.name}, {made.dtype} on {made.device}, {made.layout})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None, *, turns: Turns = "last") -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: not used by reward models.
            turns: `"all"` also reads a reward after every assistant turn, in the same pass: `Scores.turn_rewards`.

        Raises:
            ScoringError: some rows have no score; the others are in its `scores`.
        """
        if turns not in ("last", "all"):
            raise ConfigError(f"turns must be 'last' or 'all'; got {turns!r}.")
        with self._lock:
            start = time.perf_counter()
            rendered = self._render(conversations, turns)
            sequences = [each for row in rendered if not isinstance(row, ConversationError) for each in row]
            scored = self._remembered(sequences)
            tokens = self._to_tokens(sequences, scored)
            seconds = time.perf_counter() - start
            result = self._scheduler.run(list(tokens.values()), self.executor)
            self._reduce(result, tokens, scored)
            self._remember(sequences, scored)
        cost = Workload(num_tokens=sum(len(each.input_ids) for each in sequences), render_seconds=seconds)
        return self._collect(rendered, scored, turns, result.workload + cost).raise_for_errors()

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one forward; halved after running out of memory."""
        return self._scheduler.budget

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, budget: int) -> None:
        self._scheduler.budget = budget

    def update_weights(self, weights: Weights) -> None:
        """Take other weights of the same model, between two calls; nothing remembered survives.

        Args:
            weights: a folder or hub id of the same architecture, or tensors by name.

        Raises:
            ConfigError: they do not fit; the old weights are kept.
        """
        with self._lock:
            self.executor.update_weights(weights)
            self.clear_cache()
            if not isinstance(weights, Mapping):
                self.provenance = dataclasses.replace(self.provenance, model=str(weights), revision=None)

    def sleep(self) -> None:
        """Free the device's memory for something else, a policy for instance; `score` wakes by itself."""
        with self._lock:
            self.executor.sleep()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        with self._lock:
            self.executor.wake()

    def clear_cache(self) -> None:
        """Forget everything remembered across calls; needed after the weights of a model in training changed."""
        with self._lock:
            self._cache.clear()
            self.executor.clear_cache()

    def close(self) -> None:
        """Give up the model; can be repeated."""
        with self._lock:
            self._cache.clear()
            self.executor.close()

    # --- the steps of a call -----------------------------------------------------------------------------------

    def _render(self, conversations: Sequence[Conversation], turns: Turns) -> list[list[Rendered] | ConversationError]:
        if turns == "last":
            encoded = self.renderer.encode(conversations)
            return [each if isinstance(each, ConversationError) else [each] for each in encoded]
        rows: list[list[Rendered] | ConversationError] = []
        for conversation in conversations:
            try:
                rows.append(self.renderer.encode_turns(conversation))
            except ConversationError as error:
                rows.append(error)
        return rows

    def _remembered(self, sequences: Sequence[Rendered]) -> dict[int, ScoredSequence]:
        """What is known of M sequences from earlier calls, by their index."""
        scored = {}
        if self._cache_size:
            for m, rendered in enumerate(sequences):
                key = _key(rendered)
                if key in self._cache:
                    scored[m] = self._cache[key]
                    self._cache.move_to_end(key)
        return scored

    def _to_tokens(self, sequences: Sequence[Rendered], scored: dict[int, ScoredSequence]) -> dict[int, TokenSequence]:
        """The sequences to run, by their index; what cannot be read gets its reason in `scored`."""
        tokens = {}
        for m, rendered in enumerate(sequences):
            if m in scored:
                continue
            try:
                self._check_ids(rendered)
                positions = self.kind.read_positions(rendered)
            except ConversationError as error:
                scored[m] = self._failed(str(error))
            else:
                tokens[m] = TokenSequence(rendered.input_ids, positions, rendered.second_segment)
        return tokens

    def _check_ids(self, rendered: Rendered) -> None:
        """Ids outside the vocabulary abort CUDA; on a CPU they fail a whole batch."""
        if self.info.num_embeddings is not None and int(rendered.input_ids.max()) >= self.info.num_embeddings:
            token = int(rendered.input_ids.max())
            raise ConversationError(
                f"the token {self.renderer.tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, but the model "
                f"has {self.info.num_embeddings} embeddings: the tokenizer is another model's, or has grown since."
            )

    def _reduce(
        self, result: RunResult, tokens: Mapping[int, TokenSequence], scored: dict[int, ScoredSequence]
    ) -> None:
        """Turn the values of the sequences that were run into rewards, in `scored`."""
        if not tokens:
            return
        starts = np.cumsum([0, *(len(each.read_positions) for each in tokens.values())])
        reduction = self.kind.reduce(result.values, starts)
        for k, m in enumerate(tokens):
            reward = float(reduction.rewards[k])
            if k in result.failures:
                scored[m] = self._failed(result.failures[k])
            elif not np.isfinite(reward):
                scored[m] = self._failed(f"the reward model gave {reward}")
            else:
                steps = None if reduction.steps is None else reduction.steps[starts[k] : starts[k + 1]]
                scored[m] = ScoredSequence(reward, reduction.components[k], steps=steps)

    def _failed(self, reason: str) -> ScoredSequence:
        nothing = np.full(len(self.kind.component_names), np.nan, dtype=np.float32)
        return ScoredSequence(float("nan"), nothing, reason)

    def _remember(self, sequences: Sequence[Rendered], scored: Mapping[int, ScoredSequence]) -> None:
        if not self._cache_size:
            return
        for m, rendered in enumerate(sequences):
            if scored[m].error is None:
                self._cache.setdefault(_key(rendered), scored[m])
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _collect(
        self,
        rendered: Sequence[list[Rendered] | ConversationError],
        scored: Mapping[int, ScoredSequence],
        turns: Turns,
        workload: Workload,
    ) -> Scores:
        """Give every conversation the scores of its turns."""
        nothing = np.empty(0, dtype=np.float32)
        rows: list[ScoredSequence] = []
        turn_rewards: list[FloatArray] = []
        lengths, truncated = np.zeros((2, len(rendered)), dtype=np.int64)
        m = 0
        for row, turn_renders in enumerate(rendered):
            if isinstance(turn_renders, ConversationError):
                rows.append(self._failed(str(turn_renders)))
                turn_rewards.append(nothing)
                continue
            mine = [scored[m + k] for k in range(len(turn_renders))]
            m += len(turn_renders)
            lengths[row] = len(turn_renders[-1].input_ids)
            truncated[row] = turn_renders[-1].truncated_tokens
            turn_rewards.append(np.array([one.reward for one in mine], dtype=np.float32))
            reason = next((one.error for one in mine if one.error is not None), None)
            rows.append(mine[-1] if reason is None else self._failed(reason))
        if truncated.any():
            warn_once(
                f"conversations longer than max_length={self.renderer.max_length} are cut "
                f"(overlong={self.renderer.overlong!r}); Scores.truncated_tokens counts what each one lost."
            )
        names = self.kind.component_names
        components = np.array([one.components for one in rows], dtype=np.float32).reshape(len(rows), len(names))
        steps = [nothing if one.steps is None else one.steps.copy() for one in rows]
        return Scores(
            rewards=np.array([one.reward for one in rows], dtype=np.float32),
            components={name: components[:, h].copy() for h, name in enumerate(names)},
            num_tokens=lengths,
            truncated_tokens=truncated,
            errors=tuple(one.error for one in rows),
            turn_rewards=tuple(turn_rewards) if turns == "all" else None,
            step_rewards=tuple(steps) if any(one.steps is not None for one in rows) else None,
            provenance=self.provenance,
            workload=workload,
        )


def load_reward_model(
    path: Any = None, *, kind: str = "auto", executor: Executor | None = None, **options: Any
) -> RewardModelScorer:
    """Load a checkpoint and make its scorer; what `gym_rm.load_scorer` calls for a folder or hub id.

    Args:
        path: None for the embedded reward model, a Hugging Face folder or hub id, also of a LoRA adapter.
        kind: which kind of reward model it is; `"auto"` detects it from what the checkpoint holds.
        executor: where the forward runs; None for this process.
        **options: the fields of `LoadOptions`, `EngineOptions`, `TextOptions` and of the kind's `Options`.

    Raises:
        ConfigError: the checkpoint cannot be loaded as a reward model, or an unknown or invalid option.
    """
    _check_kind(kind)
    loading = {name: value for name, value in options.items() if name in LoadOptions.model_fields}
    of_scorer = {name: value for name, value in options.items() if name not in loading}
    (load,) = divide_settings({"path": path, "kind": kind, **loading}, LoadOptions, owner="a checkpoint")
    checkpoint = open_checkpoint(load)
    return RewardModelScorer.of_checkpoint(checkpoint, executor=executor, **of_scorer)


def _check_kind(kind: str) -> None:
    if kind != "auto" and kind not in KINDS:
        known = [*KINDS, *SCORER_KINDS]
        raise ConfigError(f"unknown kind of reward model {kind!r}; known: {sorted(known)}.{nearest(kind, known)}")


def _reference(options: Config, source: ModelSource) -> ModelSource | None:
    """The second model of a kind that compares two, loaded as the first is."""
    if not isinstance(options, ImplicitKind.Options):
        return None
    if isinstance(options.reference, PreTrainedModel):
        return options.reference
    load = source.options if isinstance(source, Checkpoint) else LoadOptions()
    update = {"path": str(options.reference), "kind": "implicit", "head": None, "base": None, "revision": None}
    return open_checkpoint(load.model_copy(update=update))


def _key(rendered: Rendered) -> bytes:
    marks = [-1 if mark is None else mark for mark in (rendered.second_segment, rendered.reply_start)]
    return np.array(marks, dtype=np.int32).tobytes() + rendered.input_ids.tobytes()
