"""The checker of a row, which decides whether an output is right where several are."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from gym_rm.scorers.code.row_cases import TestsError

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
