"""Ctrl-C at any line of a step, a reset, a send or a recv: the environment has done all of it or nothing."""

import contextlib
import copy
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from gym_rm import Scores, ScoringError
from gym_rm.scorer import NeverCopied
from tests.envs.environments import PROMPTS, interrupt_at, length_reward, lines_of, make

SETTINGS = {"reward_model": length_reward, "prompts": PROMPTS, "render_mode": "ansi"}
REPLIES = [["a", "bb"], ["ccc", ""], ["dd", "e"], ["f", "g"]]
CALL = '<tool_call>{"name": "double", "arguments": {"a": 2}}</tool_call>'
NEVER_CHANGED = ("window", "prompts", "settings", "spec", "action_space", "observation_space", "_user", "_toolbox")


class LengthScorer(NeverCopied):
    """Scorer of the length of a reply, in the thread that receives or in one of its own."""

    def __init__(self, max_concurrent_calls):
        self.max_concurrent_calls = max_concurrent_calls

    def score(self, conversations, prompts=None):
        replies = [conversation[-1]["content"] for conversation in conversations]
        scores = Scores.from_rewards([np.nan if "FAIL" in reply else len(reply) for reply in replies])
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def double(a: int) -> int:
    return 2 * a


def clone(envs):
    """Return a copy that shares everything that never changes, which is ten times faster than a plain deep copy."""
    shared = [value for each in (envs, envs.unwrapped) for name, value in vars(each).items() if name in NEVER_CHANGED]
    return copy.deepcopy(envs, {id(value): value for value in shared})


def check_interrupts(envs, call, then, at_least=100):
    """Interrupt `call(envs)` at each of its lines, the first and the last time that it runs.

    Then `then(envs)` must return the same as after all or after nothing.
    """
    before, after = clone(envs), clone(envs)
    call(clone(envs))  # fills the caches
    lines = lines_of(lambda: call(after))
    expected = [then(before), then(after)]
    first = {line: number for number, line in reversed(list(enumerate(lines, 1)))}
    last = {line: number for number, line in enumerate(lines, 1)}
    for number in sorted({*first.values(), *last.values()}):
        attempt = clone(envs)
        with pytest.raises(KeyboardInterrupt), interrupt_at(number):
            call(attempt)
        found = then(attempt)
        assert any(data_equivalence(found, one, exact=True) for one in expected), lines[number - 1]
    assert len(first) > at_least


def steps(*all_actions):
    return lambda envs: [(envs.step(actions), envs.render()) for actions in all_actions]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("SameStep", {"group_size": 2}),
        ("NextStep", {"reward_on": "end", "max_turns": 2}),
        ("SameStep", {"reward_on": "improvement"}),
        ("Disabled", {}),
        ("SameStep", {"tools": [double]}),
    ],
    ids=["groups", "reward on end", "improvement", "disabled", "tools"],
)
def test_an_interrupted_step_has_changed_all_or_nothing(mode, options):
    envs = make(2, autoreset_mode=mode, **SETTINGS, **options)
    envs.reset(seed=3)
    if mode != "Disabled":
        envs.step(["x", "x"])
    following = REPLIES[1:] if mode != "Disabled" else []

    def then(envs):
        finish = [envs.step(replies) for replies in following]
        return finish, envs.reset(), envs.step(["y", "z"]), envs.reset(seed=0), envs.step(["y", "z"])

    check_interrupts(envs, steps([CALL, "bb"] if "tools" in options else REPLIES[0]), then)


FIRST = np.array([True, False])


@pytest.mark.parametrize("max_calls", [0, 1])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_an_interrupted_send_has_sent_all_or_nothing(mode, max_calls):
    envs = make(2, autoreset_mode=mode, **{**SETTINGS, "reward_model": LengthScorer(max_calls)})
    envs.reset(seed=3)
    envs.send(["first", ""], rows=FIRST)
    while max_calls and not envs.ready[0]:
        time.sleep(0.001)

    def then(envs):
        sent = envs.in_flight
        return sent, envs.recv(int(sent.sum())), envs.in_flight

    check_interrupts(envs, lambda envs: envs.send(["", "bb"], rows=~FIRST), then, at_least=50)


@pytest.mark.parametrize("max_calls", [0, 1])
@pytest.mark.parametrize(
    ("mode", "options"),
    [("SameStep", {}), ("NextStep", {"reward_on": "end"}), ("Disabled", {"tools": [double]})],
    ids=["same step", "next step", "disabled"],
)
def test_an_interrupted_recv_has_received_all_or_nothing(mode, options, max_calls):
    envs = make(2, autoreset_mode=mode, **{**SETTINGS, "reward_model": LengthScorer(max_calls)}, **options)
    envs.reset(seed=3)
    envs.send([CALL, ""], rows=FIRST)
    envs.send(["", "bb"], rows=~FIRST)
    while max_calls and not envs.ready.all():
        time.sleep(0.001)

    def then(envs):
        received = [envs.recv(2)] if envs.in_flight.all() else []
        return envs.in_flight, envs.state.episodes, envs.render(), len(received) and received[0][4]["rows"].all()

    check_interrupts(envs, lambda envs: envs.recv(2), then, at_least=80)


@pytest.mark.parametrize("call", ["cancel", "fail"])
def test_an_interrupted_cancel_or_failure_leaves_rows_in_flight_or_not(call):
    envs = make(2, **{**SETTINGS, "reward_model": LengthScorer(1)})
    envs.reset(seed=3)
    envs.send(["a", "FAIL"])
    while not envs.ready.all():
        time.sleep(0.001)

    def fail(envs):
        with contextlib.suppress(ScoringError):
            envs.recv(2)

    def then(envs):
        return envs.in_flight, envs.state.episodes

    check_interrupts(envs, fail if call == "fail" else lambda envs: envs.cancel(), then, at_least=5)


@pytest.mark.parametrize(
    ("group_size", "options"),
    [
        (2, {"seed": 5}),
        (1, {"options": {"prompt_indices": [2, 2]}}),
        (2, {"options": {"reset_mask": np.array([True, False])}}),
    ],
    ids=["seed", "prompt_indices", "reset_mask"],
)
def test_an_interrupted_reset_has_changed_all_or_nothing(group_size, options):
    envs = make(2, group_size=group_size, **SETTINGS)
    envs.reset(seed=3)
    for replies in REPLIES[:2]:
        envs.step(replies)

    def then(envs):
        return [envs.step(replies) for replies in REPLIES], envs.reset(), envs.step(["y", "z"])

    check_interrupts(envs, lambda envs: envs.reset(**options), then, at_least=50)


@pytest.mark.parametrize("call", ["step", "reset"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RewardModelCandidates-v0", {"candidates": ["one", "two"], "autoreset_mode": "SameStep"}),
        ("RewardModelTokens-v0", {"max_new_tokens": 2, "autoreset_mode": "NextStep"}),
    ],
)
def test_an_interrupted_view_has_changed_all_or_nothing(name, options, call):
    envs = gym.make_vec(name, num_envs=2, window=4, **SETTINGS, **options)
    envs.reset(seed=3)
    for actions in ([0, 1], [0, 0]):
        envs.step(actions)
    mask = {"reset_mask": np.array([False, True])}
    interrupted = steps([0, 1]) if call == "step" else lambda envs: envs.reset(options=mask)
    check_interrupts(envs, interrupted, steps([1, 1], [0, 1], [1, 0]), at_least=50)


@pytest.mark.parametrize("call", [lambda env: env.step("abc"), lambda env: env.reset(seed=9)], ids=["step", "reset"])
def test_an_interrupted_single_environment_has_changed_all_or_nothing(call):
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=PROMPTS[4:], disable_env_checker=True)
    env.reset(seed=3)
    env.step("a")

    def then(env):
        return env.unwrapped.step("b"), env.unwrapped.reset(), env.unwrapped.step("c"), env.np_random.random()

    check_interrupts(env.unwrapped, call, then, at_least=50)
