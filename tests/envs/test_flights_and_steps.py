"""Rows that are sent and received in any order have what plain steps give."""

import time
from random import Random

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm import Scores, ScoringError
from gym_rm.envs.infos import infos_of_row
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.testing import check_vector_env
from tests.envs.environments import PROMPTS, each_mode, make, say_more, until_long
from tests.envs.test_flights import send


class NowAndThen:
    """Scorer that waits up to 3 ms, and fails or raises in some calls; a conversation that failed may succeed later."""

    def __init__(self, seed, max_concurrent_calls=1, chance=0.15, *, relative=False):
        self.max_concurrent_calls, self.relative = max_concurrent_calls, relative
        self.random, self.chance = np.random.default_rng(seed), chance

    def score(self, conversations, prompts=None):
        time.sleep(self.random.random() * 0.003 * (self.chance > 0))
        if self.random.random() < self.chance / 3:
            raise ConnectionError("now and then")
        failed = self.random.random(len(conversations)) < self.chance
        lengths = np.array([sum(len(m["content"]) for m in each) for each in conversations]) / 7
        odd = [len(each[-1]["content"]) % 2 == 1 for each in conversations]
        infos = {
            "odd": [each or None for each in odd],
            "said": [each[-1]["content"] for each in conversations],
        }
        scores = Scores.from_rewards(np.where(failed, np.nan, lengths), components={"length": lengths}, infos=infos)
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


class Patient(RewardVectorEnv):
    """Environment whose plain steps are repeated until nothing fails."""

    def step(self, actions, *, rows=None):
        while True:
            try:
                return super().step(actions, rows=rows)
            except (ScoringError, ConnectionError):
                continue

    def recv(self, min_rows=1, timeout=None):
        flying = self.in_flight
        try:
            return super().recv(min_rows, timeout)
        except ConnectionError:  # its rows are sent again, as those without a score
            landed = np.flatnonzero(flying & ~self.in_flight).tolist()
            failed = Scores.from_rewards([np.nan] * len(landed)).mark_failures()
            raise ScoringError(failed.scatter(landed, self.num_envs)) from None


@each_mode
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 2},
        {"tools": ["calculator"]},
        {"reward_on": "improvement"},
        {"reward_on": "end"},
        {"group_size": 2, "relative": True},
    ],
    ids=str,
)
def test_an_environment_whose_scorer_fails_now_and_then_passes_check_vector_env(mode, options):
    chosen = {name: value for name, value in options.items() if name != "relative"}
    for seed in range(3):
        scorer = NowAndThen(seed, max_concurrent_calls=seed, relative="relative" in options)
        envs = Patient(4, reward_model=scorer, prompts=PROMPTS, autoreset_mode=AutoresetMode(mode), **chosen)
        check_vector_env(envs, seed=seed)
        envs.close()


def result_of(row, observations, *columns, infos):
    own = {name: value for name, value in infos_of_row(infos, row).items() if name != "rows"}
    return observations[row], *(column[row].item() for column in columns), own


def play(envs, mode, replies, seed, random=None):
    """Return what each row gets, from steps, or from sending and receiving rows in a random order."""
    size, steps = envs.num_envs, len(replies)
    *shown, infos = envs.reset(seed=seed)
    histories = [[result_of(row, *shown, infos=infos)] for row in range(size)]
    turns, nobody = np.zeros(size, dtype=int), np.zeros(size, dtype=bool)
    while turns.min() < steps:
        flying = envs.in_flight if random else nobody
        free = np.flatnonzero(~flying & (turns < steps))
        if random and len(free) and (not flying.any() or random.random() < 0.6):
            chosen = random.sample(free.tolist(), random.randint(1, len(free)))
            send(envs, {row: replies[turns[row]][row] for row in chosen})
            continue
        try:
            if random:
                limit = random.choice([None, 0, 0.002])
                *step, infos = envs.recv(random.randint(1, int(flying.sum())), limit)
            else:
                *step, infos = envs.step(replies[turns[0]])
        except (ScoringError, ConnectionError):
            continue
        came = infos["rows"] if random else ~nobody
        over = came & (step[2] | step[3])
        for row in np.flatnonzero(came):
            histories[row].append(result_of(row, *step, infos=infos))
        if mode == "Disabled" and over.any():
            *shown, infos = envs.reset(options={"reset_mask": over.copy()})
            for row in np.flatnonzero(over):
                histories[row].append(result_of(row, *shown, infos=infos))
        turns += came
    return histories


@each_mode
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 100),
    max_calls=st.integers(0, 3),
    max_turns=st.sampled_from([None, 1, 2]),
    reward_on=st.sampled_from(["turn", "improvement", "end"]),
    respond=st.sampled_from([None, say_more, until_long]),
    replies=st.lists(st.lists(st.text("ab é", max_size=6), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_rows_in_any_order_with_delays_and_failures_equal_sync_vector_env(
    mode, seed, max_calls, max_turns, reward_on, respond, replies
):
    options = {"prompts": PROMPTS, "max_turns": max_turns, "reward_on": reward_on, "respond": respond}
    sync = make(
        3,
        reward_model=NowAndThen(0, chance=0),
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode(mode)},
        **options,
    )
    native = make(3, reward_model=NowAndThen(seed, max_calls), autoreset_mode=mode, **options)
    found, expected = play(native, mode, replies, seed, Random(seed)), play(sync, mode, replies, seed)
    assert data_equivalence(found, expected, exact=True)
    native.close()
