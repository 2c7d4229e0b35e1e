"""Chat models in this process."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import chain_models
import pytest
import tiny_models
from generation.chat_servers import user

from gym_rm import ConfigError
from gym_rm.generation.chat import load_chat_model
from gym_rm.generation.local_chat import LocalChatModel
from gym_rm.testing import check_chat_model


@pytest.fixture(scope="module")
def random_writer(tmp_path_factory):
    """A model that writes a random digit, then stops."""
    folder = tmp_path_factory.mktemp("writer")
    digits = [f" {digit}" for digit in range(10)]
    return chain_models.save_chain(folder, {"\n": digits, **{each: [chain_models.END] for each in digits}})


def test_a_template_can_open_the_reasoning(tmp_path):
    template = tiny_models.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    chain_models.save_chain(tmp_path, {"\n": ["Yes."], "Yes.": [chain_models.END]}, chat_template=template)
    (reply,) = LocalChatModel(tmp_path).reply([user("?")], seeds=[0])
    assert (reply.text, reply.finished) == ("", False)


def test_the_contract_of_chat_models(random_writer):
    check_chat_model(LocalChatModel(random_writer, temperature=1.0, max_num_seqs=2))


def test_replies_depend_on_their_seeds(random_writer):
    replies = LocalChatModel(random_writer, temperature=1.0, max_num_seqs=7).reply([user("?")] * 30, seeds=range(30))
    assert len({reply.text for reply in replies}) > 5
    assert all(reply.finished for reply in replies)


class Wrong(LocalChatModel):
    """Breaks one promise: a function changes its replies."""

    change = staticmethod(lambda replies: replies)

    def reply(self, conversations, **options):
        return self.change(super().reply(conversations, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda replies: replies[1:], "2 replies to 3 conversations"),
        (lambda replies: [each.text for each in replies], "expected ChatReply"),
        (lambda replies: [replace(each, text=f"{time.perf_counter()}") for each in replies], "equal seeds"),
        (lambda replies: [replace(each, text=str(k)) for k, each in enumerate(replies)], "order of the rows"),
        (lambda replies: [replace(each, error=None) for each in replies], "must have an error"),
    ],
)
def test_a_broken_chat_model_is_noticed(change, message, random_writer):
    model = Wrong(random_writer)
    model.change = change
    with pytest.raises(AssertionError, match=message):
        check_chat_model(model)


def test_a_reply_that_reaches_its_limit_is_unfinished(tmp_path):
    folder = chain_models.save_chain(tmp_path, {"\n": [" on"], " on": [" on"]})
    (reply,) = LocalChatModel(folder, max_new_tokens=3).reply([user("?")], seeds=[0])
    assert (reply.text, reply.finished) == ("on on on", False)


def test_a_conversation_that_is_too_long_or_invalid_is_an_error_of_its_row(random_writer):
    model = LocalChatModel(random_writer, max_length=40)
    replies = model.reply([user("a"), user("a" * 5000), user("\ud800"), user("b")], seeds=range(4))
    assert [reply.error is None for reply in replies] == [True, False, False, True]
    assert "40" in replies[1].error


def test_a_system_message_is_joined_where_the_template_has_none(tmp_path):
    tiny_models.save_policy(tmp_path)
    tokenizer = tiny_models.tokenizer("gemma", eos_token="<end_of_turn>")
    tokenizer.save_pretrained(tmp_path)
    model = LocalChatModel(tmp_path, max_new_tokens=2)
    (reply,) = model.reply([[{"role": "system", "content": "Be brief."}, *user("?")]], seeds=[0])
    assert reply.error is None


def test_a_busy_model_does_not_make_a_call_late(random_writer):
    model = LocalChatModel(random_writer)
    with ThreadPoolExecutor(1) as other, model._lock:  # which is not released before there is a result
        call = other.submit(model.reply, [user("?")], seeds=[0], deadline=time.monotonic() + 0.05)
        (reply,) = call.result(timeout=60)
    assert "time" in reply.error


def test_a_closed_model_says_so(random_writer):
    model = LocalChatModel(random_writer)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.reply([user("?")], seeds=[0])


@pytest.mark.parametrize("model", [None, 3, {"name": "x"}, LocalChatModel])
def test_other_values_are_no_chat_models(model):
    with pytest.raises(ConfigError, match="model must be"):
        load_chat_model(model)


def test_a_reward_model_and_impossible_limits_are_refused(tmp_path, random_writer):
    tiny_models.save_reward_model(tmp_path)
    with pytest.raises(ConfigError, match="ForCausalLM"):
        load_chat_model(str(tmp_path))
    with pytest.raises(ConfigError, match="max_new_tokens=4096"):
        load_chat_model(random_writer, max_new_tokens=4096)
