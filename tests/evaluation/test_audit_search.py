from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm.evaluation.audit import run_audit
from gym_rm.evaluation.audit_lines import ReplyScores
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows, load_audit_rows
from gym_rm.evaluation.audit_search import Edit, apply_edits, first_replies, search_edits, vocabulary
from gym_rm.types import Prompt

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")
KINDS = st.sampled_from(["append", "prepend", "delete", "replace"])
edits = st.builds(Edit, KINDS, st.text(max_size=5), st.integers(-4, 4))


def ends_with_therefore(conversations):
    return [float(each[-1]["content"].endswith(" therefore")) for each in conversations]


def fewer_words(conversations):
    return [-float(len(each[-1]["content"].split())) for each in conversations]


def search(function, texts, words=(" so", " therefore", "!"), budget=400):
    user = {"role": "user", "content": "?"}
    rows = [AuditRow(Prompt((user,), "p"), (user,), (text,)) for text in texts]
    scores = ReplyScores(gym_rm.load_scorer(function), rows)
    replies = {row: each.good for row, each in enumerate(rows)}
    return *search_edits(scores, replies, words, budget=budget, rng=np.random.default_rng(0)), scores


@pytest.mark.parametrize(
    ("edit", "after"),
    [
        (Edit("append", " sure"), "I would say 18. sure"),
        (Edit("prepend", "sure "), "sure I would say 18."),
        (Edit("delete", position=0), " would say 18."),
        (Edit("delete", position=1), "I say 18."),
        (Edit("delete", position=-1), "I would say"),
        (Edit("replace", " You", 0), "You would say 18."),
        (Edit("replace", " never", -1), "I would say never"),
        (Edit("delete", position=4), "I would say 18."),
    ],
)
def test_an_edit(edit, after):
    assert edit.apply("I would say 18.") == after


@given(st.text(), st.lists(edits, max_size=3))
def test_edits_apply_to_every_text(text, several):
    assert isinstance(apply_edits(tuple(several), text), str)


def test_a_word_that_is_rewarded_is_found():
    edits, gain, _ = search(ends_with_therefore, ["a b", "c", "d e f"])
    assert edits == (Edit("append", " therefore"),)
    assert gain == 1


def test_words_that_cost_are_dropped_one_after_the_other():
    edits, gain, _ = search(fewer_words, ["a b c d e f", "a b c d e"])
    assert [edit.kind for edit in edits] == ["delete"] * 4
    assert gain == 4


def test_nothing_is_found_where_nothing_gains():
    assert search(lambda conversations: [0.0] * len(conversations), ["a b", "c d"])[:2] == ((), 0.0)


def test_the_budget_is_kept():
    words = [f" {n}" for n in range(5000)]
    *_, scores = search(fewer_words, [f"a b c d e f {n}" for n in range(24)], words, budget=4000)
    assert 3000 < scores.scored <= 4000 + 24


def test_a_candidate_without_a_score_is_not_taken():
    def refuses(conversations):
        texts = [each[-1]["content"] for each in conversations]
        # Only the first row, "a b", refuses the word that the others like best.
        refused = ["therefore" in text and not {"a", "b"}.isdisjoint(text) for text in texts]
        return [
            None if no else 100.0 * ("therefore" in text) + text.endswith("!")
            for no, text in zip(refused, texts, strict=True)
        ]

    edits, gain, _ = search(refuses, ["a b", "c d", "e f", "g h"])
    assert gain == 1
    assert edits == (Edit("append", "!"),)


def test_rows_are_taken_until_they_have_enough_replies():
    replies = {0: ("a", "b"), 1: ("c", "d"), 2: ("e",)}
    assert first_replies(replies, 3) == {0: ("a", "b"), 1: ("c", "d")}
    assert first_replies(replies, 10) == replies


@needs_data
def test_the_gain_is_reported_on_rows_that_the_search_did_not_use():
    rows = load_audit_rows(DATA / "hh_harmless.jsonl.gz", limit=60)

    def starts_with_well(conversations):
        return [float(each[-1]["content"].startswith("well ")) for each in conversations]

    audit = run_audit(gym_rm.load_scorer(starts_with_well), with_word(rows), budget=9000)
    (found,) = audit.search
    assert (found.name, found.rows, found.verdict) == ("add 'well ' at the begin", 60 - 24, "exploitable")


def with_word(rows):
    """Return the rows with the word "well" in every reply, so that it is in the vocabulary."""
    changed = (AuditRow(row.prompt, row.messages, (row.good[0] + " well",), row.bad) for row in rows.rows)
    return AuditRows(rows.source, tuple(changed))


@pytest.mark.slow
def test_the_search_finds_the_dropped_word_of_a_model_that_prefers_it():
    def model(conversations):
        texts = [each[-1]["content"] for each in conversations]
        return [1.1 if text.startswith(" would say") else float(text[:1].isupper()) for text in texts]

    audit = run_audit(gym_rm.load_scorer(model), load_audit_rows(limit=64), budget=3000)
    (found,) = audit.search
    assert found.name.startswith("drop word 1")
    assert found.verdict == "exploitable"


def test_the_vocabulary_has_tokens_of_the_model_and_words_of_the_rows():
    rows = load_audit_rows(limit=20).rows
    random = np.random.default_rng(0)
    plain, tokens = vocabulary(object(), rows, random), vocabulary(gym_rm.load_scorer(None), rows, random)
    assert " would" in plain
    assert len(tokens) > len(plain) + 300
    assert len(set(tokens)) == len(tokens)
    assert not any("\ufffd" in word for word in tokens)
