"""Programs of tests that count what holds: every assert is evaluated in a `try`, and reported."""

from __future__ import annotations

import ast

COUNTERS = """
_gym_rm_log = {"passed": 0, "failed": 0, "sites": [], "errors": [], "end": None}
def _gym_rm_pass(site):
    _gym_rm_log["passed"] += 1
    if site not in _gym_rm_log["sites"]:
        _gym_rm_log["sites"].append(site)
def _gym_rm_fail(site, error):
    _gym_rm_log["failed"] += 1
    if site not in _gym_rm_log["sites"]:
        _gym_rm_log["sites"].append(site)
    if len(_gym_rm_log["errors"]) < 3:
        _gym_rm_log["errors"].append([type(error).__name__, str(error)[:2000]])
def _gym_rm_end(error):
    if _gym_rm_log["end"] is None:
        _gym_rm_log["end"] = [type(error).__name__, str(error)[:2000]]
"""
OUTCOME = "_gym_rm_log"
RUNNER = """
def _gym_rm_calls(function):
    calls = [{{}}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            rows = [row.values if type(row).__name__ == "ParameterSet" else row for row in rows]
            names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
            rows = [row if len(names) > 1 or type(row) is tuple and len(row) == 1 else [row] for row in rows]
            calls = [call | dict(zip(names, row)) for call in calls for row in rows]
    code = function.__code__
    given = code.co_varnames[:code.co_argcount - len(function.__defaults__ or ())]
    for name in given:
        if name not in calls[0] and name != "self":
            raise NotImplementedError(f"{{function.__name__}} needs the fixture {{name!r}}")
    return calls
def _gym_rm_run():
    import unittest
    site = 0
    for function in {functions}:
        try:
            for call in _gym_rm_calls(globals()[function]):
                globals()[function](**call)
        except BaseException as error:
            _gym_rm_fail(site, error)
        else:
            _gym_rm_pass(site)
        site += 1
    for name in {classes}:
        kind = globals()[name]
        names = [each for each in vars(kind) if each.startswith("test") and callable(getattr(kind, each))]
        is_case = issubclass(kind, unittest.TestCase)
        suite = unittest.TestSuite(map(kind, names)) if is_case else None
        if is_case:
            result, passed = unittest.TestResult(), []
            result.addSuccess = passed.append
            result.addExpectedFailure = lambda test, error: passed.append(test)
            suite.run(result)
            bad = result.failures + result.errors
            for k, (test, trace) in enumerate(bad, len(passed)):  # more than tests, of those with parts
                last = trace.strip().splitlines()[-1]
                error = type(last.split(":")[0].split(".")[-1], (Exception,), {{}})(last.partition(":")[2].strip())
                _gym_rm_fail(site + min(k, len(names) - 1), error)
            for k in range(len(passed)):
                _gym_rm_pass(site + k)
            site += len(names)
            skipped = sum(hasattr(getattr(kind, each), "__unittest_skip__") for each in names)  # by a decorator
            _gym_rm_log["sites"] += range(site - skipped, site)
            continue
        for each in names:
            try:
                for call in _gym_rm_calls(vars(kind)[each]):
                    getattr(kind(), each)(**call)
            except BaseException as error:
                _gym_rm_fail(site, error)
            else:
                _gym_rm_pass(site)
            site += 1
_gym_rm_run()
"""


def count_asserts(tree: ast.Module) -> frozenset[int]:
    """Wrap every assert of the tests so that it is counted; return the asserts that each run must evaluate.

    An assert in a branch, a handler, a nested function or a `try` with handlers may be left out by a right solution.
    `assert False` marks code that must not be reached.
    """
    counter = _Counter()
    counter.visit(tree)
    ast.fix_missing_locations(tree)
    return frozenset(counter.required)


class _Counter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.sites = 0
        self.required: set[int] = set()
        self.optional = 0
        self.functions = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        site, self.sites = self.sites, self.sites + 1
        unreachable = isinstance(node.test, ast.Constant) and not node.test.value
        if not self.optional and not unreachable:
            self.required.add(site)
        return _try([node], f"_gym_rm_fail({site}, _gym_rm_error)", f"_gym_rm_pass({site})")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer = self.functions == 0 and node.name == "check"
        return self._inside(node, optional=not outer)

    def _inside(self, node: ast.AST, optional: bool = True) -> ast.AST:
        self.optional += optional
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1
        self.optional -= optional
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._inside(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node)

    def visit_Match(self, node: ast.Match) -> ast.AST:
        return self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._inside(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        ours = any(isinstance(each, ast.ExceptHandler) and each.name == "_gym_rm_error" for each in node.handlers)
        return self._inside(node, optional=bool(node.handlers) and not ours)


def _try(body: list[ast.stmt], on_error: str, otherwise: str) -> ast.stmt:
    source = f"try:\n    pass\nexcept BaseException as _gym_rm_error:\n    {on_error}\nelse:\n    {otherwise}"
    guarded = ast.parse(source).body[0]
    assert isinstance(guarded, ast.Try)
    guarded.body = body
    return guarded


def guarded(body: list[ast.stmt]) -> ast.stmt:
    """Return statements whose error ends only them, and is reported."""
    return _try(body, "_gym_rm_end(_gym_rm_error)", "pass")


def finish(tree: ast.Module) -> str:
    """Return the program: counters, the tests, and the outcome as its value. An error of the tests ends them."""
    ast.fix_missing_locations(tree)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    head = ast.unparse(ast.Module(list(imports), []))
    body = [node for node in tree.body if node not in imports]
    whole = ast.fix_missing_locations(ast.Module([guarded(body)], []))
    return f"{head}\n{COUNTERS}\n{ast.unparse(whole)}\n{OUTCOME}"
