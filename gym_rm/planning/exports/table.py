"""Exports as tables: which setting of a library has which value of a plan, and which values a library has alone.

The tests change every field of a plan: an export has it in its text, or is refused with the field's name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from gym_rm.planning.exports.parts import Flags, Parts
from gym_rm.planning.plan import SIZES_OF, ComponentPlan

Subject: TypeAlias = Literal["policy", "generation", "reference", "critic", "reward_model", "plan"]
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Row:
    """A setting of a library for each subject that the plan has.

    Its value is the subject's field of a name, or that of a function of the parts and the subject. It is left out where
    this is None, or `when` does not hold.
    """

    name: str
    of: Subject
    value: str | Callable[[Parts, Any], Any]
    when: Callable[[Parts], bool] = lambda parts: True


@dataclass(frozen=True, slots=True)
class Only:
    """A field of subjects that the library fixes at some values: another is refused, or noted if it is harmless.

    What the library does instead is for the message. It is harmless if it takes no more memory than planned.
    """

    of: str
    name: str
    values: tuple[Any, ...] | Callable[[Parts, Any], tuple[Any, ...]]
    does: str
    harmless: bool = False

    def check(self, parts: Parts, subject: Any) -> None:
        """Refuse or note another value, by its place in a request."""
        value, path = read(subject, self.name), f"{parts.path(subject)}.{self.name}"
        values = self.values(parts, subject) if callable(self.values) else self.values
        if value is None or value in values:
            return
        text = f"{path}={show(value)}, but {self.does}"
        if self.harmless:
            parts.note(f"{text}.")
        else:
            parts.refuse(f"{text}; set {path}={show(values[0])}.")


@dataclass(frozen=True, slots=True)
class Library:
    """How a library is told what a plan says.

    Attributes:
        rows: its settings in their order, and the fields that it fixes.
        line: returns a setting as the library reads it; None leaves it out.
        check: collects what the library cannot do, and what it does otherwise.
        commands: returns the lines before the settings.
    """

    rows: tuple[Row | Only, ...]
    line: Callable[[str, Any], str | None]
    check: Callable[[Parts], None]
    commands: Callable[[Parts], list[str]] = lambda parts: []


def write(parts: Parts, library: Library) -> Flags:
    """Return the settings of a library, with the notes.

    Raises:
        ConfigError: there are reasons against the export.
    """
    library.check(parts)
    check(parts, [row for row in library.rows if isinstance(row, Only)])
    parts.require()
    lines = library.commands(parts)
    written = [row for row in library.rows if isinstance(row, Row) and row.when(parts)]
    for row, subject in [(each, subject) for each in written for subject in parts.of(each.of)]:
        value = read(subject, row.value) if isinstance(row.value, str) else row.value(parts, subject)
        line = None if value is None else library.line(row.name, value)
        lines += [] if line is None else [line]
    parts.require()
    return Flags(parts.library, tuple(lines), tuple(parts.notes))


def check(parts: Parts, rows: Iterable[Only]) -> None:
    """Refuse or note what a library fixes otherwise, and models of which the plan has only sizes."""
    for row in rows:
        for subject in (each for name in row.of.split() for each in parts.of(name)):
            row.check(parts, subject)
    for each in (parts.policy, *parts.of("critic"), *parts.reward_models):
        if each.model.startswith(SIZES_OF):
            parts.refuse(f"the plan has only sizes for {each.name}; set {parts.path(each)}.model.")


def read(subject: Any, name: str) -> Any:
    """Return a field, such as `dtype` or `lora.rank`; None for one of adapters that there are not."""
    for part in name.split("."):
        subject = getattr(subject, part, None)
    return subject


def show(value: Any) -> str:
    """Return a value as a request has it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def hydra(name: str, value: Any) -> str:
    """Return a setting as a shell and Hydra read it: a text with other letters than those of a path is quoted."""
    if isinstance(value, str) and not re.fullmatch(r"[\w./:+-]*", value):
        return shlex.quote(f"{name}={json.dumps(value)}")
    return f"{name}={show(value)}"


def words(value: Any) -> str:
    """Return a value as the arguments of a shell's command."""
    return shlex.join(value) if isinstance(value, tuple) else shlex.quote(show(value))


def always(value: Any) -> Callable[[Parts, Any], Any]:
    """Return a function for a setting that does not depend on the plan."""
    return lambda parts, subject: value


def same(of: str, name: str, does: str, *, harmless: bool = False) -> Only:
    """Return the row of a field that has the policy's value."""
    return Only(of, name, lambda parts, _: (getattr(parts.policy, name),), f"{does}, as policy.{name}", harmless)


def _whole(_: Parts, policy: ComponentPlan) -> tuple[int]:
    return (max(round(policy.lora.alpha if policy.lora else 0), 1),)


# What several libraries fix.
USUAL = (
    Only("policy critic", "shared_prompts", (False,), "every reply has its prompt in its own row"),
    Only("policy critic", "lora.alpha", _whole, "it reads a whole number"),
    Only("plan", "turns", (1,), "its run has one reply to a prompt; more need an agent loop of your own"),
    same("reference", "model", "its reference is a copy of the policy"),
)
STRICT = (
    *USUAL,
    Only("policy critic", "optimizer", ("adamw",), "it trains with AdamW"),
    Only("reward_model", "quantization", (None,), "only gym_rm's scorers have such weights"),
    Only("reward_model", "fsdp_size", (1,), "only gym_rm's scorers are divided so"),
)
SHARDED = Only(
    "policy reference critic",
    "fsdp_size",
    lambda _, each: (each.fsdp_size * each.num_replicas, 1),
    "it shards a model over all of its GPUs, or over none",
)
