"""Scorers, prompts, environments and interrupts that the tests of `RewardVectorEnv` share."""

import contextlib
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import gym_rm
from gym_rm import Prompt, Scores, ScoringError
from gym_rm.envs.responders import scripted_user

MODES = ["SameStep", "NextStep", "Disabled"]
each_mode = pytest.mark.parametrize("mode", MODES)


def length_reward(conversations):
    return [len(conversation[-1]["content"]) / 4 for conversation in conversations]


def say_more(conversations, prompts, scores):
    """Responder that ends an episode after the second reply."""
    return ["more?" if len(conversation) < 4 else None for conversation in conversations]


def until_long(conversations, prompts, scores):
    """Responder that follows the script, and ends an episode earlier after a reply of four characters or more."""
    turns = scripted_user(conversations, prompts, scores)
    return [None if len(c[-1]["content"]) > 3 else turn for c, turn in zip(conversations, turns, strict=True)]


class Recorder:
    """Scorer that rewards the length of the reply, stores its calls, and has no score for replies with FAIL."""

    def __init__(self):
        self.calls = []

    def score(self, conversations, prompts=None):
        self.calls.append(conversations)
        replies = [conversation[-1]["content"] for conversation in conversations]
        lengths = np.array([len(reply) for reply in replies], dtype=np.float32)
        failed = np.array(["FAIL" in reply for reply in replies])
        scores = Scores(
            rewards=np.where(failed, np.float32(np.nan), lengths),
            components={"length": lengths, "half": lengths / 2},
            num_tokens=np.array([sum(len(m["content"]) for m in c) for c in conversations], dtype=np.int64),
            truncated_tokens=np.array([reply.count("~") for reply in replies], dtype=np.int64),
            errors=tuple("asked to fail" if each else None for each in failed),
        )
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def prompt(index, *user_turns, answer=None):
    return Prompt(({"role": "user", "content": f"question {index}"},), f"p{index}", user_turns, answer)


PROMPTS = [
    prompt(0),
    prompt(1, "why?", answer="one"),
    prompt(2, "why?", "sure?"),
    prompt(3, answer="three"),
    prompt(4, "a", "b", "c", "d"),
]


def make(num_envs=2, **options):
    options = {"reward_model": length_reward, "prompts": PROMPTS, **options}
    return gym.make_vec("RewardModel-v0", num_envs=num_envs, **options)


def one_turn(num_envs=2, **options):
    """Environments whose episodes end after one reply."""
    return make(num_envs, prompts=[prompt(0), prompt(1), prompt(2)], **options)


def prompt_ids(envs, steps, seed):
    """Prompt ids of every environment over some steps, `[N, steps]`."""
    _, infos = envs.reset(seed=seed)
    rows = [infos["prompt_id"]]
    rows += [envs.step(["x"] * envs.num_envs)[-1]["prompt_id"] for _ in range(steps - 1)]
    return np.array(rows).T


FOLDERS = tuple(str(Path(gym_rm.__file__).parent / name) for name in ("envs", "reports"))


@contextlib.contextmanager
def each_line(call):
    """Call a function with the file and number of each line that runs in the files of the environments."""

    def trace(frame, kind, argument):
        name = frame.f_code.co_filename
        if not name.startswith(FOLDERS):
            return None
        if kind == "line":
            call((name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(call):
    """Return file and number of each line that runs in a call."""
    lines = []
    with each_line(lines.append):
        call()
    return lines


def interrupt_at(count):
    """Context that raises KeyboardInterrupt at the given line that runs."""
    left = count

    def interrupt(line):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    return each_line(interrupt)
