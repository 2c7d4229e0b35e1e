"""Public names, commands, settings and routes are those of tests/interfaces.txt.

`python -m tests.test_interfaces` writes the file again; its difference belongs into the change that made it.
"""

import ast
import functools
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import gymnasium
from typer.main import get_command

import gym_rm
from gym_rm import testing
from gym_rm.cli.main import app
from gym_rm.scorers.load import SCORER_KINDS

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "interfaces.txt"
RENEW = "python -m tests.test_interfaces"

SETTINGS = {
    "gym-rm train": "gym_rm.training.reward_model_settings:RewardModelTraining",
    "gym-rm grpo": "gym_rm.policy.grpo_settings:GRPOSettings",
    "gym-rm plan": "gym_rm.planning.request_settings:PlanSettings",
}
"""Settings in files and as NAME=VALUE, by command."""

OPTIONS = {
    "gym_rm.engine.loading.checkpoint:LoadOptions": "model",
    "gym_rm.engine.reward_model_scorer:EngineOptions": "model",
    "gym_rm.engine.executors.parallel_options:ParallelOptions": "model",
    "gym_rm.engine.text.text_options:TextOptions": "model",
    "gym_rm.engine.text.judged:JudgedOptions": "model",
    "gym_rm.engine.kinds.decoder:EncoderKind.Options": "kind=encoder",
    "gym_rm.engine.kinds.multi_head:MultiHeadKind.Options": "kind=multi_head",
    "gym_rm.engine.kinds.process:ProcessKind.Options": "kind=process",
    "gym_rm.engine.kinds.language_models:GenerativeKind.Options": "kind=generative",
    "gym_rm.engine.kinds.language_models:ImplicitKind.Options": "kind=implicit",
    "gym_rm.scorers.remote.options:RemoteOptions": "URL",
    "gym_rm.scorers.judge.options:JudgeOptions": "kind=judge",
}
"""Options of `load_scorer`, and for what."""

ENVIRONMENTS = {
    "RewardModel-v0": "gym_rm.envs.settings:EnvSettings",
    "RewardModelCandidates-v0": "gym_rm.envs.numeric_views:CandidateAction",
    "RewardModelTokens-v0": "gym_rm.envs.numeric_views:TokenLevel",
}
"""Whose fields or arguments are keywords of an environment; those of verifiers' environments are their scorers'."""

# The sources are read as text: no torch, no extras, and the same lines in every version of Python and of libraries.


@functools.cache
def tree_of(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


@functools.cache
def names_of(module: str) -> dict[str, tuple[str, ast.stmt | str]]:
    """Return the module and the definition of every name of a module; a text is its name where it is imported from."""
    found: dict[str, tuple[str, ast.stmt | str]] = {}
    tree = tree_of(module)
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node in (node for body in blocks for node in body):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = module, node
                inner = (each for each in node.body if isinstance(each, ast.ClassDef))
                found |= {f"{node.name}.{each.name}": (module, each) for each in inner}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = module, node
            case ast.ImportFrom(module=source, names=names) if source and source.startswith("gym_rm"):
                found |= {each.asname or each.name: (source, each.name) for each in names}
    return found


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the module that defines a name, and the definition; None if it is not in the package."""
    source, node = names_of(module).get(name, ("", None))
    while isinstance(node, str):
        source, node = names_of(source).get(node, ("", None))
    return None if node is None else (source, node)


def classes_of(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Return a class and its bases that are in the package."""
    yield module, node
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        known = definition(module, name.id) if isinstance(name, ast.Name) else None
        if known is not None and isinstance(known[1], ast.ClassDef):
            yield from classes_of(*known)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def members_of(module: str, node: ast.ClassDef) -> dict[str, str]:
    """Return the public fields, properties and methods of a class with its bases, as text."""
    members: dict[str, str] = {}
    for _, each in classes_of(module, node):
        for item in each.body:
            match item:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                    default = f" = {ast.unparse(value)}" if value else ""
                    members.setdefault(name, f": {ast.unparse(kind)}{default}")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    marks = {ast.unparse(mark) for mark in item.decorator_list}
                    is_property = marks & {"property", "functools.cached_property"}
                    kind = f": {ast.unparse(item.returns)}" if is_property and item.returns else signature(item)
                    members.setdefault(name, kind)
    return {name: text for name, text in members.items() if not name.startswith("_") or name == "__init__"}


def python_names(prefix: str, module: str, name: str) -> Iterator[str]:
    source, node = definition(module, name)
    if isinstance(node, ast.ClassDef):
        yield f"{prefix}.{name}: class({', '.join(map(ast.unparse, node.bases))})"
        yield from (f"{prefix}.{name}.{member}{text}" for member, text in members_of(source, node).items())
    elif isinstance(node, ast.AnnAssign):
        yield f"{prefix}.{name} = {ast.unparse(node.value)}"
    else:
        yield f"{prefix}.{name}{signature(node)}"


def settings_of(place: str, module: str, name: str) -> Iterator[str]:
    """Return a line for each setting of a schema, or argument of a constructor, also of schemas inside of it."""
    source, node = definition(module, name)
    bases = list(classes_of(source, node))
    members = members_of(source, node)
    if "__init__" in members and not any(each.name == "Config" for _, each in bases):
        yield f"{place}{name}{members['__init__']}"
        return
    for owner, base in bases:
        for field in (item for item in base.body if isinstance(item, ast.AnnAssign)):
            key = ast.unparse(field.target)
            yield f"{place}{key}{members[key]}"
            for part in (part.id for part in ast.walk(field.annotation) if isinstance(part, ast.Name)):
                inner = definition(owner, part)
                if inner is not None and isinstance(inner[1], ast.ClassDef):
                    yield from settings_of(f"{place}{key}.", inner[0], inner[1].name)


def choices_of(kind) -> Iterator[str]:
    """Return the values of the literals in a type."""
    for part in typing.get_args(kind):
        if typing.get_origin(kind) is typing.Literal:
            yield str(part)
        else:
            yield from choices_of(part)


def commands(name: str, command) -> Iterator[str]:
    """Return a line for each command, its exit codes, its arguments and its options."""
    yield f"command {name}"
    kinds = typing.get_type_hints(command.callback) if command.callback else {}
    for parameter in command.params:
        choices = list(choices_of(kinds.get(parameter.name)))
        values = f" {'|'.join(choices)}" if choices else ""
        default = parameter.default
        shown = f" = {default}" if isinstance(default, str | int | float) and not isinstance(default, bool) else ""
        names = " ".join(sorted({*parameter.opts, *parameter.secondary_opts}, key=lambda each: (len(each), each)))
        yield f"command {name} {names if names.startswith('-') else names.upper()}{values}{shown}"
    if codes := re.search(r"Exit codes: (.*?)(\n\n|$)", command.help or "", re.DOTALL):
        yield f"command {name}: exit codes: {' '.join(codes[1].split())}"
    for inner, each in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {inner}", each)


def routes() -> Iterator[str]:
    _, node = definition("gym_rm.server.app", "ROUTES")
    yield from (f"route {method.value} {path.value}" for method, path, _ in (each.elts for each in node.value.elts))


def interfaces() -> list[str]:
    """Return one line for each public name, sorted."""
    lines = [line for name in gym_rm.__all__ for line in python_names("gym_rm", "gym_rm", name)]
    lines += [line for name in testing.__all__ for line in python_names("gym_rm.testing", "gym_rm.testing", name)]
    for module in (f"gym_rm.adapters.{path.stem}" for path in ROOT.glob("gym_rm/adapters/[a-z]*.py")):
        for name, (source, node) in names_of(module).items():
            if source == module and isinstance(node, ast.ClassDef | ast.FunctionDef) and name[0] != "_":
                lines += python_names(module, module, name)
    for name, place in SETTINGS.items():
        lines += settings_of(f"setting {name} ", *place.split(":"))
    for place, owner in OPTIONS.items():
        lines += settings_of(f"option load_scorer {owner} ", *place.split(":"))
    for kind, place in SCORER_KINDS.items():
        lines += settings_of(f"option load_scorer kind={kind}:", *place.split(":"))
    lines += [f"environment {name}" for name, spec in gymnasium.registry.items() if "gym_rm." in str(spec.entry_point)]
    for name, place in ENVIRONMENTS.items():
        lines += settings_of(f"environment {name} ", *place.split(":"))
    return sorted({*lines, *commands("gym-rm", get_command(app)), *routes()})


def test_public_interfaces_are_those_that_are_stored():
    stored, current = STORED.read_text().splitlines(), interfaces()
    gone, new = sorted({*stored} - {*current}), sorted({*current} - {*stored})
    changes = sorted([f"- {line}" for line in gone] + [f"+ {line}" for line in new], key=lambda each: each[2:])
    assert not changes, "\n".join(
        ["public interfaces changed (docs/stability.md says what that asks for):", *changes, f"If meant: {RENEW}"]
    )


if __name__ == "__main__":
    STORED.write_text("".join(f"{line}\n" for line in interfaces()))
