"""Rewards that are improvements on the turn before: their sum, what has none, and what the infos say."""

import logging
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm import ConfigError, Scores, ScoringError
from gym_rm.scorers.load import load_scorer
from tests.envs.environments import Recorder, each_mode, make, prompt
from tests.envs.test_flights import Waits, received, send

LONG = [prompt(0, "a", "b", "c"), prompt(1, "a", "b", "c")]


def improving(num_envs=1, **options):
    """Environments of four turns whose score is the length of the reply, after a reset."""
    envs = make(num_envs, **{"reward_model": Recorder(), "prompts": LONG, "reward_on": "improvement", **options})
    envs.reset(seed=0)
    return envs


def said(conversations):
    """Reward function: the number that a reply says, or None."""
    return [None if "FAIL" in c[-1]["content"] else float(c[-1]["content"]) for c in conversations]


def turn_score(infos, row=0):
    """The raw score of a row, also of one that has just ended; None without one."""
    for each in (infos.get("final_info", {}), infos):
        if "turn_score" in each and each["_turn_score"][row]:
            return each["turn_score"][row]
    return None


def test_a_turn_is_paid_the_difference_and_the_infos_have_the_score():
    envs = improving(autoreset_mode="Disabled")
    steps = [envs.step([reply]) for reply in ["1234", "12", "123456", "12345"]]
    assert [rewards[0] for _, rewards, *_ in steps] == [4, -2, 4, -1]
    assert [infos["turn_score"][0] for *_, infos in steps] == [4, 2, 6, 5]
    assert [infos["components"]["half"][0] for *_, infos in steps] == [2, 1, 3, 2.5]  # of the score
    assert [len(call) for call in envs.unwrapped.scorer.calls] == [1, 1, 1, 1]  # none is scored twice


@each_mode
@settings(deadline=None, max_examples=25)
@given(
    scores=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), min_size=4, max_size=9),
    max_turns=st.integers(1, 4),
)
def test_the_rewards_of_an_episode_add_up_to_its_last_score(mode, scores, max_turns):
    options = {"reward_model": said, "max_turns": max_turns, "prompts": LONG, "reward_on": "improvement"}
    native = make(2, **options, autoreset_mode=mode)
    sync = make(2, **options, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode(mode)})
    assert data_equivalence(native.reset(seed=3), sync.reset(seed=3), exact=True)
    totals = np.zeros(2)
    for replies in scores:
        actions = [repr(score) for score in replies]
        step = native.step(actions)
        assert data_equivalence(step, sync.step(actions), exact=True)
        _, rewards, terminations, truncations, infos = step
        totals += rewards
        for row in np.flatnonzero(terminations | truncations):
            assert turn_score(infos, row) == replies[row]
            assert totals[row] == pytest.approx(replies[row], abs=1e-9 * 4)  # four roundings of numbers up to 2e6
            totals[row] = 0
        if mode == "Disabled" and (over := terminations | truncations).any():
            for envs in (native, sync):
                envs.reset(options={"reset_mask": over.copy()})


@pytest.mark.parametrize("whole", [True, False])
def test_a_failed_turn_and_the_one_after_it_have_no_improvement(whole, caplog):
    envs = improving(2, fallback_reward=-7.0).unwrapped
    found = []
    for replies in (["12", "12"], ["FAIL", "123"], ["1234", "1"], ["123", "12"]):
        with caplog.at_level(logging.INFO, logger="gym_rm"):
            if whole:
                _, rewards, *_, infos = envs.step(replies)
            else:
                envs.send(replies)
                _, rewards, *_, infos = envs.recv(2)
        error = envs.state.scores.scores.errors[0]
        found.append((rewards.tolist(), turn_score(infos), error))
    unknown = "the score is 4, but the turn before has none to improve on"
    assert found == [
        ([2, 2], 2, None),
        ([-7, 1], None, "asked to fail"),
        ([-7, -2], 4, unknown),
        ([-1, 1], 3, None),
    ]
    assert unknown in caplog.text
    assert infos["final_info"]["score_ok"].tolist() == [True, True]


def test_a_turn_without_an_improvement_has_no_components_and_is_not_ok():
    envs = improving(fallback_reward=0.0)
    envs.step(["FAIL"])
    *_, infos = envs.step(["12"])
    assert infos["score_ok"].tolist() == [False]
    assert "components" not in infos


def test_without_a_fallback_a_failed_turn_is_repeated_and_nothing_has_changed():
    envs = improving(2)
    envs.step(["12", "12"])
    with pytest.raises(ScoringError, match="row 1: asked to fail"):
        envs.step(["123", "FAIL"])
    assert envs.step(["1234", "1"])[1].tolist() == [2, -1]


def test_rows_in_any_order_improve_on_their_own_last_turn():
    envs = improving(2, reward_model=Waits())
    send(envs, {1: "123"})
    assert received(envs) == {1: 3}
    send(envs, {1: "1234"})
    send(envs, {0: "12"})
    found = received(envs)
    found |= {} if len(found) == 2 else received(envs)
    assert found == {0: 2, 1: 1}
    send(envs, {1: "FAIL"})
    with pytest.raises(ScoringError):
        received(envs)
    send(envs, {0: "1", 1: "1"})
    assert received(envs, 2) == {0: -1, 1: -3}  # the turn that failed was taken back


def test_a_reset_in_an_episode_starts_from_nothing():
    envs = improving(2, autoreset_mode="Disabled")
    envs.step(["123", "123"])
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert envs.step(["12", "12"])[1].tolist() == [2, -1]
    assert envs.step(["x", "1"], rows=np.array([False, True]))[1].tolist() == [0, -1]  # row 0 has not moved
    assert envs.step(["123", "1"])[1].tolist() == [1, 0]


def test_a_state_that_is_not_committed_or_is_pickled_keeps_the_score_before():
    envs = improving().unwrapped
    envs.step(["123"])
    before = envs.next_step(["12345"])
    assert before[1][1].tolist() == [2]
    twin = pickle.loads(pickle.dumps(envs))
    assert envs.step(["1"])[1].tolist() == twin.step(["1"])[1].tolist() == [-2]
    envs.commit(before[0])
    assert envs.step(["123"])[1].tolist() == [-2]


def test_a_responder_gets_the_scores_themselves():
    seen = []

    def respond(conversations, prompts, scores):
        seen.append(scores.rewards.tolist())
        return ["more?"] * len(conversations)

    envs = improving(respond=respond)
    envs.step(["123"])
    envs.step(["12"])
    assert seen == [[3], [2]]


class Ranks:
    """Scorer that compares replies."""

    relative = True

    def score(self, conversations, prompts=None):
        return Scores.from_rewards(np.arange(len(conversations)))


@pytest.mark.parametrize("weighted", [True, False])
def test_a_scorer_that_compares_replies_is_refused(weighted):
    scorer = load_scorer({"kind": "weighted", "scorers": {"ranks": Ranks()}}) if weighted else Ranks()
    with pytest.raises(ConfigError, match=r"'improvement' with .*, which compares the replies .* use reward_on"):
        improving(2, reward_model=scorer, group_size=2)


def test_an_info_of_the_scorer_cannot_have_the_name_of_the_score():
    envs = improving(reward_model=lambda c: Scores.from_rewards([1.0], infos={"turn_score": [2.0]}))
    with pytest.raises(ConfigError, match=r"infos.'turn_score'.* the environment uses"):
        envs.step(["x"])


def test_tokens_add_up_to_the_last_score():
    envs = gym.make_vec(
        "RewardModelTokens-v0", num_envs=2, max_new_tokens=3, prompts=LONG, max_turns=3, reward_on="improvement"
    )
    envs.reset(seed=0)
    envs.action_space.seed(0)
    totals, ended = np.zeros(2), 0
    for _ in range(30):
        _, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        totals += rewards
        for row in np.flatnonzero(terminations | truncations):
            assert totals[row] == pytest.approx(turn_score(infos, row), abs=1e-9)
            totals[row], ended = 0, ended + 1
    assert ended > 3
