"""The reward-model scorer: render, plan, run, scatter.

A `score` call renders its conversations to token sequences, merges them into prefix trees under the token budget,
runs each tree once, and scatters what was read back to the conversations. What the steps decide lives in `render`,
`token_tree` and `models`; here they are put in order, and failures are kept to the rows that they belong to.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from gym_rm.engine.schedule import BudgetedRunner
from gym_rm.errors import ConfigError, RenderError, ScoringError, logger, warn_once
from gym_rm.engine.executors import Executor, LocalExecutor
from gym_rm.engine.kinds import (
    DecoderRewardModel,
    RewardModel,
    check_layout,
    choose_layout,
    load_checkpoint,
    make_reward_model,
)
from gym_rm.engine.backbones.fused import MODEL_TYPES
from gym_rm.engine.backbones.low_precision import Quantization, quantization_of, quantize_layers
from gym_rm.engine.backbones.prefix_cache import BLOCK, PrefixCache
from gym_rm.engine.kinds.reward_model import FloatArray, Layout
from gym_rm.engine.text.renderer import DATE, Overlong, Rendered, Renderer, Turns
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.types import Conversation, Provenance, Scores, Workload


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """What one token sequence earned: the reward, its parts `[H]`, its single steps, or why there is none."""

    reward: float
    parts: FloatArray
    error: str | None = None
    steps: FloatArray | None = None


class RewardModelScorer:
    """Scores conversations with a reward model: the plain model's numbers, every shared token computed once.

    `gym_rm.load_scorer(path, ...)` loads a checkpoint and makes one; the constructor takes a model that is loaded
    already, such as one in training.

    Args:
        model: a Hugging Face model, or a `RewardModel`.
        tokenizer: its tokenizer, with the chat template.
        kind: which kind of reward model it is; `"auto"` tells by the configuration.
        pooling: `"hf"` or `"last"`, see `DecoderRewardModel`; `"auto"` as the checkpoint was trained.
        max_num_batched_tokens: most tokens in one forward, padding included; `"auto"` by the device's free memory.
        quantization: `"int8"` (CPU) or `"fp8"` (GPU) computes the backbone's products in 8 bits: faster, and not
            exactly the plain model's numbers (see `benchmarks/README.md`). Replaces the layers of `model` for good.
        max_length: longest conversation in tokens; None for what the model's positions allow.
        overlong: what happens to a longer one, see `Renderer`.
        chat_template, chat_template_kwargs, add_bos, date: see `Renderer`.
        batch_invariant: run every distinct conversation alone, so that its score is bit-equal whatever stands beside
            it. Only exact duplicates are shared then; by default a score may move in its last bits, in float32 within
            1e-5.
        tree: False never merges prefixes (to compare, or to measure).
        cache_size: how many scored sequences to remember across calls, by their token ids; 0 for none.
        prefix_cache_tokens: of how many tokens to keep keys and values across calls, so that the next turn of a
            dialogue computes only what is new; 0 for none. Scores may then differ in their last bits from call to call.
        executor: where the forward runs; None for this process.
        name, revision: what `Scores.provenance` says about the weights.
        model_options: further options of the kind.

    Raises:
        ConfigError: an option cannot be, or the model is no reward model.

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
        model: PreTrainedModel | RewardModel,
        tokenizer: Any,
        *,
        kind: str = "auto",
        pooling: Literal["auto", "last", "hf"] = "auto",
        max_num_batched_tokens: int | Literal["auto"] = "auto",
        max_length: int | None = None,
        overlong: Overlong = "error",
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_bos: bool | None = None,
        date: datetime.date | str = DATE,
        quantization: Quantization | None = None,
        batch_invariant: bool = False,
        tree: bool = True,
        cache_size: int = 0,
        prefix_cache_tokens: int = 0,
        executor: Executor | None = None,
        name: str | None = None,
        revision: str | None = None,
        **model_options: Any,
    ) -> None:
        if isinstance(model, PreTrainedModel):
            model = make_reward_model(model, tokenizer, kind=kind, pooling=pooling, **model_options)
        elif model_options:
            raise ConfigError(
                f"unknown options {sorted(model_options)} for a {type(model).__name__} that exists already."
            )
        self.model = model
        self.renderer = Renderer(
            tokenizer,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_bos=add_bos,
            date=date,
            max_length=model.max_positions if max_length is None else max_length,
            overlong=overlong,
            presentation=model.presentation,
        )
        model.layout = choose_layout(model, allow_tree=tree)
        if model.layout == "one_by_one":
            warn_once(
                f"{type(model.model).__name__} gives the plain model's numbers only one conversation at a time: "
                "scoring is exact and slow."
            )
        if quantization is not None:
            for module in model.modules:
                quantize_layers(module, quantization, model.device)
            check_layout(model)
        computed_in = quantization_of(model.model)  # by this scorer, or by another of the same model
        self.layout: Layout = "one_by_one" if batch_invariant else model.layout
        self.executor = executor or LocalExecutor(model)
        self._runner = BudgetedRunner(model, layout=self.layout, budget=max_num_batched_tokens)
        self._num_embeddings = model.num_embeddings
        self._cache: OrderedDict[bytes, ScoredSequence] = OrderedDict()
        if cache_size < 0:
            raise ConfigError(f"cache_size must be a number of sequences to remember, 0 for none; got {cache_size}.")
        self._cache_size = cache_size
        self._prefix_cache = self._make_prefix_cache(prefix_cache_tokens)
        self._lock = threading.RLock()
        self.provenance = Provenance(
            scorer=type(self).__name__,
            model=name or model.model.name_or_path or type(model.model).__name__,
            revision=revision,
            template_hash=self.renderer.template_hash,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            path=self.layout,
            settings={
                "kind": model.kind,
                "max_length": self.renderer.max_length,
                "overlong": overlong,
                "batch_invariant": batch_invariant,
                **({} if computed_in is None else {"quantization": computed_in}),
                **({} if self.renderer.date is None else {"date": str(self.renderer.date)}),
                **model.settings,
            },
        )
        logger.info("scoring with %s", self.provenance)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what belongs to this process: the lock, and what is remembered."""
        self.clear_cache()
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> RewardModelScorer:
        """Itself: `gym.make_vec` deep-copies its keywords, and a reward model must not be loaded twice."""
        return self

    def score(self, conversations: Sequence[Conversation], *, turns: Turns = "last") -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            turns: `"all"` also reads a reward after every assistant turn, in the same pass: `Scores.turn_rewards`.

        Raises:
            ScoringError: some rows have no score; the others are in its `scores`.
        """
        if turns not in ("last", "all"):
            raise ConfigError(f"turns must be 'last' or 'all'; got {turns!r}.")
        with self._lock:
            start = time.perf_counter()
            rendered = self._render(conversations, turns)
            flat = [render for row in rendered if not isinstance(row, RenderError) for render in row]
            rendered_at = time.perf_counter()
            scored, cost = self._score_sequences(flat)
        workload = Workload(render_seconds=rendered_at - start, **cost)
        scores = self._collect(rendered, scored, turns, workload)
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens in one forward; halved after running out of memory."""
        return self._runner.budget

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, budget: int) -> None:
        self._runner.budget = budget

    def sleep(self) -> None:
        """Free the device's memory for something else, a policy for instance; `score` wakes by itself."""
        with self._lock:
            self.executor.sleep()
            if self._prefix_cache is not None:
                self._prefix_cache.clear()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        with self._lock:
            self.executor.wake()

    def clear_cache(self) -> None:
        """Forget everything remembered across calls, as after the model's weights changed."""
        with self._lock:
            self._cache.clear()
            if self._prefix_cache is not None:
                self._prefix_cache.clear()

    def _make_prefix_cache(self, num_tokens: int) -> PrefixCache | None:
        if num_tokens == 0:
            return None
        if num_tokens < BLOCK:
            raise ConfigError(f"prefix_cache_tokens must be 0 or at least {BLOCK}; got {num_tokens}.")
        if not (isinstance(self.model, DecoderRewardModel) and self.model.fused and self.layout == "tree"):
            raise ConfigError(
                f"prefix_cache_tokens needs a decoder of a type in {sorted(MODEL_TYPES)} over the token tree; this "
                f"is a {type(self.model).__name__} of a {type(self.model.model).__name__}, layout {self.layout!r}."
            )
        self.model.prefix_cache = PrefixCache(num_tokens)
        return self.model.prefix_cache

    def _render(self, conversations: Sequence[Conversation], turns: Turns) -> list[list[Rendered] | RenderError]:
        if turns == "last":
            return [one if isinstance(one, RenderError) else [one] for one in self.renderer.encode(conversations)]
        rows: list[list[Rendered] | RenderError] = []
        for conversation in conversations:
            try:
                rows.append(self.renderer.encode_turns(conversation))
            except RenderError as error:
                rows.append(error)
        return rows

    def _score_sequences(self, rendered: Sequence[Rendered]) -> tuple[list[ScoredSequence], dict[str, Any]]:
        """Score M sequences: from the cache, or by a forward that they share."""
        keys = [_key(render) for render in rendered] if self._cache_size else []
        known = {key: self._cache[key] for key in keys if key in self._cache}
        new = [m for m in range(len(rendered)) if not (keys and keys[m] in known)]
        fresh, workload = self._run([rendered[m] for m in new])
        workload["num_tokens"] = sum(len(render.input_ids) for render in rendered)
        if not self._cache_size:
            return fresh, workload
        by_row = dict(zip(new, fresh, strict=True))
        for m, one in by_row.items():
            if one.error is None:
                self._cache[keys[m]] = one
        for key in known:
            self._cache.move_to_end(key)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [by_row[m] if m in by_row else known[keys[m]] for m in range(len(rendered))], workload

    def _run(self, rendered: Sequence[Rendered]) -> tuple[list[ScoredSequence], dict[str, Any]]:
        """Score M sequences by a forward; one that the model finds nothing to read in gets its reason."""
        sequences: list[TokenSequence] = []
        failures: dict[int, str] = {}
        for m, render in enumerate(rendered):
            try:
                self._check_ids(render)
                sequences.append(TokenSequence(render.input_ids, self.model.reads(render), render.second_segment))
            except RenderError as error:
                failures[m] = str(error)
        readable = [m for m in range(len(rendered)) if m not in failures]
        reused = 0 if self._prefix_cache is None else self._prefix_cache.reused_tokens
        result = self._runner.run(sequences, self.executor)
        if self._prefix_cache is not None:
            result.workload["reused_tokens"] = self._prefix_cache.reused_tokens - reused
        failures |= {readable[place]: reason for place, reason in result.failures.items()}
        starts = np.cumsum([0] + [len(sequence.reads) for sequence in sequences])
        nothing = np.full(len(self.model.part_names), np.nan, dtype=np.float32)
        scored = [ScoredSequence(float("nan"), nothing, failures.get(m)) for m in range(len(rendered))]
        if sequences:
            rewards, parts = self.model.reduce(result.values, starts)
            steps = self.model.step_rewards(result.values)
            for place, m in enumerate(readable):
                reward = float(rewards[place])
                if m not in failures and not np.isfinite(reward):
                    failures[m] = f"the reward model gave {reward}"
                mine = None if steps is None else steps[starts[place] : starts[place + 1]]
                scored[m] = ScoredSequence(reward, parts[place], failures.get(m), mine)
        return scored, result.workload

    def _check_ids(self, rendered: Rendered) -> None:
        """On a GPU a token without an embedding would end the process, and on a CPU its whole batch."""
        if self._num_embeddings is not None and int(rendered.input_ids.max()) >= self._num_embeddings:
            token = int(rendered.input_ids.max())
            raise RenderError(
                f"the token {self.renderer.tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, but the model "
                f"has {self._num_embeddings} embeddings: the tokenizer is not this model's, or has grown since."
            )

    def _collect(
        self,
        rendered: Sequence[list[Rendered] | RenderError],
        scored: Sequence[ScoredSequence],
        turns: Turns,
        workload: Workload,
    ) -> Scores:
        """Give every conversation what its turns earned."""
        size = len(rendered)
        rewards = np.full(size, np.nan, dtype=np.float32)
        parts = np.full((size, len(self.model.part_names)), np.nan, dtype=np.float32)
        num_tokens, truncated = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        errors: list[str | None] = [None] * size
        turn_rewards: list[FloatArray] = []
        step_rewards: list[FloatArray] = [np.empty(0, dtype=np.float32)] * size
        place = 0
        for row, turn_renders in enumerate(rendered):
            if isinstance(turn_renders, RenderError):
                errors[row] = str(turn_renders)
                turn_rewards.append(np.empty(0, dtype=np.float32))
                continue
            mine = scored[place : place + len(turn_renders)]
            place += len(turn_renders)
            num_tokens[row] = len(turn_renders[-1].input_ids)
            truncated[row] = turn_renders[-1].truncated_tokens
            errors[row] = next((one.error for one in mine if one.error is not None), None)
            turn_rewards.append(
                np.array([one.reward if one.error is None else np.nan for one in mine], dtype=np.float32)
            )
            if errors[row] is None:
                rewards[row] = mine[-1].reward
                parts[row] = mine[-1].parts
                step_rewards[row] = step_rewards[row] if mine[-1].steps is None else mine[-1].steps
        if truncated.any():
            warn_once(
                f"conversations longer than max_length={self.renderer.max_length} are cut "
                f"(overlong={self.renderer.overlong!r}); Scores.truncated_tokens counts what each one lost."
            )
        return Scores(
            rewards=rewards,
            heads={name: parts[:, k].copy() for k, name in enumerate(self.model.part_names)},
            num_tokens=num_tokens,
            truncated_tokens=truncated,
            errors=tuple(errors),
            turn_rewards=tuple(turn_rewards) if turns == "all" else None,
            step_rewards=tuple(step_rewards) if any(one.steps is not None for one in scored) else None,
            provenance=self.provenance,
            workload=workload,
        )


def load_reward_model(
    path: str | os.PathLike[str] | None = None,
    *,
    kind: str = "auto",
    head: str | None = None,
    base: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | PreTrainedModel | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> RewardModelScorer:
    """Load a checkpoint and make its scorer; what `gym_rm.load_scorer` calls for a folder or hub id.

    Args:
        path: None for the embedded reward model, a Hugging Face folder or hub id, also of a LoRA adapter.
        kind: which kind of reward model it is; `"auto"` tells by what the checkpoint holds.
        head: first name of the tensors of a head that no known family has.
        base: of an adapter, instead of the one that it names.
        reference: for `kind="implicit"`, the model before preference tuning: a folder, a hub id or a loaded model.
        dtype: `"auto"`, `"float32"`, `"bfloat16"`, `"float16"`; auto is the checkpoint's own on a GPU, else float32.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"`.
        device_map, attn_implementation, quantization_config, revision, trust_remote_code: as in transformers. With
            the token tree, attention is gym_rm's own and `attn_implementation` serves the other layouts.
        options: of `RewardModelScorer`, and of the kind.

    Raises:
        ConfigError: the checkpoint cannot be loaded as a reward model, or an option cannot be.
    """
    loading: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "quantization_config": quantization_config,
        "trust_remote_code": trust_remote_code,
    }
    checkpoint = load_checkpoint(path, kind=kind, head=head, base=base, revision=revision, **loading)
    if reference is not None and not isinstance(reference, PreTrainedModel):
        reference = load_checkpoint(reference, kind="implicit", **loading).model
    return RewardModelScorer(
        checkpoint.model,
        checkpoint.tokenizer,
        kind=checkpoint.kind,
        name=checkpoint.name,
        revision=checkpoint.revision,
        **{**checkpoint.options, **({} if reference is None else {"reference": reference}), **options},
    )


def _key(rendered: Rendered) -> bytes:
    marks = [-1 if mark is None else mark for mark in (rendered.second_segment, rendered.reply_start)]
    return np.array(marks, dtype=np.int32).tobytes() + rendered.input_ids.tobytes()
