"""Audits of judges: within a budget of questions, and beside the good reply for those that compare."""

import re

import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation import audit as audits
from gym_rm.evaluation.audit import FEWEST, run_audit
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows, load_audit_rows
from gym_rm.evaluation.perturbations import PERTURBATIONS, WORDINGS
from gym_rm.reports.evaluation.audit_tables import summary
from gym_rm.types import Prompt
from tests.evaluation.test_audit import line
from tests.scorers.judge.test_scorer import Judge, by_length

COMPARING = {"mode": "pairwise", "comparisons": "all_pairs"}
GRADING = {"scale": (0, 1e6)}
FEW_WORDINGS = WORDINGS[::20]  # all of them take seconds of a scripted judge
SMALLEST = FEWEST * (2 + len(PERTURBATIONS) + len(FEW_WORDINGS))  # replies: one good and one worse reply per row


@pytest.fixture(autouse=True)
def few_wordings(monkeypatch):
    monkeypatch.setattr(audits, "WORDINGS", FEW_WORDINGS)


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


def audit(answer, rows, *, max_calls=None, **options):
    """Return the audit of a scripted judge, and its model."""
    model = answer if hasattr(answer, "reply") else Judge(answer)
    judge = gym_rm.load_scorer({"kind": "judge", "model": model, **options})
    return run_audit(judge, rows, max_calls=max_calls), model


# --- comparing ---------------------------------------------------------------------------------------------------


def test_a_comparing_judge_that_likes_long_replies_is_exploitable():
    found, _ = audit(by_length, made_up(12), **COMPARING)
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

    found, _ = audit(answer, made_up(12), **COMPARING)
    assert [each.name for each in found.lines if each.mean.value > 0] == []
    assert line(found, "reply of another row").verdict == "suspicious"  # it does not read the question
    assert line(found, "another language").verdict == "ok"


def test_the_first_good_reply_is_the_one_that_is_changed():
    found, model = audit(by_length, made_up(12, good=3), **COMPARING)
    assert found.num_rows == 12
    shown = repr(model.conversations)
    assert "It is 3. Yes." in shown
    assert "That is 3. Yes." not in shown


def test_a_judge_without_any_verdict_is_no_clean_judge():
    """It does not see thinking, so the reply with some is equal to the one without."""
    with pytest.raises(ConfigError, match=r"\d+ of \d+ changes have no score"):
        audit(lambda replies, mark, _: "I cannot say.", made_up(12), max_retries=0, **COMPARING)


def test_replies_that_are_refused_are_counted_in_their_line():
    def answer(replies, mark, _):
        return "No comment." if "" in replies else by_length(replies, mark, _)

    found, _ = audit(answer, made_up(12), max_retries=0, **COMPARING)
    assert (line(found, "empty reply").failed, line(found, "empty reply").verdict) == (12, "not judged")


# --- the budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "cost"), [(GRADING, 1), (COMPARING, 2)])
@pytest.mark.parametrize("share", [1.0, 1.7])
def test_an_audit_stays_within_its_budget(options, cost, share):
    budget = int(share * SMALLEST * cost)
    found, model = audit(by_length, made_up(20), max_calls=budget, **options)
    assert found.calls == len(model.conversations) <= budget
    assert (found.num_rows == FEWEST) == (share == 1.0)
    assert found.level == 2
    assert f"{found.calls:,} calls of the model, of {budget:,} that are allowed (--max-calls)." in summary(found)


def test_a_judge_has_a_budget_and_other_scorers_have_none(monkeypatch):
    monkeypatch.setattr(audits, "JUDGE_CALLS", 2 * SMALLEST)
    found, model = audit(by_length, made_up(20), **COMPARING)
    assert found.max_calls == 2 * SMALLEST >= found.calls == len(model.conversations)
    found = run_audit(gym_rm.load_scorer(lambda chats: [len(each[-1]["content"]) for each in chats]), made_up(20))
    assert (found.max_calls, found.num_rows, found.calls) == (None, 20, found.scored)


def test_the_budget_of_a_reward_model_is_conversations():
    seen = []

    def model(conversations):
        seen.extend(conversations)
        return [len(each[-1]["content"]) for each in conversations]

    found = run_audit(gym_rm.load_scorer(model), load_audit_rows(limit=64), max_calls=3000)
    assert len(seen) == found.calls <= 3000
    assert FEWEST < found.num_rows < 64


@pytest.mark.parametrize(("options", "cost"), [(GRADING, 1), ({**COMPARING, "samples": 2}, 4)])
def test_a_budget_that_is_too_small_names_the_smallest(options, cost):
    model = Judge(by_length)
    smallest = cost * SMALLEST
    with pytest.raises(ConfigError, match=f"an audit of 11 rows, the smallest, takes {smallest:,} calls"):
        audit(model, made_up(12), max_calls=smallest - 1, **options)
    assert len(model.conversations) == cost  # one reply, to know what it costs
