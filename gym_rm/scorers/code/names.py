"""Where do names come from that tests use and do not define? From the library, or from the model's code."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

LIBRARY = ("math", "collections", "itertools", "functools", "copy", "datetime", "decimal", "fractions")
"""Modules whose names tests use without importing them."""


def module_of(name: str) -> str:
    """Return the module of the library that has a name, or an empty text."""
    return next((module for module in LIBRARY if hasattr(importlib.import_module(module), name)), "")


def imports_of(names: Sequence[str], trees: Sequence[ast.Module], *, known: str = "") -> list[str]:
    """Return imports of names that tests forgot: of the library, else of the model's code.

    The model's code must not choose what compares its results, so that it gives no name that judges results of others,
    and one of the library only if it is what the tests assert. `known` is a name that it gives in any case.
    """
    given = {name for name in [known, *names] if name not in sys.stdlib_module_names}
    asserted = [used for tree in trees for _, used in _assertions(tree, given)]
    alone = {name for used in asserted if len(used) == 1 for name in used}
    mixed = {name for used in asserted if len(used) > 1 for name in used}
    judging = judges(given, trees)
    lines = []
    for name in names:
        module = module_of(name)
        if name not in given:
            lines.append(f"import {name}")
        elif module and name not in alone - mixed:
            lines.append(f"from {module} import {name}")
        elif name not in judging:
            lines.append(f"from solution import {name}")
    return lines


def judges(names: Iterable[str], trees: Sequence[ast.Module]) -> set[str]:
    """Return those of these names of which the tests assert that they are true of results of others."""
    asserted = [each for tree in trees for each in _assertions(tree, set(names))]
    return {
        call.func.id
        for node, used in asserted
        for call in _truths(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and used - {call.func.id}
    }


def _assertions(tree: ast.Module, names: set[str]) -> list[tuple[ast.AST, set[str]]]:
    """Return each assertion, with those of these names that it uses or that gave the values of its variables."""
    origins = {name: {name} for name in names}
    found = []
    for node in sorted((each for each in ast.walk(tree) if hasattr(each, "lineno")), key=lambda each: each.lineno):
        value: ast.AST | None = None
        targets: Sequence[ast.AST] = ()
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.For):
            value, targets = node.iter, [node.target]
        elif _is_assertion(node):
            found.append((node, _used(node, origins)))
        if value is not None:
            used = _used(value, origins)
            origins.update((name, used) for target in targets for name in words_of(target))
    return found


def _used(node: ast.AST, origins: Mapping[str, set[str]]) -> set[str]:
    return set[str]().union(*(origins.get(name, set()) for name in words_of(node)))


def words_of(node: ast.AST) -> set[str]:
    """Return the names that a part of a program uses."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_assertion(node: ast.AST) -> bool:
    """Return whether a statement is an assert, or a call of `self.assert...`."""
    call = node.value if isinstance(node, ast.Expr) else None
    method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
    return isinstance(node, ast.Assert) or method.startswith("assert")


def _truths(node: ast.AST) -> Iterator[Any]:
    """Yield the expressions whose truth an assertion asserts."""
    tests = [node.test] if isinstance(node, ast.Assert) else [*node.value.args]  # type: ignore[attr-defined]
    while tests:
        test = tests.pop()
        if isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            tests += sides if any(isinstance(side, ast.Constant) and type(side.value) is bool for side in sides) else []
        elif isinstance(test, (ast.BoolOp, ast.UnaryOp)):
            tests += test.values if isinstance(test, ast.BoolOp) else [test.operand]
        else:
            yield test
