"""Which code of a reply is graded, and which tests a data row has."""

import json

import numpy as np
import pytest
from scorers.code.solutions import SOLUTIONS

from gym_rm.data.prompts import load_prompts
from gym_rm.engine.text.thinking import Thinking
from gym_rm.scorers.code.replies import extract_code, indented
from gym_rm.scorers.code.row_tests import TestsError, read_tests, solution_parts
from gym_rm.types import Prompt

STUB = 'def double(x):\n    """Return 2 * x."""\n'


def prompt(text="?", **metadata):
    return Prompt(({"role": "user", "content": text},), "p", metadata=metadata)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Text\n```py\nx = 1\n```\nmore", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nfirst\n```\nthen\n```python\nlast\n```", "last\n"),
        ("```python\nx\n```\nprints\n```text\n3\n```", "x\n"),
        ("~~~~\nx = '''\n```\n'''\n~~~~", "x = '''\n```\n'''\n"),
        ("see <code>x = 1</code> there", "x = 1"),
        ("<code>\n```python\nx = 1\n```\n</code>", "x = 1\n"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
        ("<think>\n```python\nprint('</think>')\n```\n</think>\n```python\nyes\n```", "yes\n"),
        ("thoughts\n```python\nno\n</think>\n```python\nyes\n```", "yes\n"),
        ("<think>a ```python\nno\n</think>\n```python\nyes\n```", "yes\n"),
        ("```python\nx = '</think>'\n```\n", "x = '</think>'\n"),
        ("```python\nx = '<think>'\ny = '<code>'\n```\n", "x = '<think>'\ny = '<code>'\n"),
        ("<code>x = '</code><code>'</code> as `<code>`", "x = '</code><code>'"),
        ("1. First:\n\n   ```python\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("- a\n  - b\n\n        ```python\n        x\n        ```\n", "x\n"),
        ("> ```python\n> x\n> ```\n", "x\n"),
        ("Use `<code>`:\n````{python}\nx = 2\n```\n````", "x = 2\n```\n"),
        ("x = 1", "x = 1"),
        ("    return x\n", "    return x"),
        ("```bash\nls\n```", None),
        ("<think>```python\nx\n```", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_is_graded(reply, code):
    _, answer = Thinking().split({"content": reply})
    assert extract_code(reply if answer == reply.strip() else answer or "") == code


def test_of_several_blocks_the_last_with_the_function_is_graded():
    reply = "```python\ndef f(x):\n    return x\n```\nIn use:\n```python\nprint(f(1))\n```"
    assert extract_code(reply, names=["f"]) == "def f(x):\n    return x\n"
    assert extract_code(reply, names=["g"]) == extract_code(reply) == "print(f(1))\n"
    assert extract_code("```python\nclass Solution:\n    def f(self): pass\n```\n```\n3\n```", names=["f"])[:5] == "class"


@pytest.mark.parametrize(
    "body",
    [
        "    y = x\n    if y:\n        y += x\n    return y",
        "y = x\nif y:\n    y += x\nreturn y",
        "y = x\n    if y:\n        y += x\n    return y",
        "if x:\n        x += x\n    return x",
        "for y in [x]:\n    x += y\nreturn x",
        "return x + x",
    ],
)
def test_a_body_is_indented_whatever_it_lost(body):
    names = {}
    exec(f"{STUB}{indented(body)}", names)
    assert names["double"](4) == 8


def test_a_reply_continues_the_function_of_the_prompt_or_replaces_it():
    tests = read_tests(
        prompt(f"import math\n\n{STUB}", entry_point="double", test="def check(f):\n    assert f(1) == 2")
    )
    assert solution_parts("    return 2 * x", tests) == (f"import math\n\n{STUB}    return 2 * x\n",)
    whole = "def double(x):\n    return 2 * x"
    assert solution_parts(whole, tests) == ("import math\n\n", whole)


def test_the_code_of_a_prompt_is_found_in_a_fence_and_after_text():
    check = "def check(f):\n    assert f(1) == 2"
    for text in (f"Do it:\n```python\n{STUB}```\nThanks.", f"Complete this.\n\n{STUB}"):
        assert read_tests(prompt(text, entry_point="double", test=check)).stub.strip() == STUB.strip()


CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
LINES = {"inputs": ["1\n2\n"], "outputs": ["3\n"]}


@pytest.mark.parametrize(
    ("row", "form", "total"),
    [
        ({"test": "def check(f):\n    assert f(1) == 2", "entry_point": "double"}, "program", 1),
        ({"test_list": ["assert double(1) == 2", "assert set(double(0)) == 0"]}, "program", 2),
        ({"test": "from solution import f\ndef test_f():\n    assert f() == 1"}, "program", 1),
        ({"unit_tests": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass"}, "program", 1),
        ({"cases": [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}]}, "cases", 2),
        ({"input_output": json.dumps(LINES)}, "cases", 1),
        ({"input_output": json.dumps(CALLS)}, "calls", 2),
        ({"reward_model": {"style": "rule", "ground_truth": json.dumps(CALLS)}}, "calls", 2),
        (
            {
                "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
                "metadata": json.dumps({"func_name": "add"}),
            },
            "calls",
            1,
        ),
    ],
)
def test_tests_are_found_in_the_usual_fields(row, form, total):
    tests = read_tests(prompt(**row))
    assert (tests.form, tests.total) == (form, total)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests"),
        ({"entry_point": "f", "test": "def check(f:"}, "'test' is not Python"),
        ({"test": "def check(f):\n    assert f()"}, "entry_point"),
        ({"test_list": ["assert (1"]}, "test_list"),
        ({"cases": [{"input": "1"}]}, "'output'"),
        ({"input_output": "{"}, "not JSON"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "one length"),
        ({"unit_tests": "x = 1"}, "no test"),
    ],
)
def test_tests_that_cannot_be_read_are_named(row, message):
    with pytest.raises(TestsError, match=message):
        read_tests(prompt(**row))


def test_every_embedded_task_has_tests_and_a_solution():
    rows = load_prompts("embedded:code")
    assert len(rows) == 40
    assert {row.prompt_id for row in rows} == set(SOLUTIONS)
    assert all(read_tests(row).total >= 3 for row in rows)


def test_columns_of_arrays_are_read_as_lists():
    columns = {"inputs": np.array(["1\n", "2\n"], object), "outputs": np.array(["1", "2"], object)}
    assert len(read_tests(prompt(input_output=columns)).cases) == 2
