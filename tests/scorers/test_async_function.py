"""Functions that are called once for each row, and functions that are `async def`, as scorers."""

import asyncio
import functools
import threading

import gymnasium as gym
import numpy as np
import pytest

from gym_rm import ConfigError, Prompt, Scores, ScoringError, load_scorer
from gym_rm.scorer import try_score
from gym_rm.testing import check_scorer


def said(text):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]


SAID = [said("one"), said("three"), said("")]
PROMPTS = [Prompt(({"role": "user", "content": "2 + 2?"},), answer, answer=answer) for answer in ("one", "2", "4")]


async def lengths(conversations):
    await asyncio.sleep(0)
    return [len(conversation[-1]["content"]) for conversation in conversations]


async def all_right(conversations, prompts):
    return [float(c[-1]["content"] == p.answer) for c, p in zip(conversations, prompts, strict=True)]


async def right(conversation, prompt):
    await asyncio.sleep(0)
    return float(conversation[-1]["content"] == prompt.answer)


def right_at_once(conversation, *, prompt):
    return float(conversation[-1]["content"] == prompt.answer)


async def scaled(scale, conversation, prompt):
    return scale * await right(conversation, prompt)


class Verifier:
    async def __call__(self, conversation, prompt):
        return await right(conversation, prompt)


WITH_PROMPTS = {
    "async": all_right,
    "async rows": right,
    "rows": right_at_once,
    "partial": functools.partial(scaled, 1.0),
    "object": Verifier(),
    "partial of an object": functools.partial(Verifier()),
    "name": f"{__name__}:right",
}


@pytest.mark.parametrize("form", WITH_PROMPTS)
def test_forms_of_functions(form):
    scorer = load_scorer(WITH_PROMPTS[form])
    assert scorer.score(SAID, PROMPTS).rewards.tolist() == [1, 0, 0]
    assert scorer.score([], []).rewards.shape == (0,)


def test_rows_are_awaited_together_but_not_more_than_max_concurrency():
    running, most = set(), []

    async def slow(conversation):
        running.add(id(conversation))
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.discard(id(conversation))
        return 1.0

    load_scorer(slow).score(SAID * 20)
    assert max(most) == 60
    most.clear()
    load_scorer(slow, max_concurrency=4).score(SAID * 20)
    assert max(most) == 4


@pytest.mark.parametrize("wait", [True, False])
def test_a_row_that_fails_has_an_error_and_the_others_keep_their_scores(wait):
    async def fragile(conversation):
        if conversation[-1]["content"] == "three":
            raise OSError("no connection")
        if not conversation[-1]["content"]:
            await asyncio.sleep(60)
        return 1.0

    def fragile_at_once(conversation):
        return {"one": 1.0, "three": None}[conversation[-1]["content"]]

    with pytest.raises(ScoringError) as caught:
        (load_scorer(fragile, timeout=0.05) if wait else load_scorer(fragile_at_once)).score(SAID)
    scores = caught.value.scores
    assert scores.rewards_or_none() == [1.0, None, None]
    late = ("OSError: no connection", "TimeoutError: no result within 0.05 seconds")
    assert scores.errors[1:] == (late if wait else ("the reward function returned None", "KeyError: ''"))


def test_a_row_may_return_scores_with_components():
    async def graded(conversation):
        length = len(conversation[-1]["content"])
        return Scores.from_rewards([length], components={"long": [1.0]} if length > 3 else {})

    scores = load_scorer(graded).score(SAID)
    assert scores.rewards.tolist() == [3, 5, 0]
    np.testing.assert_equal(scores.components["long"], [np.nan, 1, np.nan])


def test_one_call_for_all_rows_that_fails():
    async def slow(conversations):
        await asyncio.sleep(60)

    async def broken(conversations):
        raise OSError("no connection")

    late = "TimeoutError: no result within 0.05 seconds"
    assert try_score(load_scorer(slow, timeout=0.05), SAID).errors == (late,) * 3
    with pytest.raises(OSError, match="no connection"):
        load_scorer(broken).score(SAID)


def test_limits_are_options_of_async_functions_only():
    with pytest.raises(ConfigError, match=r"\['timeout'\] cannot be applied to the function right_at_once"):
        load_scorer(right_at_once, timeout=1.0)
    with pytest.raises(ConfigError, match="max_concurrency must be an integer"):
        load_scorer(right, max_concurrency=0)


def test_an_async_function_passes_check_scorer():
    check_scorer(load_scorer(right), SAID, PROMPTS)
    check_scorer(load_scorer(lengths))


def test_a_scorer_works_in_a_running_event_loop_and_inside_other_scorers():
    scorer = load_scorer(lengths)

    async def outer(conversations):
        return scorer.score(conversations).rewards

    async def notebook():
        return scorer.score(SAID).rewards.tolist()

    assert asyncio.run(notebook()) == [3, 5, 0]
    assert load_scorer(outer).score(SAID).rewards.tolist() == [3, 5, 0]
    assert load_scorer({"kind": "weighted", "scorers": {"a": lengths, "b": right}}).score(SAID, PROMPTS).rewards[0] == 4


def test_an_environment_closes_the_scorer_that_it_made():
    threads = set()

    async def reward(conversation, prompt):
        threads.add(threading.current_thread())
        return 0.5

    for name, settings in (("RewardModel-v0", {"reward_model": reward}), ("Mixed-v0", {"scorers": {"r": reward}})):
        envs = gym.make_vec(name, num_envs=2, prompts=["2 + 2?"], **settings)
        envs.reset(seed=0)
        assert envs.step(["4", "5"])[1].tolist() == [0.5, 0.5]
        envs.close()
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)
