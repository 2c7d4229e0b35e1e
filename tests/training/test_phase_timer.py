"""Seconds of the phases of a step, by a clock of the tests."""

import numpy as np
import pytest

from agents import grpo
from gym_rm.policy import rollouts_ahead
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.policy.rollouts_ahead import KeptCompletions, RolloutsAhead
from gym_rm.training import phase_timer
from gym_rm.training.phase_timer import PhaseTimer
from tests.policy.test_rollouts import Run


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time, in seconds."""
    now = [0.0]
    for module in (phase_timer, rollouts_ahead):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_phase_is_counted_once_and_beside_it_what_it_hides(clock):
    timer = PhaseTimer()
    for hides in (None, "score"):
        with timer.measure("generate", hides=hides):
            clock[0] += 2
    with timer.measure("score"):
        clock[0] += 1
    assert timer.take() == {"generate": 4, "score": 1, "score_hidden": 2}
    assert timer.take() == {}


def test_all_that_a_step_waits_for_is_in_a_phase(clock, tmp_path):
    """Each look at the sampler takes 3 s, rendering 5 s, sending 1 s and receiving 7 s."""
    run = Run(tmp_path)
    envs = grpo.make_envs(run.settings, run.prompts, run.scorer, 16, group_size=4)
    batch, stream = run.schedule.training(1), run.sampler.stream()
    sampler = type("Sampler", (), {"stream": lambda self: stream})()
    for owner, name, seconds in ((batch, "requests", 5), (stream, "take", 3), (envs, "send", 1), (envs, "recv", 7)):
        slow_down(owner, name, seconds, clock)
    timer = PhaseTimer()
    grpo.play(envs, sampler, batch, timer)
    seconds = timer.take()
    assert seconds["generate"] + seconds["score"] == clock[0]
    assert seconds["score_hidden"] % 3 == 0
    assert seconds["score_hidden"] < seconds["generate"]
    envs.close()


def slow_down(owner, name, seconds, clock):
    function = getattr(owner, name)

    def slow(*arguments, **options):
        clock[0] += seconds
        return function(*arguments, **options)

    setattr(owner, name, slow)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        (0, {"generate": 0, "score": 0, "generate_hidden": 5, "score_hidden": 4 + 2}),
        (3, {"generate": 3, "score": 0, "generate_hidden": 5, "score_hidden": 1 + 2}),
        (9, {"generate": 9, "score": 0, "generate_hidden": 0, "score_hidden": 2}),
    ],
)
def test_a_step_that_was_played_ahead_costs_only_the_wait_for_it(waits, expected, clock):
    def play_step(step, timer):
        timer.add(5, "generate")
        timer.add(2, "score_hidden")
        timer.add(4, "score")
        return RolloutTable([])

    ahead, timer = RolloutsAhead(play_step, KeptCompletions(None)), PhaseTimer()
    ahead.begin(1)
    ahead.wait()
    slow_down(ahead, "wait", waits, clock)
    ahead.take(timer)
    assert timer.take() == expected
    assert np.isclose(clock[0], waits)
