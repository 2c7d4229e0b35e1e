"""What servers say and how rows are sent: gym_rm's own protocol and that of vLLM."""

import json

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from conftest import assistant, user
from reward_servers import FAST, RewardApp, conversations, reward_of, rewards, scorer_at, serve, sigmoid

from gym_rm import ConfigError, RemoteError, ScoringError, load_scorer
from gym_rm.types import Prompt


def test_turns_and_prompts_reach_the_server(app, url):
    given = [[user("a"), assistant("b"), user("c"), assistant("d")], *conversations(1)]
    tools = ({"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},)
    prompt = Prompt((user("a"),), "p7", answer="42", metadata={"level": (1, 2), "loss": float("nan")}, tools=tools)
    with scorer_at(url) as scorer:
        scores = scorer.score(given, [prompt, None], turns="all")
    assert [len(each) for each in scores.turn_rewards] == [2, 1]
    sent = app.requests[-1][2]
    assert sent["turns"] == "all"
    row = {"id": "p7", "answer": "42", "metadata": {"level": [1, 2], "loss": None}, "tools": list(tools)}
    assert sent["prompts"] == [row, None]


def edit(**changes):
    return lambda reply: json.dumps({**reply, **changes}).encode()


GARBAGE = {
    "a text": edit(rewards=["1.0"]),
    "too many rows": lambda reply: json.dumps({**reply, "rewards": [1.0, 2.0]}).encode(),
    "nan": lambda reply: json.dumps(reply).replace(json.dumps(reply["rewards"]), "[NaN]").encode(),
    "overflow": lambda reply: json.dumps(reply).replace(json.dumps(reply["rewards"]), "[1e999]").encode(),
    "null without an error": edit(rewards=[None]),
    "components of another length": edit(components={"a": [1.0, 2.0]}),
    "a list": lambda reply: b"[]",
    "no JSON": lambda reply: b"{",
    "deep JSON": lambda reply: b"[" * 100_000,
    "a provenance that is none": edit(provenance={"scorer": 1}),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_an_error_and_never_a_reward(app, url, name):
    with scorer_at(url, max_retries=0) as scorer:
        app.always = GARBAGE[name]
        with pytest.raises(RemoteError, match="invalid reply"):
            scorer.score(conversations(1))


def test_a_reply_without_the_rewards_of_turns_is_an_error(app, url):
    with scorer_at(url, max_retries=0) as scorer:
        app.always = lambda reply: json.dumps({k: v for k, v in reply.items() if k != "turn_rewards"}).encode()
        with pytest.raises(RemoteError, match="lacks the rewards of its turns"):
            scorer.score(conversations(1), turns="all")


def test_fields_of_a_newer_server_are_ignored(app, url):
    with scorer_at(url) as scorer:
        app.always = lambda reply: json.dumps(
            {**reply, "new": 1, "provenance": {**reply["provenance"], "new": 1}}
        ).encode()
        assert scorer.score(conversations(1)).rewards.tolist() == rewards(conversations(1))


def test_vllm_is_recognised_and_asked_for_values_without_activation():
    app = RewardApp("vllm")
    with serve(app) as url, scorer_at(url) as scorer:
        scores = scorer.score(conversations(30))
    assert scores.rewards.tolist() == rewards(conversations(30))
    assert scores.provenance.model == "fake"
    path, _, request = app.requests[-1]
    assert path == "/classify"
    assert request == {
        "model": "fake",
        "messages": request["messages"],
        "use_activation": False,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "add_special_tokens": False,
    }


def test_a_vllm_that_ignores_use_activation_is_noticed(caplog):
    app = RewardApp("vllm", reward=lambda conversation: sigmoid(reward_of(conversation) / 20))
    with serve(app) as url:
        load_scorer(url, **FAST).close()
        assert "may apply a sigmoid" in caplog.text
        app.reward = lambda conversation: 1.0
        with pytest.raises(ConfigError, match="a softmax to one value"):
            load_scorer(url, **FAST)


def test_a_vllm_model_with_several_values_is_refused():
    app = RewardApp("vllm")
    app.always = lambda reply: json.dumps({**reply, "data": [{"index": 0, "probs": [1.5, -2.5]}]}).encode()
    with serve(app) as url, pytest.raises(ConfigError, match="returns 2 values"):
        load_scorer(url, **FAST)


def test_an_unknown_server_is_named():
    with serve(RewardApp("another")) as url, pytest.raises(ConfigError, match=r"no server of gym-rm serve or vLLM"):
        load_scorer(url, **FAST)


def test_a_conversation_too_long_for_vllm_fails_and_is_not_cut():
    long = [user("?"), assistant("word " * 5000)]
    with serve(RewardApp("vllm")) as url, scorer_at(url) as scorer:  # noqa: SIM117
        with pytest.raises(ScoringError, match=r"row 1: .*maximum context length is 4096 tokens") as raised:
            scorer.score([conversations(1)[0], long])
    assert raised.value.rows == (1,)
