"""The code of the page, with ms-swift's own rewards, advantages and scheduler."""

import asyncio

import pytest

from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said

torch = pytest.importorskip("torch")
pytest.importorskip("swift.rewards", reason="ms-swift is not installed")

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rewards import orms
from swift.rl_core.advantage import compute_advantages
from swift.rl_core.data import GRPOSample
from swift.rl_core.grpo_algorithm import compute_rewards_per_func, score_completions
from swift.rollout.multi_turn import GYMScheduler

from gym_rm import ScoringError, load_scorer


@pytest.fixture
def page(tmp_path):
    return module_of_page("ms_swift", tmp_path)


def samples(conversations):
    return [GRPOSample(messages=messages, extra={"solution": "71"}, prompt_id="q") for messages in conversations]


def rewards_of(conversations):
    """Return what ms-swift computes with the function that `--reward_funcs gym_rm` names."""
    rewards = compute_rewards_per_func(samples(conversations), [orms["gym_rm"]()], [None], torch.device("cpu"))
    return rewards[:, 0].tolist()


def test_the_rewards_are_those_of_the_scorer(page):
    conversations = said(*REPLIES)
    assert rewards_of(conversations) == load_scorer().score(conversations).rewards.tolist()


def test_the_column_solution_is_the_reference_answer(page):
    page.REWARD_MODEL = lambda conversations, prompts: [
        float(prompt.answer in conversation[-1]["content"])
        for conversation, prompt in zip(conversations, prompts, strict=True)
    ]
    assert rewards_of(said(*REPLIES)) == [0.0, 1.0, 0.0, 0.0]


def test_a_completion_without_a_score_stops_training(page):
    page.REWARD_MODEL = fails
    with pytest.raises(ScoringError, match="1 of 4 conversations could not be scored: row 2"):
        rewards_of(said(*REPLIES))


def test_ms_swift_would_count_a_missing_reward_as_zero():
    missing, zero = (torch.tensor([[3.0], [-1.0], [value]]) for value in (torch.nan, 0.0))
    with_missing, with_zero = (compute_advantages(rewards, torch.ones(1), 3)[0] for rewards in (missing, zero))
    assert with_missing.tolist() == with_zero.tolist()


async def play(replies, **row):
    """Return the request and the infos of a dialogue that ms-swift's scheduler drives with these replies."""
    scheduler = GYMScheduler(gym_env="gym_rm")
    request = RolloutInferRequest(messages=[QUESTION], data_dict={"solution": "71", **row}, uuid="one")
    await scheduler.on_trajectory_start([request])
    for turn, reply in enumerate(replies, 1):
        request.messages.append({"role": "assistant", "content": reply})
        outcome = await scheduler.on_turn_end(request, None, turn)
        if not outcome["done"]:
            scheduler.step(request, None, turn)
    return request, outcome


def test_the_environment_answers_in_the_scheduler_and_sums_the_rewards(page):
    request, outcome = asyncio.run(play(["It is 12.", "It is 71."], user_turns=["Are you sure?"]))
    assert [message["content"] for message in request.messages][1:] == ["It is 12.", "Are you sure?", "It is 71."]
    expected = load_scorer().score([request.messages[:2], request.messages]).rewards.sum()
    assert outcome["done"]
    (sample,) = samples([request.messages])
    sample.rollout_infos = outcome["rollout_infos"]
    rewards = score_completions([sample], [], [], True, torch.device("cpu"))
    assert rewards.item() == pytest.approx(expected, rel=1e-6)


def test_a_reply_without_a_score_stops_the_scheduler(page):
    page.REWARD_MODEL = fails
    with pytest.raises(ScoringError, match="could not be scored"):
        asyncio.run(play(["FAIL"]))
