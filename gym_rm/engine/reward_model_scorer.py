"""The reward-model scorer: render, plan, run, reduce.

A `score` call renders conversations to token sequences and plans where each sequence is read. The scheduler builds
batches under the token budget, and the executor, which owns the model, runs them. The kind of reward model reduces the
values to rewards. A failure affects only the rows of its own sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import pydantic
from transformers import PreTrainedModel

from gym_rm.checks import integer
from gym_rm.config import Config, Flag, NonNegativeInt, divide_settings
from gym_rm.engine.debugging import call_id, stage
from gym_rm.engine.executors.choice import choose_executor
from gym_rm.engine.executors.executor import Executor, LoadSpec, ModelSource, Weights
from gym_rm.engine.executors.model_info import revision_of_sources
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.kinds import KINDS, Kind, ModelFacts, check_kind, detect_kind
from gym_rm.engine.kinds.language_models import ImplicitKind
from gym_rm.engine.loading.checkpoint import LoadOptions, ModelFiles, open_checkpoint, split_options
from gym_rm.engine.loading.fidelity import CheckedConversations
from gym_rm.engine.loading.files import check_tokenizer
from gym_rm.engine.loading.headed_models import outputs_of_modules
from gym_rm.engine.schedule import Budget, RunResult, Scheduler
from gym_rm.engine.score_call import RenderedRow, ScoreCall, in_chunks
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.engine.text.messages import CHARACTERS_PER_TOKEN
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.renderer import RenderedText, Renderer, Turns
from gym_rm.engine.text.text_options import TextOptions
from gym_rm.engine.token_tree import Layout, TokenSequence
from gym_rm.errors import ConfigError, ConversationError, logger, warn_once
from gym_rm.scorer import lock_open_after_fork
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts, Provenance, Workload, tools_of

SIZES = ("tensor_parallel_size", "fsdp_size", "num_replicas")  # options that `Provenance.settings` has if not 1


def _budget(value: Any) -> Budget:
    return "auto" if value == "auto" else integer("max_num_batched_tokens", value, minimum=1)


class EngineOptions(Config):
    """Options for running a reward model."""

    max_num_batched_tokens: Annotated[Budget, pydantic.PlainValidator(_budget)] = "auto"
    """Maximum number of tokens in one forward, padding included; `"auto"` chooses it by the device's free memory."""
    quantization: Literal["int8", "fp8"] | None = None
    """`"int8"` (CPU, encoders) or `"fp8"` (GPU) computes the backbone's matrix products in 8 bits: faster, with a
    rounding error in the scores (see `benchmarks/README.md`)."""
    tree: Flag = True
    """Merge shared prefixes into token trees; False turns this off, for comparisons and measurements."""
    prefix_cache_tokens: NonNegativeInt = 0
    """Number of tokens whose keys and values are kept across calls, so that the next turn of a dialogue computes only
    its new tokens; 0 turns the prefix cache off. Scores do not change."""
    check: Any = True
    """Compare scores of 16 conversations at load with those of the stored weights in the plain forward, and refuse a
    model that is far from them (`Provenance.fidelity`). A file of pairs (JSON lines with `prompt`, `chosen`,
    `rejected`) for yours; False to skip this."""


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
        **options: the fields of `EngineOptions`, `TextOptions`, `JudgedOptions` and of the kind's `Options`.

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
        if not getattr(model.config, "return_dict", True):
            raise ConfigError("model.config.return_dict is False, and its layers return tuples; set it to True.")
        tokenizer = check_tokenizer(tokenizer)
        name = name or model.name_or_path or type(model).__name__
        facts = ModelFacts(name, model.config, outputs_of_modules(model), tokenizer)
        self._start(model, facts, kind, executor, options)

    @classmethod
    def of_checkpoint(
        cls, checkpoint: ModelFiles, /, *, executor: Executor | str | None = None, **options: Any
    ) -> RewardModelScorer:
        """Return the scorer of a checkpoint; only the executor reads the weights. See `load_reward_model`."""
        scorer = cls.__new__(cls)
        facts = dataclasses.replace(checkpoint.facts, name=checkpoint.name)
        scorer._start(checkpoint, facts, checkpoint.family.kind, executor, {**checkpoint.family.options, **options})
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
        schemas = (EngineOptions, ParallelOptions, TextOptions, JudgedOptions, KINDS[kind].Options)
        loading = (LoadOptions,) if isinstance(source, ModelFiles) else ()
        engine, parallel, text, judged, of_kind = divide_settings(
            options, *schemas, owner=f"a reward model of kind {kind!r}", others=loading
        )
        if engine.prefix_cache_tokens and not isinstance(source, ModelFiles):
            raise ConfigError(
                "prefix_cache_tokens needs a model whose weights nobody else changes: save yours with save_pretrained, "
                "and pass its folder to gym_rm.load_scorer."
            )
        self._judged: JudgedOptions = judged
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
            CheckedConversations.render(engine.check, self.kind, self.renderer, judged),
        )
        self.executor: Executor = choose_executor(executor, parallel, spec)
        with ThreadPoolExecutor(1) as beside:  # reading large files takes as long as loading them
            revision = beside.submit(revision_of_sources, spec)
            self.info = self.executor.load(spec)
        if text.max_length is None:
            self.renderer.max_length = self.info.max_positions
        self.layout: Layout = self.info.layout
        self._scheduler = Scheduler(self.info, layout=self.layout, budget=engine.max_num_batched_tokens)
        self._lock = lock_open_after_fork()
        self.provenance = Provenance(
            scorer=type(self).__name__,
            model=facts.name,
            revision=revision.result(),
            template_hash=self.renderer.template_hash,
            dtype=self.info.dtype,
            device=self.info.device,
            layout=self.layout,
            attention=("paths" if self.info.kernels else "tree") if self.layout == "tree" else self.info.attention,
            batch_invariance=self.info.batch_invariance,
            rows=self.info.rows,
            fidelity=self.info.fidelity,
            torch=self.info.torch,
            transformers=self.info.transformers,
            settings={
                "kind": kind,
                **({"family": source.family.name} if isinstance(source, ModelFiles) else {}),
                "not_tried_beyond_tokens": self.info.tried_length,
                "max_length": self.renderer.max_length,
                "overlong": self.renderer.overlong,
                **({} if self.info.quantization is None else {"quantization": self.info.quantization}),
                **{name: size for name in SIZES if (size := getattr(parallel, name)) > 1},
                **({} if self.renderer.date is None else {"date": str(self.renderer.date)}),
                **self.renderer.settings,
                **self.kind.settings,
                **self._judged.settings,
            },
        )
        logger.info("scoring with %s", self.provenance)

    def __getstate__(self) -> dict[str, Any]:
        """Clear the caches and return the state without the lock."""
        self.clear_cache()
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = lock_open_after_fork()

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
    ) -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: their `tools` are given to the chat template; nothing else of them is used.
            turns: `"all"` also scores the conversation after every assistant turn (`Scores.turn_rewards`).

        Raises:
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
        """
        if turns not in ("last", "all"):
            raise ConfigError(f"turns must be 'last' or 'all'; got {turns!r}.")

        judged, prompts, complete = self._judged.read(conversations, prompts)
        tools = tools_of(prompts, len(judged))

        def render(rows: Sequence[int]) -> list[RenderedRow]:
            return self.renderer.encode_turns([judged[k] for k in rows], [tools[k] for k in rows], turns=turns)

        with self._lock, call_id("score"):
            characters = CHARACTERS_PER_TOKEN * self._scheduler.budget
            chunks = in_chunks(judged, tools, characters) if self._scheduler.ahead else [range(len(judged))]
            call = ScoreCall(self.kind)
            result = self._scheduler.run(self._sequences(call, chunks, render), self.executor)
            return complete(self._collect(call, result, chunks, all_turns=turns == "all")).raise_for_errors()

    def score_texts(self, texts: Sequence[RenderedText], *, add_special_tokens: bool = True) -> Scores:
        """Score N texts that the caller has rendered, as servers of other engines do: no chat template is applied.

        Control tokens in a text count as such, so the caller must not put a stranger's message into it. All of a text
        is scored, whatever `judged` is.

        Args:
            texts: rendered texts, token ids, or pairs of texts, which are joined as vLLM's `/score` does.
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
        encode = functools.partial(self.renderer.encode_text, add_special_tokens=add_special_tokens)
        with self._lock, call_id("score"):
            call = ScoreCall(self.kind)
            sequences = self._sequences(call, [texts], functools.partial(_each, encode))
            result = self._scheduler.run(sequences, self.executor)
            return self._collect(call, result, [texts]).raise_for_errors()

    @property
    def max_concurrent_calls(self) -> int:
        """See `gym_rm.scorer.max_concurrent_calls`: 0 on a CPU, which also computes everything else."""
        return int(not self.info.device.startswith("cpu"))

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens in one forward; halved after running out of memory."""
        return self._scheduler.budget

    def update_weights(self, weights: Weights) -> None:
        """Replace the weights and clear the caches.

        Args:
            weights: folder or hub id of a checkpoint with the same architecture, or tensors by name.

        Raises:
            ConfigError: the weights do not fit the model; the old weights are kept.
        """
        with self._lock:
            self.executor.update_weights(weights)
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
        """Clear the prefix cache, which `update_weights` does by itself."""
        with self._lock:
            self.executor.clear_cache()

    def close(self) -> None:
        """Release the model; closing twice is allowed."""
        with self._lock:
            self.executor.close()

    def _sequences(
        self, call: ScoreCall, chunks: Sequence[Any], render: Callable[[Any], list[RenderedRow]]
    ) -> Iterator[list[TokenSequence]]:
        """Render chunks, which have numbers of rows if there are several, and add them to the call."""
        for rows in chunks:
            start = time.perf_counter()
            with stage("render"):
                added = call.add(render(rows), self.info, self.renderer.tokenizer)
            call.render_seconds += time.perf_counter() - start
            yield added

    def _collect(self, call: ScoreCall, result: RunResult, chunks: Sequence[Any], *, all_turns: bool = False) -> Scores:
        """Return the scores of all rows."""
        call.reduce(result)
        if any(sequence.truncated_tokens for sequence in call.sequences):
            warn_once(
                f"conversations longer than max_length={self.renderer.max_length} are cut "
                f"(overlong={self.renderer.overlong!r}); Scores.truncated_tokens has the number of tokens removed."
            )
        seconds = call.render_seconds
        times = Workload(num_tokens=call.num_tokens, render_seconds=seconds, run_seconds=-seconds)
        scores = call.collect(all_turns=all_turns, provenance=self.provenance, workload=result.workload + times)
        return scores.scatter(itertools.chain(*chunks), len(scores)) if len(chunks) > 1 else scores


def load_reward_model(
    path: Any = None, *, kind: str = "auto", executor: Executor | str | None = None, **options: Any
) -> RewardModelScorer:
    """Load a checkpoint and return its scorer; `gym_rm.load_scorer` calls this for a folder or hub id.

    Args:
        path: Hugging Face folder or hub id of a model or a LoRA adapter; None for the embedded reward model.
        kind: kind of reward model; `"auto"` detects it from the checkpoint.
        executor: executor that runs the forward, or `"local"`, `"processes"` or `"ray"`; None for this process, or what
            `ParallelOptions` need.
        **options: the fields of `LoadOptions`, `EngineOptions`, `ParallelOptions`, `TextOptions`, `JudgedOptions` and
            of the kind's `Options`.

    Raises:
        ConfigError: the checkpoint cannot be loaded as a reward model, or an option is unknown or invalid.
    """
    load, others = split_options({"path": path, "kind": kind, **options})
    return RewardModelScorer.of_checkpoint(open_checkpoint(load), executor=executor, **others)


def _each(encode: Callable[[Any], Rendered], texts: Iterable[Any]) -> list[RenderedRow]:
    """Encode texts one by one; one that cannot be encoded becomes its error."""
    rows: list[RenderedRow] = []
    for text in texts:
        try:
            rows.append([encode(text)])
        except ConversationError as error:
            rows.append(error)
    return rows


def _reference(options: Config, source: ModelSource, tokenizer: Any) -> ModelSource | None:
    """Return the reference model of the implicit kind, opened with the options of the policy; None for other kinds."""
    if not isinstance(options, ImplicitKind.Options):
        return None
    if isinstance(options.reference, PreTrainedModel):
        return options.reference
    load = source.options if isinstance(source, ModelFiles) else LoadOptions()
    update = {"path": str(options.reference), "kind": "implicit", "head": None, "base": None, "revision": None}
    return open_checkpoint(load.model_copy(update={**update, "tokenizer": tokenizer}))
