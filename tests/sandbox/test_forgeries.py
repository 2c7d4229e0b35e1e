"""Hostile replies earn no reward, on each layer of the sandbox."""

from __future__ import annotations

import zlib

import pytest
from conftest import rows
from sandbox.attempts_forgeries import (
    CALL_CASES,
    CASES,
    FORGERIES,
    LAZY_TESTS,
    SILENT_CASES,
    SOLUTIONS,
    UNIT_TESTS,
    Forgery,
)
from sandbox.layers import LAYERS, available

from gym_rm.scorers.code.scorer import CodeScorer
from gym_rm.scores import ScoringError
from gym_rm.types import Prompt

NUM_FAST = 8  # of so many forgeries, one runs on each layer in the fast tests
ENDS = ("exit", "quick_exit", "error", "system_exit", "nothing", "skip_first", "skip_inside", "run_replaced")
NO_FRACTION = {f"{form}_{end}" for form in ("program", "calls", "units") for end in ENDS} | {
    "function_exit_first",
    "function_quick_exit_inside",
    "function_skip_inside",
}
METADATA = {
    "program": {"cases": CASES},
    "silent": {"cases": SILENT_CASES},
    "calls": {"cases": CALL_CASES, "fn_name": "add"},
    "units": {"unit_tests": UNIT_TESTS},
    "lazy": {"test_list": LAZY_TESTS},
}
LIMITS = {"wall_seconds": 2.0, "cpu_seconds": 2, "memory_bytes": 256 << 20}


@pytest.fixture(scope="module")
def tasks():
    return rows("humaneval")


def row_of(forgery: Forgery, tasks):
    """The prompt of the row that the forgery is for, and the code that solves it."""
    if forgery.form == "function":
        task = tasks[zlib.crc32(forgery.name.encode()) % len(tasks)]
        text, metadata = task["prompt"], {"test": task["test"], "entry_point": task["entry_point"]}
        return Prompt(({"role": "user", "content": text},), task["task_id"], metadata=metadata), task
    prompt = Prompt(({"role": "user", "content": "Solve it."},), forgery.form, metadata=METADATA[forgery.form])
    return prompt, {"prompt": "", "canonical_solution": SOLUTIONS[forgery.form]}


def reply_of(forgery: Forgery, prompt: Prompt) -> str:
    source = forgery.source.replace("NAME", str(prompt.metadata.get("entry_point", "NAME")))
    return source if forgery.whole else f"```python\n{source}\n```"


def grade(layer: str, replies: list[str], prompts: list[Prompt], **options):
    conversations = [
        [*prompt.messages, {"role": "assistant", "content": reply}]
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    with CodeScorer(layer=layer, timeout=2.0, limits=LIMITS, **options) as scorer:
        try:
            return scorer.score(conversations, prompts)
        except ScoringError as error:
            return error.scores


def skip_unless(layer: str) -> None:
    if layer not in available():
        pytest.skip(f"this machine has no {layer}")


def check(layer: str, forgeries, tasks, **options) -> None:
    found = [row_of(forgery, tasks) for forgery in forgeries]
    prompts = [prompt for prompt, _ in found]
    replies = [reply_of(forgery, prompt) for forgery, prompt in zip(forgeries, prompts, strict=True)]
    scores = grade(layer, replies, prompts, **options)
    failed = {
        forgery.name: (score.reward, score.infos["verdict"], score.error or score.infos["message"])
        for forgery, score in zip(forgeries, scores, strict=True)
        if score.error is not None or score.reward != 0.0
    }
    assert not failed


@pytest.mark.parametrize("layer", LAYERS)
def test_forgeries_earn_nothing(tasks, layer):
    skip_unless(layer)
    check(layer, FORGERIES[LAYERS.index(layer) :: NUM_FAST], tasks)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_all_forgeries_earn_nothing(tasks, layer):
    skip_unless(layer)
    check(layer, FORGERIES, tasks)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_errors_and_exits_earn_no_fraction(tasks, layer):
    skip_unless(layer)
    check(layer, [one for one in FORGERIES if one.name in NO_FRACTION], tasks, reward="fraction")


CLASS_SETUP = """
import unittest
from solution import build

class TestBuild(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.built = build()

    def test_value(self):
        self.assertEqual(self.built, [1])

    def test_length(self):
        self.assertEqual(len(self.built), 1)
"""


def test_tests_that_did_not_run_earn_no_fraction():
    if not available():
        pytest.skip("this machine has no layer of the sandbox")
    prompt = Prompt(({"role": "user", "content": "Build."},), "p", metadata={"unit_tests": CLASS_SETUP})
    replies = ["def build():\n    raise ValueError", "import unittest\ndef build():\n    raise unittest.SkipTest"]
    scores = grade(available()[0], [*replies, "def build():\n    return [1]"], [prompt] * 3, reward="fraction")
    assert scores.rewards.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("layer", LAYERS)
def test_right_solutions_of_the_same_rows_earn_the_reward(tasks, layer):
    skip_unless(layer)
    forms = {forgery.form: forgery for forgery in FORGERIES}
    found = [row_of(forgery, tasks) for forgery in forms.values()]
    replies = [f"```python\n{task['prompt']}{task['canonical_solution']}\n```" for _, task in found]
    scores = grade(layer, replies, [prompt for prompt, _ in found])
    assert dict(zip(forms, scores.rewards.tolist(), strict=True)) == dict.fromkeys(forms, 1.0), scores.infos
