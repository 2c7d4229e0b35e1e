"""Asserts that count: each reports whether it held, and a failed one does not end the tests."""

from __future__ import annotations

import ast


class CountedAsserts(ast.NodeTransformer):
    """Puts every assert of the tests of a row into `with _gym_rm_assert(place):`.

    `required` has the places of the asserts that each run must evaluate. A right solution may leave out an assert in a
    branch, a handler, a nested function or a `try` with handlers, and `assert False` marks what must not be reached.
    """

    def __init__(self) -> None:
        self.places = 0
        self.required: set[int] = set()
        self._depth = 0
        self._optional = 0

    def source(self, tree: ast.Module) -> str:
        """Return the source of tests with counted asserts."""
        return ast.unparse(ast.fix_missing_locations(self.visit(tree)))

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Count the assert."""
        unreachable = isinstance(node.test, ast.Constant) and not node.test.value
        if not self._optional and not unreachable:
            self.required.add(self.places)
        counter = ast.Call(ast.Name("_gym_rm_assert", ast.Load()), [ast.Constant(self.places)], [])
        self.places += 1
        return ast.With([ast.withitem(counter)], [node])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Visit a function; only `check` is sure to be called."""
        return self._inside(node, optional=self._depth > 0 or node.name != "check")

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Visit a `try`, whose body may be left early if it has handlers."""
        return self._inside(node, optional=bool(node.handlers))

    def _inside(self, node: ast.AST, optional: bool = True) -> ast.AST:
        self._depth += 1
        self._optional += optional
        self.generic_visit(node)
        self._depth -= 1
        self._optional -= optional
        return node

    visit_If = visit_Match = visit_ClassDef = visit_AsyncFunctionDef = _inside
