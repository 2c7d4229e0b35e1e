"""What is tested: the tests of a data row, read from the usual fields into one of three forms."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gym_rm.documents import parse_json
from gym_rm.scorers.code.names import imports_of, judges, module_of, words_of
from gym_rm.scorers.code.replies import Block, fenced_blocks, indented, is_python
from gym_rm.scorers.code.row_cases import TestsError, fields_of, number, read_cases, read_checker
from gym_rm.types import Prompt

USUAL_IMPORTS = """
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, sqrt
import bisect, collections, functools, heapq, itertools, math, operator, re, string
"""
"""What sites with tests of functions import for every solution."""


@dataclass(frozen=True, slots=True, eq=False)
class RowTests:
    """The tests of one row. Rows with equal tests share one object.

    Attributes:
        form: `"program"`: a program that calls the model's code; `"calls"`: arguments and results; `"cases"`: inputs
            and outputs of a program.
        entry_point: name of the function under test; empty for programs.
        names: names that the tests need of the model's code; none for a program that is run.
        stub: code of the prompt up to the body of this function, which a reply may continue.
        preamble: code of the prompt before this function: imports and helpers.
        parts: for `"program"`, sources to run one after another. An error in the first ends the run.
        asserts: for `"program"`, the number of its assert statements.
        undefined: for `"program"`, names that it uses and does not define.
        units: for `"program"`, whether it has unit tests to run.
        cases: for `"cases"`, text for standard input and text expected on standard output; for `"calls"`, the list of
            arguments and the expected value.
        checker: source of the function `checker(input, output, expected)` that compares outputs; "" for none.
        tolerance: of decimal numbers; None for that of the scorer.
        seconds: time limit of a case; None for that of the scorer.
    """

    form: Literal["program", "calls", "cases"]
    entry_point: str = ""
    names: tuple[str, ...] = ()
    stub: str = ""
    preamble: str = ""
    parts: tuple[str, ...] = ()
    asserts: int = 0
    undefined: tuple[str, ...] = ()
    units: bool = False
    cases: tuple[tuple[Any, Any], ...] = ()
    checker: str = ""
    tolerance: float | None = None
    seconds: float | None = None

    @property
    def total(self) -> int:
        """Number of cases; 1 for unit tests, which are counted when they run."""
        return len(self.cases) or max(self.asserts, 1)


class CountedAsserts(ast.NodeTransformer):
    """Puts every assert of the tests of a row into a `with _gym_rm_assert(...)`, which counts it and goes on.

    A `try` with handlers is one case: some of its asserts are there not to be reached.
    """

    def __init__(self) -> None:
        self.asserts = 0
        self.is_handled: bool | None = None

    def source(self, tree: ast.Module) -> str:
        """Return the source of tests with counted asserts."""
        return ast.unparse(ast.fix_missing_locations(self.visit(tree)))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Count the assert; in a `try`, only its failure that the handlers would hide."""
        if self.is_handled is None:
            self.asserts += 1
        return node if self.is_handled is False else self._counted(node, self.asserts)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Count a `try` that has handlers and asserts."""
        if self.is_handled is not None or not node.handlers or not _has(node, ast.Assert):
            return self.generic_visit(node)
        self.asserts += 1
        self.is_handled = not any(_has(handler, (ast.Assert, ast.Raise)) for handler in node.handlers)
        node.body = [self.visit(each) for each in node.body]
        self.is_handled = None
        return self._counted(node, self.asserts)

    def _counted(self, node: ast.stmt, case: int) -> ast.stmt:
        arguments: list[ast.expr] = [ast.Constant(case), ast.Constant(bool(self.is_handled))]
        return ast.With([ast.withitem(ast.Call(ast.Name("_gym_rm_assert", ast.Load()), arguments, []))], [node])


def _has(node: ast.AST, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def read_tests(prompt: Prompt | None) -> RowTests:
    """Return the tests of a row. Raises TestsError, which names the field, if there are none that can be read."""
    if prompt is None:
        raise TestsError("the tests come with the prompt of the row, but it has none; pass prompts=")
    text = prompt.messages[-1]["content"] if prompt.messages else ""
    try:
        return _tests(json.dumps([{**prompt.metadata}, prompt.answer, text], sort_keys=True, default=_plain))
    except RecursionError as error:
        raise TestsError("the tests are nested too deeply") from error


def _plain(value: Any) -> Any:
    """Return an array, as the columns of a table have them, as a list, and any other object as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@functools.lru_cache(maxsize=4096)
def _tests(row: str) -> RowTests:
    data, answer, text = json.loads(row)
    info = data.get("extra_info")
    data = {**info, **data} if isinstance(info, dict) else data
    tests, checker = _read(data, answer, text), read_checker(data)
    if checker and tests.form != "cases":
        raise TestsError("'checker' is for programs with inputs and outputs; the tests of functions compare themselves")
    names = tests.names or ((tests.entry_point,) if tests.entry_point else ())
    tolerance, seconds = number(data, "tolerance"), number(data, "time_limit")
    return dataclasses.replace(tests, names=names, checker=checker, tolerance=tolerance, seconds=seconds)


def _read(data: dict[str, Any], answer: str | None, text: str) -> RowTests:
    """Return the tests of the first field that has some."""
    fields = fields_of(data)
    for name in ("test_list", *fields):
        if listed := _texts(data.get(name)):
            return _assert_list(listed, data, text)
    for name in ("unit_tests", "test_file", "test", "tests"):
        source = data.get(name)
        if isinstance(source, str) and source.strip() and not source.lstrip().startswith(("{", "[")):
            is_check = re.search(r"^def check\(", source, re.M)
            return _check(data, source, text) if is_check else _unit_tests(name, source, data)
    if not any(fields.values()) and "inputs" in data and "outputs" in data:
        fields = {"inputs": {"inputs": data["inputs"], "outputs": data["outputs"]}}
    if not any(fields.values()) and answer and answer.lstrip().startswith(("{", "[")):
        fields = {"answer": answer}
    if fields:
        function, cases = read_cases(fields, data)
        stub, preamble = prompt_code(text, function) if function else ("", "")
        return RowTests("calls" if function else "cases", function, (), stub, preamble, cases=tuple(cases))
    raise TestsError(
        "the row has no tests: expected the fields 'test' with 'entry_point' (HumanEval), 'test_list' (MBPP), "
        "'unit_tests' or 'test_file', or 'cases', 'test_cases' or 'input_output' with inputs and outputs, or those of "
        f"another data set that docs/environments/code.md lists; got {sorted(data)}"
    )


def _texts(value: Any) -> list[str]:
    """Return a list of texts, or JSON of one; of anything else an empty list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else []


def _check(data: Mapping[str, Any], source: str, text: str) -> RowTests:
    given = data.get("entry_point")
    name = given.removeprefix("Solution().") if isinstance(given, str) else ""  # as LeetCodeDataset writes it
    if not name.isidentifier():
        raise TestsError(f"'test' defines check(candidate), so 'entry_point' must be a name; got {given!r:.80}")
    stub, preamble = prompt_code(text, name)
    if name != given:
        preamble = next((code for code in (data.get("prompt"), text) if isinstance(code, str) and is_python(code)), "")
    tree, counter = _parse("test", source), CountedAsserts()
    if not any(isinstance(node, ast.Expr) and "check" in _called(node.value) for node in tree.body):
        tree.body += ast.parse("check(candidate)").body
    parts = (f"{_helpers(preamble)}\n{counter.source(tree)}",)
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    names = {name, *(each.arg for check in checks for each in check.args.args)}
    if not counter.asserts or not any(words_of(check) & names for check in checks):
        raise TestsError("'test' has no case: its function check(candidate) must have an assert and call the candidate")
    return RowTests("program", name, (), stub, preamble, parts, counter.asserts, _undefined(parts))


def _unit_tests(name: str, source: str, data: Mapping[str, Any]) -> RowTests:
    """Return unit tests, with the names of the module `solution` that they use."""
    entry = data.get("entry_point")
    if isinstance(entry, str) and entry in _undefined([source]):  # BigCodeBench runs tests beside the code
        source = f"from solution import {entry}\n{source}"
    tree, counter = _parse(name, source), CountedAsserts()
    imports = ast.parse("\n".join(imports_of(_undefined([source]), [tree]))).body
    tree = _NamedImports(imports).visit(tree)
    mains = ("unittest.main(", "pytest.main(")  # the tests run in any case
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith(mains)]
    names = _names_of_solution(tree)
    if not names and not re.search(r"""["']solution["']""", source):
        raise TestsError(f"{name!r} has no test that uses a name of the module 'solution', which is the code")
    functions = [each.name for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    units = any(each.startswith("test") or each == "runTest" for each in functions)
    parts = (ast.unparse(tree) if units else counter.source(tree),)
    if not units and not counter.asserts:
        raise TestsError(f"{name!r} has no test: no function test_..., no method of a TestCase and no assert")
    return RowTests("program", "", names, "", "", parts, counter.asserts, _undefined(parts), units)


def _names_of_solution(tree: ast.Module) -> tuple[str, ...]:
    """Return the names of the module `solution` that tests use."""
    nodes, words, names = [*ast.walk(tree)], words_of(tree), set[str]()
    imports = [each for node in nodes if isinstance(node, ast.Import) for each in node.names]
    modules = {"solution", *(each.asname for each in imports if each.name == "solution")}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            names |= {each.name for each in node.names if (each.asname or each.name) in words}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add(node.attr)
    return tuple(sorted(names))


def _assert_list(listed: Sequence[str], data: Mapping[str, Any], text: str) -> RowTests:
    imports = data.get("test_imports") or []
    lines = [*(imports if isinstance(imports, list) else []), str(data.get("test_setup_code") or "")]
    setup = ast.unparse(_parse("test_setup_code", "\n".join(lines)))
    trees = [_parse(f"test_list[{k}]", source) for k, source in enumerate(listed)]
    name = data.get("entry_point") or data.get("func_name") or _first_call(trees)
    if not isinstance(name, str) or not name.isidentifier():
        raise TestsError(f"'test_list' calls no function by its name, got {listed!r:.80}")
    stub, preamble = prompt_code(text, name)
    setup = f"{_helpers(preamble)}\n{setup}"
    missing = [each for each in _undefined([setup, *listed]) if each != name and not _is_module(each, trees)]
    first = "\n".join([*imports_of(missing, trees, known=name), setup])
    counter = CountedAsserts()
    parts = (first, *(counter.source(tree) for tree in trees))
    if not counter.asserts or not any(name in words_of(tree) for tree in trees):
        raise TestsError(f"'test_list' has no case: expected asserts that call {name!r}, got {listed!r:.80}")
    return RowTests("program", name, (), stub, preamble, parts, counter.asserts, _undefined(parts))


def _is_module(name: str, trees: Sequence[ast.Module]) -> bool:
    """Return whether the tests use a name as that of a package, such as np, which the model's code does not give."""
    nodes = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = any(isinstance(node, ast.Name) and node.id == name for node in nodes)
    return used and name.islower() and name not in sys.stdlib_module_names


def _first_call(trees: Sequence[ast.Module]) -> str:
    """Return the name of the function that most of the asserts call."""
    calls = [set().union(*(_called(node) for node in ast.walk(tree))) for tree in trees]
    names = dict.fromkeys(name for tree in trees for node in ast.walk(tree) for name in _called(node))
    known = {name for name in names if hasattr(builtins, name) or module_of(name)} | judges(names, trees)
    return max(names, key=lambda name: (name not in known, sum(name in called for called in calls)), default="")


def _called(node: ast.AST) -> list[str]:
    """Return the name of the function that this node calls, or nothing."""
    return [node.func.id] if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else []


def prompt_code(text: str, entry_point: str) -> tuple[str, str]:
    """Return the code of a prompt up to the body of a function, and the part of it before this function.

    Both are empty if the prompt shows no such code.
    """
    starts = [0, *(match.start() for match in re.finditer(r"^(from |import |def |class |@|[A-Z_]+ *=)", text, re.M))]
    header = re.compile(rf"^(?:@.*\n)*(async +)?def +{entry_point}\b", re.M)
    for code in [block.code for block in fenced_blocks(text)] + [text[start:] for start in starts]:
        function = header.search(code)
        if function is not None and is_python(code):
            return code if code.endswith("\n") else code + "\n", code[: function.start()]
    return "", ""


def _helpers(preamble: str) -> str:
    """Return the prompt's helpers, as part of the tests."""
    tree = _parse("prompt", preamble)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Assert)]
    return ast.unparse(tree)


class _NamedImports(ast.NodeTransformer):
    """Replaces `from solution import *`: the model's code must not choose names of the tests."""

    def __init__(self, imports: Sequence[ast.stmt]) -> None:
        self.imports = imports

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        """Return the imports of the names that the tests use."""
        is_all = node.module == "solution" and node.names[0].name == "*"
        return [*self.imports] or ast.Pass() if is_all else node


def _undefined(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a program uses and does not define."""
    program = Block.of("\n".join(sources))
    if not program.is_program:  # what only the whole shows, such as `return` outside of a function
        raise TestsError("the tests are not Python, or return outside of a function")
    return tuple(sorted(program.lacks - {"__name__", "__file__", "_gym_rm_assert"}))


def _parse(name: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"{name!r} is not Python: {error}") from error


def solution_parts(code: str, tests: RowTests) -> tuple[str, ...]:
    """Return the sources to execute one after another: the prompt's helpers and the code, or both as one function."""
    name = tests.entry_point
    defined = re.search(rf"^(?:(?:async +)?def +{name}\b|class +(?:{name}|Solution)\b|{name}\s*[:=])", code, re.M)
    if tests.stub and not defined:
        return (tests.stub + indented(code),)
    preamble = tests.preamble + (USUAL_IMPORTS if tests.form == "calls" else "")
    return (preamble, code) if preamble.strip() else (code,)
