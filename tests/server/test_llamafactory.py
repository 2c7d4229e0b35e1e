"""`POST /llamafactory`: the requests of LLaMA-Factory's `get_rewards_from_server`, whole texts of a batch."""

import importlib.resources

import pytest
from recording import RecordingScorer, chat

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


def query(reply):
    return f"<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"


@pytest.fixture(scope="module")
def served(serving):
    recorder = RecordingScorer()
    with serving(recorder, policy_tokenizer=POLICY) as (_, client):
        yield recorder, client


def ask(served, *messages):
    """Do what LLaMA-Factory does, which reads no status."""
    served[0].calls.clear()
    return served[1].post("/llamafactory", json={"model": "model", "messages": messages}).json()["scores"]


def test_whole_texts_become_conversations(served):
    later = query("Sure?").replace("How much is 90 - 50?", "Hello") + "\n" + query("four" + "<|im_end|>" * 3) + "\n"
    assert ask(served, query("40"), SYSTEM + query(""), later) == [0.5, 0.0, 1.0]
    first, second, third = served[0].calls[0]
    assert first == chat("How much is 90 - 50?", "40")
    assert second == [{"role": "system", "content": "Be brief."}, *chat("How much is 90 - 50?", "")]
    assert third == chat("Hello", "Sure?", "How much is 90 - 50?", "four")
    assert ask(served) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("40", "the start of the reply was not found"),
        ("Hi! " + query("40"), "the prompt was not written by the chat template"),
        (query("FAIL"), "the reply contains FAIL"),
        (query("40") + "\n<|im_start|>user\nSure?<|im_end|>\n", "goes on with a further turn"),
    ],
)
def test_a_text_without_a_score_makes_a_reply_without_scores(served, text, reason):
    reply = served[1].post("/llamafactory", json={"model": "model", "messages": [query("40"), text]})
    assert reply.status_code == 422
    assert reason in reply.json()["error"]["message"]
    with pytest.raises(KeyError, match="scores"):
        ask(served, query("40"), text)
