"""Rows as libraries write them, with the keys of their sources."""

import json
import math

import pytest

from gym_rm.data.rollouts import read_rollout
from gym_rm.errors import ConfigError

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
VERL = {"input": "system\nBe short.\nuser\n2 + 2?\nassistant\n", "output": "4", "gts": "4", "score": 1.0, "step": 3}
TRL = {"step": 1, "prompt": [USER], "completion": [FOUR], "accuracy": 1.0, "source": "a", "advantage": 0.7}
RESULT = {"example_id": 5, "prompt": [USER], "completion": [FOUR], "answer": "4", "reward": 1.0, "error": None}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
GYM = {
    "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}], "tools": []},
    "response": {"output": [ITEM, {"type": "function_call_output", "call_id": "c", "output": "unseen"}]},
    "reward": 1.0, "score": 7.0, "question": "other", "expected_answer": 4, "is_correct": 1.0,
    "_ng_task_index": 2, "_ng_rollout_index": 1,
}  # fmt: skip
NODES = [
    {"parent": None, "message": USER},
    {"parent": 0, "message": {"role": "assistant", "content": "a branch that was left"}},
    {"parent": 0, "message": FOUR},
]
TRACE = {"id": "t1", "agent": {"name": "agent"}, "nodes": NODES, "tools": [], "ok": True,
         "rewards": {"exact": {"score": 1.0, "weight": 0.5}, "style": {"score": 1.0, "weight": 1.0}}}  # fmt: skip
EPISODE = {"id": "e1", "task": {"type": "Task", "data": {"answer": "4"}, "key": "k"}, "ok": True, "traces": [TRACE]}
OURS = {
    "step": 2,
    "prompt_id": "p",
    "messages": [USER, FOUR],
    "reward": 1.0,
    "phase": "train",
    "group": 0,
    "right": True,
}


def read(row, **options):
    return read_rollout(row, "file line 1", **options)


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize(
    ("row", "reward"),
    [(TRL, 1.0), (RESULT, 1.0), (GYM, 1.0), (EPISODE, 1.5), (OURS, 1.0), ({"prompt": [USER], "completion": "4"}, None)],
)
def test_every_library_writes_the_same_conversation(row, reward):
    found = read(row)
    assert found.row.conversations == ((USER, FOUR),)
    assert found.row.prompt.messages == (USER,)
    assert found.reward == reward if reward else math.isnan(found.reward)


def test_the_turns_of_chatml_are_found_without_control_tokens():
    found = read({**VERL, "input": "user\nHi\nassistant\nHello.\nuser\n2 + 2?\nassistant\n<think>\n\n</think>\n\n"})
    assert [message["content"] for message in found.row.conversations[0]] == [
        "Hi", "Hello.", "2 + 2?", "<think>\n\n</think>\n\n4"
    ]  # fmt: skip
    assert [message["role"] for message in read(VERL).row.conversations[0]] == ["system", "user", "assistant"]
    assert read(VERL).row.prompt.answer == "4"
    assert read({**VERL, "input": "2 + 2 = "}).row.prompt.messages == ({"role": "user", "content": "2 + 2 = "},)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "system\n\nToday is Monday.\n\nuser\n\n2 + 2?assistant\n\n"}, "lacks the control tokens"),
        ({"input": "user\nsay\nuser\nagain\nassistant\n"}, "lacks the control tokens"),
        ({"output": "4\nuser\n<tool_response>4</tool_response>\nassistant\n4"}, "one text of several turns"),
        ({"output": None}, "not as verl has it: TypeError"),
    ],
)
def test_texts_of_verl_whose_turns_are_not_certain_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read({**VERL, **change})


def test_only_the_columns_between_completion_and_advantage_of_trl_are_rewards():
    two = {**without(TRL, "advantage"), "format": 0.5, "advantage": 0.7}
    with pytest.raises(ConfigError, match=r"the reward is one of \['accuracy', 'format'\]"):
        read(two)
    assert read(two, weights={"accuracy": 1.0, "format": 0.5}).reward == 1.25
    assert read({**two, "format": None}, weights={"accuracy": 1.0, "format": 0.5}).reward == 1.0
    assert math.isnan(read({**TRL, "accuracy": None}).reward)
    with pytest.raises(ConfigError, match=r"\['formal'\], which is not a column"):
        read(two, weights={"formal": 1.0})


@pytest.mark.parametrize(
    "row",
    [
        {**RESULT, "reward": 0.0, "error": {"error": "Timeout"}},
        {**GYM, "reward": 0.0, "mask_sample": True},
        {**GYM, "reward": 0.0, "_ng_failure_class": "verifier_error"},
        {**EPISODE, "traces": [{**TRACE, "ok": False}]},
        {**EPISODE, "traces": [{**TRACE, "rewards": {"exact": {"score": 1.0}, "style": None}}]},
        {**OURS, "reward": None},
        without(OURS, "reward"),
    ],
)
def test_the_reward_of_a_failed_rollout_is_no_number(row):
    assert math.isnan(read(row).reward)


def test_calls_of_tools_are_read_from_json_texts_and_flat_ones():
    call = {"id": "c1", "name": "add", "arguments": '{"a": 2}'}
    asks = {"role": "assistant", "content": None, "tool_calls": [json.dumps(call)]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    found = read({**RESULT, "completion": [asks, result, FOUR]}).row.conversations[0]
    nodes = [{"parent": place - 1 if place else None, "message": each}
             for place, each in enumerate([USER, {**asks, "tool_calls": [call]}, result, FOUR])]  # fmt: skip
    assert read({**EPISODE, "traces": [{**TRACE, "nodes": nodes}]}).row.conversations[0] == found
    assert found[1]["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 2}}}
    ]


DIALOGUE = {**OURS, "messages": [USER, {"role": "assistant", "content": "?"}, USER, FOUR]}


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (TRL, {**TRL, "completion": "5", "accuracy": 0.0}, True),
        (TRL, {**TRL, "step": 2}, False),
        (VERL, {**VERL, "output": "5"}, True),
        (VERL, {**VERL, "input": "2 + 3?"}, False),
        (OURS, {**OURS, "group": 1}, False),
        (OURS, {**OURS, "phase": "held_out"}, False),
        (OURS, DIALOGUE, True),
        (without(OURS, "group", "prompt_id"), without(DIALOGUE, "group", "prompt_id"), False),
        (GYM, {**GYM, "_ng_rollout_index": 2}, True),
        (GYM, {**GYM, "_ng_task_index": 3}, False),
        (RESULT, {**RESULT, "example_id": 6}, False),
        (EPISODE, {**EPISODE, "id": "e2"}, True),
        (EPISODE, {**EPISODE, "group": {"id": "g"}}, False),
    ],
)
def test_groups_are_replies_to_one_prompt_in_one_step(first, second, same):
    assert (read(first).group == read(second).group) == same


def test_rollouts_of_a_group_have_names_where_the_library_gives_them():
    assert [read(row).name for row in (GYM, EPISODE, RESULT, VERL)] == ["1", "t1", None, None]
    assert [read(row).right for row in (GYM, OURS, {**OURS, "right": False})] == [1.0, 1.0, 0.0]
    assert [read({**OURS, "right": text}).right for text in ("True", "0", "1.0")] == [1.0, 0.0, 1.0]  # of csv files
    assert math.isnan(read({**OURS, "right": "almost"}).right)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "4"}, r"step, prompt, completion, advantage \(TRL\).*got \['text'\]"),
        ({**TRL, **VERL}, "the columns of one library"),
        ({"prompt": "2 + 2?", "responses": ["4", "5"]}, "write a row for each"),
        ({"prompt": "2 + 2?", "response": "4", "reward": 1, "score": 2}, r"one of \['reward', 'score'\]"),
        ({"prompt": "2 + 2?", "response": "4", "reward": "good"}, "'reward' must be a number, got str 'good'"),
        ({"prompt": "<|im_start|>user\n2 + 2?<|im_end|>", "response": "4"}, "chat template has been applied"),
        ({**EPISODE, "traces": []}, "expected one trace of a trained agent, got 0"),
        (
            {**EPISODE, "traces": [{**TRACE, "nodes": [{"parent": None}]}]},
            "not as verifiers has it: KeyError",
        ),
    ],
)
def test_other_rows_are_refused_with_what_was_expected(row, message):
    with pytest.raises(ConfigError, match=message):
        read(row)
