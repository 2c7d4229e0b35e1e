"""The reward-model scorer: render, plan, run, reduce.

A `score` call renders conversations to token sequences and plans where each sequence is read. The scheduler builds
batches under the token budget, and the executor, which owns the model, runs them. The kind of reward model reduces the
values to rewards. A failure affects only the rows of its own sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from gym_rm.config import Config, Flag, NonNegativeInt, divide_settings
from gym_rm.engine.backbones.prefix_cache import CACHE_BLOCK_SIZE
from gym_rm.engine.executors.choice import choose_executor
from gym_rm.engine.executors.executor import Executor, LoadSpec, ModelSource, Weights
from gym_rm.engine.executors.replica import ParallelOptions
from gym_rm.engine.kinds import KINDS, Kind, ModelFacts, check_kind, detect_kind
from gym_rm.engine.kinds.implicit import ImplicitKind
from gym_rm.engine.loading.checkpoint import Checkpoint, LoadOptions, open_checkpoint
from gym_rm.engine.loading.files import check_tokenizer
from gym_rm.engine.loading.headed_models import outputs_of_modules
from gym_rm.engine.schedule import Budget, RunResult, Scheduler, checked_budget
from gym_rm.engine.score_cache import ScoreCache, ScoredSequence
from gym_rm.engine.text.options import TextOptions
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.rendered_texts import encode_text
from gym_rm.engine.text.renderer import Renderer, Turns
from gym_rm.engine.token_tree import Layout, TokenSequence
from gym_rm.errors import ConfigError, ConversationError, logger, warn_once
from gym_rm.scorer import check_rows
from gym_rm.scorers.batching import MicroBatchingScorer
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompts, Provenance, Workload

SIZES = ("tensor_parallel_size", "fsdp_size", "num_replicas")  # options that `Provenance.settings` has if not 1


Item = TypeVar("Item")


class EngineOptions(Config):
    """Options for running a reward model."""

    max_num_batched_tokens: Annotated[Budget, pydantic.PlainValidator(checked_budget)] = "auto"
    """Maximum number of tokens in one forward, padding included; `"auto"` chooses it by the device's free memory."""
    quantization: Literal["int8", "fp8"] | None = None
    """`"int8"` (CPU) or `"fp8"` (GPU) computes the backbone's matrix products in 8 bits: faster, with a rounding error
    in the scores (see `benchmarks/README.md`)."""
    tree: Flag = True
    """Merge shared prefixes into token trees; False turns this off, for comparisons and measurements."""
    cache_size: NonNegativeInt = 0
    """Number of scored sequences to keep across calls, looked up by their token ids; 0 turns the score cache off."""
    prefix_cache_tokens: NonNegativeInt = 0
    """Number of tokens whose keys and values are kept across calls, so that the next turn of a dialogue computes only
    its new tokens; 0 turns the prefix cache off. Scores do not change."""


class RewardModelScorer:
    """Scores conversations with a reward model; shared prefixes are computed once.

    `gym_rm.load_scorer(path, ...)` loads a checkpoint and returns its scorer. The constructor takes a loaded model, for
    example one in training. Every call uses the current weights and leaves the model unchanged.

    Args:
        model: a Hugging Face model with its head.
        tokenizer: the model's tokenizer, with the chat template, or its folder or hub id.
        kind: kind of reward model; `"auto"` detects it from the configuration.
        executor: executor that runs the forward; None for this process. A model that is passed in cannot be sent to
            other processes.
        name: model name in `Scores.provenance`; None for the model's own name.
        **options: the fields of `EngineOptions`, `TextOptions` and of the kind's `Options`.

    Raises:
        ConfigError: an option is unknown or invalid, or the model is not a reward model.

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
        executor: Executor | str | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            advice = "pass its get_base_model()" if hasattr(model, "get_base_model") else "use load_scorer for a path"
            if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
                advice = "prompt tuning and prefix tuning are not supported, pass a function that calls the model"
            raise ConfigError(
                f"model must be a Hugging Face model (PreTrainedModel), got {type(model).__name__}; {advice}."
            )
        tokenizer = check_tokenizer(tokenizer)
        name = name or model.name_or_path or type(model).__name__
        facts = ModelFacts(name, model.config, outputs_of_modules(model), tokenizer)
        self._start(model, facts, kind, executor, options)

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, /, *, executor: Executor | str | None = None, **options: Any
    ) -> RewardModelScorer:
        """Return the scorer of a checkpoint; only the executor reads the weights. See `load_reward_model`."""
        scorer = cls.__new__(cls)
        facts = dataclasses.replace(checkpoint.facts, name=checkpoint.name)
        scorer._start(checkpoint, facts, checkpoint.family.kind, executor, {**checkpoint.kind_options, **options})
        return scorer

    def _start(
        self,
        source: ModelSource,
        facts: ModelFacts,
        kind: str,
        executor: Executor | str | None,
        options: dict[str, Any],
    ) -> None:
        kind = detect_kind(facts) if kind == "auto" else check_kind(kind)
        schemas = (EngineOptions, ParallelOptions, TextOptions, KINDS[kind].Options)
        loading = (LoadOptions,) if isinstance(source, Checkpoint) else ()
        engine, parallel, text, of_kind = divide_settings(
            options, *schemas, owner=f"a reward model of kind {kind!r}", others=loading
        )
        if 0 < engine.prefix_cache_tokens < CACHE_BLOCK_SIZE:
            raise ConfigError(
                f"prefix_cache_tokens must be 0 or at least {CACHE_BLOCK_SIZE}; got {engine.prefix_cache_tokens}."
            )
        self.kind: Kind = KINDS[kind].of(facts, of_kind)
        self.renderer = Renderer(facts.tokenizer, input_format=self.kind.input_format, **dict(text))
        spec = LoadSpec(
            source,
            self.kind.readout,
            _reference(of_kind, source, facts.tokenizer),
            engine.tree,
            engine.quantization,
            engine.prefix_cache_tokens,
            parallel.tensor_parallel_size,
            parallel.fsdp_size,
        )
        self.executor: Executor = choose_executor(executor, parallel, spec)
        self.info = self.executor.load(spec)
        if text.max_length is None:
            self.renderer.max_length = self.info.max_positions
        self.layout: Layout = self.info.layout
        self._scheduler = Scheduler(self.info, layout=self.layout, budget=engine.max_num_batched_tokens)
        self._cache = ScoreCache(engine.cache_size)
        self._lock = threading.RLock()
        self._merging: MicroBatchingScorer | None = None
        self._constant_calls = 0
        self.provenance = Provenance(
            scorer=type(self).__name__,
            model=facts.name,
            revision=self.info.revision,
            template_hash=self.renderer.template_hash,
            dtype=self.info.dtype,
            device=self.info.device,
            layout=self.layout,
            attention="tree" if self.layout == "tree" else self.info.attention,
            batch_invariance=self.info.batch_invariance,
            torch=self.info.torch,
            transformers=self.info.transformers,
            settings={
                "kind": kind,
                "max_length": self.renderer.max_length,
                "overlong": self.renderer.overlong,
                **({} if self.info.quantization is None else {"quantization": self.info.quantization}),
                **({} if self.info.device_map is None else {"device_map": self.info.device_map}),
                **{name: size for name in SIZES if (size := getattr(parallel, name)) > 1},
                **({} if self.renderer.date is None else {"date": str(self.renderer.date)}),
                **self.renderer.settings,
                **self.kind.settings,
            },
        )
        logger.info("scoring with %s", self.provenance)

    def __getstate__(self) -> dict[str, Any]:
        """Clear the caches and return the state without the lock and the thread of `score_async`."""
        self.clear_cache()
        return {**{name: value for name, value in self.__dict__.items() if name != "_lock"}, "_merging": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> RewardModelScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and the model must not be loaded twice."""
        return self

    def __repr__(self) -> str:
        made = self.provenance
        return f"RewardModelScorer({made.model!r}, {self.kind.name}, {made.dtype} on {made.device}, {made.layout})"

    def score(
        self,
        conversations: Sequence[Conversation],
        prompts: Prompts = None,
        *,
        turns: Turns = "last",
        progress: bool = False,
    ) -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: not used by reward models.
            turns: `"all"` also scores the conversation after every assistant turn (`Scores.turn_rewards`).
            progress: whether to show a progress bar on stderr.

        Raises:
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
        """
        if turns not in ("last", "all"):
            raise ConfigError(f"turns must be 'last' or 'all'; got {turns!r}.")
        check_rows(conversations, prompts)
        with self._lock:
            start = time.perf_counter()
            rendered = self._render(conversations, turns)
            sequences = [each for row in rendered if not isinstance(row, ConversationError) for each in row]
            if self._cache.size:
                self._cache.keep_for(self.executor.weights_version())
            scored = self._cache.find(sequences)
            tokens = self._plan(sequences, scored)
            seconds = time.perf_counter() - start
            with _progress_bar(len(tokens)) if progress else contextlib.nullcontext() as report:
                result = self._scheduler.run(list(tokens.values()), self.executor, report)
            self._reduce(result, tokens, scored)
            self._cache.add(sequences, scored)
            self._check_variation(sequences, scored)
        cost = Workload(num_tokens=sum(len(each.input_ids) for each in sequences), render_seconds=seconds)
        return self._collect(rendered, scored, turns, result.workload + cost).raise_for_errors()

    async def score_async(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations without blocking the event loop; calls that wait at the same time share batches.

        At most 4096 conversations wait at a time, and further calls wait for their turn (`MicroBatchingScorer`).

        Raises:
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
        """
        with self._lock:
            if self._merging is None:
                # A proxy and a finalizer, so that the thread does not keep a scorer that nobody holds.
                self._merging = MicroBatchingScorer(weakref.proxy(self))
                weakref.finalize(self, self._merging.close)
            merging = self._merging
        return await merging.score_async(conversations, prompts)

    def score_texts(self, texts: Sequence[str | Sequence[int]], *, add_special_tokens: bool = True) -> Scores:
        """Score N texts that the caller has rendered, as servers of other engines do: no chat template is applied.

        Control tokens in a text count as such, so the caller must not put a stranger's message into it.

        Args:
            texts: rendered texts, or token ids.
            add_special_tokens: whether to add the special tokens of the tokenizer that a text lacks. Token ids are
                scored as they are.

        Raises:
            ConfigError: the kind of reward model needs the messages (it reads the reply alone, or adds a question).
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
        """
        if self.kind.input_format.mark_reply:
            raise ConfigError(
                f"a reward model of kind {self.kind.name!r} needs to know where the reply starts; pass conversations "
                "to score()."
            )
        with self._lock:
            start = time.perf_counter()
            rendered = self._each(texts, lambda text: [encode_text(self.renderer, text, add_special_tokens)])
            sequences = [each for row in rendered if not isinstance(row, ConversationError) for each in row]
            if self._cache.size:
                self._cache.keep_for(self.executor.weights_version())
            scored = self._cache.find(sequences)
            tokens = self._plan(sequences, scored)
            seconds = time.perf_counter() - start
            result = self._scheduler.run(list(tokens.values()), self.executor, None)
            self._reduce(result, tokens, scored)
            self._cache.add(sequences, scored)
        cost = Workload(num_tokens=sum(len(each.input_ids) for each in sequences), render_seconds=seconds)
        return self._collect(rendered, scored, "last", result.workload + cost).raise_for_errors()

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens in one forward; halved after running out of memory."""
        return self._scheduler.budget

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, budget: int) -> None:
        self._scheduler.budget = budget

    def update_weights(self, weights: Weights) -> None:
        """Replace the weights and clear the caches.

        Args:
            weights: folder or hub id of a checkpoint with the same architecture, or tensors by name.

        Raises:
            ConfigError: the weights do not fit the model; the old weights are kept.
        """
        with self._lock:
            self.executor.update_weights(weights)
            self.clear_cache()
            model = self.provenance.model if isinstance(weights, Mapping) else str(weights)
            self.provenance = dataclasses.replace(self.provenance, model=model, revision=None)

    def sleep(self) -> None:
        """Free the device's memory, for example for a policy; the next `score` moves the weights back."""
        with self._lock:
            self.executor.sleep()

    def wake(self) -> None:
        """Move the weights back to the device."""
        with self._lock:
            self.executor.wake()

    def clear_cache(self) -> None:
        """Clear everything computed from earlier weights; needed only if `ChangeCounter` cannot notice a change."""
        with self._lock:
            self._cache.clear()
            self.executor.clear_cache()

    def close(self) -> None:
        """Release the model; closing twice is allowed. Calls of `score_async` that wait are scored first."""
        with self._lock:
            merging, self._merging = self._merging, None
        if merging is not None:
            merging.close()
        with self._lock:
            self._cache.clear()
            self.executor.close()

    # --- the steps of a call -----------------------------------------------------------------------------------

    def _render(self, conversations: Sequence[Conversation], turns: Turns) -> list[list[Rendered] | ConversationError]:
        if turns == "last":
            encoded = self.renderer.encode(conversations)
            return [each if isinstance(each, ConversationError) else [each] for each in encoded]
        return self._each(conversations, self.renderer.encode_turns)

    @staticmethod
    def _each(
        items: Iterable[Item], render: Callable[[Item], list[Rendered]]
    ) -> list[list[Rendered] | ConversationError]:
        """Render items one by one; one that cannot be rendered becomes its error."""
        rows: list[list[Rendered] | ConversationError] = []
        for item in items:
            try:
                rows.append(render(item))
            except ConversationError as error:
                rows.append(error)
        return rows

    def _plan(self, sequences: Sequence[Rendered], scored: dict[int, ScoredSequence]) -> dict[int, TokenSequence]:
        """Return the sequences to run, by index; a sequence that cannot be read gets an error in `scored`."""
        tokens = {}
        for m, rendered in enumerate(sequences):
            if m in scored:
                continue
            try:
                self._check_tokens(rendered)
                positions = self.kind.read_positions(rendered)
            except ConversationError as error:
                scored[m] = self._failed(str(error))
            else:
                tokens[m] = TokenSequence(rendered.input_ids, positions, rendered.second_segment)
        return tokens

    def _check_tokens(self, rendered: Rendered) -> None:
        """Raise ConversationError for ids and positions outside the model's tables, which abort CUDA."""
        if self.info.num_positions is not None and len(rendered.input_ids) > self.info.num_positions:
            raise ConversationError(
                f"the conversation has {len(rendered.input_ids)} tokens, but the model has {self.info.num_positions} "
                "positions; do not pass a larger max_length, and pass overlong= to cut longer conversations."
            )
        if self.info.num_embeddings is not None and int(rendered.input_ids.max()) >= self.info.num_embeddings:
            token = int(rendered.input_ids.max())
            raise ConversationError(
                f"the token {self.renderer.tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, but the model "
                f"has {self.info.num_embeddings} embeddings; pass the model's own tokenizer, or resize its embeddings."
            )

    def _reduce(
        self, result: RunResult, tokens: Mapping[int, TokenSequence], scored: dict[int, ScoredSequence]
    ) -> None:
        """Compute rewards from the values that were read, and put them into `scored`."""
        if not tokens:
            return
        starts = np.cumsum([0, *(len(each.read_positions) for each in tokens.values())])
        reduction = self.kind.reduce(result.values, starts)
        for k, m in enumerate(tokens):
            reward = float(reduction.rewards[k])
            if k in result.failures:
                scored[m] = self._failed(result.failures[k])
            elif not np.isfinite(reward):
                scored[m] = self._failed(f"the reward model returned {reward}")
            else:
                steps = None if reduction.steps is None else reduction.steps[starts[k] : starts[k + 1]]
                scored[m] = ScoredSequence(reward, reduction.components[k], steps=steps)

    def _check_variation(self, sequences: Sequence[Rendered], scored: Mapping[int, ScoredSequence]) -> None:
        """Warn if all different sequences of a call got exactly the same reward, in three calls in a row."""
        kept = [m for m in range(len(sequences)) if scored[m].error is None]
        if len({scored[m].reward for m in kept}) > 1:
            self._constant_calls = 0
        elif len({sequences[m].input_ids.tobytes() for m in kept}) > 1:
            self._constant_calls += 1
            if self._constant_calls == 3:
                warn_once(
                    f"{self.provenance.model} gave exactly the same score to all different conversations of three "
                    "calls in a row; check that its head is trained, that the chat template writes the replies, "
                    "and that max_length does not cut them off."
                )

    def _failed(self, reason: str) -> ScoredSequence:
        components = np.full(len(self.kind.component_names), np.nan, dtype=np.float32)
        return ScoredSequence(float("nan"), components, reason)

    def _collect(
        self,
        rendered: Sequence[list[Rendered] | ConversationError],
        scored: Mapping[int, ScoredSequence],
        turns: Turns,
        workload: Workload,
    ) -> Scores:
        """Return the `Scores` of the call: one row per conversation, from the scores of its turns."""
        empty = np.empty(0)
        rows: list[ScoredSequence] = []
        turn_rewards: list[RewardArray] = []
        lengths, truncated = np.zeros((2, len(rendered)), dtype=np.int64)
        m = 0
        for row, turn_renders in enumerate(rendered):
            if isinstance(turn_renders, ConversationError):
                rows.append(self._failed(str(turn_renders)))
                turn_rewards.append(empty)
                continue
            of_turns = [scored[m + k] for k in range(len(turn_renders))]
            m += len(turn_renders)
            lengths[row] = len(turn_renders[-1].input_ids)
            truncated[row] = turn_renders[-1].truncated_tokens
            turn_rewards.append(np.array([one.reward for one in of_turns]))
            reason = next((one.error for one in of_turns if one.error is not None), None)
            rows.append(of_turns[-1] if reason is None else self._failed(reason))
        if truncated.any():
            warn_once(
                f"conversations longer than max_length={self.renderer.max_length} are cut "
                f"(overlong={self.renderer.overlong!r}); Scores.truncated_tokens has the number of tokens removed."
            )
        dropped = [0 if isinstance(each, ConversationError) else each[-1].dropped_characters for each in rendered]
        names = self.kind.component_names
        components = np.array([one.components for one in rows], dtype=np.float64).reshape(len(rows), len(names))
        steps = [empty if one.steps is None else one.steps.astype(np.float64) for one in rows]
        return Scores(
            rewards=np.array([one.reward for one in rows]),
            components={name: components[:, h].copy() for h, name in enumerate(names)},
            num_tokens=lengths,
            truncated_tokens=truncated,
            errors=tuple(one.error for one in rows),
            turn_rewards=tuple(turn_rewards) if turns == "all" else None,
            step_rewards=tuple(steps) if any(one.steps is not None for one in rows) else None,
            infos={"dropped_characters": np.array(dropped)} if any(dropped) else {},
            provenance=self.provenance,
            workload=workload,
        )


def load_reward_model(
    path: Any = None, *, kind: str = "auto", executor: Executor | str | None = None, **options: Any
) -> RewardModelScorer:
    """Load a checkpoint and return its scorer; `gym_rm.load_scorer` calls this for a folder or hub id.

    Args:
        path: Hugging Face folder or hub id of a model or a LoRA adapter; None for the embedded reward model.
        kind: kind of reward model; `"auto"` detects it from the checkpoint.
        executor: executor that runs the forward, or `"local"`, `"processes"` or `"ray"`; None for this process, or what
            `ParallelOptions` need.
        **options: the fields of `LoadOptions`, `EngineOptions`, `ParallelOptions`, `TextOptions` and of the kind's
            `Options`.

    Raises:
        ConfigError: the checkpoint cannot be loaded as a reward model, or an option is unknown or invalid.
    """
    loading = {name: value for name, value in options.items() if name in LoadOptions.model_fields}
    of_scorer = {name: value for name, value in options.items() if name not in loading}
    (load,) = divide_settings({"path": path, "kind": kind, **loading}, LoadOptions, owner="a checkpoint")
    checkpoint = open_checkpoint(load)
    return RewardModelScorer.of_checkpoint(checkpoint, executor=executor, **of_scorer)


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr; yield the function that advances it."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("scoring", total=total)
        yield functools.partial(bar.advance, task)


def _reference(options: Config, source: ModelSource, tokenizer: Any) -> ModelSource | None:
    """Return the reference model of the implicit kind, opened with the options of the policy; None for other kinds."""
    if not isinstance(options, ImplicitKind.Options):
        return None
    if isinstance(options.reference, PreTrainedModel):
        return options.reference
    load = source.options if isinstance(source, Checkpoint) else LoadOptions()
    update = {"path": str(options.reference), "kind": "implicit", "head": None, "base": None, "revision": None}
    return open_checkpoint(load.model_copy(update={**update, "tokenizer": tokenizer}))
