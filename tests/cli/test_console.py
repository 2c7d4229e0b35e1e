import io
import sys
from logging import WARNING

import pytest
import tiny_models
import torch
import typer
from rich.console import Console
from transformers.utils import logging

import gym_rm
from gym_rm.cli import console
from gym_rm.errors import ConfigError, logger


@pytest.fixture
def progress_bars():
    """Enable the progress bars of transformers before and after the test."""
    logging.enable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_an_error_is_printed_unchanged_with_its_notes(capsys):
    error = ConfigError("[bold]not markup[/]: " + "a long text " * 30)
    error.add_note("while scoring in.jsonl line 5")
    with pytest.raises(typer.Exit) as caught:
        console.fail(error, code=7)
    assert caught.value.exit_code == 7
    assert capsys.readouterr() == ("", f"error: {error}\nwhile scoring in.jsonl line 5\n")


def test_progress_bars_are_disabled_without_a_terminal(progress_bars):
    console.quiet_loading()
    assert not logging.is_progress_bar_enabled()


def test_progress_bars_stay_enabled_in_a_terminal(progress_bars, monkeypatch):
    monkeypatch.setattr(console, "stderr", Console(file=io.StringIO(), force_terminal=True))
    console.quiet_loading()
    assert logging.is_progress_bar_enabled()


def test_warnings_of_the_package_are_printed_with_the_name_of_the_option(capsys):
    record = logger.makeRecord(logger.name, WARNING, "", 0, "the date is fixed; pass date= for %s", ("another",), None)
    console.PrintedWarnings().handle(record)
    expected = "warning: the date is fixed; pass date= for another\nOn the command line: --option date=VALUE\n"
    assert capsys.readouterr() == ("", expected)


@pytest.fixture
def threads():
    """Function that returns the number of torch's threads after `choose_threads`, starting from three."""
    before = torch.get_num_threads()

    def chosen(scorer, number=None):
        torch.set_num_threads(3)
        console.choose_threads(scorer, number)
        return torch.get_num_threads()

    yield chosen
    torch.set_num_threads(before)


def test_a_small_model_runs_on_one_thread(threads, scorer_of):
    small = scorer_of("qwen3")
    assert threads(small) == 1
    assert threads(gym_rm.load_scorer(kind="ensemble", scorers=[small, small])) == 1


def test_a_larger_model_and_a_function_keep_the_threads_of_torch(threads):
    large = tiny_models.reward_model("qwen3", hidden_size=console.HIDDEN_SIZE_FOR_THREADS)
    tokenizer = tiny_models.tokenizer("qwen")
    assert threads(gym_rm.RewardModelScorer(large, tokenizer)) == 3
    assert threads(gym_rm.load_scorer(lambda conversations: [0.0] * len(conversations))) == 3


@pytest.mark.parametrize(("given", "while_loading"), [(None, 3), (2, 2)])
def test_a_model_is_loaded_with_at_least_the_threads_that_run_it(threads, monkeypatch, given, while_loading):
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.set_num_threads(3)
    console.prepare_loading(None, given)
    assert torch.get_num_threads() == while_loading


def test_a_given_number_of_threads_is_used(threads, scorer_of):
    assert threads(scorer_of("qwen3"), 2) == 2


def test_loading_a_scorer_leaves_the_threads_of_the_process(threads, saved_model):
    torch.set_num_threads(3)
    gym_rm.load_scorer(saved_model("qwen3"))
    assert torch.get_num_threads() == 3
