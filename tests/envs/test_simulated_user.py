"""A chat model as user: what it sees, when it ends an episode, and that its failures change nothing."""

import math

import chain_models
import gymnasium as gym
import pytest
from conftest import assistant, user

from gym_rm import ConfigError, GymRMError
from gym_rm.envs.simulated_user import OPENING, SimulatedUser
from gym_rm.generation.chat import ChatReply
from gym_rm.types import Prompt


class Writer:
    """Chat model that answers with a function of the conversation."""

    def __init__(self, answer):
        self.answer, self.calls, self.seeds = answer, [], []

    def reply(self, conversations, *, seeds, deadline=math.inf):
        self.calls.append(list(conversations))
        self.seeds += seeds
        said = [self.answer(conversation) for conversation in conversations]
        return [one if isinstance(one, ChatReply) else ChatReply(one, finished=True) for one in said]


def lengths(conversations):
    return [float(len(conversation)) for conversation in conversations]


def make(respond, num_envs=2, **options):
    options = {"prompts": ["Hi"], "reward_model": lengths, "respond": respond, **options}
    envs = gym.make_vec("RewardModel-v0", num_envs=num_envs, **options)
    envs.reset(seed=0)
    return envs


def test_all_rows_of_a_step_are_one_call_with_the_roles_changed():
    writer = Writer(lambda conversation: f"And {conversation[-1]['content']}?")
    envs = make(SimulatedUser(writer, instructions="You are shy."))
    observations, _, terminations, _, _ = envs.step(["one", "two"])
    assert [each[-1] for each in observations] == [user("And one?"), user("And two?")]
    assert not terminations.any()
    (call,) = writer.calls
    system = {"role": "system", "content": "You are shy."}
    assert call == [[system, user(OPENING), assistant("Hi"), user(reply)] for reply in ("one", "two")]
    envs.step(["three", "four"])
    assert writer.calls[1][0][-3:] == [user("one"), assistant("And one?"), user("three")]


def test_the_marker_ends_the_episode_and_is_never_seen():
    writer = Writer(lambda conversation: "Thanks! [END]" if conversation[-1]["content"] == "done" else "More.")
    envs = make(SimulatedUser(writer), autoreset_mode="Disabled")
    observations, _, terminations, truncations, _ = envs.step(["done", "[END]"])
    assert terminations.tolist() == [True, False]
    assert not truncations.any()
    assert observations[0][-1] == assistant("done")
    assert observations[1][-1] == user("More.")
    assert "write [END]" in writer.calls[0][0][0]["content"]


def test_instructions_show_the_data_row():
    prompt = Prompt((user("Hi"),), "p", answer="4", metadata={"goal": "a sum", "facts": ["x"]})
    writer = Writer(lambda conversation: "More.")
    told = "{metadata.goal} {metadata.facts} {answer} {end_marker} {other}"
    SimulatedUser(writer, instructions=told, end_marker="STOP")([[user("Hi"), assistant("?")]], [prompt], None)
    assert writer.calls[0][0][0]["content"] == 'a sum ["x"] 4 STOP {other}'
    with pytest.raises(ConfigError, match=r"metadata\.none"):
        SimulatedUser(writer, instructions="{metadata.none}")([[user("Hi"), assistant("?")]], [prompt], None)


def test_messages_of_one_side_in_a_row_are_joined_and_other_roles_left_out():
    writer = Writer(lambda conversation: "More.")
    said = [
        {"role": "system", "content": "secret"},
        user("a"),
        user("b"),
        {"role": "tool", "content": "t"},
        assistant("c"),
    ]
    SimulatedUser(writer)([said], [Prompt(tuple(said[:4]), "p")], None)
    assert writer.calls[0][0][1:] == [user(OPENING), assistant("a\n\nb"), user("c")]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ChatReply(error="no server"), "no server"),
        (ChatReply("", finished=False), "was empty, or cut"),
        (" ", "empty"),
        *(
            (ChatReply(value, finished=True), "expected a ChatReply")
            for value in (None, b"hi", 3, ["hi"], {"text": "hi"})
        ),
    ],
)
def test_a_failure_names_the_row_and_leaves_the_environment_unchanged(failure, reason):
    broken = [True]
    writer = Writer(lambda conversation: failure if broken[0] and conversation[-1]["content"] == "two" else "More.")
    envs = make(SimulatedUser(writer, max_retries=1))
    before = envs.unwrapped.state
    with pytest.raises(GymRMError, match=rf"conversation 1 of 2: .*{reason}"):
        envs.step(["one", "two"])
    assert envs.unwrapped.state is before
    broken[0] = False
    observations, *_ = envs.step(["one", "two"])
    assert [len(each) for each in observations] == [3, 3]


def test_an_empty_message_is_asked_for_again():
    answers = iter(["", "More."])
    writer = Writer(lambda conversation: next(answers))
    user_model = SimulatedUser(writer)
    assert user_model([[user("Hi"), assistant("?")]], [Prompt((user("Hi"),), "p")], None) == ["More."]
    assert writer.seeds[0] != writer.seeds[1]


def test_the_same_conversation_gets_the_same_message_and_another_seed_another(tmp_path):
    digits = [f" {digit}" for digit in range(10)]
    folder = chain_models.save_chain(tmp_path, {"\n": digits, **{each: [chain_models.END] for each in digits}})
    talks = [[user("Hi"), assistant(str(k))] for k in range(20)]
    rows = [Prompt((user("Hi"),), "p")] * 20
    first, again, other = (SimulatedUser(folder, temperature=1.0, seed=seed)(talks, rows, None) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_dict_is_a_user_whose_model_the_environment_closes(tmp_path, monkeypatch):
    folder = chain_models.save_chain(tmp_path, {"\n": ["Why?"], "Why?": [chain_models.END]})
    closed = []
    monkeypatch.setattr(SimulatedUser, "close", lambda each: closed.append(each))
    envs = make({"model": folder, "instructions": "Ask why.", "max_turns": 1}, autoreset_mode="Disabled")
    observations, *_ = envs.step(["a", "b"])
    assert observations[0][-1] == user("Why?")
    assert envs.step(["a", "b"])[2].all()
    envs.close()
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"instructions": "x"}, "no model"),
        ({"model": "embedded", "instruction": "x"}, "Did you mean 'instructions'"),
        ({"model": "embedded", "max_turns": 0}, "max_turns"),
        ({"model": "embedded", "end_marker": ""}, "end_marker"),
        ({"model": "no-such-folder"}, "does not exist"),
        ({"model": 3}, "model must be"),
    ],
)
def test_invalid_settings_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        make(settings)


def test_tool_turns_are_not_shown_to_the_user_and_do_not_count():
    def now() -> int:
        return 12

    writer = Writer(lambda conversation: "And then?")
    envs = make(SimulatedUser(writer, instructions="Ask.", max_turns=1), num_envs=1, tools=[now])
    call = '<tool_call>{"name": "now"}</tool_call>'
    envs.step([call])
    envs.step(["<tool_call>{bad</tool_call>"])
    assert not writer.calls
    (observation,), _, terminations, *_ = envs.step(["Noon."])
    assert observation[-1] == user("And then?")
    assert not terminations[0]
    assert writer.calls[0][0][-1]["content"].endswith("Noon.")
    assert not [message for message in writer.calls[0][0] if "Error" in message["content"] or not message["content"]]
    assert envs.step(["One."])[2].tolist() == [True]
