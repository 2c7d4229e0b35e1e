"""What crosses between the model's code and its tests: plain data, and nothing that decides."""

from __future__ import annotations

import pytest
from scorers.code.forging_replies import ROWS, forgeries
from scorers.code.honest_rows import RIGHT
from scorers.code.wrong_rows import NEEDS_OBJECTS, WRONG

from gym_rm.scorer import try_score
from gym_rm.scorers.code.scorer import CodeScorer
from gym_rm.types import Prompt

HEAD = "import asyncio, contextlib, io, unittest\nfrom solution import {}\n\ndef test_it():\n    {}\n"


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


def unit_rows(table):
    return {
        name: ({"unit_tests": HEAD.format(imports, body.replace("\n", "\n    "))}, code)
        for name, (imports, code, body, *_) in table.items()
    }


def test_right_solutions_pass(scorer):
    scores = scores_of(scorer, unit_rows(RIGHT))
    assert {name: s.error or s.infos["message"] for name, s in scores.items() if s.reward != 1.0} == {}


def test_wrong_solutions_fail(scorer):
    scores = scores_of(scorer, unit_rows(WRONG))
    assert {name: s.error for name, s in scores.items() if s.error is not None or s.reward != 0.0} == {}


def test_rows_that_need_more_than_data_are_errors(scorer):
    scores = scores_of(scorer, unit_rows(NEEDS_OBJECTS))
    assert {name: s.error for name, s in scores.items() if NEEDS_OBJECTS[name][3] not in str(s.error)} == {}


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_forging_replies_earn_nothing_and_make_no_error(step):
    rows = {(name, form): (ROWS[form], code) for name, code in forgeries().items() for form in ROWS}
    rows = {name: rows[name] for name in list(rows)[::step]}
    with CodeScorer(allow_unsafe=True, timeout=1.5, num_workers=2, reward="fraction") as opened:
        scores = scores_of(opened, rows)
    assert {name: s.error or s.reward for name, s in scores.items() if s.error is not None or s.reward != 0.0} == {}
