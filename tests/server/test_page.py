"""The page at `/` in a real browser: scores of turns, two replies, hostile texts, errors in words."""

import json
import re

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("playwright.sync_api")

from playwright import sync_api
from reward_servers import RewardApp, error, reward_of, serve

from gym_rm.server import page as page_module

HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
TALK = "User: Hi\nAssistant: Hello.\nUser: And now?\nAssistant: One thing. Another thing! A last one?"


class PageApp(RewardApp):
    """The server with the page; `seen` has the rewards of turns as the real server gives them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.page = (page_module.page(), {"content-type": "text/html; charset=utf-8", **page_module.headers()})

    def rewards(self, request, size):
        status, headers, body = super().rewards(request, size)
        reply = json.loads(body)
        if "turn_rewards" in reply:
            reply["turn_rewards"] = [
                [self.reward(one[: k + 1]) for k, message in enumerate(one) if message["role"] == "assistant"]
                for one in request["conversations"]
            ]
        return status, headers, json.dumps(reply).encode()


@pytest.fixture(scope="module")
def served():
    app = PageApp()
    with serve(app) as url:
        yield app, url


@pytest.fixture
def app(served):
    served[0].__init__()
    return served[0]


@pytest.fixture
def tab(app, served, browser):
    """The page, opened; the test fails if it contacts another host, breaks its own policy or raises an error."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(8000)
    complaints, hosts = [], set()
    opened.on("pageerror", lambda problem: complaints.append(str(problem)))
    opened.on("console", lambda message: complaints.append(message.text) if "Security Policy" in message.text else None)
    opened.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    url = served[1]
    opened.goto(url)
    model_is(opened, "fake")
    yield opened
    assert not complaints
    assert hosts == {url.split("/")[2]}
    context.close()


def score(tab, text, *, replies=None):
    """Score a conversation, or two replies to it, and wait for the results or an error."""
    if replies is not None:
        tab.get_by_text("Compare two replies").click()
        for name, reply in zip("ab", replies, strict=True):
            tab.fill(f"#reply-{name}", reply)
    tab.fill("#conversation", text)
    tab.click("#score")
    tab.wait_for_selector("#score:enabled")


def model_is(tab, text):
    """Wait until the page shows this model. (`wait_for_function` needs eval, which the page forbids.)"""
    sync_api.expect(tab.locator("#model")).to_contain_text(text)


def texts(tab, selector):
    return [text.strip() for text in tab.locator(selector).all_inner_texts()]


def numbers(tab, selector):
    return [float(text.replace("−", "-")) for text in texts(tab, selector)]


def read(text):
    """Return the messages of a text with one line for each."""
    return [
        {"role": name.lower(), "content": content}
        for name, content in (line.split(": ", 1) for line in text.split("\n"))
    ]


def test_every_turn_has_its_reward(app, tab):
    score(tab, TALK)
    messages = read(TALK)
    whole = reward_of(messages)
    assert numbers(tab, ".score strong") == [pytest.approx(whole, abs=0.01)]
    assert numbers(tab, ".turn .value") == pytest.approx([reward_of(messages[:2]), whole], abs=0.01)
    assert [request["turns"] for _, _, request in app.requests] == ["all"]


def test_two_replies_are_compared(app, tab):
    score(tab, "User: Hi", replies=["Hello there. Welcome!", "zz"])
    a, b = (reward_of([{"role": "assistant", "content": text}]) for text in ("Hello there. Welcome!", "zz"))
    assert numbers(tab, ".score strong") == pytest.approx([a, b], abs=0.01)
    better = "A" if a > b else "B"
    assert f"Reply {better} has {abs(a - b):.2f}" in tab.inner_text(".verdict")
    left, right = (card.bounding_box() for card in tab.locator(".sides .card").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]


def test_texts_are_never_html(app, tab):
    app.provenance["revision"] = HOSTILE
    tab.reload()
    messages = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": f"{HOSTILE} Fine. {HOSTILE} FAIL"},
    ]
    score(tab, json.dumps([{"role": HOSTILE, "content": HOSTILE}, *messages]))
    assert HOSTILE in tab.inner_text("#results")
    app.always = error(422, HOSTILE)
    score(tab, TALK)
    assert HOSTILE in tab.inner_text("#error")
    assert tab.evaluate("[document.images.length, document.scripts.length, window.hacked ?? null]") == [0, 1, None]


def test_json_and_unicode_reach_the_server_unchanged(app, tab):
    content = "Grüße 👩‍🚀! 你好。\u202bשלום\u202c <b>x</b> \\n \u0000 \ud800"
    messages = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": content}]
    score(tab, json.dumps(messages))
    score(tab, json.dumps({"messages": messages, "id": 7}))
    assert [request["conversations"] for _, _, request in app.requests] == [[messages]] * 2


UNREADABLE = [
    ("", "The conversation is empty."),
    ("[{", "not valid JSON"),
    ("[]", "must be a list of messages"),
    ('[{"role": "user"}]', 'Message 1 must have the texts "role" and "content"'),
    ("[null]", "Message 1 must have"),
    ("hello", "The first line must start with"),
    ("User: hello", "must end with a reply of the assistant"),
]
FAULTS = [
    (error(429, "the queue is full", **{"Retry-After": "7"}), "(status 429): the queue is full. Try again in 7 s"),
    (error(503, "draining"), "The server is not ready (status 503): draining."),
    (error(413, "too many bytes"), "The conversation is too large for the server"),
    ((500, {}, b"<html>"), "The server failed (status 500)"),
    ((200, {}, b"<html>"), "not JSON"),
    ((200, {}, b"{}"), "another number of rewards"),
]


def test_what_cannot_be_read_and_errors_of_the_server_are_explained(app, tab):
    for text, problem in UNREADABLE:
        score(tab, text)
        assert problem in tab.inner_text("#error")
    assert not app.requests
    score(tab, "User: Hi\nAssistant: This is fine. This will FAIL now.")
    assert tab.inner_text(".score .value") == "no score: too long"
    for fault, words in FAULTS:
        app.always = fault
        score(tab, TALK)
        assert words in tab.inner_text("#error")


def test_the_key_is_asked_for_and_kept_in_memory_only(app, tab):
    app.key = "secret"
    tab.reload()
    model_is(tab, "The server needs a key.")
    score(tab, TALK)
    assert "The server needs a key, or the key is wrong" in tab.inner_text("#error")
    tab.fill("#key", "secret")
    tab.press("#key", "Tab")
    model_is(tab, "fake")
    score(tab, TALK)
    assert len(numbers(tab, ".score strong")) == 1
    stored = "[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('secret')]"
    assert tab.evaluate(stored) == [0, 0, "", False]


def test_a_scorer_without_turns_still_shows_the_last_reply(app, tab):
    app.faults = []
    right = app.rewards

    def rewards(request, size):
        return error(501, "cannot score all turns") if request["turns"] == "all" else right(request, size)

    app.rewards = rewards
    score(tab, TALK)
    assert "Only the last reply has a score." in tab.inner_text("#results")
    assert "cannot score all turns" in tab.inner_text("#results")
    assert texts(tab, ".turn .value")[0] == "–"


def test_a_request_can_be_stopped(app, tab):
    app.always = "hang"
    tab.fill("#conversation", TALK)
    tab.press("#conversation", "Control+Enter")
    tab.click("#stop")
    tab.wait_for_selector("#score:enabled")
    assert tab.is_hidden("#error")


def test_the_page_needs_nothing_from_elsewhere():
    text = page_module.page()
    assert not re.findall(r"https?://|innerHTML|eval\(|style=|\son\w+=|import ", text)
    policy = page_module.headers()["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
