"""Which outputs and results are right: numbers, checkers, and the time of many cases."""

import pytest
from scorers.code.test_scorer import grade, open_scorer, verdict

from gym_rm.scorers.code.verdicts import is_output

LONG = "1" * 400
CHECKER = "def checker(given, output, expected):\n    return sum(map(int, output.split())) == int(given)"
PROGRAM = """import sys
with open(sys.argv[1]) as given, open(sys.argv[3]) as output:
    print(int(sum(map(int, output.read().split())) == int(given.read())))
"""
SUMS = {"cases": [{"input": "5", "output": "2 3"}, {"input": "9", "output": "1 8"}]}


@pytest.fixture(scope="module")
def fast():
    with open_scorer("auto", timeout=0.5) as opened:
        yield opened


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        *(("0.6000000000000001", "0.6"), ("0.20000000000000004", "0.2"), ("2", "2.0"), ("2.50", "2.5"), (".5", "0.5")),
        *(("1000", "1e3"), ("+1.5", "1.5"), ("-0.0", "0.0"), ("1000000.5", "1000000.9"), ("0.0000001", "0.0")),
        *(
            ("[0.1, 0.6000000000000001]", "[0.1, 0.6]"),
            ("Case #1: 0.50", "Case #1: 0.5"),
            ("1.50 \n2.5\n\n", "1.5\n2.50"),
        ),
        *(("inf", "inf"), ("nan", "nan"), ("1e400", "1e400"), (LONG, LONG), ("a b", "a b")),
    ],
)
def test_equal_numbers_are_right_where_decimals_are_expected(output, expected):
    assert is_output(output, expected, 1e-6)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        *(
            ("3", "2"),
            ("2.0", "2"),
            ("2.51", "2.5"),
            ("0.3333", "0.3333333"),
            ("-0.5", "0.5"),
            ("0.6 1", "0.6"),
            ("", "0.6"),
        ),
        *(("inf", "0.5"), ("nan", "0.5"), ("1e400", "0.5"), ("inf", "1e400"), ("1e401", "1e400"), ("0.5", "1e400")),
        *(("1_000", "1000"), ("1_000.0", "1000.0"), ("0x10", "16.0"), ("٣.٥", "3.5"), ("３", "3.0"), (LONG, "1.5")),
        *((f"{LONG}2", f"{LONG}1"), ("True", "1.0"), ("1.10.1", "1.1.1"), ("10.0.0.10", "10.0.0.1"), ("0,6", "0.6")),
        *(
            ("NaN", "nan"),
            ("Yes", "YES"),
            ("a  b", "a b"),
            ("0.5", "0.5\n0.5"),
            ("0.5\n\n0.5", "0.5\n0.5"),
            ("6e", "6.0"),
        ),
    ],
)
def test_other_numbers_and_texts_are_wrong(output, expected):
    assert not is_output(output, expected, 1e-6)


def test_a_row_has_its_own_tolerance():
    with open_scorer("auto", tolerance=0.1) as scorer:
        row = {"cases": [{"input": "", "output": "0.6"}]}
        assert verdict(scorer, "print(0.65)", **row) == "passed"
        assert verdict(scorer, "print(0.65)", **row, tolerance=0.01) == "wrong_answer"
        assert scorer.score([], []).provenance.settings["tolerance"] == 0.1


@pytest.mark.parametrize(
    ("result", "expected", "is_right"),
    [
        *(("0.1 + 0.2", 0.3, True), ("(0.1 + 0.2, [2])", [0.3, [2.0]], True), ("{1: 0.1 + 0.2}", {"1": 0.3}, True)),
        *(("2.0000001", 2, False), ("0.4", 0.3, False), ("float('nan')", 0.5, False), ("float('inf')", 0.5, False)),
        *(
            ("10**400", 0.5, False),
            ("'0.3'", 0.3, False),
            ("[0.3]", [0.3, 0.3], False),
            ("{'b': 0.3}", {"a": 0.3}, False),
        ),
    ],
)
def test_results_of_functions_have_the_tolerance_of_outputs(fast, result, expected, is_right):
    row = {"input_output": {"fn_name": "f", "inputs": [[]], "outputs": [[expected]]}}
    assert (verdict(fast, f"def f(): return {result}", **row) == "passed") is is_right


@pytest.mark.parametrize("checker", [{"checker": CHECKER}, {"generated_checker": PROGRAM}])
def test_a_checker_decides_where_several_outputs_are_right(fast, checker):
    for code, reward in {"print(input(), 0)": 1.0, "print(2, 3)": 0.0, "print('x')": 0.0, "print()": 0.0}.items():
        score = grade(fast, code, **SUMS, **checker)
        assert (score.reward, score.error) == (reward, None)


@pytest.mark.parametrize(
    "body",
    ["raise ValueError", "return 'yes'", "pass", "return 2", "return float('nan')", "while True: pass", "exit()"],
)
def test_a_checker_that_decides_nothing_is_an_error_of_the_row(fast, body):
    checker = f"def checker(given, output, expected):\n    {body}"
    assert "the checker of the row must return" in grade(fast, "print(2, 3)", **SUMS, checker=checker).error


def test_the_code_of_a_reply_cannot_reach_the_checker(fast):
    code = "import builtins, sys\nbuiltins.int = lambda x: 5\nsys.modules['checker'] = None\nprint(2, 2)"
    assert grade(fast, code, **SUMS, checker=CHECKER).reward == 0.0


def test_many_cases_have_more_time_and_one_case_has_that_of_a_row(fast):
    cases = [{"input": str(k), "output": str(k)} for k in range(30)]
    assert verdict(fast, "import time\ntime.sleep(0.02)\nprint(input())", cases=cases) == "passed"  # 0.6 of 1.5 seconds
    assert verdict(fast, "while True: pass", cases=cases) == "time"


def test_the_time_limit_of_a_row_replaces_that_of_the_scorer(fast):
    sleeps, one = "import time\ntime.sleep({})\nprint(1)", [{"input": "", "output": "1"}]
    assert verdict(fast, sleeps.format(0.7), cases=one, time_limit=6) == "passed"
    assert verdict(fast, sleeps.format(1), cases=one, time_limit="0.3 seconds") == "time"
    function = {"fn_name": "f", "inputs": [[]], "outputs": [[1]]}
    assert (
        verdict(fast, "import time\ndef f():\n    time.sleep(0.7)\n    return 1", input_output=function, time_limit=6)
        == "passed"
    )
