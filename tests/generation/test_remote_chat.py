"""Chat models at a URL: real servers that are busy, slow, wrong or dead."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")


from generation.chat_servers import user

from gym_rm import ConfigError
from gym_rm.engine.text.control_tokens import COMMON, spaced
from gym_rm.generation.chat import load_chat_model
from gym_rm.generation.remote_chat import RemoteChatModel, _read_reply
from gym_rm.http_client.responses import InvalidReply
from gym_rm.testing import check_chat_model

BUSY = (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.1"})


@pytest.fixture
def app(chat_server):
    chat_server.__init__(lambda messages: f"You said: {messages[-1]['content']}")
    return chat_server


def ask(app, *texts, seconds=20.0, **options):
    model = RemoteChatModel(app.url, **options)
    return model.reply([user(text) for text in texts], seeds=range(len(texts)), deadline=time.monotonic() + seconds)


def test_replies_come_in_the_order_of_conversations(app):
    replies = ask(app, *map(str, range(40)), max_connections=4)
    assert [reply.text for reply in replies] == [f"You said: {k}" for k in range(40)]
    assert all(reply.finished and reply.error is None for reply in replies)
    assert app.most_running <= 4


def test_the_contract_of_chat_models(app):
    check_chat_model(RemoteChatModel(app.url))


def test_a_request_has_the_model_the_limits_and_the_extra_fields(app):
    ask(app, "Hi", temperature=0.5, max_new_tokens=7, extra={"top_p": 0.9})
    (request,) = app.requests
    assert request == {
        "model": "judge-7b",
        "messages": user("Hi"),
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 0,
        "top_p": 0.9,
    }


@pytest.mark.parametrize(
    "fault",
    [BUSY, (503, {"error": "loading"}), (500, b"oops"), (200, b'{"choices": [{"mess'), (200, {"choices": []}), "drop"],
)
def test_a_failed_request_is_sent_again(app, fault):
    app.faults = [fault, None]
    (reply,) = ask(app, "Hi", max_retries=1)
    assert reply.text == "You said: Hi"
    assert len(app.requests) == 2


@pytest.mark.parametrize("fault", ["hang", "drip", (500, b""), BUSY, (200, b"{")])
def test_a_server_that_never_answers_costs_no_more_than_the_time_of_the_call(app, fault):
    app.faults = [None]
    app.always = fault
    started = time.monotonic()
    replies = ask(app, "a", "b", "c", seconds=0.5, max_retries=100, attempt_timeout=60)
    assert time.monotonic() - started < 30, "the time of one request is 60 seconds"
    assert sorted(reply.error is None for reply in replies) == [False, False, True]
    assert all(app.url in reply.error for reply in replies if reply.error)


def test_a_refused_conversation_is_the_error_of_its_row(app):
    app.faults = [(400, {"error": {"message": "maximum context length is 4096 tokens"}})]
    replies = ask(app, "a", "b", max_connections=1)
    assert [reply.error is None for reply in replies] == [False, True]
    assert "maximum context length" in replies[0].error


def test_a_wrong_key_stops_the_call(app):
    app.key = "secret"
    with pytest.raises(ConfigError, match="refused the key"):
        ask(app, "Hi", name="judge-7b")
    assert ask(app, "Hi", key="secret")[0].error is None


def test_a_model_that_is_not_served_stops_the_call(app):
    with pytest.raises(ConfigError, match="no-model"):
        ask(app, "Hi", name="no-model")


def test_a_reply_that_was_cut_is_unfinished_and_reasoning_is_left_out(app):
    answers = {"cut": ("It is", "length"), "think": "<think>Score: 3</think>\nIt is 4.", "open": "<think>So", "": None}
    app.answer = lambda messages: answers[messages[-1]["content"]]
    replies = ask(app, *answers)
    assert [(reply.text, reply.finished) for reply in replies] == [
        ("It is", False),
        ("It is 4.", True),
        ("", False),
        ("", False),
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_server_can_put_the_reasoning_into_a_field(field):
    bodies = [
        {"choices": [{"message": {"content": content, field: "Score: 3"}, "finish_reason": "stop"}]}
        for content in ("It is 4.", None)
    ]
    replies = [_read_reply(json.dumps(body).encode()) for body in bodies]
    assert [(reply.text, reply.finished) for reply in replies] == [("It is 4.", True), ("", False)]


THOUGHT = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
    {"type": "thinking", "thinking": "Score: 3", "signature": "c2ln"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Score: 3"}]},
    {"type": "redacted_thinking", "data": "c2ln"},
]


def read(message, reason="stop"):
    return _read_reply(json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode())


@pytest.mark.parametrize("thought", THOUGHT)
@pytest.mark.parametrize("kind", ["text", "output_text"])
def test_text_parts_of_a_server_are_joined_and_thinking_parts_are_thinking(thought, kind):
    said = [{"type": kind, "text": "It is"}, {"type": kind, "text": " 4."}]
    reply = read({"role": "assistant", "content": [thought, *said]})
    assert (reply.text, reply.finished) == ("It is 4.", True)
    reply = read({"role": "assistant", "content": [thought]})
    assert (reply.text, reply.finished) == ("", False)


@pytest.mark.parametrize(
    "message",
    [{"content": [{"type": "refusal", "refusal": "No."}]}, {"content": None, "refusal": "No."}, {"refusal": "No."}],
)
def test_a_refusal_is_what_the_model_said(message):
    assert read(message).text == "No."


@pytest.mark.parametrize(
    "content",
    [3, {"a": 1}, ["a"], [{"type": "image_url"}], [{"type": "text"}], [{"type": "text", "text": None}], [{"type": []}]],
)
def test_content_without_a_text_is_no_reply(content):
    with pytest.raises(InvalidReply):
        read({"content": content})


def test_a_withheld_reply_is_an_error(app):
    app.answer = lambda messages: ("", "content_filter")
    assert "content filter" in ask(app, "Hi")[0].error


def test_a_reply_that_a_stopping_server_aborted_is_asked_for_again(app):
    answers = iter([("He", "abort"), ("Hello", "stop")])
    app.answer = lambda messages: next(answers)
    assert ask(app, "Hi")[0].text == "Hello"


def test_a_lone_surrogate_is_the_error_of_its_row(app):
    replies = ask(app, "\ud800", "Hi")
    assert "UTF-8" in replies[0].error
    assert replies[1].error is None


def test_a_system_message_is_joined_for_models_without_one(app):
    model = RemoteChatModel(app.url, system_role=False)
    model.reply([[{"role": "system", "content": "Rules."}, *user("Hi")]], seeds=[0])
    assert app.requests[0]["messages"] == user("Rules.\n\nHi")


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "[/INST]", "<<SYS>>", "<｜User｜>"]
)
def test_control_tokens_in_messages_are_not_sent(app, token):
    ask(app, f"Good.{token}system: {token}{token[0]}{token}")
    (sent,) = app.requests[0]["messages"]
    assert token not in sent["content"]
    assert sent["content"].replace(" ", "") == f"Good.{token}system:{token}{token[0]}{token}"


PIECES = st.sampled_from(
    ["<", "|", ">", "im_end", "<|", "|>", "<s", "[", "/", "INST", "]", "SYS", "a", " ", "｜", "pad"]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_no_control_token_remains_and_only_spaces_are_added(text):
    plain = spaced(text)
    assert not COMMON.search(plain)
    assert plain.replace(" ", "") == text.replace(" ", "")


def test_the_control_tokens_of_a_tokenizer_are_known(tmp_path):
    import tiny_models

    tokenizer = tiny_models.tokenizer("chatml")
    tokenizer.add_special_tokens({"extra_special_tokens": ["~turn~"]})
    tokenizer.save_pretrained(tmp_path)
    model = RemoteChatModel("http://127.0.0.1:1", tokenizer=str(tmp_path))
    assert spaced("a ~turn~ b", model._control) == "a ~ turn ~ b"


def test_an_option_of_the_other_kind_of_model_is_refused():
    with pytest.raises(ConfigError, match="device"):
        load_chat_model("http://127.0.0.1:1", device="cpu")
    with pytest.raises(ConfigError, match="timeout"):
        load_chat_model("http://127.0.0.1:1", timeout=0)
    with pytest.raises(ConfigError, match="temperature"):
        load_chat_model("http://127.0.0.1:1", temperature=-1.0)
