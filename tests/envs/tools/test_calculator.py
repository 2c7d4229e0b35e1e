import pytest

from gym_rm.envs.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 + 3 * 4", "14"),
        ("0.1 + 0.2", "0.3"),
        ("-(7 // 2) % 5", "2"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("1 / 3", "0.33333333333333333333"),
        ("1e300 / 3", "3.3333333333333333333E+299"),
        (" 100.0 ", "100"),
        ("1 / 3 * 3", "1"),
    ],
)
def test_results_are_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "more than 10000 bits"),
        ("2 ** (2 ** 0.5 * 1e300)", "bits"),
        ("0.1 ** 100000", "bits"),
        ("(-1) ** 0.5", "not real"),
        ("__import__('os')", "only numbers"),
        ("(1).real", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("True + 1", "only numbers"),
        ("1e999", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("1" * 1001, "may have 1000 characters"),
        ("2 ^ 3", "only numbers"),
    ],
)
def test_everything_else_is_an_error(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression)


@pytest.mark.parametrize("expression", ["1 / 0", "0 ** -1", "2 +", "(" * 900, "", "1\x00", "10.0 ** 400.5"])
def test_broken_expressions_raise(expression):
    with pytest.raises((ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError)):
        calculator(expression)
