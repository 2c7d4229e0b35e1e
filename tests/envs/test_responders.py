"""The user's turns: scripts, `respond`, a scorer with `respond`, and errors in them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError, Prompt, Scores
from gym_rm.envs.episodes import Episode
from gym_rm.envs.responders import UserSimulator, scripted_user
from gym_rm.envs.spaces import ConversationSpace
from tests.envs.environments import Recorder, make, prompt, say_more


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


@pytest.mark.parametrize("answer", ["text", None, [], ["a", "b"], 3, {"a": 1}])
def test_a_responder_must_return_a_list_of_the_right_length(answer):
    with pytest.raises(ConfigError, match=r"respond must return a list with the user's next turn.*each of the 1 conv"):
        one_turn(simulator(lambda conversations, prompts, scores: answer), episode())


def test_a_responder_with_another_signature_raises_config_error():
    with pytest.raises(ConfigError, match=r"respond must take \(conversations, prompts, scores\)"):
        simulator(lambda conversation: None)


@pytest.mark.parametrize("answer", [3, "\ud800", b"bytes", "x" * 101])
def test_an_invalid_user_turn_raises_config_error_and_changes_nothing(answer):
    answers = [answer, "fine"]
    envs = make(2, max_text_length=100, respond=lambda conversations, prompts, scores: answers)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="environment 0: respond returned an invalid turn"):
        envs.step(["a", "b"])
    answers[0] = None
    observations, _, terminations, _, _ = envs.step(["a", "b"])
    assert terminations.tolist() == [True, False]
    assert [message["content"] for message in observations[1]][1:] == ["b", "fine"]


def test_with_reward_on_end_respond_is_called_before_the_scorer_without_scores():
    events = []
    recorder = Recorder()

    def respond(conversations, prompts, scores):
        events.append((len(recorder.calls), scores))
        return [None if c[-1]["content"] == "done" else "go on" for c in conversations]

    envs = make(2, reward_model=recorder, respond=respond, reward_on="end", prompts=[prompt(0)])
    envs.reset(seed=0)
    _, rewards, terminations, _, _ = envs.step(["done", "not yet"])
    assert events == [(0, None)]
    assert (rewards.tolist(), terminations.tolist()) == ([4.0, 0.0], [True, False])
    assert [[c[-1]["content"] for c in call] for call in recorder.calls] == [["done"]]


def test_a_scorer_can_end_an_episode():
    class EndsWhenRight(Recorder):
        def score(self, conversations, prompts=None):
            ends = ["right" in conversation[-1]["content"] for conversation in conversations]
            verdicts = np.array(["right" if each else "wrong" for each in ends], dtype=object)
            return Scores.from_rewards(ends, terminations=ends, infos={"verdict": verdicts})

    envs = make(2, reward_model=EndsWhenRight(), prompts=[prompt(0, "again?", "and again?")], autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, _, infos = envs.step(["right", "wrong"])
    assert terminations.tolist() == [True, False]
    assert [o[-1]["content"] for o in observations] == ["right", "again?"]
    assert infos["verdict"].tolist() == ["right", "wrong"]


def test_respond_of_the_scorer_is_used_unless_respond_is_set():
    class RespondingRecorder(Recorder):
        def respond(self, conversations, prompts, scores):
            return [f"you said {conversation[-1]['content']}" for conversation in conversations]

    for options, said in (({}, "you said a"), ({"respond": say_more}, "more?")):
        envs = make(1, reward_model=RespondingRecorder(), prompts=["hi"], **options)
        envs.reset(seed=0)
        (observation,), *_ = envs.step(["a"])
        assert observation[-1]["content"] == said


def test_a_step_can_be_repeated_after_an_error_in_respond():
    answers = iter([RuntimeError("the simulator is down"), None])

    def respond(conversations, prompts, scores):
        answer = next(answers)
        if answer is not None:
            raise answer
        return ["go on"] * len(conversations)

    envs = make(1, respond=respond, prompts=["hi"])
    envs.reset(seed=0)
    with pytest.raises(RuntimeError, match="the simulator is down"):
        envs.step(["a"])
    (observation,), *_ = envs.step(["a"])
    assert [message["content"] for message in observation] == ["hi", "a", "go on"]
