import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from recording import RecordingScorer, chat

import gym_rm

KEY = {"Authorization": "Bearer secret"}
CONVERSATIONS = [chat("How much is 90 - 50?", reply) for reply in ("It is 40.", "It is 37.")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import tiny_models

    return [str(tiny_models.save_reward_model(tmp_path_factory.mktemp("rm"), seed=seed)) for seed in (1, 2)]


@pytest.fixture
def updating(serving, folders):
    scorer = gym_rm.load_scorer(folders[0])
    with serving(scorer, key="secret", allow_weight_updates=True) as (server, client):
        client.headers.update(KEY)
        yield server, client


def test_an_update_changes_the_scores_the_model_and_the_known_rewards(updating, folders):
    _, client = updating
    expected = [gym_rm.load_scorer(folder).score(CONVERSATIONS).rewards.tolist() for folder in folders]
    before = client.get("/info").json()
    first = client.post("/v1/rewards", json={"conversations": CONVERSATIONS}).json()
    reply = client.post("/v1/weights", json={"path": folders[1]})
    second = client.post("/v1/rewards", json={"conversations": CONVERSATIONS}).json()
    after = client.get("/info").json()
    assert reply.status_code == 200
    assert [first["rewards"], second["rewards"]] == expected
    assert [first["model"], second["model"]] == folders
    assert [before["model"], after["model"]] == folders
    assert before["calibration"]["rewards"] != after["calibration"]["rewards"]
    assert (
        after["calibration"]["rewards"]
        == (client.post("/v1/rewards", json={"conversations": after["calibration"]["conversations"]}).json()["rewards"])
    )


TEXT, (QUERY, DOCUMENT) = "Is 90 - 50 equal to 40?", (message["content"] for message in CONVERSATIONS[0])
LABELLED = {
    "/v1/rewards": {"conversations": CONVERSATIONS},
    "/classify": {"input": TEXT},
    "/pooling": {"messages": CONVERSATIONS[0]},
    "/v1/embeddings": {"input": TEXT},
    "/score": {"text_1": QUERY, "text_2": DOCUMENT},
    "/info": None,
}


def test_every_reply_names_the_model_of_its_scores_while_weights_change(updating, folders, wait_until):
    """Values differ between the models, so a reply whose values are those of its label has the right label."""
    _, client = updating
    stop = threading.Event()
    replies = []

    def ask(path):
        body = LABELLED[path]
        reply = client.get(path) if body is None else client.post(path, json=body)
        assert reply.status_code == 200
        content = reply.json()
        values = content.get("rewards") or content.get("data") or content["calibration"]
        return path, content["model"], str(values)

    def ask_on(path):
        while not stop.is_set():
            replies.append(ask(path))

    right = set()
    for turn in (1, 0):
        assert client.post("/v1/weights", json={"path": folders[turn]}).json()["model"] == folders[turn]
        right |= {ask(path) for path in LABELLED}
    assert len({(path, values) for path, _, values in right}) == 2 * len(LABELLED)
    with ThreadPoolExecutor(2 * len(LABELLED)) as pool:
        asking = [pool.submit(ask_on, path) for path in (*LABELLED, *LABELLED)]
        turn = 0
        while turn < 4:
            turn += 1
            seen = len(replies)
            wait_until(lambda: len(replies) > seen + 8)  # noqa: B023
            assert client.post("/v1/weights", json={"path": folders[turn % 2]}).status_code == 200
        stop.set()
        for each in asking:
            each.result()
    assert set(replies) == right


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(updating, folders, tmp_path):
    import tiny_models

    _, client = updating
    other = str(tiny_models.save_reward_model(tmp_path / "wide", hidden_size=64))
    before = client.post("/v1/rewards", json={"conversations": CONVERSATIONS}).json()["rewards"]
    for path in (other, str(tmp_path / "nowhere")):
        reply = client.post("/v1/weights", json={"path": path})
        assert reply.status_code == 422
        assert "the weights are unchanged" in reply.json()["error"]["message"]
    assert client.post("/v1/rewards", json={"conversations": CONVERSATIONS}).json()["rewards"] == before
    assert client.get("/ready").status_code == 200


def test_pickled_weights_are_refused(updating, folders, tmp_path):
    import torch

    _, client = updating
    folder = Path(shutil.copytree(folders[1], tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    reply = client.post("/v1/weights", json={"path": str(folder)})
    assert reply.status_code == 422
    assert "safetensors" in reply.json()["error"]["message"]


def test_ready_is_503_while_weights_change(serving, wait_until):
    class Slow(RecordingScorer):
        started, finish = threading.Event(), threading.Event()

        def update_weights(self, path):
            self.started.set()
            self.finish.wait(60)

    scorer = Slow()
    with serving(scorer, key="secret", allow_weight_updates=True) as (server, client), ThreadPoolExecutor(2) as pool:
        client.headers.update(KEY)
        update = pool.submit(client.post, "/v1/weights", json={"path": "x"})
        scorer.started.wait(60)
        assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)
        assert client.post("/v1/weights", json={"path": "y"}).status_code == 429
        waiting = pool.submit(client.post, "/v1/rewards", json={"conversations": [chat("a", "four")]})
        wait_until(lambda: server.service._queued == 1)
        scorer.finish.set()
        assert (update.result().status_code, waiting.result().json()["rewards"]) == (200, [1.0])
        assert client.get("/ready").status_code == 200


def test_updates_are_off_by_default(serving, folders):
    with serving(gym_rm.load_scorer(folders[0]), key="secret") as (_, client):
        reply = client.post("/v1/weights", json={"path": folders[1]}, headers=KEY)
        assert (reply.status_code, "--allow-weight-updates" in reply.text) == (501, True)
