"""Objects, classes and exceptions of the model's code as unit tests see them, and what they cannot decide."""

from __future__ import annotations

import pytest

from gym_rm.scorers.code.scorer import CodeScorer
from tests.scorers.code.test_scorer import grade


@pytest.fixture(scope="module")
def scorer():
    with CodeScorer(allow_unsafe=True, reward="fraction", timeout=5.0) as opened:
        yield opened


def test_a_number_with_a_class_has_one_value(scorer):
    code = """
class Number(float):
    answers = iter([9.0, 0.0] * 9)
    def __float__(self): return next(self.answers)
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __eq__ = __lt__
    def __hash__(self): return 0
def near(): return Number(9)
"""
    for test in ("0.45 < near() < 0.55", "abs(near() - 0.5) < 0.1", "abs(0.5 - near()) < 0.1", "near() == 0.5"):
        tests = f"from solution import Number, near\ndef test_it():\n    assert {test}"
        assert grade(scorer, code, unit_tests=tests).reward == 0.0


def test_each_assert_of_a_script_counts_once(scorer):
    tests = "from solution import f\nassert f(1) == 2\nassert f(2) == 3"
    rewards = [grade(scorer, f"def f(x): return {each}", unit_tests=tests).reward for each in ("None", "2", "x + 1")]
    assert rewards == [0.0, 0.5, 1.0]


def test_an_assert_in_a_loop_is_one_case(scorer):
    check = "def check(f):\n    assert f(0) == 1\n    for x in f(9): assert x == 0\n"
    check += "    assert f(5) == 6\n    assert f(6) == 7"
    for length in (1, 10_000):
        code = f"def f(x): return [0] * {length} if x == 9 else 5"
        assert grade(scorer, code, test=check, entry_point="f").reward == 0.25


def test_any_number_is_not_near_to_an_infinite_one(scorer):
    for expected in ("inf", "9" * 400):
        assert grade(scorer, "print(1)", cases=[{"input": "", "output": expected}]).reward == 0.0
        assert grade(scorer, f"print('{expected}')", cases=[{"input": "", "output": expected}]).reward == 1.0


def test_a_comparison_that_the_asserts_forgot_to_import_is_not_that_of_the_model(scorer):
    forged = "def isclose(*args): return True\ndef f(x): return 0"
    assert grade(scorer, forged, test_list=["assert isclose(f(1), 2.5)"]).reward == 0.0
    assert grade(scorer, "def f(x): return 2.5", test_list=["assert isclose(f(1), 2.5)"]).reward == 1.0
    forged = "class np:\n    allclose = lambda *args: True\ndef f(x): return 0"
    assert "'np' is not defined" in grade(scorer, forged, test_list=["assert np.allclose(f(1), 2.5)"]).error


def test_a_case_that_is_too_large_is_a_fault_of_the_data_and_a_result_of_the_reply(scorer):
    assert (
        "the value is longer than"
        in grade(scorer, "def f(x): return 1", cases=[{"input": ["x" * 2**23], "output": 1}], fn_name="f").error
    )
    score = grade(scorer, "def f(x): return 'x' * 2**23", cases=[{"input": [1], "output": 1}], fn_name="f")
    assert score.infos["verdict"] == "output"


def test_tests_that_are_skipped_by_a_decorator_are_not_required(scorer):
    tests = """
import unittest
from solution import f
class TestF(unittest.TestCase):
    @unittest.skip("later")
    def test_later(self): self.fail()
    def test_one(self): self.assertEqual(f(1), 2)
    def test_two(self): self.assertEqual(f(2), 4)
"""
    assert grade(scorer, "def f(x): return 2 * x", unit_tests=tests).reward == 1.0
    assert grade(scorer, "def f(x): return 2", unit_tests=tests).reward == 0.5
    assert grade(scorer, "import unittest\ndef f(x): raise unittest.SkipTest", unit_tests=tests).reward == 0.0
    only = tests[: tests.index("    def test_one")]
    assert "no test" in grade(scorer, "def f(x): return 2", unit_tests=only).error


def verdict_of(scorer, code, **metadata):
    return grade(scorer, code, **metadata).infos["verdict"]


UNITS = """
import unittest
from solution import Account, Overdrawn, total
import solution

class AccountTest(unittest.TestCase):
    def setUp(self):
        self.account = Account("ann", balance=5)

    def test_balance(self):
        self.account.deposit(10)
        self.assertEqual(self.account.balance, 15)
        self.assertEqual(str(self.account), "ann: 15")
        self.assertEqual(len(self.account), 1)

    def test_overdrawn(self):
        with self.assertRaises(Overdrawn) as caught:
            self.account.withdraw(100)
        self.assertIn("95", str(caught.exception))
        with self.assertRaises(ValueError):
            self.account.withdraw(100)

    def test_equal(self):
        self.assertEqual(Account("ann", 5), self.account)
        self.assertNotEqual(Account("bob", 5), self.account)
        self.assertIsInstance(self.account, Account)

def test_total():
    assert total([Account("a", 1), Account("b", 2)]) == 3
    assert solution.RATE == 0.5
"""


ACCOUNT = """
RATE = 0.5
class Overdrawn(ValueError):
    pass
class Account:
    def __init__(self, name, balance=0):
        self.name, self.balance, self.bookings = name, balance, 0
    def deposit(self, amount):
        self.balance += amount
        self.bookings += 1
    def withdraw(self, amount):
        if amount > self.balance:
            raise Overdrawn(f"{amount - self.balance} too much")
        self.balance -= amount
    def __eq__(self, other):
        return (self.name, self.balance) == (other.name, other.balance)
    def __str__(self):
        return f"{self.name}: {self.balance}"
    def __len__(self):
        return self.bookings
def total(accounts):
    return sum(each.balance for each in accounts)
"""


def test_unit_tests_use_classes_methods_and_exceptions_of_the_model(scorer):
    score = grade(scorer, ACCOUNT, unit_tests=UNITS)
    assert (score.infos["verdict"], score.infos["tests_passed"]) == ("passed", 4), score.infos["message"]
    wrong = ACCOUNT.replace("self.balance += amount", "self.balance += 1")
    score = grade(scorer, wrong, unit_tests=UNITS)
    assert (score.infos["verdict"], score.infos["tests_passed"]) == ("wrong_answer", 3)


def test_asserts_may_name_classes_of_the_solution_and_modules_that_it_imports(scorer):
    code = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef width(pair): return pair.b - pair.a"
    tests = ["assert width(Pair(1, 4)) == 3", "assert math.isclose(width(Pair(0.1, 0.3)), 0.2)"]
    assert verdict_of(scorer, code, test_list=tests) == "passed"
    assert verdict_of(scorer, code.replace("- pair.a", ""), test_list=tests) == "wrong_answer"
    assert verdict_of(scorer, "def width(pair): return 3", test_list=tests) == "exception"
    forged = "class math:\n    isclose = lambda *a: True\nclass Pair(int):\n    def __new__(cls, *args): return 3"
    assert verdict_of(scorer, f"{forged}\ndef width(pair): return 3", test_list=tests) == "wrong_answer"


def test_types_cross_to_the_solution_and_back(scorer):
    tests = ["assert convert(int, '12') == 12", "assert convert(type, 1) is int", "assert convert(str, 12) == '12'"]
    assert verdict_of(scorer, "def convert(kind, x): return kind(x)", test_list=tests) == "passed"
    assert verdict_of(scorer, "def convert(kind, x): return int(x)", test_list=tests) == "wrong_answer"
