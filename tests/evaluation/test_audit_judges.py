"""Audits of judges: few rows, and beside the good reply for those that compare."""

import re

import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation import audit as audits
from gym_rm.evaluation.audit import JUDGE_ROWS, ROWS, default_rows, run_audit
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows
from gym_rm.evaluation.perturbations import CHANGES
from gym_rm.types import Prompt
from tests.evaluation.test_audit import line
from tests.scorers.judge.test_scorer import Judge, by_length

COMPARING = {"mode": "pairwise", "comparisons": "all_pairs"}
GRADING = {"scale": (0, 1e6)}
FEW = tuple(each for k, each in enumerate(CHANGES) if each.every or each.expected == "lower" or not k % 20)


@pytest.fixture(autouse=True)
def few_changes(monkeypatch):
    """All of them take seconds of a scripted judge."""
    monkeypatch.setattr(audits, "CHANGES", FEW)


def made_up(size, *, good=1):
    users = [{"role": "user", "content": f"What is {n}?"} for n in range(size)]
    replies = ("It is {}. Yes.", "That is {}. Yes.", "I say {}. Yes.")
    return AuditRows(
        "made up",
        tuple(
            AuditRow(Prompt((user,), "p"), (user,), tuple(each.format(n) for each in replies[:good]), ("No.",))
            for n, user in enumerate(users)
        ),
    )


def audit(answer, rows, **options):
    """Return the audit of a scripted judge, and its model."""
    model = answer if hasattr(answer, "reply") else Judge(answer)
    judge = gym_rm.load_scorer({"kind": "judge", "model": model, **options})
    return run_audit(judge, rows), model


# --- comparing ---------------------------------------------------------------------------------------------------


def test_a_comparing_judge_that_likes_long_replies_is_exploitable():
    found, _ = audit(by_length, made_up(14), **COMPARING)
    assert found.level == 2
    for name in ("filler sentences, 20", "whole reply 5 times"):
        assert (line(found, name).verdict, line(found, name).mean.value) == ("exploitable", 1.0)
    for name in ("second half dropped", "empty reply", "worse reply of the row"):
        assert (line(found, name).verdict, line(found, name).mean.value) == ("ok", -1.0)
    assert line(found, "lower case").mean.value == 0.0
    assert (found.compares, found.margin_mean, found.spread) == (True, 1.0, 1.0)


def test_a_comparing_judge_that_knows_the_good_reply_is_clean():
    def answer(replies, mark, _):
        good = [re.fullmatch(r"It is \d+\. Yes\.", reply) is not None for reply in replies]
        return f"Verdict {mark}: {'tie' if good[0] == good[1] else 'A' if good[0] else 'B'}"

    found, _ = audit(answer, made_up(14), **COMPARING)
    assert [each.name for each in found.lines if each.mean.value > 0] == []
    assert line(found, "reply of another row").verdict == "suspicious"  # it does not read the question
    assert line(found, "another language").verdict == "ok"


def test_the_first_good_reply_is_the_one_that_is_changed():
    found, model = audit(by_length, made_up(14, good=3), **COMPARING)
    assert found.num_rows == 14
    shown = repr(model.conversations)
    assert "It is 3. Yes." in shown
    assert "That is 3. Yes." not in shown


def test_a_judge_without_any_verdict_is_no_clean_judge():
    """It does not see thinking, so the reply with some is equal to the one without."""
    with pytest.raises(ConfigError, match=r"\d+ of \d+ changes have no score"):
        audit(lambda replies, mark, _: "I cannot say.", made_up(14), max_retries=0, **COMPARING)


def test_replies_that_are_refused_are_counted_in_their_line():
    def answer(replies, mark, _):
        return "No comment." if "" in replies else by_length(replies, mark, _)

    found, _ = audit(answer, made_up(14), max_retries=0, **COMPARING)
    assert (line(found, "empty reply").failed, line(found, "empty reply").verdict) == (14, "not judged")


def test_an_audit_of_a_judge_has_few_rows_unless_the_user_says_how_many():
    assert default_rows(gym_rm.load_scorer({"kind": "judge", "model": Judge(by_length), **GRADING})) == JUDGE_ROWS
    assert default_rows(gym_rm.load_scorer(lambda chats: [0.0] * len(chats))) == ROWS
    found, _ = audit(by_length, made_up(JUDGE_ROWS), **GRADING)
    assert found.level == 2
