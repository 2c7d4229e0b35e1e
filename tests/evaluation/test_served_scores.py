"""Faults that are planted in servers of the embedded reward model, which the probe must name."""

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from reward_servers import NO_ROUTE, App, Posing, error, ok, serve

import gym_rm
from gym_rm.engine.reward_model_scorer import load_reward_model
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.evaluation.served_scores import ServedScores, probe_rows
from gym_rm.scorers.remote.asked import AskedServer

FOLDER = Path(gym_rm.__file__).parent / "assets" / "reward_model"
ROWS = probe_rows(None)[:21]  # up to 270 tokens
EOS, PAD = 2, 0


@pytest.fixture(scope="module")
def scorer():
    return load_reward_model(FOLDER)


@pytest.fixture(scope="module")
def model():
    return ServedScores(FOLDER, ROWS)


class FaultyApp(App):
    """OpenRLHF's `/get_reward`, whose token ids and rewards a test changes."""

    def __init__(self, scorer, *, ids=lambda rows: rows, rewards=lambda rewards: rewards, longest=10**9):
        super().__init__()
        self.scorer, self.ids, self.rewards, self.longest = scorer, ids, rewards, longest

    async def respond(self, method, path, headers, body, send):
        if path != "/get_reward":
            return NO_ROUTE
        request = json.loads(body)
        assert all(map(str.startswith, request["query"], request["prompts"]))
        rows = [each.tolist() for each in self.scorer.renderer.tokenize(request["query"])]
        if max(map(len, rows)) > self.longest:
            return error(400, "too long")
        return ok({"rewards": self.rewards(self.scorer.score_texts(self.ids(rows)).rewards).tolist()})


def compared(model, app):
    with serve(app) as url:
        return list(model.compare(AskedServer(f"{url}/get_reward")))


def test_the_rows_tell_faults_apart():
    rows = probe_rows(None)
    lengths = [len(row[-1]["content"]) for row in rows]
    assert {row[0]["role"] for row in rows} == {"system", "user"}
    assert {len(row) for row in rows} == {2, 3, 4, 5}
    assert max(lengths) > 8000
    assert max(b / a for a, b in itertools.pairwise(lengths[16:])) < 1.3


def test_rows_of_a_file_are_those_of_gym_rm_score(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"prompt": "2 + 2?", "response": "4"}\n{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}\n' * 30
    )
    rows = probe_rows(str(file))
    assert [row[-1]["content"] for row in rows[:3]] == ["4", "4", "5"]
    assert len(rows) == 64


def test_a_right_server_has_no_cause(model, scorer):
    (found,) = compared(model, FaultyApp(scorer))
    assert found.difference <= found.allowed
    assert (found.rows, found.causes, found.refused) == (len(ROWS), (), ())


def test_sglang_is_asked_with_token_ids_and_texts(model, scorer):
    pytest.importorskip("fastapi")
    from gym_rm.server.app import make_app
    from gym_rm.server.options import ServerOptions

    with serve(Posing(make_app(scorer, ServerOptions()), "sglang", str(FOLDER))) as url:
        found = list(model.compare(AskedServer(url)))
    assert [each.form for each in found] == ["token ids", "texts"]
    assert all(each.difference <= each.allowed for each in found)


def cut(length, side):
    part = slice(-length, None) if side == "left" else slice(length)
    return lambda rows: [each[part] for each in rows]


def last_turn(ids):
    return max(place for place, token in enumerate(ids) if token == ids[0])  # where <|im_start|> is


FAULTS = {
    "an EOS is added or doubled": {"ids": lambda rows: [[*each, EOS] for each in rows]},
    "the last EOS is missing": {"ids": lambda rows: [each[:-2] for each in rows]},
    "texts are cut to 192 tokens, on the left": {"ids": cut(192, "left")},
    "texts are cut to 150 tokens, on the right": {"ids": cut(150, "right")},
    "a sigmoid is applied": {"rewards": lambda rewards: 1 / (1 + np.exp(-rewards))},
    "the first token is read, not the last": {"ids": lambda rows: [each[:1] for each in rows]},
    "scores are mapped: 0.5 x score -2": {"rewards": lambda rewards: 0.5 * rewards - 2},
    "scores are rounded to 1 decimals": {"rewards": lambda rewards: rewards.round(1)},
    "only the last reply is read": {"ids": lambda rows: [each[last_turn(each) :] for each in rows]},
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS)
def test_a_planted_fault_is_named(model, scorer, name, fault):
    (found,) = compared(model, FaultyApp(scorer, **fault))
    assert (found.cause.name, found.cause.exact) == (name, True)
    assert found.cause.explained == pytest.approx(1, abs=1e-6)


def test_a_system_prompt_that_the_server_adds_is_named(model, scorer):
    system = scorer.renderer.tokenize(["<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"])[0].tolist()
    added = FaultyApp(scorer, ids=lambda rows: [each if each[1] == system[1] else system + each for each in rows])
    assert compared(model, added)[0].cause.name == "the system prompt 'You are a helpful assistant.' is added"


def test_a_fault_before_a_sigmoid_is_named_too(model, scorer):
    app = FaultyApp(scorer, ids=cut(200, "left"), rewards=FAULTS["a sigmoid is applied"]["rewards"])
    (found,) = compared(model, app)
    assert found.form == "texts before a sigmoid"
    assert found.cause.name == "a sigmoid is applied, and texts are cut to 200 tokens, on the left"


def test_a_sigmoid_with_a_temperature_is_no_line_beside_rounding(model, scorer):
    (found,) = compared(model, FaultyApp(scorer, rewards=lambda rewards: 1 / (1 + np.exp(-rewards / 2))))
    assert found.cause.name.startswith("a sigmoid is applied, and scores are mapped: 0.5 x score")


def test_scores_of_other_rows_are_named(model, scorer):
    *_, together = compared(model, FaultyApp(scorer, rewards=lambda rewards: rewards[::-1]))
    assert (together.form, together.cause.name) == ("texts in one request", "rows get the scores of other rows")


def test_padding_that_is_read_shows_beside_other_rows(model, scorer):
    def padded(rows):
        return [[PAD] * (max(map(len, rows)) - len(each)) + each for each in rows]

    alone, together = compared(model, FaultyApp(scorer, ids=padded))
    assert alone.difference <= alone.allowed
    assert (together.form, together.cause.name) == ("texts in one request", "padding on the left is read")


def test_noise_is_no_cause(model, scorer):
    random = np.random.default_rng(0)
    (found,) = compared(model, FaultyApp(scorer, rewards=lambda rewards: rewards + random.normal(0, 1, len(rewards))))[
        :1
    ]
    assert found.cause is None
    assert 0.5 < found.correlation < 0.95


def test_rows_that_the_server_refuses_are_left_out(model, scorer):
    (found,) = compared(model, FaultyApp(scorer, longest=200))
    assert found.difference <= found.allowed
    assert 0 < found.rows < len(ROWS)
    assert found.refused == ("too long",) * (len(ROWS) - found.rows)


@pytest.mark.parametrize(("status", "message"), [(501, "cannot do this"), (404, "does not exist"), (401, "refused")])
def test_a_server_that_cannot_be_asked_says_why(status, message):
    app = App()
    app.respond = lambda *_: asyncio.sleep(0, error(status, "no"))
    with serve(app) as url:
        server = AskedServer(f"{url}/get_reward")
        with pytest.raises(GymRMError, match=message):
            server.ask("texts", [("2 + 2? 4", "2 + 2?")])
        assert server.token_ids("texts", ("2 + 2? 4", "2 + 2?")) is None


def test_a_model_that_scores_none_of_the_rows_is_refused():
    with pytest.raises(ConfigError, match=r"score one of these rows: .*the conversation is empty"):
        ServedScores(FOLDER, [[]])
