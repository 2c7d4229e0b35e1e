import asyncio
import inspect
import math
from types import SimpleNamespace

import pytest
from recording import chat, merged

from gym_rm import ScoringError
from gym_rm.adapters.verifiers import TraceReward, group_reward_function, reward_function


class Message:
    """Message of a trace with the one method that rewards call."""

    def __init__(self, **fields):
        self.fields = fields

    def model_dump(self, exclude_none=False, exclude=()):
        return {
            name: value
            for name, value in self.fields.items()
            if name not in exclude and not (exclude_none and value is None)
        }


def trace(*texts, **data):
    """Return a trace of these messages whose task has this data."""
    task = SimpleNamespace(data=Message(idx=3, id=None, prompt=texts[0], system_prompt=None, **data))
    return SimpleNamespace(messages=[Message(**message, tool_calls=None) for message in chat(*texts)], task=task)


# --- v1 ------------------------------------------------------------------------------------------------------------


def test_a_trace_gets_the_score_of_its_messages(recorder):
    assert asyncio.run(TraceReward(recorder)(trace("q", "a", "sure?", "four"))) == 1.0
    assert recorder.calls == [[chat("q", "a", "sure?", "four")]]


def test_text_parts_of_a_message_are_joined(recorder):
    user = Message(role="user", content=[{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
    asyncio.run(TraceReward(recorder)(SimpleNamespace(messages=[user, Message(role="assistant", content="four")])))
    assert recorder.calls == [[chat("2 + 2?", "four")]]


def test_concurrent_traces_are_scored_in_one_batch(recorder):
    score = TraceReward(merged(recorder, 32))

    async def rollouts():
        return await asyncio.gather(*(score(trace("q", "x" * n)) for n in range(32)))

    assert asyncio.run(rollouts()) == [n / 4 for n in range(32)]
    assert len(recorder.calls) == 1


def test_a_trace_without_a_score_is_an_error(recorder):
    with pytest.raises(ScoringError):
        asyncio.run(TraceReward(recorder)(trace("q", "FAIL")))


def test_verifiers_calls_the_reward_of_a_task(recorder):
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


def test_the_data_of_the_task_reaches_a_verifier(verifier):
    score = TraceReward(verifier)
    assert asyncio.run(score(trace("2 + 2?", "5", "sure?", "No, 4.", answer="4", level="easy"))) == 1.0
    assert asyncio.run(score(trace("2 + 2?", "5", answer="4"))) == 0.0
    prompt = verifier.prompts[0]
    assert (prompt.messages, prompt.answer, prompt.prompt_id) == (tuple(chat("2 + 2?")), "4", "3")
    assert prompt.metadata["level"] == "easy"


def test_the_task_data_of_the_library_reaches_a_verifier(verifier):
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    score = TraceReward(verifier)

    class Sum(vf.TaskData):
        answer: str

    messages = [
        vf.SystemMessage(content="s"),
        vf.UserMessage(content="2 + 2?"),
        vf.AssistantMessage(content="It is 4."),
    ]
    data = Sum(idx=7, prompt="2 + 2?", system_prompt="s", answer="4")
    assert asyncio.run(score(SimpleNamespace(messages=messages, task=SimpleNamespace(data=data)))) == 1.0
    prompt = verifier.prompts[0]
    assert (prompt.answer, prompt.prompt_id) == ("4", "7")
    assert [(message["role"], message["content"]) for message in prompt.messages] == [
        ("system", "s"),
        ("user", "2 + 2?"),
    ]


# --- rubrics of earlier releases -----------------------------------------------------------------------------------


def test_a_reward_function_scores_one_rollout(recorder):
    function = reward_function(recorder, name="helpfulness")
    assert function.__name__ == "helpfulness"
    assert asyncio.run(function(prompt=chat("q"), completion=chat("q", "four")[1:], answer="4", state={})) == 1.0
    assert asyncio.run(function(prompt="q", completion="four")) == 1.0
    assert recorder.calls == [[chat("q", "four")]] * 2


def test_a_group_function_makes_one_score_call(recorder):
    function = group_reward_function(recorder)
    assert {"prompts", "completions"} <= set(
        inspect.signature(function).parameters
    )  # rubrics recognise group functions by these parameters
    rewards = asyncio.run(function(prompts=["q"] * 3, completions=["four", "FAIL", ""], answers=[""] * 3))
    assert (rewards[0], rewards[2], len(recorder.calls)) == (1.0, 0.0, 1)
    assert math.isnan(rewards[1])


@pytest.mark.parametrize(("prompt", "completion"), [("q", "FAIL"), ("q", "CRASH"), ("<|im_start|>user\nq", "a")])
def test_a_reward_function_returns_nan_instead_of_raising(recorder, prompt, completion):
    # A rubric logs exceptions and records the reward 0.0.
    assert math.isnan(asyncio.run(reward_function(recorder)(prompt=prompt, completion=completion)))


def test_the_columns_of_a_rollout_reach_a_verifier(verifier):
    function = reward_function(verifier)
    row = {"answer": "4", "info": {"level": "easy"}, "task": "sums", "state": {"turn": 1}}
    assert asyncio.run(function(prompt=chat("2 + 2?"), completion=chat("", "It is 4.")[1:], **row)) == 1.0
    assert asyncio.run(function(prompt="2 + 2?", completion="It is 5.", **row)) == 0.0
    prompt = verifier.prompts[0]
    assert (prompt.messages, prompt.answer) == (tuple(chat("2 + 2?")), "4")
    assert prompt.metadata == {"level": "easy", "task": "sums"}


def test_each_rollout_of_a_group_is_compared_with_its_own_answer(verifier):
    function = group_reward_function(verifier)
    rows = {"answers": ["4", "6"], "infos": [{"level": "easy"}, {}], "tasks": ["sums"] * 2, "states": [{}, {}]}
    assert asyncio.run(function(prompts=["2 + 2?", "3 + 3?"], completions=["It is 6."] * 2, **rows)) == [0.0, 1.0]
    assert [prompt.metadata for prompt in verifier.prompts] == [{"level": "easy", "task": "sums"}, {"task": "sums"}]


def test_a_group_with_a_missing_answer_keeps_the_other_rewards(verifier):
    function = group_reward_function(verifier)
    rewards = asyncio.run(function(prompts=["q"] * 3, completions=["4"] * 3, answers=["4", None, "5"]))
    assert (rewards[0], rewards[2]) == (1.0, 0.0)
    assert math.isnan(rewards[1])
