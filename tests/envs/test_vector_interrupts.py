"""Ctrl-C at any line of a step or a reset: the environment has done all of it or nothing."""

import copy
import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence

from tests.envs.environments import PROMPTS, interrupt_at, length_reward, make

SETTINGS = {"reward_model": length_reward, "prompts": PROMPTS, "render_mode": "ansi"}


def clone(envs):
    """Return a copy that shares everything that never changes, which is ten times faster than a plain deep copy."""
    fixed = ("window", "prompts", "settings", "spec", "action_space", "observation_space", "_user")
    shared = [value for each in (envs, envs.unwrapped) for name, value in vars(each).items() if name in fixed]
    return copy.deepcopy(envs, {id(value): value for value in shared})


def check_interrupts(envs, call, then, event="line"):
    """Interrupt `call(envs)` at every line. Then `then(envs)` must return the same as after all or after nothing."""
    before, after = clone(envs), clone(envs)
    call(after)
    expected = [then(before), then(after)]
    for count in itertools.count(1):
        attempt = clone(envs)
        try:
            with interrupt_at(count, event=event):
                call(attempt)
        except KeyboardInterrupt:
            found = then(attempt)
            assert any(data_equivalence(found, one, exact=True) for one in expected), f"{event} {count}"
        else:
            return count


def steps(*all_actions):
    return lambda envs: [(envs.step(actions), envs.render()) for actions in all_actions]


REPLIES = [["a", "bb"], ["ccc", ""], ["dd", "e"], ["f", "g"]]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("SameStep", {"group_size": 2}),
        ("NextStep", {"reward_on": "end", "max_turns": 2}),
        ("Disabled", {}),
    ],
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

    assert check_interrupts(envs, steps(REPLIES[0]), then) > 100


@pytest.mark.parametrize(
    ("group_size", "options"),
    [
        (2, {"seed": 5}),
        (1, {"options": {"prompt_indices": [2, 2]}}),
        (2, {"options": {"reset_mask": np.array([True, False])}}),
    ],
)
def test_an_interrupted_reset_has_changed_all_or_nothing(group_size, options):
    envs = make(2, group_size=group_size, **SETTINGS)
    envs.reset(seed=3)
    for replies in REPLIES[:2]:
        envs.step(replies)

    def then(envs):
        return [envs.step(replies) for replies in REPLIES], envs.reset(), envs.step(["y", "z"])

    assert check_interrupts(envs, lambda envs: envs.reset(**options), then) > 50


def view(name, mode, **options):
    sizes = {"candidates": ["one", "two"]} if name == "RewardModelCandidates-v0" else {"max_new_tokens": 2}
    settings = {**SETTINGS, "window": 4, "autoreset_mode": mode, **sizes, **options}
    envs = gym.make_vec(name, num_envs=2, **settings)
    envs.reset(seed=3)
    return envs


@pytest.mark.parametrize(
    ("name", "mode"), [("RewardModelCandidates-v0", "SameStep"), ("RewardModelTokens-v0", "NextStep")]
)
def test_an_interrupted_step_of_a_view_has_changed_all_or_nothing(name, mode):
    envs = view(name, mode)
    for actions in ([0, 1], [0, 0]):
        envs.step(actions)
    then = steps([1, 1], [0, 1], [1, 0])
    assert check_interrupts(envs, steps([0, 1]), then) > 100


@pytest.mark.parametrize("name", ["RewardModelCandidates-v0", "RewardModelTokens-v0"])
def test_an_interrupted_reset_of_a_view_has_changed_all_or_nothing(name):
    envs = view(name, "SameStep")
    envs.step([0, 1])
    then = steps([1, 1], [0, 1], [1, 0])
    mask = np.array([False, True])
    assert check_interrupts(envs, lambda envs: envs.reset(options={"reset_mask": mask}), then) > 50


@pytest.mark.parametrize("call", [lambda env: env.step("abc"), lambda env: env.reset(seed=9)], ids=["step", "reset"])
def test_an_interrupted_single_environment_has_changed_all_or_nothing(call):
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=PROMPTS[4:], disable_env_checker=True)
    env.reset(seed=3)
    env.step("a")

    def then(env):
        return env.unwrapped.step("b"), env.unwrapped.reset(), env.unwrapped.step("c"), env.np_random.random()

    assert check_interrupts(env.unwrapped, call, then) > 50
