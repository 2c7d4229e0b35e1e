"""The help pages list the options of scorers, and errors show how to write them."""

import pytest
from typer.testing import CliRunner

from gym_rm.cli.main import app
from gym_rm.cli.options import how_to_write, scorer_options
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.text.renderer import TextOptions


@pytest.mark.parametrize("command", ["score", "serve"])
def test_the_help_page_lists_every_option_with_type_and_default(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=200).stdout
    words = " ".join(shown.split())
    for title, settings in scorer_options().items():
        assert f"--option NAME=VALUE, {title}:" in shown
        for setting in settings:
            assert f"{setting.name} {setting.text}".strip() in words
            assert f"[{setting.type}; default: {setting.default}]" in words


def test_the_options_come_from_the_classes_of_settings():
    groups = scorer_options()
    every = {setting.name for setting in groups["for every reward model"]}
    assert set(TextOptions.model_fields) <= every
    assert {f"for kind={name}" for name, kind in KINDS.items() if kind.Options.model_fields} <= set(groups)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("pass overlong='drop_turns'", "On the command line: --option overlong=VALUE"),
        ("max_length=5; pass overlong=", "On the command line: --max-length VALUE, --option overlong=VALUE"),
        ("pass turns='last'", "On the command line: --turns VALUE"),
        ("path='x' does not exist", None),
        ("overlong is a word here", None),
        ("--option overlong=VALUE", "On the command line: --option overlong=VALUE"),
        ("the text x.date=3 and key-date=3", None),
    ],
)
def test_options_named_as_keywords_are_shown_as_arguments(message, expected):
    assert how_to_write(message) == expected
