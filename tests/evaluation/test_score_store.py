"""Scores of rows: failures of a scorer, batches, and files that repeat or continue an evaluation."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.evaluation.scored import (
    RowScores,
    comparisons_of,
    digest_of,
    missing_comparisons,
    score_comparisons,
)
from gym_rm.evaluation.stored_scores.store import ScoreStore
from tests.cli.command import LengthScorer
from tests.evaluation.comparisons import comparison

ROWS = [comparison(["ok", "bad"], (0, 1), prompt="a"), comparison(["one", "three", "nine"], (0, 1, 2), prompt="b")]


def test_a_reply_without_a_score_has_its_reason():
    first, second = score_comparisons(LengthScorer(), ROWS)
    assert first.errors == (None, "it is bad")
    assert math.isnan(first.rewards[1])
    assert second.rewards == pytest.approx((0.3, 0.5, 0.4))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_batches_do_not_split_a_comparison_or_change_a_score(batch_size):
    scorer, seen = LengthScorer(), []
    found = score_comparisons(scorer, ROWS * 3, batch_size=batch_size, report=lambda row, scores: seen.append(scores))
    assert sum(scorer.calls) == 15
    assert (
        list(map(repr, found)) == list(map(repr, score_comparisons(LengthScorer(), ROWS * 3))) == list(map(repr, seen))
    )


def test_a_verifier_gets_the_answer_of_the_row():
    class Verifier(LengthScorer):
        def score(self, conversations, prompts=None, turns="last"):
            assert [prompt.answer for prompt in prompts] == ["7", "7"]
            return super().score(conversations, prompts, turns)

    row = dataclasses.replace(comparison(["ok", "no"], (0, 1)), metadata={"answer": 7})
    score_comparisons(Verifier(), [row])


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)), min_size=3, max_size=3))
def test_a_file_gives_back_the_rewards_exactly(tmp_path_factory, rewards):
    path = tmp_path_factory.mktemp("scores") / "deep" / "scores.jsonl"
    errors = tuple("it \ud800 failed\n" if value is None else None for value in rewards)
    row = RowScores(tuple(math.nan if value is None else value for value in rewards), errors, 2, "x line 3")
    store = ScoreStore(path)
    store.start({"model": "m", "provenance": {"model": "m"}})
    store.add({digest_of(ROWS[1]): row.as_entry()})
    store.close()
    scored = comparisons_of(ScoreStore.read(path), [ROWS[1]])
    assert (scored.model, scored.provenance, repr(scored.scores)) == ("m", {"model": "m"}, repr((row,)))


@pytest.fixture
def filled(tmp_path):
    """Path of a store with the scores of `ROWS`, the first of which failed."""
    store = ScoreStore(tmp_path / "scores.jsonl")
    store.start({"model": "m"})
    scores = score_comparisons(LengthScorer(), ROWS)
    store.add({digest_of(row): each.as_entry() for row, each in zip(ROWS, scores, strict=True)})
    store.close()
    return store.path


def test_rows_are_found_by_their_texts_in_any_order(filled):
    moved = [dataclasses.replace(row, where="elsewhere", source="new") for row in reversed(ROWS)]
    assert comparisons_of(ScoreStore.read(filled), moved).scores[0].rewards == pytest.approx((0.3, 0.5, 0.4))


def test_a_row_without_scores_is_named(filled):
    store = ScoreStore.read(filled)
    store.entries.clear()
    with pytest.raises(ConfigError, match=r"no scores for 2 of 2 rows, the first is a row; give --reward-model"):
        comparisons_of(store, ROWS)


def test_rows_that_failed_are_missing(filled):
    assert missing_comparisons(ScoreStore.read(filled), ROWS * 2) == ROWS[:1]


def test_an_incomplete_last_line_is_missing_and_removed_by_the_next_run(filled):
    filled.write_bytes(filled.read_bytes()[:-9])
    store = ScoreStore(filled)
    assert missing_comparisons(store, ROWS) == ROWS
    store.lock()
    store.add({"d": {"rewards": [1.0]}})
    store.close()
    assert [*ScoreStore.read(filled).entries] == [digest_of(ROWS[0]), "d"]


def test_a_store_that_another_process_writes_is_an_error(filled):
    store = ScoreStore(filled)
    store.lock()
    with pytest.raises(ConfigError, match="another process is writing"):
        ScoreStore(filled).lock()
    store.close()
    ScoreStore(filled).lock()


@pytest.mark.parametrize("line", ["{", "[]", '{"rewards": [1]}'])
def test_a_line_of_another_file_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "scores.jsonl"
    path.write_text(json.dumps({"model": "m", "provenance": None}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 2 is not a line of scores"):
        ScoreStore.read(path)


@pytest.mark.parametrize("entry", [{}, {"rewards": ["high"]}, {"rewards": 1}])
def test_an_entry_without_rewards_is_an_error(entry):
    with pytest.raises(ConfigError, match="expected scores as gym-rm evaluate writes them"):
        RowScores.from_entry(entry)


def test_a_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the scores"):
        ScoreStore.read(tmp_path / "none.jsonl")
