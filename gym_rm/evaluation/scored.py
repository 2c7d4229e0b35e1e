"""Comparisons with the rewards of a model, and their pairs as columns."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.data.comparisons import prompt_of
from gym_rm.data.pairs import decided_pairs
from gym_rm.data.rows import show
from gym_rm.errors import ConfigError
from gym_rm.evaluation.judges import JudgeRecord, JudgeReport, judge_report
from gym_rm.evaluation.stored_scores.store import ScoreStore, digest_of_text
from gym_rm.plain_values import to_plain
from gym_rm.scorer import Scorer, try_score
from gym_rm.types import Comparison, Provenance


@dataclass(frozen=True, slots=True)
class RowScores:
    """Rewards of the K replies of one comparison.

    Attributes:
        rewards: `[K]`, NaN where `errors` has a message.
        errors: `[K]`, None or why the reward is missing.
        truncated: number of replies of which tokens were cut.
        where: file and line of the comparison.
        judge: what the judge did for these replies; None for other scorers.
    """

    rewards: tuple[float, ...]
    errors: tuple[str | None, ...]
    truncated: int = 0
    where: str = ""
    judge: JudgeRecord | None = None

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> RowScores:
        """Return the rewards from an entry of a `ScoreStore`.

        Raises:
            ConfigError: the entry has no list of rewards.
        """
        try:
            rewards = tuple(math.nan if reward is None else float(reward) for reward in entry["rewards"])
            errors = tuple(entry.get("errors") or [None] * len(rewards))
            judge = JudgeRecord(**entry["judge"]) if "judge" in entry else None
            return cls(rewards, errors, int(entry.get("truncated", 0)), str(entry.get("where", "")), judge)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"expected scores as gym-rm evaluate writes them, got {show(entry)}: {error!r}."
            ) from error

    def as_entry(self) -> dict[str, Any]:
        """Return the rewards as an entry of a `ScoreStore`."""
        rewards = [reward if math.isfinite(reward) else None for reward in self.rewards]
        entry: dict[str, Any] = {"where": self.where, "rewards": rewards}
        if any(self.errors):
            entry["errors"] = self.errors
        entry |= {"truncated": self.truncated} if self.truncated else {}
        if self.judge is not None:
            numbers = dataclasses.asdict(self.judge).items()
            entry["judge"] = {name: value for name, value in numbers if math.isfinite(value)}
        return entry


@dataclass(frozen=True, slots=True, eq=False)
class ScoredComparisons:
    """M comparisons with the rewards of one model.

    Attributes:
        comparisons: the M comparisons.
        scores: the rewards of each.
        model: name of the model, for tables.
        provenance: how the scores were computed, or None if the scorer does not say.
    """

    comparisons: tuple[Comparison, ...]
    scores: tuple[RowScores, ...]
    model: str = "model"
    provenance: Mapping[str, Any] | None = None

    @property
    def errors(self) -> Counter[str]:
        """How often each reason of a missing reward occurs."""
        return Counter(error for row in self.scores for error in row.errors if error is not None)

    def judge(self) -> JudgeReport | None:
        """Return what the judge did; None if the scorer is no judge."""
        samples = ((self.provenance or {}).get("settings") or {}).get("samples")
        return judge_report([row.judge for row in self.scores], samples=samples)


@dataclass(frozen=True, slots=True, eq=False)
class PairTable:
    """The P pairs of replies with two finite rewards, as columns `[P]`.

    A comparison of K ranked replies has a pair for each two replies with different ranks.

    Attributes:
        margins: reward of the first (better) reply minus that of the second.
        length_differences: characters of the first reply minus those of the second.
        rows: index of the comparison.
        first: index of the better reply within its comparison.
        second: index of the other reply.
        prompts: index of the prompt, from 0 to C - 1; comparisons with the same prompt have the same index.
        num_left_out: number of pairs that lack a reward.
    """

    margins: NDArray[np.float64]
    length_differences: NDArray[np.float64]
    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    prompts: NDArray[np.int64]
    num_left_out: int


def score_comparisons(
    scorer: Scorer,
    comparisons: Sequence[Comparison],
    *,
    batch_size: int = 128,
    report: Callable[[Comparison, RowScores], None] = lambda comparison, scores: None,
) -> tuple[RowScores, ...]:
    """Score the replies of M comparisons, about `batch_size` conversations in one call; `report` gets every row.

    A reply without a score has an error and a NaN, and does not stop the others. Each comparison has a `prompt_id`
    of its own, so that a scorer that compares replies compares those of one comparison with each other.

    Raises:
        GymRMError: the scorer failed for a whole batch.
    """
    finished: list[RowScores] = []
    for batch in _batches(comparisons, batch_size):
        conversations = [conversation for each in batch for conversation in each.conversations]
        named = [(prompt_of(each, f"{each.where}#{k}"), len(each.replies)) for k, each in enumerate(batch)]
        prompts = [prompt for prompt, size in named for _ in range(size)]
        started = time.monotonic()
        scores = try_score(scorer, conversations, prompts)
        seconds = time.monotonic() - started
        start = 0
        for each in batch:
            rows = slice(start, start := start + len(each.replies))
            cut = int(np.count_nonzero(scores.truncated_tokens[rows]))
            judge = JudgeRecord.of(scores.infos, rows, seconds=seconds)
            row = RowScores(tuple(scores.rewards[rows].tolist()), scores.errors[rows], cut, each.where, judge)
            finished.append(row)
            report(each, row)
    return tuple(finished)


def missing_comparisons(store: ScoreStore, comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Return the comparisons without rewards in a store, or with a failed one, each text once."""
    by_digest = {digest_of(comparison): comparison for comparison in comparisons}
    return [
        comparison
        for digest, comparison in by_digest.items()
        if digest not in store.entries or any(store.entries[digest].get("errors") or ())
    ]


def comparisons_of(store: ScoreStore, comparisons: Sequence[Comparison]) -> ScoredComparisons:
    """Return comparisons with their rewards in a store.

    Raises:
        ConfigError: a comparison has no entry.
    """
    digests = [digest_of(comparison) for comparison in comparisons]
    if absent := [row for row, digest in enumerate(digests) if digest not in store.entries]:
        raise ConfigError(
            f"{str(store.path)!r} has no scores for {len(absent)} of {len(comparisons)} rows, the first is "
            f"{comparisons[absent[0]].where or 'unnamed'}; give --reward-model to score them, or the file that was "
            "scored."
        )
    header = store.header or {}
    rows = tuple(RowScores.from_entry(store.entries[digest]) for digest in digests)
    return ScoredComparisons(tuple(comparisons), rows, str(header.get("model", "model")), header.get("provenance"))


def pair_table(scored: ScoredComparisons) -> PairTable:
    """Return the pairs of replies with different ranks."""
    prompts: dict[str, int] = {}
    columns: list[tuple[float, float, int, int, int, int]] = []
    left_out = 0
    for row, (comparison, scores) in enumerate(zip(scored.comparisons, scored.scores, strict=True)):
        prompt = prompts.setdefault(digest(comparison.prompt), len(prompts))
        lengths = [sum(len(message.get("content") or "") for message in reply) for reply in comparison.replies]
        for first, second in decided_pairs(comparison.ranks or ()):
            margin = scores.rewards[first] - scores.rewards[second]
            if not math.isfinite(margin):
                left_out += 1
                continue
            columns.append((margin, lengths[first] - lengths[second], row, first, second, prompt))
    table = np.array(columns, dtype=np.float64).reshape(-1, 6).T
    rows, firsts, seconds, of_prompts = table[2:].astype(np.int64)
    of_prompts = np.unique(of_prompts, return_inverse=True)[1]  # without prompts that have no pair
    return PairTable(table[0], table[1], rows, firsts, seconds, of_prompts, left_out)


def model_name(provenance: Provenance | None) -> str | None:
    """Return the name of a model for tables: its folder or hub id without the path to it."""
    return None if provenance is None else Path(provenance.model.rstrip("/")).name or provenance.model


def digest_of(comparison: Comparison) -> str:
    """Return 24 hex digits of the SHA-256 of the prompt, the replies and the tools."""
    return digest([comparison.prompt, comparison.replies, *comparison.tools])


def digest(value: Any) -> str:
    """Return 24 hex digits of the SHA-256 of a JSON value."""
    return digest_of_text(json.dumps(to_plain(value), sort_keys=True).encode())


def _batches(comparisons: Sequence[Comparison], batch_size: int) -> Iterator[list[Comparison]]:
    batch: list[Comparison] = []
    size = 0
    for each in comparisons:
        batch.append(each)
        size += len(each.replies)
        if size >= batch_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
