"""What crosses between the model's code and its tests: plain data, and nothing that decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scorers.code.forging_replies import ROWS, forgeries

from gym_rm.scorer import try_score
from gym_rm.scorers.code.scorer import CodeScorer
from gym_rm.types import Prompt

HEAD = "import asyncio, contextlib, io, unittest\n{}\n\ndef test_it():\n    {}\n"
TABLE = Path(__file__).with_name("plain_data_rows.jsonl")


@pytest.fixture(scope="module")
def scorer():
    with CodeScorer(allow_unsafe=True, timeout=4.0, num_workers=2) as opened:
        yield opened


def scores_of(scorer, rows):
    """Score rows of metadata and code, and return each score by its name."""
    question = {"role": "user", "content": "?"}
    prompts = [Prompt((question,), "p", metadata=metadata) for metadata, _ in rows.values()]
    replies = [{"role": "assistant", "content": f"```python\n{code}\n```"} for _, code in rows.values()]
    return dict(zip(rows, try_score(scorer, [[question, reply] for reply in replies], prompts), strict=True))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_rows_pass_fail_or_are_errors_as_the_table_says(scorer, step):
    """Each row has imports, the body of a test, code, and "right", "wrong" or a part of the error of the row."""
    table = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()][::step]
    bodies = [HEAD.format(row["imports"], row["body"].replace("\n", "\n    ")) for row in table]
    given = {row["name"]: ({"unit_tests": body}, row["code"]) for row, body in zip(table, bodies, strict=True)}
    found = scores_of(scorer, given)
    wrong = {
        row["name"]: found[row["name"]] for row in table if not is_as_expected(found[row["name"]], row["expected"])
    }
    assert len(table) > 120 // step
    assert wrong == {}


def is_as_expected(score, expected):
    if expected.startswith("error: "):
        return expected.removeprefix("error: ") in str(score.error)
    return score.error is None and score.reward == float(expected == "right")


@pytest.mark.parametrize("step", [37, pytest.param(3, marks=pytest.mark.slow)])
def test_forging_replies_earn_nothing_and_make_no_error(step):
    """With a step of 3, each reply meets two or three of the eight forms of tests."""
    rows = {(name, form): (ROWS[form], code) for name, code in forgeries().items() for form in ROWS}
    rows = {name: rows[name] for name in list(rows)[::step]}
    with CodeScorer(allow_unsafe=True, timeout=1.5, num_workers=2, reward="fraction") as opened:
        scores = scores_of(opened, rows)
    assert {name: s.error or s.reward for name, s in scores.items() if s.error is not None or s.reward != 0.0} == {}
