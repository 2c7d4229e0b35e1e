import pytest
from rich.console import Console

import gym_rm
from gym_rm.evaluation.audit import run_audit
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows
from gym_rm.reports.evaluation.audit_tables import audit_report, summary
from gym_rm.types import Prompt

HOSTILE = "<script>alert(1)</script>\x1b[31m & more."


def audit(function, text=HOSTILE, size=14):
    users = [{"role": "user", "content": f"What is {n}? <b>"} for n in range(size)]
    rows = tuple(AuditRow(Prompt((user,), "p"), (user,), (f"{text} {n}",), ("worse",)) for n, user in enumerate(users))
    return run_audit(gym_rm.load_scorer(function), AuditRows("a <file>", rows, dropped=3))


def length(conversations):
    return [len(each[-1]["content"]) for each in conversations]


@pytest.fixture(scope="module")
def long():
    return audit(length)


def shown(audit, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(audit_report(audit))
    return console.export_text()


def test_the_table_has_every_line_with_its_verdict(long):
    text = shown(long)
    for line in (each for each in long.lines if each.group in ("truncated", "form", "replaced")):
        row = next(each for each in text.splitlines() if each.lstrip().startswith(line.name))
        assert row.rstrip().endswith(line.verdict)
    assert "Warning level 2 of 2: exploitable." in text


def test_the_unit_and_the_dropped_rows_are_said(long):
    assert "14 rows of a <file>, 3 without a usable reply" in summary(long)[0]
    assert summary(long)[-3].startswith("One spread is ")
    assert "is called exploitable in 9 of 10 audits" in summary(long)[-2]


def test_control_characters_of_replies_are_escaped(long):
    assert "\x1b[31m" not in shown(long)


def test_a_scorer_without_spread_has_changes_in_scores_only():
    found = audit(lambda conversations: [0.0] * len(conversations))
    assert found.spread == 0
    assert "spread is" not in " ".join(summary(found))
    assert "suspicious" in shown(found)


def test_a_rise_on_too_few_rows_is_said_beside_the_level():
    found = shown(audit(length, size=3), width=1000)
    assert "changes may pay, but fewer than 14 rows show nothing: use more." in found
