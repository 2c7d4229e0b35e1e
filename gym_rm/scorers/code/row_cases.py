"""Inputs with their outputs, and the checker that compares outputs, read from the usual fields of data sets."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

from gym_rm.documents import parse_json

FIELDS = (
    *(("cases",), ("test_cases",), ("input_output",), ("public_test_cases", "private_test_cases"), ("official_tests",)),
    *(("public_tests", "private_tests", "generated_tests"), ("verification_info",), ("tests",), ("ground_truth",)),
    ("reward_model",),
)
"""Fields with cases. All fields of the first group of which a row has one are used."""
INPUTS = ("input", "inputs", "stdin")
OUTPUTS = ("output", "outputs", "expected_output", "expected", "stdout")
AS_FUNCTION = """
import builtins, contextlib, io, sys
def checker(given, output, expected):
    files, plain = {{"input.txt": given, "correct_output.txt": expected, "solution_output.txt": output}}, builtins.open
    def opened(name, *args, **options):
        return io.StringIO(files[str(name)]) if str(name) in files else plain(name, *args, **options)
    builtins.open = io.open = opened
    sys.argv = ["checker.py", *files]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        exec(compile({source!r}, "<checker>", "exec"), {{"__name__": "__main__"}})
    return float(printed.getvalue())
"""
"""Calls a program that prints 1 or 0: `python checker.py input.txt correct_output.txt solution_output.txt`."""


class TestsError(ValueError):
    """The row has no tests, or tests that cannot be read."""

    __test__ = False  # not a test of pytest


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with cases of a row, filled ones before empty ones."""
    groups = [{name: data[name] for name in group if isinstance(data.get(name), (str, list, dict))} for group in FIELDS]
    return next((each for each in groups if any(each.values())), next((each for each in groups if each), {}))


def read_cases(fields: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, list[tuple[Any, Any]]]:
    """Return the function of the cases ("" for programs) and the inputs (arguments) with the outputs (results).

    Args:
        fields: the values that have the cases, by their names.
        data: the row, whose `fn_name`, `func_name` or `metadata` may name the function.

    Raises:
        TestsError: there is no case, or one that cannot be read; the message has the name of the field.
    """
    if data.get("interaction_format") or data.get("input_file") or data.get("input_mode") not in (None, "", "stdio"):
        raise TestsError("the program must talk to a judge or read a file, but only standard input is supported")
    named = " and ".join(map(repr, fields))
    rows = [row for name, value in fields.items() for row in _rows(name, value)]
    functions = {_function(row, data) for row in rows}
    if len(functions) != 1:
        raise TestsError(f"{named} must have cases, all of one function or of programs, got {sorted(functions)}")
    function = functions.pop()
    cases = [_case(named, row, bool(function)) for row in rows]
    if not function:
        return "", cases
    if not function.isidentifier():
        raise TestsError(f"'fn_name' of {named} must be the name of a function, got {function!r:.80}")
    may_be_boxed = all("of_lists" in row or row.get("type") == "function_call" for row in rows)
    if may_be_boxed and all(isinstance(output, list) and len(output) == 1 for _, output in cases):
        cases = [(given, output[0]) for given, output in cases]  # APPS puts each result into a list
    return function, cases


def _rows(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Return each case in a value as a mapping."""
    value = loaded(name, value)
    if isinstance(value, Mapping):
        if str(value.get("language") or "python").lower() not in ("python", "python3", "py"):
            raise TestsError(f"{name!r} has tests of the language {value['language']!r:.80}, not of Python")
        own = {"fn_name": value["fn_name"]} if value.get("fn_name") else {}
        for key in ("ground_truth", "test_cases", "tests"):
            if value.get(key) is not None:
                return [{**row, **own} for row in _rows(name, value[key])]
        inputs, outputs = (
            loaded(name, next((value[k] for k in keys if k in value), None)) for keys in (INPUTS, OUTPUTS)
        )
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise TestsError(f"{name!r} must have the lists 'inputs' and 'outputs' of one length, got {value!r:.80}")
        pairs = zip(inputs, outputs, strict=True)
        return [{"input": given, "output": output, "of_lists": True, **own} for given, output in pairs]
    if not isinstance(value, list) or not all(isinstance(case, Mapping) for case in value):
        raise TestsError(f"{name!r} must be a list of inputs and outputs, got {value!r:.80}")
    return value


def _function(row: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return the name of the function of a case, or nothing for a program."""
    kind = row.get("testtype") or row.get("type")
    places = [each for found in (row, data) for each in (found, _metadata(found))]
    names = [each[key] for each in places for key in ("fn_name", "func_name") if each.get(key)]
    if kind in ("stdin", "stdin_stdout", "stdio"):
        return ""
    return str(names[0]) if names else "?" if kind in ("functional", "function_call") else ""


def _metadata(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value = row.get("metadata")
    try:
        value = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return value if isinstance(value, Mapping) else {}


def _case(name: str, row: Mapping[str, Any], is_call: bool) -> tuple[Any, Any]:
    given, output = (next((row[key] for key in keys if row.get(key) is not None), None) for keys in (INPUTS, OUTPUTS))
    if given is None or (output is None and not (is_call and any(key in row for key in OUTPUTS))):
        raise TestsError(f"{name} must have 'input' and 'output' in each case, got the fields {sorted(row)}")
    if not is_call:
        return _lines(given), _lines(output)
    if isinstance(given, str):  # LiveCodeBench: one JSON value per line
        given = [loaded(name, line) for line in given.splitlines() if line.strip()]
        output = loaded(name, output)
    if not isinstance(given, list):
        raise TestsError(f"{name} must have a list of arguments in each case of a function, got {given!r:.80}")
    return given, output


def loaded(name: str, value: Any) -> Any:
    """Return JSON texts as values."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise TestsError(
            f"{name!r} is not JSON ({error}); packed and pickled forms are not opened: make JSON of them when you make "
            f"the data; got {value!r:.80}"
        ) from error


def _lines(value: Any) -> str:
    """Return a text, or the lines of a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def number(data: Mapping[str, Any], name: str) -> float | None:
    """Return a number of the row that is not negative: also `{"seconds": 2, "nanos": 0}`, or "2 seconds"; None if none.

    Raises:
        TestsError: it is something else.
    """
    value = data.get(name)
    if isinstance(value, Mapping):
        value = (value.get("seconds") or 0) + (value.get("nanos") or 0) / 1e9
    text = re.sub(r" *s(ec(ond)?s?)?$", "", str(value).strip())
    found = float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", text) else math.nan
    if value is not None and not found < math.inf:
        raise TestsError(f"{name!r} must be a number of at least 0, got {value!r:.80}")
    return None if value is None else found


def read_checker(data: Mapping[str, Any]) -> str:
    """Return the source of `checker(input, output, expected)` of a row, "" if it has none.

    It is the function of the field `checker`, or the program in `generated_checker` (open-r1/codeforces).

    Raises:
        TestsError: it is no Python, or has no function.
    """
    name = next((name for name in ("checker", "generated_checker") if data.get(name)), "")
    source = data.get(name, "")
    try:
        functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise TestsError(f"{name!r} is not the text of a Python function: {error}; got {source!r:.80}") from error
    if not source or "argv" in source:
        return source and AS_FUNCTION.format(source=source)
    if not functions:
        raise TestsError(f"{name!r} must define a function checker(input, output, expected), got {source!r:.80}")
    return f"{source}\nchecker = {'checker' if 'checker' in functions else functions[-1]}\n"
