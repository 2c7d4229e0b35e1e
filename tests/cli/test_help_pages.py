"""The help pages list the options of scorers."""

import pytest
from typer.testing import CliRunner

from gym_rm.cli.main import app
from gym_rm.cli.scorer_arguments import scorer_options
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.text.renderer import TextOptions


@pytest.mark.parametrize("command", ["score", "serve"])
def test_the_help_page_lists_every_option_with_type_and_default(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, [command, "--help-all"], terminal_width=200).stdout
    words = " ".join(shown.split())
    for title, settings in scorer_options().items():
        assert f"{title}:" in shown
        for setting in settings:
            assert f"{setting.name} {setting.text}".strip() in words
            assert f"[{setting.type}; default: {setting.default}]" in words


def test_the_help_page_has_the_usual_options_and_names_the_page_of_all():
    shown = CliRunner().invoke(app, ["score", "--help"]).stdout
    assert len(shown.splitlines()) < 90
    assert "score --help-all" in shown
    assert "max_length" in shown
    assert "step_token" not in shown


def test_the_options_come_from_the_classes_of_settings():
    groups = scorer_options()
    every = {setting.name for setting in groups["--option NAME=VALUE, for every reward model"]}
    assert set(TextOptions.model_fields) <= every
    assert {
        f"--option NAME=VALUE, for kind={name}" for name, kind in KINDS.items() if kind.Options.model_fields
    } <= set(groups)
