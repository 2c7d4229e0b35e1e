import io

import pytest
import typer
from rich.console import Console
from transformers.utils import logging

from gym_rm.cli import console
from gym_rm.errors import ConfigError


@pytest.fixture
def progress_bars():
    """transformers' progress bars are on, and stay so after the test."""
    logging.enable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_an_error_is_printed_with_its_notes_as_it_is(capsys):
    error = ConfigError("[bold]not markup[/]: " + "a long text " * 30)
    error.add_note("while scoring in.jsonl line 5")
    with pytest.raises(typer.Exit) as caught:
        console.fail(error, code=7)
    assert caught.value.exit_code == 7
    assert capsys.readouterr() == ("", f"error: {error}\nwhile scoring in.jsonl line 5\n")


def test_a_log_file_gets_no_progress_bars_of_transformers(progress_bars):
    console.quiet_loading()
    assert not logging.is_progress_bar_enabled()


def test_a_terminal_keeps_the_progress_bars_of_transformers(progress_bars, monkeypatch):
    monkeypatch.setattr(console, "stderr", Console(file=io.StringIO(), force_terminal=True))
    console.quiet_loading()
    assert logging.is_progress_bar_enabled()
