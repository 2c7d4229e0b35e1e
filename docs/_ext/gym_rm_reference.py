"""Directives of the reference: `settings` makes tables of pydantic schemas, `command-line` sections of the commands."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gym_rm.cli.main import app as commands
from gym_rm.config import Config, Setting, settings_of


def code(text: str) -> str:
    """Return a text as code for the cell of a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def prose(text: str) -> str:
    """Return a help text as Markdown: options are code, and other text has no marks of HTML."""
    text = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", text)
    shown = (part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)
    return "".join(shown).replace("|", "\\|")


def table(settings: Sequence[Setting], prefix: str) -> list[str]:
    """Return the lines of a table of settings."""
    rows = (
        f"| {code(prefix + each.name)} | {prose(each.type)} | {code(each.default)} | {prose(each.text)} |"
        for each in settings
    )
    return ["| setting | type | default | |", "| --- | --- | --- | --- |", *rows]


def sections_of(source: Any, prefix: str = "") -> Iterator[tuple[str, Sequence[Setting]]]:
    """Yield the title and the settings of a schema and of each group in it, or of the sections of a help page."""
    if not (isinstance(source, type) and issubclass(source, Config)):
        yield from (source() if callable(source) else source).items()
        return
    groups = {}
    for name, field in source.model_fields.items():
        for schema in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(schema, type) and issubclass(schema, Config):
                groups[name] = schema
    yield (
        prefix,
        [each for each in settings_of(source) if source.model_fields[each.name].annotation not in groups.values()],
    )
    for name, schema in groups.items():
        yield from sections_of(schema, f"{prefix}{name}.")


class Settings(SphinxDirective):
    """Tables of the settings of schemas, or of functions that return the sections of a help page.

    A group of settings is a section. Every setting is in the index, where the search finds it.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the tables and sections."""
        module, _, attribute = self.arguments[0].partition(":")
        found: list[nodes.Node] = []
        for title, settings in sections_of(getattr(importlib.import_module(module), attribute)):
            prefix = title if title.endswith(".") else ""
            tables = self.parse_text_to_nodes("\n".join(table(settings, prefix)))
            for row in (row for each in tables for row in each.findall(nodes.row)):
                if names := list(row[0].findall(nodes.literal)):
                    self._add_to_index(row, names[0].astext())
            for each in tables:
                for inner in each.findall(nodes.table):
                    inner["classes"].append("settings")
            if title := title.removeprefix("--option NAME=VALUE, "):
                heading = nodes.title("", "", nodes.literal(title, title) if prefix else nodes.Text(title))
                section = nodes.section("", heading, *tables, names=[nodes.fully_normalize_name(title)])
                self.state.document.note_implicit_target(section, section)
                tables = [section]
            found += tables
        return found

    def _add_to_index(self, row: nodes.row, name: str) -> None:
        anchor = f"setting-{self.env.new_serialno('setting')}-{nodes.make_id(name)}"
        row["ids"].append(anchor)
        row[0].insert(0, addnodes.index(entries=[("single", name, anchor, "main", None)]))


class CommandLine(SphinxDirective):
    """A section for each command of `gym-rm`, with its usage, help, arguments and options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        lines = self.sections(typer.main.get_command(commands), "gym-rm")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)

    def sections(self, command: Any, name: str) -> Iterator[str]:
        """Yield the lines of a command and of its sub-commands."""
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f"## {name}", "", "```text", f"{name} {usage}", "```", "")
        yield from (paragraphs(inspect.cleandoc(command.help or "")), "")
        records = [each.get_help_record(context) for each in command.get_params(context) if each.name != "help"]
        rows = [record for record in records if record]
        if rows:
            yield from ("| argument or option | |", "| --- | --- |")
            yield from (f"| {code(names)} | {prose(text)} |" for names, text in rows)
            yield ""
        for part, subcommand in getattr(command, "commands", {}).items():
            yield from self.sections(subcommand, f"{name} {part}")


def paragraphs(text: str) -> str:
    """Return a help text as Markdown; a paragraph after a line with a backspace stays as it is."""
    parts = text.split("\n\n")
    return "\n\n".join(f"```text{part[1:]}\n```" if part.startswith("\b") else prose(part) for part in parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("settings", Settings)
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
