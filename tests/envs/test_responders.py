import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError, Prompt, Scores
from gym_rm.envs.episodes import Episode
from gym_rm.envs.responders import UserSimulator, scripted_user
from gym_rm.envs.spaces import ConversationSpace
from tests.envs.environments import make


def episode(*user_turns):
    prompt = Prompt(({"role": "user", "content": "hi"},), "greeting", user_turns)
    return Episode(prompt, 0, list(prompt.messages))


def simulator(respond=None, **limits):
    return UserSimulator(respond, space=ConversationSpace(100), **limits)


def with_reply(episode, reply):
    return [*episode.messages, {"role": "assistant", "content": reply}]


def one_turn(user, conversation, reply="reply", scores=None):
    (turn,) = user.next_turns([0], [conversation], [with_reply(conversation, reply)], scores)
    return turn


def said_by(turn):
    return turn.messages[0]["content"] if turn.messages else None


def ending(*terminations):
    return Scores.from_rewards([1.0] * len(terminations), terminations=terminations)


def test_a_script_without_further_turns_ends_the_episode():
    conversation = episode("and?")
    turn = one_turn(simulator(), conversation)
    assert (said_by(turn), turn.terminated, turn.truncated) == ("and?", False, False)
    conversation.messages = [*with_reply(conversation, "one"), {"role": "user", "content": "and?"}]
    turn = one_turn(simulator(), conversation)
    assert (said_by(turn), turn.terminated, turn.truncated) == (None, True, False)


@given(st.lists(st.text(max_size=3), max_size=5), st.integers(1, 3))
def test_a_script_returns_its_turns_in_order_after_any_prompt(turns, length):
    messages = tuple({"role": "user", "content": str(k)} for k in range(length))
    prompt = Prompt(messages, "p", tuple(turns))
    said, conversation = [], list(messages)
    while True:
        conversation.append({"role": "assistant", "content": "reply"})
        (user,) = scripted_user([conversation], [prompt], None)
        if user is None:
            break
        said.append(user)
        conversation.append({"role": "user", "content": user})
    assert said == turns


@pytest.mark.parametrize(
    ("user_turns", "max_turns", "terminated", "truncated"),
    [((), None, True, False), ((), 1, True, False), (("more?",), 1, False, True), (("more?",), 2, False, False)],
)
def test_max_turns_truncates_a_script_with_further_turns(user_turns, max_turns, terminated, truncated):
    turn = one_turn(simulator(max_turns=max_turns), episode(*user_turns))
    assert (turn.terminated, turn.truncated) == (terminated, truncated)


def test_the_scorer_ends_an_episode_before_the_user_does():
    turn = one_turn(simulator(), episode("more?"), scores=ending(True))
    assert (said_by(turn), turn.terminated, turn.truncated) == (None, True, False)
    assert one_turn(simulator(), episode("more?"), scores=ending(False)).messages[0]["content"] == "more?"


def test_a_responder_is_called_once_for_the_rows_that_continue():
    asked = []

    def respond(conversations, prompts, scores):
        asked.append(([c[-1]["content"] for c in conversations], [p.user_turns for p in prompts], scores))
        return ["go on", None][: len(conversations)]

    user = simulator(respond, max_turns=2)
    over_limit, ended, first, second = (episode(str(k)) for k in range(4))
    over_limit.num_replies = 1
    episodes = [over_limit, ended, first, second]
    replies = ["a", "c", "d", "e"]
    said = [with_reply(each, reply) for each, reply in zip(episodes, replies, strict=True)]
    scores = Scores.from_rewards([0.0, 2.0, 3.0, 4.0], terminations=[False, True, False, False])
    turns = user.next_turns(range(4), episodes, said, scores)
    ((contents, user_turns, given_scores),) = asked
    assert contents == ["d", "e"]
    assert user_turns == [("2",), ("3",)]
    assert given_scores.rewards.tolist() == [3.0, 4.0]
    assert [(said_by(turn), turn.terminated, turn.truncated) for turn in turns] == [
        (None, False, True),
        (None, True, False),
        ("go on", False, False),
        (None, True, False),
    ]


def test_a_responder_receives_copies():
    def respond(conversations, prompts, scores):
        conversations[0][0]["content"] = "changed"
        prompts[0].messages[0]["content"] = "changed"
        return [None]

    conversation = episode()
    said = with_reply(conversation, "one")
    simulator(respond).next_turns([0], [conversation], [said], None)
    assert said[0]["content"] == conversation.prompt.messages[0]["content"] == "hi"


def test_an_async_responder_is_refused():
    async def respond(conversations, prompts, scores):
        return [None] * len(conversations)

    with pytest.raises(ConfigError, match=r"respond must not be async; .*asyncio\.run"):
        simulator(respond)


@pytest.mark.parametrize("answer", ["text", None, [], ["a", "b"], 3, {"a": 1}])
def test_a_responder_must_return_a_list_of_the_right_length(answer):
    with pytest.raises(ConfigError, match=r"respond must return a list with the user's next turn.*each of the 1 conv"):
        one_turn(simulator(lambda conversations, prompts, scores: answer), episode())


@pytest.mark.parametrize("turn", [3, b"bytes", "\ud800", "x" * 101])
def test_the_error_for_an_invalid_turn_names_the_environment(turn):
    user = simulator(lambda conversations, prompts, scores: [turn])
    conversation = episode()
    with pytest.raises(ConfigError, match="environment 7: respond returned an invalid turn"):
        user.next_turns([7], [conversation], [with_reply(conversation, "a")], None)


def test_a_responder_with_another_signature_raises_config_error():
    with pytest.raises(ConfigError, match=r"respond must take \(conversations, prompts, scores\)"):
        simulator(lambda conversation: None)


def test_a_simulator_survives_pickling():
    assert one_turn(pickle.loads(pickle.dumps(simulator())), episode("more?")).messages[0]["content"] == "more?"


def test_a_turn_is_its_characters_also_for_subclasses_of_str():
    class Loud(str):
        def __str__(self):
            return "LOUD"

    envs = make(1, respond=lambda conversations, prompts, scores: [Loud("more?")])
    envs.reset(seed=0)
    (observation,) = envs.step(["x"])[0]
    assert type(observation[-1]["content"]) is str
    assert observation[-1]["content"] == "more?"
