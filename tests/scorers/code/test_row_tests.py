"""Which tests a data row has."""

import base64
import json
import pickle
import zlib

import numpy as np
import pytest
from conftest import solutions

from gym_rm.data.prompts import load_prompts
from gym_rm.scorers.code.row_cases import TestsError
from gym_rm.scorers.code.row_tests import read_tests, solution_parts
from gym_rm.types import Prompt

STUB = 'def double(x):\n    """Return 2 * x."""\n'


def prompt(text="?", **metadata):
    return Prompt(({"role": "user", "content": text},), "p", metadata=metadata)


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
LIST = [{"input": "1", "output": "2", "type": "stdin_stdout"}, {"input": "2", "output": "4", "testtype": "stdin"}]
COLUMNS = {"input": ["1", "2"], "output": ["2", "4"]}
CALL = {"input": [1], "output": [2], "type": "function_call", "fn_name": "f"}
CHECK = "def check(candidate):\n    assert candidate(x=1) == 2"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)"
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LIST)))).decode()
NO_CASES = [
    *({"test_list": []}, {"cases": []}, {"test_cases": "[]"}, {"input_output": "{}"}, {"ground_truth": "[]"}),
    *({"inputs": [], "outputs": []}, {"input_output": json.dumps({**CALLS, "inputs": [], "outputs": []})}),
    *({"public_test_cases": "[]", "private_test_cases": "[]"}, {"public_tests": {"input": [], "output": []}}),
    *({"verification_info": {"test_cases": []}}, {"official_tests": []}),
    *({"test": f"def check(candidate):\n    {body}", "entry_point": "f"} for body in ("pass", "f(1)", "assert True")),
    *({"test_list": [text], "entry_point": "f"} for text in ("", "f(1)", "assert True")),
    *({"unit_tests": f"from solution import f\n{text}"} for text in ("", "x = 1", "def test_a(): assert True")),
    {"unit_tests": "def test_a(): assert 1 == 1"},
]


@pytest.mark.parametrize(
    ("row", "form", "total"),
    [
        ({"test": "def check(f):\n    assert f(1) == 2", "entry_point": "double"}, "program", 1),
        ({"test_list": ["assert double(1) == 2", "assert set(double(0)) == 0"]}, "program", 2),
        ({"test": "from solution import f\ndef test_f():\n    assert f() == 1"}, "program", 1),
        ({"unit_tests": f"from solution import f\n{UNITTEST}"}, "program", 1),
        ({"test": UNITTEST, "entry_point": "f", "libs": "['random']"}, "program", 1),  # BigCodeBench
        ({"test_cases": ["assert f(1) == 2", "assert f(2) == 4"]}, "program", 2),  # AceCode
        ({"test": CHECK, "entry_point": "Solution().f", "prompt": "inf = 1"}, "program", 1),  # LeetCodeDataset
        ({"public_test_cases": LIST, "private_test_cases": json.dumps(LIST), "metadata": "{}"}, "cases", 4),
        (
            {"public_tests": COLUMNS, "private_tests": COLUMNS, "generated_tests": {"input": [], "output": []}},
            "cases",
            4,
        ),
        ({"official_tests": LIST, "generated_tests": 0, "input_mode": "stdio"}, "cases", 2),  # open-r1/codeforces
        ({"verification_info": {"language": "python", "test_cases": LIST}}, "cases", 2),
        ({"verification_info": json.dumps({"test_cases": [CALL], "language": "python"})}, "calls", 1),
        ({"tests": json.dumps([CALL])}, "calls", 1),
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
        ({"public_test_cases": LIST, "private_test_cases": PACKED}, "'private_test_cases' is not JSON"),
        ({"verification_info": {"language": "cpp", "test_cases": LIST}}, "'cpp', not of Python"),
        ({"verification_info": {"test_cases": [CALL, *LIST]}}, "all of one function or of programs"),
        ({"official_tests": LIST, "input_mode": "file"}, "only standard input"),
        ({"public_tests": COLUMNS, "input_file": "in.txt"}, "only standard input"),
        ({"cases": [{**CALL, "fn_name": "f(x)"}]}, "'fn_name'"),
        ({"cases": LIST, "tolerance": -1}, "'tolerance'"),
        ({"cases": LIST, "time_limit": "long"}, "'time_limit'"),
        ({"cases": LIST, "checker": "x = 1"}, "must define a function"),
        ({"cases": LIST, "checker": "def f(:"}, "'checker'"),
        ({"cases": [CALL], "checker": "def f(a, b, c): pass"}, "is for programs"),
    ],
)
def test_tests_that_cannot_be_read_are_named(row, message):
    with pytest.raises(TestsError, match=message):
        read_tests(prompt(**row))


@pytest.mark.parametrize("row", NO_CASES, ids=str)
def test_a_row_without_a_case_is_an_error(row):
    with pytest.raises(TestsError, match=r"no case|have cases|no test|calls no function|the lists"):
        read_tests(prompt(**row))


@pytest.mark.parametrize("limit", [1.5, "1.5", "1.5 seconds", {"seconds": 1, "nanos": 500_000_000}])
def test_the_time_limit_of_a_row_has_the_forms_of_data_sets(limit):
    assert read_tests(prompt(cases=LIST, time_limit=limit)).seconds == 1.5


def test_the_names_that_tests_need_are_known():
    tests = "from solution import add, sub as minus, other\ndef test_a(): assert add(1, 1) == minus(3, 1)"
    assert read_tests(prompt(unit_tests=tests)).names == ("add", "sub")
    assert read_tests(prompt(test=CHECK, entry_point="Solution().f")).names == ("f",)
    assert read_tests(prompt(cases=LIST)).names == ()


def test_every_embedded_task_has_tests_and_a_solution():
    rows = load_prompts("embedded:code")
    assert len(rows) == 40
    assert {row.prompt_id for row in rows} == set(solutions())
    assert all(read_tests(row).total >= 3 for row in rows)


def test_columns_of_arrays_are_read_as_lists():
    columns = {"inputs": np.array(["1\n", "2\n"], object), "outputs": np.array(["1", "2"], object)}
    assert len(read_tests(prompt(input_output=columns)).cases) == 2
