"""`POST /slime`: the requests of slime's `remote_rm`, one sample each, whose reply is the reward."""

import importlib.resources
import json

import pytest

import gym_rm

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [{"role": "user", "content": "How much is 90 - 50?"}]


def right(conversations, prompts):
    found = [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]
    errors = ["the reply contains FAIL" if "FAIL" in c[-1]["content"] else None for c in conversations]
    return gym_rm.Scores.from_rewards(found, errors=errors)


@pytest.fixture(scope="module")
def ask(serving):
    """Post to a server with the policy's tokenizer; return the status and the JSON of the reply."""
    with serving(gym_rm.load_scorer(right), policy_tokenizer=POLICY) as (_, client):

        def post(prompt, response, **fields):
            reply = client.post("/slime", json={"prompt": prompt, "response": response, "label": "40", **fields})
            return reply.status_code, reply.json()

        yield post


@pytest.mark.parametrize("prompt", [PROMPT, QUESTION])
def test_the_body_is_the_reward_of_a_rendered_or_a_listed_prompt(ask, prompt):
    assert ask(prompt, "It is 40.<|im_end|>\n") == (200, 1.0)
    assert ask(prompt, "no<|im_end|>") == (200, 0.0)


def test_the_label_is_the_answer(ask):
    assert ask(QUESTION, "41", label=41) == (200, 1.0)
    status, reply = ask(QUESTION, "41", label=None)
    assert (status, reply["error"]["code"]) == (500, "scorer_error")


@pytest.mark.parametrize(
    ("prompt", "response", "reason"),
    [
        (QUESTION, "FAIL", "the reply contains FAIL"),
        ("How much?", "40", "was not written by the chat template"),
        ([], "40", "must be a text or a list of messages"),
        (None, "40", "prompt.str: Input should be a valid string"),
    ],
)
def test_a_sample_without_a_score_is_an_error_status(ask, prompt, response, reason):
    status, reply = ask(prompt, response)
    assert status == 422
    assert reason in reply["error"]["message"]


def test_without_the_policys_tokenizer_plain_prompts_work_and_rendered_ones_do_not(client):
    plain = client.post("/slime", json={"prompt": "90 - 50?", "response": "four", "label": None})
    assert (plain.status_code, plain.json()) == (200, 1.0)
    for prompt, response in ((PROMPT, "four"), (QUESTION, "four<|im_end|>")):
        refused = client.post("/slime", json={"prompt": prompt, "response": response, "label": None})
        assert refused.status_code == 501
        assert "--policy-tokenizer" in refused.json()["error"]["message"]


def test_a_fallback_reward_is_a_number_that_the_user_chose(serving):
    with serving(gym_rm.load_scorer(right), fallback_reward=-7.0) as (_, client):
        reply = client.post("/slime", json={"prompt": QUESTION, "response": "FAIL", "label": "4"})
    assert json.loads(reply.text) == -7.0
