"""One call of a reward-model scorer, without its model: which sequences to run, and the `Scores` of their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gym_rm.engine.debugging import replay_command
from gym_rm.engine.executors.executor import ModelInfo
from gym_rm.engine.kinds import Kind
from gym_rm.engine.schedule import RunResult
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConversationError, RowError
from gym_rm.scores import FloatArray, Scores

RenderedRow: TypeAlias = list[Rendered] | ConversationError
"""The sequences of a conversation (one per turn that is scored), or why it has none."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Score of one token sequence, or its error.

    Attributes:
        reward: the reward; NaN if there is an error.
        components: float32 `[H]`, the reward's components.
        error: reason of a missing score, or None.
        steps: float32 `[K]`, one reward per step of the sequence; None for kinds without step rewards.
    """

    reward: float
    components: FloatArray
    error: str | None = None
    steps: FloatArray | None = None


@dataclass(slots=True)
class ScoreCall:
    """The sequences of N conversations, and their scores as far as they are known.

    Attributes:
        kind: kind of reward model.
        rendered: `[N]`, the sequences of each conversation, which are added in chunks.
        sequences: `[M]`, the sequences of all conversations, in order.
        scored: scores by index of the sequence.
        tokens: sequences to run, by index of the sequence.
        render_seconds: seconds that their texts took.
    """

    kind: Kind
    rendered: list[RenderedRow] = field(default_factory=list)
    sequences: list[Rendered] = field(default_factory=list)
    scored: dict[int, ScoredSequence] = field(default_factory=dict)
    tokens: dict[int, TokenSequence] = field(default_factory=dict)
    render_seconds: float = 0.0

    def add(self, rendered: Sequence[RenderedRow], info: ModelInfo, tokenizer: Any) -> list[TokenSequence]:
        """Add conversations and return the sequences to run; one without a position to read gets an error."""
        before, first = len(self.tokens), len(self.sequences)
        self.rendered.extend(rendered)
        self.sequences.extend(each for row in rendered if not isinstance(row, ConversationError) for each in row)
        for m, sequence in enumerate(self.sequences[first:], start=first):
            try:
                check_tokens(sequence, info, tokenizer)
                positions = self.kind.read_positions(sequence)
            except ConversationError as error:
                self.scored[m] = _failed(str(error), self.kind)
            else:
                self.tokens[m] = TokenSequence(sequence.input_ids, positions, sequence.second_segment)
        return list(self.tokens.values())[before:]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(sequence.input_ids) for sequence in self.sequences)

    def reduce(self, result: RunResult) -> None:
        """Compute rewards from the values that were read, and put them into `scored`."""
        if not self.tokens:
            return
        starts = np.cumsum([0, *map(len, result.values)])
        with np.errstate(all="ignore"):  # values that are not finite have no reward, see below
            reduction = self.kind.reduce(np.concatenate(result.values), starts)
        for k, m in enumerate(self.tokens):
            reward = float(reduction.rewards[k])
            values = result.values[k]
            if k in result.failures:
                self.scored[m] = _failed(result.failures[k], self.kind)
            elif not np.isfinite(values).all():  # a reduction can hide them: the sigmoid of infinity is 1
                reason = f"the reward model returned {values[~np.isfinite(values)][0]}"
                saved = f"; its batch is saved, see {replay_command(result.saved[k])}" if k in result.saved else ""
                self.scored[m] = _failed(reason + saved, self.kind)
            elif not np.isfinite([reward, *reduction.components[k]]).all():
                self.scored[m] = _failed(f"the reward is {reward}, from values that are too large", self.kind)
            else:
                steps = None if reduction.steps is None else reduction.steps[starts[k] : starts[k + 1]]
                self.scored[m] = ScoredSequence(reward, reduction.components[k], steps=steps)

    def collect(self, *, all_turns: bool, **others: Any) -> Scores:
        """Return the `Scores` of the call. A row has the score of its last sequence, if none of them failed.

        Args:
            all_turns: whether to return `turn_rewards`.
            **others: further fields of `Scores`.
        """
        empty, names = np.empty(0), self.kind.component_names
        rows: list[ScoredSequence] = []
        turn_rewards = []
        counts = np.zeros((3, len(self.rendered)), dtype=np.int64)  # tokens, truncated tokens, dropped characters
        m = 0
        for row, sequences in enumerate(self.rendered):
            if isinstance(sequences, ConversationError):
                rows.append(_failed(RowError.of(sequences), self.kind))
                turn_rewards.append(empty)
                continue
            turns = [self.scored[m + k] for k in range(len(sequences))]
            m += len(sequences)
            last = sequences[-1]
            counts[:, row] = len(last.input_ids), last.truncated_tokens, last.dropped_characters
            turn_rewards.append(np.array([turn.reward for turn in turns]))
            reason = next((turn.error for turn in turns if turn.error is not None), None)
            rows.append(turns[-1] if reason is None else _failed(reason, self.kind))
        components = np.array([row.components for row in rows], dtype=np.float64).reshape(len(rows), len(names))
        steps = [empty if row.steps is None else row.steps.astype(np.float64) for row in rows]
        ends = [row[-1].step_ends if isinstance(row, list) else () for row in self.rendered]
        ends = [end if len(step) else () for end, step in zip(ends, steps, strict=True)]
        dropped = {"dropped_characters": np.where(counts[2] > 0, counts[2], np.array(None))} if counts[2].any() else {}
        return Scores(
            rewards=np.array([row.reward for row in rows]),
            components={name: components[:, h].copy() for h, name in enumerate(names)},
            num_tokens=counts[0],
            truncated_tokens=counts[1],
            errors=tuple(row.error for row in rows),  # type: ignore[misc]  # texts are converted
            turn_rewards=tuple(turn_rewards) if all_turns else None,
            step_rewards=tuple(steps) if any(row.steps is not None for row in rows) else None,
            step_ends=tuple(map(np.array, ends)) if any(ends) else None,
            infos=dropped,
            **others,
        )


def in_chunks(conversations: Sequence[Any], tools: Sequence[Any], characters: int) -> list[list[int]]:
    """Return rows in chunks of about so many different characters, with the replies to a prompt in one if they fit."""
    pairs = [(each[:-1], each[-1:]) if isinstance(each, list | tuple) else ((), each) for each in conversations]
    texts = [(f"{of_row}{prompt}", str(reply)) for (prompt, reply), of_row in zip(pairs, tools, strict=True)]
    chunks: dict[int, list[int]] = {}
    before, start, stop = None, 0, 0
    for row in sorted(range(len(texts)), key=texts.__getitem__):
        prompt, reply = texts[row]
        if prompt != before:
            before, start, stop = prompt, stop, stop + len(prompt)
        stop += len(reply)
        chunks.setdefault(max(start, stop - characters) // characters, []).append(row)
    return [sorted(rows) for rows in chunks.values()]


def check_tokens(rendered: Rendered, info: ModelInfo, tokenizer: Any) -> None:
    """Raise ConversationError for ids and positions outside the model's tables, which abort CUDA."""
    if info.num_positions is not None and len(rendered.input_ids) > info.num_positions:
        raise ConversationError(
            f"the conversation has {len(rendered.input_ids)} tokens, but the model has {info.num_positions} "
            "positions; do not pass a larger max_length, and pass overlong= to cut longer conversations."
        )
    token = int(rendered.input_ids.max())
    if info.num_embeddings is not None and token >= info.num_embeddings:
        raise ConversationError(
            f"the token {tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, but the model has "
            f"{info.num_embeddings} embeddings; pass the model's own tokenizer, or resize its embeddings."
        )


def _failed(reason: str, kind: Kind) -> ScoredSequence:
    components = np.full(len(kind.component_names), np.nan, dtype=np.float32)
    return ScoredSequence(float("nan"), components, reason)
