"""verifiers scores real traces with the code of its page."""

import asyncio
import json

import pytest

vf = pytest.importorskip("verifiers.v1")

import gym_rm
from gym_rm.data.rollouts import read_rollout
from tests.trainers.pages import QUESTION, REPLIES, fails, module_of_page, said


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return module_of_page("verifiers", tmp_path_factory.mktemp("page"))


def trace_of(task, reply):
    nodes = [
        vf.MessageNode(message=vf.UserMessage(content=QUESTION["content"])),
        vf.MessageNode(message=vf.AssistantMessage(content=reply), parent=0, sampled=True, token_ids=[7], mask=[True]),
    ]
    recorded = vf.TraceTask(type=type(task).__name__, data=task.data)
    return vf.Trace(task=recorded, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def scored(task, replies):
    """Score a trace of each reply as a rollout does, all at once."""
    traces = [trace_of(task, reply) for reply in replies]

    async def score(trace):
        try:
            await task.score(trace)
            trace.ok = True
        except vf.TaskError as error:
            trace.record_error(error)

    async def score_all():
        await asyncio.gather(*map(score, traces))

    asyncio.run(score_all())
    return traces


def test_a_task_gives_the_rewards_of_the_scorer(page):
    traces = scored(page.ChatTask(page.Question(prompt=QUESTION["content"], answer="71")), REPLIES)
    assert [trace.reward for trace in traces] == gym_rm.load_scorer().score(said(*REPLIES)).rewards.tolist()
    assert [trace.has_error for trace in traces] == [False] * 4


def test_a_verifier_gets_the_answer_of_the_task(page):
    class MathTask(vf.Task[page.Question]):
        @vf.reward
        async def right(self, trace) -> float:
            return await page.score_trace(trace, {"kind": "math"})

    traces = scored(MathTask(page.Question(prompt=QUESTION["content"], answer="71")), ("It is 12.", "It is 71."))
    assert [trace.reward for trace in traces] == [0.0, 1.0]


def test_a_trace_without_a_score_has_an_error_and_no_reward_and_the_others_keep_theirs(page):
    class FailingTask(vf.Task[page.Question]):
        @vf.reward
        async def length(self, trace) -> float:
            return await page.score_trace(trace, fails)

    traces = scored(FailingTask(page.Question(prompt=QUESTION["content"], answer="71")), REPLIES)
    assert [trace.has_error for trace in traces] == [False, False, True, False]
    assert traces[2].rewards == {"length": None}
    assert "returned None" in traces[2].last_error.message
    assert [trace.reward for trace in traces if not trace.has_error] == fails(said(*REPLIES[:2], REPLIES[3]))


def test_saved_episodes_are_read_with_their_rewards(page):
    traces = scored(page.ChatTask(page.Question(prompt=QUESTION["content"], answer="71")), REPLIES)
    records = [vf.Episode(task=trace.task, traces=[trace]).to_record() for trace in traces]
    saved = [read_rollout(json.loads(json.dumps(record)), "here") for record in records]
    assert [each.row.conversations[0] for each in saved] == [
        (QUESTION, {"role": "assistant", "content": reply}) for reply in REPLIES
    ]
    assert [each.reward for each in saved] == pytest.approx([trace.reward for trace in traces])
    assert len({each.group for each in saved}) == 1
    assert len({each.name for each in saved}) == len(REPLIES)
