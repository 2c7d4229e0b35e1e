import io

import pytest
from rich.console import Console

from gym_rm.reports.live import LiveView
from gym_rm.reports.runs import read_run
from tests.reports.test_monitor import RUNS


def view(*, terminal=False, steps=100, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    return LiveView(console, steps, **options), console.file


def metrics(step):
    phases = {"generate": 3.0, "update": 1.0}
    return {"reward_mean": float(step), "reward_std": 1.0, "accuracy": 0.5, "kl": 0.01, "phase_seconds": phases}


def test_a_log_has_a_line_per_twentieth_of_the_run():
    live, file = view()
    with live:
        for step in range(1, 101):
            live.update(step, metrics(step))
    lines = file.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1] == "step  100/100   reward +100   right 50%   kl 0.01"
    assert "\x1b" not in file.getvalue()


def test_measurements_and_signs_are_printed_at_once():
    live, file = view()
    with live:
        live.measured(
            0, {"reward_mean": 0.0, "reward_std": 1.0, "accuracy": 0.25}, [f"reply {'x' * n}" for n in range(40)]
        )
        live.measured(10, {"reward_mean": 3.0, "reward_std": 1.0, "accuracy": 0.5}, ["You are great!"] * 40)
    lines = file.getvalue().splitlines()
    assert lines[0] == "step    0   held-out prompts   reward 0.00, 25.0% right"
    assert lines[2].startswith("warning: step 10: 100% of the replies are now 'You are great!'")
    assert len(lines) == 3


@pytest.mark.parametrize("reward", [None, -0.5])
def test_a_terminal_shows_progress_and_numbers(reward):
    live, file = view(terminal=True)
    with live:
        for step in range(1, 60):
            live.update(step, metrics(step) | {"reward_mean": reward})
    text = file.getvalue()
    assert "59/100" in text
    assert "kl 0.01" in text


def test_a_resumed_run_knows_what_was_before():
    live, file = view(history=read_run(RUNS / "invented_wording"), steps=100)
    assert [sign.name for sign in live.signs] == ["template"]
    with live:
        live.measured(70, {"reward_mean": 3.5, "reward_std": 1.0}, [" would say 3."] * 40)
    assert "warning" not in file.getvalue()


def test_a_view_ends_with_an_error_of_the_run():
    live, _ = view(terminal=True)
    with pytest.raises(KeyError, match="no metrics"), live:
        raise KeyError("no metrics")
    assert not live._bar.live.is_started
