import asyncio
import inspect
import math
from types import SimpleNamespace

import pytest
from recording import RecordingScorer, chat

from gym_rm import ScoringError
from gym_rm.adapters.verifiers import TraceReward, group_reward_function, reward_function


class Message:
    """A message of a trace, as far as a reward reads it."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, exclude_none=False):
        return {name: value for name, value in self.fields.items() if not (exclude_none and value is None)}


def trace(*texts):
    return SimpleNamespace(messages=[Message(**message, tool_calls=None) for message in chat(*texts)])


# --- v1 ------------------------------------------------------------------------------------------------------------


def test_a_trace_is_scored(recorder):
    assert asyncio.run(TraceReward(recorder)(trace("q", "a", "sure?", "four"))) == 1.0
    assert recorder.calls == [[chat("q", "a", "sure?", "four")]]


def test_content_in_parts_is_text(recorder):
    user = Message(role="user", content=[{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
    asyncio.run(TraceReward(recorder)(SimpleNamespace(messages=[user, Message(role="assistant", content="four")])))
    assert recorder.calls == [[chat("2 + 2?", "four")]]


def test_traces_are_scored_together():
    scorer = RecordingScorer(seconds=0.05)
    score = TraceReward(scorer)

    async def rollouts():
        return await asyncio.gather(*(score(trace("q", "x" * n)) for n in range(32)))

    assert asyncio.run(rollouts()) == [n / 4 for n in range(32)]
    assert len(scorer.calls) <= 3


def test_a_trace_without_a_score_raises(recorder):
    with pytest.raises(ScoringError):
        asyncio.run(TraceReward(recorder)(trace("q", "FAIL")))


def test_a_task_of_verifiers_records_rewards_and_failures(recorder):
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    from verifiers.v1.utils.decorators import discover_decorated, invoke_all

    score = TraceReward(recorder)

    class ChatTask:
        @vf.reward(weight=0.5)
        async def reward_model(self, trace) -> float:
            return await score(trace)

    messages = [vf.UserMessage(content="q"), vf.AssistantMessage(content="four")]
    functions = discover_decorated(ChatTask(), "reward")
    assert asyncio.run(invoke_all(functions, {"trace": SimpleNamespace(messages=messages)})) == [1.0]
    assert recorder.calls == [[chat("q", "four")]]


# --- rubrics of the earlier releases -------------------------------------------------------------------------------


def test_a_rubric_function(recorder):
    function = reward_function(recorder, name="helpfulness")
    assert function.__name__ == "helpfulness"
    assert asyncio.run(function(prompt=chat("q"), completion=chat("q", "four")[1:], answer="4", state={})) == 1.0
    assert asyncio.run(function(prompt="q", completion="four")) == 1.0
    assert recorder.calls == [[chat("q", "four")]] * 2


def test_a_group_function_makes_one_call(recorder):
    function = group_reward_function(recorder)
    assert {"prompts", "completions"} <= set(inspect.signature(function).parameters)  # how a rubric tells it
    rewards = asyncio.run(function(prompts=["q"] * 3, completions=["four", "FAIL", ""], answers=[""] * 3))
    assert (rewards[0], rewards[2], len(recorder.calls)) == (1.0, 0.0, 1)
    assert math.isnan(rewards[1])


@pytest.mark.parametrize(("prompt", "completion"), [("q", "FAIL"), ("q", "CRASH"), ("<|im_start|>user\nq", "a")])
def test_a_rubric_never_sees_an_exception(recorder, prompt, completion):
    # It would log it and count 0.0.
    assert math.isnan(asyncio.run(reward_function(recorder)(prompt=prompt, completion=completion)))
