"""The work of one simulated step: lengths, the batches of each pool, and what is finished of a batch."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from gym_rm.planning.simulation.batches import Batch, Batches, FloatArray
from gym_rm.planning.simulation.records import Generation, Scoring, Simulation, Stragglers
from gym_rm.planning.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class StepLengths:
    """Tokens of the conversations of one step: of the prompt and the reply of each, in the order of the groups."""

    prompts: FloatArray
    replies: FloatArray
    group_size: int

    @property
    def unique(self) -> FloatArray:
        """Tokens of each conversation, where a prompt counts for the first of its group."""
        result = self.replies.copy()
        result[:: self.group_size] += self.prompts[:: self.group_size]
        return result


def lengths_of(simulation: Simulation, step: int) -> StepLengths:
    """Draw the lengths of a step; a step that is done again has the same."""
    random = np.random.default_rng([simulation.seed, 2, step])
    count, size = simulation.conversations_per_step, simulation.group_size
    prompts = draw(simulation.prompts, -(-count // size), random)
    return StepLengths(np.repeat(prompts, size)[:count], draw(simulation.replies, count, random), size)


def generation_batches(work: Generation, lengths: StepLengths, num_replicas: int, factors: FloatArray) -> Batches:
    """Divide the conversations of a step equally; each replica gets one batch."""
    count = len(lengths.replies)
    cuts = np.linspace(0, count, min(num_replicas, count) + 1).astype(int)
    starts = cuts[:-1]
    replies = lengths.replies
    if np.diff(cuts).max() <= work.max_num_seqs:
        rounds = np.maximum.reduceat(replies, starts)
    else:
        rounds = np.array([last_rounds(replies[a:b], work.max_num_seqs).max() for a, b in itertools.pairwise(cuts)])
    seconds = factors[: len(starts)] * (
        work.prompt_seconds * np.add.reduceat(lengths.prompts, starts)
        + work.round_seconds * rounds
        + work.token_seconds * np.add.reduceat(replies, starts)
        + work.context_seconds * np.add.reduceat(replies * (lengths.prompts + replies / 2), starts)
    )
    return Batches(cuts, seconds, lambda rows, total: Replies(work, lengths, rows, total))


@dataclass(frozen=True, slots=True)
class Replies:
    """Which replies of a batch are finished when; see `Progress`.

    Seconds besides those of the rounds are spread equally over the tokens.
    """

    work: Generation
    lengths: StepLengths
    rows: range | list[int]
    seconds: float

    def split(self, seconds: float) -> tuple[list[int], Batch | None, float]:
        """See `Progress.split`."""
        rows = np.asarray(self.rows)
        replies = self.lengths.replies[rows]
        ends = last_rounds(replies, self.work.max_num_seqs)
        last, tokens = float(ends.max()), float(replies.sum())
        share = min(1.0, self.work.round_seconds * last / self.seconds) if self.seconds else 1.0

        def made(rounds: float) -> float:
            return float(np.clip(rounds - (ends - replies), 0.0, replies).sum())

        def progress(rounds: float) -> float:
            return share * rounds / last + (1 - share) * made(rounds) / tokens

        low, high = 0.0, last
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if progress(middle) * self.seconds <= seconds else (low, middle)
        finished = ends <= low
        if finished.all() or not last:
            return rows.tolist(), None, 1.0
        useful = float(replies[finished].sum()) / max(made(low), 1e-9)
        left = rows[~finished].tolist()
        rest = self.seconds * (
            share * float(last_rounds(replies[~finished], self.work.max_num_seqs).max()) / last
            + (1 - share) * float(replies[~finished].sum()) / tokens
        )
        return rows[finished].tolist(), Batch(left, rest, Replies(self.work, self.lengths, left, rest)), useful


def scoring_batches(
    work: Scoring, lengths: StepLengths, num_replicas: int, stragglers: Stragglers, random: np.random.Generator
) -> Batches:
    """Divide the tokens of a step into equal batches within the budget, as many for each replica."""
    ends = np.cumsum(lengths.unique)
    total = float(ends[-1])
    count = num_replicas * max(1, int(np.ceil(total / (work.max_num_batched_tokens * num_replicas))))
    cuts = np.searchsorted(ends, total * np.arange(1, count) / count, side="left") + 1
    cuts = np.unique(np.concatenate([[0], np.minimum(cuts, len(ends)), [len(ends)]]))
    tokens = np.diff(np.concatenate([[0.0], ends])[cuts])
    seconds = slowness(stragglers, len(tokens), random) * (work.batch_seconds + work.token_seconds * tokens)
    return Batches(cuts, seconds)


def slowness(stragglers: Stragglers, count: int, random: np.random.Generator) -> FloatArray:
    """Return a factor for each batch, with mean 1."""
    spread = stragglers.spread
    return np.exp(spread * random.standard_normal(count) - spread**2 / 2)


def draw(lengths: Lengths, count: int, random: np.random.Generator) -> FloatArray:
    """Return so many lengths, by the quantile function of the distribution."""
    values = np.asarray(lengths.values, dtype=np.float64)
    places = random.random(count) * len(values) - 0.5
    return np.interp(places, np.arange(len(values)), values)


def last_rounds(lengths: FloatArray, slots: int) -> FloatArray:
    """Return the round in which each reply ends, if so many run at a time and the next begins when one ends."""
    if len(lengths) <= slots:
        return lengths
    ends = sorted(lengths[:slots].tolist())
    result = lengths.copy()
    for i, length in enumerate(lengths[slots:].tolist(), slots):
        result[i] = ends[0] + length
        heapq.heapreplace(ends, ends[0] + length)
    return result
