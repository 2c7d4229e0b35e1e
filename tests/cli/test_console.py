from logging import WARNING

import pytest
import typer

from gym_rm.cli import console
from gym_rm.errors import ConfigError, logger


def test_an_error_is_printed_unchanged_with_its_notes(capsys):
    error = ConfigError("[bold]not markup[/]: " + "a long text " * 30)
    error.add_note("while scoring in.jsonl line 5")
    with pytest.raises(typer.Exit) as caught:
        console.fail(error, code=7)
    assert caught.value.exit_code == 7
    assert capsys.readouterr() == ("", f"error: {error}\nwhile scoring in.jsonl line 5\n")


def test_warnings_of_the_package_are_printed(capsys):
    record = logger.makeRecord(logger.name, WARNING, "", 0, "the date is fixed; pass date= for %s", ("another",), None)
    console.PrintedWarnings().handle(record)
    expected = "warning: the date is fixed; pass date= for another\n"
    assert capsys.readouterr() == ("", expected)
