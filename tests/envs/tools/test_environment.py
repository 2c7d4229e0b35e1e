"""Environments with tools: steps with calls, the user after them, infos, views, wrappers, checkers and interrupts."""

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from gym_rm import ActionError, ConfigError, Scores
from gym_rm.envs.numeric_views import CandidateAction, TokenLevel
from gym_rm.testing import check_vector_env
from tests.envs.environments import each_mode, make

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"}
ASK = {"prompt": "2 + 2?", "user_turns": ["Sure?"]}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def conversation_length(conversations):
    return [float(len(conversation)) for conversation in conversations]


SETTINGS = {"prompts": [ASK], "reward_model": conversation_length, "tools": [f"{__name__}:add"]}


def calling(**settings):
    return make(**{**SETTINGS, **settings})


def contents(observation):
    return [message["content"] for message in observation]


def test_a_reply_with_calls_gets_results_and_the_user_answers_the_next_one():
    envs = calling()
    _, infos = envs.reset(seed=0)
    assert infos["tools"][0][0]["function"]["name"] == "add"
    assert envs.unwrapped.prompts[0].tools == tuple(infos["tools"][1])
    observations, rewards, *ended, infos = envs.step([f"Let us see. {CALL}", "4"])
    reply = observations[0][1]
    assert reply["content"] == "Let us see."
    assert reply["tool_calls"] == [
        {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    ]
    assert observations[0][2] == RESULT
    assert contents(observations[1]) == ["2 + 2?", "4", "Sure?"]
    assert (rewards.tolist(), infos["tool_calls"].tolist(), infos["tool_errors"].tolist()) == ([2, 2], [1, 0], [0, 0])
    assert not np.any(ended)
    observations, _, terminations, *_ = envs.step(["4", "Yes."])
    assert contents(observations[0])[-2:] == ["4", "Sure?"]
    assert terminations.tolist() == [False, True]


def test_calls_that_cannot_be_read_do_not_use_up_the_script():
    envs = calling(num_envs=1)
    envs.reset(seed=0)
    observations, *_, infos = envs.step([f"{CALL}<tool_call>{{bad</tool_call>"])
    assert [message["role"] for message in observations[0]] == ["user", "assistant", "tool", "user"]
    assert (infos["tool_calls"].tolist(), infos["tool_errors"].tolist()) == ([2], [1])
    (observation,), *_ = envs.step(["4"])
    assert observation[-1]["content"] == "Sure?"


@pytest.mark.parametrize("options", [{"max_turns": 1}, {"respond": lambda c, p, s: [None], "max_turns": 1}])
def test_the_limit_of_turns_holds_for_replies_with_calls(options):
    envs = calling(num_envs=1, autoreset_mode="Disabled", **options)
    envs.reset(seed=0)
    (observation,), rewards, terminations, truncations, infos = envs.step([CALL])
    assert (observation[-1]["role"], rewards[0], terminations[0], truncations[0]) == ("assistant", 2.0, False, True)
    assert (infos["tool_calls"][0], infos["tool_errors"][0]) == (1, 0)


def test_a_scorer_that_ends_the_episode_is_asked_before_the_tools():
    executed = []

    def count() -> int:
        executed.append(1)
        return 1

    def ends(conversations):
        return Scores.from_rewards([1.0] * len(conversations), terminations=[True] * len(conversations))

    envs = calling(num_envs=1, reward_model=ends, tools=[count])
    envs.reset(seed=0)
    _, _, terminations, _, infos = envs.step(['<tool_call>{"name": "count"}</tool_call>'])
    assert terminations[0]
    assert infos["final_info"]["tool_calls"].tolist() == [1]
    assert not executed


def test_messages_are_actions_also_those_of_openai():
    envs = calling(num_envs=1)
    envs.reset(seed=0)
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    action = {
        "role": "assistant",
        "content": None,
        "annotations": [],
        "tool_calls": [{"id": "x1", "function": function}],
    }
    kept = copy.deepcopy(action)
    (observation,), *_ = envs.step([action])
    assert action == kept
    assert observation[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert observation[2] == {**RESULT, "tool_call_id": "x1"}
    (observation,), *_ = envs.step([{"role": "assistant", "content": CALL}])  # what is said in a message is no call
    assert contents(observation)[-2:] == [CALL, "Sure?"]


def deep_call():
    arguments = {}
    for _ in range(10_000):
        arguments = {"a": arguments}
    return {"function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"role": "user", "content": "4"}, "environment 0: expected a message with the role 'assistant'"),
        ({"role": "assistant", "content": "", "weight": 1}, "expected no other fields of a message"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, "'tool_calls' of a message"),
        ({"role": "assistant", "content": 4}, "'content' of a message: expected a text"),
        ({"role": "assistant", "content": "x" * 2**20 + "x"}, "'content' of a message: expected a text of at most"),
        ({"role": "assistant", "content": "", "tool_calls": [deep_call()]}, "nested too deeply"),
        (4, "an assistant message is a reply too"),
    ],
    ids=range(7),
)
def test_an_invalid_message_names_its_row(action, message):
    envs = calling()
    envs.reset(seed=0)
    with pytest.raises(ActionError, match=message):
        envs.step([action, "4"])


def test_nested_fields_of_observations_and_of_what_responders_get_are_copies():
    def meddle(conversations, prompts, scores):
        for conversation in conversations:
            conversation[1]["tool_calls"].clear()
        return ["go on"] * len(conversations)

    envs = calling(num_envs=1, respond=meddle)
    envs.reset(seed=0)
    (observation,), *_ = envs.step([CALL])
    observation[1]["tool_calls"][0]["function"]["arguments"].clear()
    (observation,), *_ = envs.step(["4"])
    assert observation[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}


def test_rows_name_their_tools_and_respond_answers_calls_only_without_tools():
    def sub(a: int, b: int) -> int:
        return a - b

    own = {"type": "function", "name": "browse", "parameters": {}}
    row = {"prompt": "Hi", "tools": [own, {"name": "add"}]}
    envs = calling(num_envs=1, prompts=[row], tools=[add, sub])
    _, infos = envs.reset(seed=0)
    assert [schema["function"]["name"] for schema in infos["tools"][0]] == ["browse", "add"]
    calls = [{"function": {"name": name, "arguments": {"a": 1, "b": 1}}} for name in ("browse", "sub", "add")]
    action = {"role": "assistant", "content": "", "tool_calls": calls}
    (observation,), *_ = envs.step([action])
    assert "unknown tool 'browse'" in observation[-3]["content"]
    assert "unknown tool 'sub'" in observation[-2]["content"]
    assert observation[-1]["content"] == "2"

    def answer(conversations, prompts, scores):
        (call, *_) = conversations[0][-1]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a page"}
        return [[result, {"role": "user", "content": "Read it."}]]

    envs = make(num_envs=1, prompts=[row], respond=answer)
    _, infos = envs.reset(seed=0)
    assert len(infos["tools"][0]) == 2
    (observation,), *_, infos = envs.step([action])
    assert contents(observation)[-2:] == ["a page", "Read it."]
    assert "tool_calls" not in infos


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ([], "expected a text, a message, a list of messages, or None"),
        ({"role": "assistant", "content": "x"}, "expected the role 'tool' or 'user', got 'assistant'"),
        ([{"role": "tool", "text": "x"}], "expected a message"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "'tool_call_id' of a message: expected a text, got 3"),
    ],
)
def test_an_invalid_turn_of_several_messages_names_its_row(turn, message):
    envs = calling(respond=lambda conversations, prompts, scores: ["fine", turn])
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match=f"environment 1: respond returned an invalid turn: {message}"):
        envs.step(["4", "4"])


@pytest.mark.parametrize("tools", ["not JSON", {"name": "f"}, [{"description": "f"}], 3])
def test_invalid_tools_of_a_row_are_refused(tools):
    with pytest.raises(ConfigError, match=r"prompts\[0\]: tools"):
        make(prompts=[{"prompt": "Hi", "tools": tools}])


@each_mode
@pytest.mark.parametrize("reward_on", ["turn", "end"])
def test_environments_with_tools_follow_the_contract(mode, reward_on):
    options = {**SETTINGS, "prompts": [ASK, "Hi"], "autoreset_mode": mode, "max_turns": 4, "reward_on": reward_on}
    check_vector_env("RewardModel-v0", num_envs=3, num_steps=6, **options)


def test_the_single_environment_passes_the_check_of_gymnasium():
    check_env(gym.make("RewardModel-v0", **SETTINGS, max_turns=3).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_schemas_are_in_the_infos_of_new_episodes(mode):
    envs = calling(prompts=["Hi"], autoreset_mode=mode)
    envs.reset(seed=0)
    *_, infos = envs.step(["4", CALL])
    if mode == "NextStep":
        assert "tools" not in infos
        *_, infos = envs.step(["", "4"])
        assert infos["_tool_calls"].tolist() == [False, True]
    assert infos["_tools"].tolist() == [True, False]


def test_views_show_results_and_read_calls():
    window = {"window": 64}
    candidates = CandidateAction(1, candidates=[CALL, "4"], **SETTINGS, **window)
    candidates.reset(seed=0)
    observations, *_, infos = candidates.step([0])
    assert infos["tool_calls"].tolist() == [1]
    assert observations in candidates.observation_space
    tokens = TokenLevel(1, vocabulary=None, prefill=CALL, max_new_tokens=1, **SETTINGS, **window)
    tokens.reset(seed=0)
    *_, infos = tokens.step([tokens.num_actions - 1])
    assert infos["tool_calls"].tolist() == [1]


def test_transcripts_show_calls_and_results():
    envs = calling(num_envs=1, render_mode="ansi")
    envs.reset(seed=0)
    envs.step([CALL])
    assert envs.render()[0].split("\n")[1:4] == ["user: 2 + 2?", "assistant:", '  calls add({"a": 2, "b": 2})']
    assert "tool add: 4" in envs.render()[0]


@pytest.mark.parametrize(("name", "row"), [("Math-v0", {"prompt": "0.1 + 0.2?", "answer": "0.3"})])
def test_verifier_envs_environments_take_tools(name, row):
    envs = gym.make_vec(name, num_envs=1, prompts=[row], tools=["calculator"], reward_on="end")
    envs.reset(seed=0)
    (observation,), *_ = envs.step(['<tool_call>{"name": "calculator", "arguments": {"expression": "0.1+0.2"}}'])
    _, rewards, *_ = envs.step([f"It is {observation[-1]['content']}."])
    assert rewards.tolist() == [1.0]
    envs.close()


def test_calls_without_room_in_the_spaces_are_refused():
    envs = calling(num_envs=1, max_text_length=1000)
    envs.reset(seed=0)
    text = '<tool_call>{"name": "add", "arguments": {"a": "%s"}}</tool_call>' % ("\x01" * 500)
    observations, *_, infos = envs.step([text])
    assert observations in envs.observation_space
    assert observations[0][-1]["content"] == "Error: a tool call could not be read: the calls are too long"
    assert infos["tool_errors"].tolist() == [1]
