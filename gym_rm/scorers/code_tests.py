"""What is tested: the tests of a data row, read from the usual fields into one of three forms."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from gym_rm.scorers.code_asserts import COUNTERS, OUTCOME, RUNNER, count_asserts, finish, guarded
from gym_rm.scorers.code_replies import fenced_blocks, indented
from gym_rm.types import Prompt

CASE_FIELDS = ("cases", "test_cases", "input_output", "public_test_cases", "tests", "ground_truth", "reward_model")
EXPECTED_FIELDS = (
    "'test' with 'entry_point' (HumanEval), 'test_list' (MBPP), 'unit_tests' or 'test_file', or 'cases', 'test_cases' "
    "or 'input_output' with inputs and outputs"
)
MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "re", "string")
USUAL = {
    "typing": ("Any", "Callable", "Deque", "Dict", "List", "Optional", "Set", "Tuple", "Union"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "functools": ("cache", "cmp_to_key", "lru_cache", "reduce"),
    "itertools": ("accumulate", "chain", "combinations", "groupby", "pairwise", "permutations", "product"),
    "heapq": ("heapify", "heappop", "heappush", "heappushpop", "nlargest", "nsmallest"),
    "bisect": ("bisect_left", "bisect_right", "insort"),
    "math": ("ceil", "comb", "floor", "gcd", "inf", "isqrt", "lcm", "sqrt"),
}


LIBRARY = ("math", "collections", "itertools", "functools", "copy", "datetime", "decimal", "fractions")
"""Modules whose names tests use without importing them."""


class TestsError(ValueError):
    """The row has no tests, or tests that cannot be read."""

    __test__ = False  # not a test of pytest


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the program with its standard input, or one call with arguments, and what is expected.

    Attributes:
        input: text for standard input, or the list of arguments.
        output: expected text on standard output, or the expected value.
    """

    input: Any
    output: Any


@dataclass(frozen=True, slots=True, eq=False)
class Tests:
    """The tests of one row. Rows with equal tests share one object.

    Attributes:
        form: `"program"`: a program that calls the model's code and counts what holds; `"calls"`: arguments and
            results; `"cases"`: inputs and outputs of a program.
        entry_point: name of the function under test; empty for programs.
        stub: code of the prompt up to the body of this function, which a reply may continue.
        preamble: code of the prompt before this function: imports and helpers.
        program: for `"program"`, the tests with counters.
        required: for `"program"`, asserts that must be evaluated at least once.
        solution: whether the tests import the module `solution`.
        cases: for `"calls"` and `"cases"`.
    """

    __test__ = False

    form: Literal["program", "calls", "cases"]
    entry_point: str = ""
    stub: str = ""
    preamble: str = ""
    program: str = ""
    required: frozenset[int] = frozenset()
    solution: bool = False
    cases: tuple[Case, ...] = ()

    @property
    def total(self) -> int:
        """Least number of tests."""
        return len(self.cases) or max(len(self.required), 1)


def read_tests(prompt: Prompt | None) -> Tests:
    """Return the tests of a row.

    Raises:
        TestsError: there are none, or they cannot be read. The message names the field.
    """
    if prompt is None:
        raise TestsError("the tests come with the prompt of the row, but it has none; pass prompts=")
    data = {**prompt.metadata}
    try:
        return _tests(json.dumps([data, prompt.answer, _text(prompt)], sort_keys=True, default=_plain))
    except RecursionError as error:
        raise TestsError("the tests are nested too deeply") from error


def _plain(value: Any) -> Any:
    """Return an array, as the columns of a table have them, as a list, and any other object as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _text(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"] if prompt.messages else ""


@functools.lru_cache(maxsize=4096)
def _tests(row: str) -> Tests:
    data, answer, text = json.loads(row)
    info = data.get("extra_info")
    data = {**info, **data} if isinstance(info, dict) else data
    if data.get("test_list"):
        return _assert_list(data, text)
    for name in ("unit_tests", "test_file", "test", "tests"):
        source = data.get(name)
        if isinstance(source, str) and _is_code(source):
            return _check(data, source, text) if re.search(r"^def check\(", source, re.M) else _units(name, source)
    if isinstance(data.get("tests"), list) and data["tests"] and isinstance(data["tests"][0], str):
        return _assert_list({**data, "test_list": data["tests"]}, text)
    for name in CASE_FIELDS:
        if data.get(name):
            return _cases(name, data[name], data, text)
    if data.get("inputs") and data.get("outputs"):
        return _cases("inputs", data, data, text)
    if answer and answer.lstrip().startswith(("{", "[")):
        return _cases("answer", answer, data, text)
    raise TestsError(f"the row has no tests: expected the fields {EXPECTED_FIELDS}; got {sorted(data)}")


def _is_code(text: str) -> bool:
    return bool(text.strip()) and not text.lstrip().startswith(("{", "["))


# --- HumanEval and MBPP ------------------------------------------------------------------------------------------


def _check(data: Mapping[str, Any], source: str, text: str) -> Tests:
    entry_point = data.get("entry_point")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise TestsError(f"'test' defines check(candidate), so 'entry_point' must be a name; got {entry_point!r:.80}")
    stub, preamble = prompt_code(text, entry_point)
    tree = _parse("test", source)
    called = any(isinstance(node, ast.Expr) and "check" in _called(node) for node in tree.body)
    if not called:
        tree.body += ast.parse("check(candidate)").body
    required = count_asserts(tree)
    tree.body = [*_quiet(preamble), *ast.parse(f"{entry_point} = candidate").body, *tree.body]
    return Tests("program", entry_point, stub, preamble, finish(tree), required)


def _assert_list(data: Mapping[str, Any], text: str) -> Tests:
    listed = data["test_list"]
    listed = json.loads(listed) if isinstance(listed, str) and listed.lstrip().startswith("[") else listed
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise TestsError(f"'test_list' must be a list of texts with asserts, got {listed!r:.80}")
    setup = _parse("test_setup_code", str(data.get("test_setup_code") or ""))
    listed_imports = data.get("test_imports") or []
    text_of_imports = "\n".join(listed_imports) if isinstance(listed_imports, list) else ""
    setup.body = _parse("test_imports", text_of_imports).body + setup.body
    items = [_parse(f"test_list[{k}]", each) for k, each in enumerate(listed)]
    name = data.get("entry_point") or data.get("func_name") or _first_call(items)
    if not isinstance(name, str) or not name.isidentifier():
        raise TestsError(f"'test_list' calls no function by its name, got {listed!r:.80}")
    stub, preamble = prompt_code(text, name)
    before = [*_quiet(preamble), *ast.parse(f"{name} = candidate").body]
    asserts = [node for item in items for node in item.body]
    missing = _undefined(ast.Module([*before, *setup.body, *asserts], []), {"candidate"})
    imports = [_import_of(each) for each in missing if not _is_module(each, items)]
    before += ast.parse("\n".join(imports)).body
    tree = ast.Module([guarded(item.body) for item in items if item.body], [])
    required = count_asserts(tree)
    tree.body = [*before, *setup.body, *tree.body]
    of_solution = any(each.startswith("from solution ") for each in imports)
    return Tests("program", name, stub, preamble, finish(tree), required, solution=of_solution)


def _import_of(name: str) -> str:
    """Return the import of a name that the tests forgot: of the library, else of the model's code.

    The model's code must not choose what compares its results.
    """
    if name in sys.stdlib_module_names:
        return f"import {name}"
    source = next((each for each in LIBRARY if hasattr(importlib.import_module(each), name)), "solution")
    return f"from {source} import {name}"


def _is_module(name: str, items: Sequence[ast.Module]) -> bool:
    """Return whether the tests use a name as that of a package, such as np, which the model's code does not give."""
    nodes = [node.value for item in items for node in ast.walk(item) if isinstance(node, ast.Attribute)]
    used = any(isinstance(node, ast.Name) and node.id == name for node in nodes)
    return used and name.islower() and name not in sys.stdlib_module_names


def _first_call(items: Sequence[ast.Module]) -> str:
    """Return the name of the function that most of the asserts call."""
    known = {*dir(builtins), "isclose"}
    counts: dict[str, int] = {}
    for item in items:
        for name in dict.fromkeys(name for node in ast.walk(item) for name in _called(node)):
            counts[name] = counts.get(name, 0) + 1
    return max(counts, key=lambda name: (name not in known, counts[name]), default="")


def _called(node: ast.AST) -> list[str]:
    """Return the name of the function that this call or expression statement calls, or nothing."""
    node = node.value if isinstance(node, ast.Expr) else node
    return [node.func.id] if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else []


def prompt_code(text: str, entry_point: str) -> tuple[str, str]:
    """Return the code of a prompt up to the body of a function, and the part of it before this function.

    Both are empty if the prompt shows no such code.
    """
    header = re.compile(rf"^(async +)?def +{entry_point}\b", re.M)
    starts = [0, *(match.start() for match in re.finditer(r"^(from |import |def |class |@|[A-Z_]+ *=)", text, re.M))]
    candidates = [block for _, block in fenced_blocks(text)] + [text[start:] for start in starts]
    for code in candidates:
        found = header.search(code)
        if found is None:
            continue
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        before = code[: found.start()]
        lines = before.splitlines(keepends=True)
        while lines and lines[-1].lstrip().startswith("@"):
            lines.pop()
        return code if code.endswith("\n") else code + "\n", "".join(lines)
    return "", ""


def _quiet(preamble: str) -> list[ast.stmt]:
    """Return the statements of the prompt's helpers, as part of the tests."""
    return [node for node in ast.parse(preamble).body if not isinstance(node, ast.Assert)]


# --- unit tests ---------------------------------------------------------------------------------------------------


def _units(name: str, source: str) -> Tests:
    tree = _without_stars(_parse(name, source))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    methods = sum(
        isinstance(each, ast.FunctionDef) and each.name.startswith("test")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for each in node.body
    )
    if not functions and not methods:
        required = count_asserts(tree)
        if required:  # a script of asserts that imports the solution
            return Tests("program", program=finish(tree), required=required, solution=True)
        raise TestsError(f"{name!r} has no test: no function test_..., no method of a TestCase and no assert")
    body = [node for node in tree.body if not _is_main_guard(node)]
    tree.body = body
    runner = RUNNER.format(functions=functions, classes=classes)
    program = f"{COUNTERS}\n{ast.unparse(tree)}\n{runner}\n{OUTCOME}"
    return Tests("program", program=program, required=frozenset(range(len(functions) + methods)), solution=True)


def _without_stars(tree: ast.Module) -> ast.Module:
    """Replace `from solution import *` by the names that the tests use and do not define.

    The model's code must not choose names of the tests: it would replace their functions.
    """
    used = _undefined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "solution" and node.names[0].name == "*" and used:
            node.names = [ast.alias(each) for each in used]
    return tree


def _undefined(tree: ast.Module, known: Set[str] = frozenset()) -> list[str]:
    """Return the names that the code uses and does not define."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {*dir(builtins), "__name__", "__file__", *known}
    known |= {node.id for node in nodes if not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(each.asname or each.name).partition(".")[0] for each in node.names}
            source = getattr(node, "module", None) or ""
            if "*" in known and source.partition(".")[0] in sys.stdlib_module_names:
                known |= vars(importlib.import_module(source)).keys()
    return [name for name in dict.fromkeys(node.id for node in nodes) if name not in known]


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


# --- inputs and outputs -------------------------------------------------------------------------------------------


def _cases(name: str, value: Any, data: Mapping[str, Any], text: str) -> Tests:
    value = _loaded(name, value)
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = _loaded(name, value["ground_truth"])
    function = data.get("fn_name") or data.get("func_name") or _named_in(data.get("metadata"))
    if isinstance(value, Mapping):
        function = value.get("fn_name") or function
        inputs, outputs = _loaded(name, value.get("inputs")), _loaded(name, value.get("outputs"))
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise TestsError(f"{name!r} must have the lists 'inputs' and 'outputs' of one length, got {value!r:.80}")
        cases = [Case(one, other) for one, other in zip(inputs, outputs, strict=True)]
        if function and all(isinstance(case.output, list) and len(case.output) == 1 for case in cases):
            cases = [Case(case.input, case.output[0]) for case in cases]  # APPS puts each result into a list
    elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        cases = [_case(name, each, bool(function)) for each in value]
    else:
        raise TestsError(f"{name!r} must be a list of inputs and outputs, got {value!r:.80}")
    if not cases:
        raise TestsError(f"{name!r} has no cases")
    if function:
        if not isinstance(function, str) or not function.isidentifier():
            raise TestsError(f"'fn_name' must be the name of a function, got {function!r:.80}")
        stub, preamble = prompt_code(text, function)
        return Tests("calls", function, stub, preamble, cases=tuple(_call(name, case) for case in cases))
    return Tests("cases", cases=tuple(Case(_lines(case.input), _lines(case.output)) for case in cases))


def _case(name: str, each: Mapping[str, Any], is_call: bool) -> Case:
    given = next((each[key] for key in ("input", "inputs", "stdin") if key in each), None)
    output = next(
        (each[key] for key in ("output", "outputs", "expected_output", "expected", "stdout") if key in each), None
    )
    if given is None or output is None:
        raise TestsError(f"{name!r} must have 'input' and 'output' in each case, got the fields {sorted(each)}")
    if is_call and isinstance(given, str):  # LiveCodeBench: one JSON value per line
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            output = json.loads(output) if isinstance(output, str) else output
        except ValueError as error:
            raise TestsError(f"{name!r} must have JSON values in the cases of a function: {error}") from error
    return Case(given, output)


def _call(name: str, case: Case) -> Case:
    if not isinstance(case.input, list):
        raise TestsError(f"{name!r} must have a list of arguments in each case of a function, got {case.input!r:.80}")
    return case


def _named_in(metadata: Any) -> Any:
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return None
    return metadata.get("func_name") if isinstance(metadata, Mapping) else None


def _loaded(name: str, value: Any) -> Any:
    """Return JSON texts as values."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise TestsError(f"{name!r} is not JSON: {error}; got {value!r:.80}") from error


def _lines(value: Any) -> str:
    """Return a text, or the lines of a list."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parse(name: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"{name!r} is not Python: {error}") from error


def solution_parts(code: str, tests: Tests) -> tuple[str, ...]:
    """Return the sources to execute one after another: the prompt's helpers and the code, or both as one function."""
    name = tests.entry_point
    defined = re.search(rf"^(?:(?:async +)?def +{name}\b|class +(?:{name}|Solution)\b|{name}\s*[:=])", code, re.M)
    if tests.stub and not defined:
        return (tests.stub + indented(code),)
    preamble = tests.preamble + (_usual_imports(code) if tests.form == "calls" else "")
    return (preamble, code) if preamble.strip() else (code,)


def _usual_imports(code: str) -> str:
    """Return imports of the names that sites with tests of functions import for every solution."""
    used = {module: [name for name in names if re.search(rf"\b{name}\b", code)] for module, names in USUAL.items()}
    used["modules"] = [each for each in MODULES if re.search(rf"(?<![.\w]){each}\.", code)]
    lines = [f"import {name}" for name in used.pop("modules")]
    return "\n".join([*lines, *(f"from {module} import {', '.join(names)}" for module, names in used.items() if names)])
