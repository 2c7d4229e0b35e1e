"""NeMo Gym 0.7.0: its collection, its environment servers, its check of sessions and its own resources servers."""

import asyncio
import contextlib
import importlib
import json
import socket
import threading
from unittest import mock

import pytest

pytest.importorskip("nemo_gym")

import uvicorn
from nemo_gym import failure_kinds
from nemo_gym.base_resources_server import ResourcesSeedSessionRequest
from nemo_gym.reward_profile import compute_aggregate_metrics, select_measured
from nemo_gym.server_utils import ServerClient
from nemo_gym.task_materialization import materialize_task
from nemo_gym.testing.session_conformance import check_resources_session_contract
from starlette.testclient import TestClient
from trainers.nemo_gym.collection import PACKAGES, collect

from gym_rm import load_scorer
from gym_rm.adapters.nemo_gym import make_app
from gym_rm.data.prompts import load_prompts
from gym_rm.data.responses_api import messages_of_items
from gym_rm.scorer import try_score
from gym_rm.scores import Scores

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Say words."}]}}
EPISODES = {"environment": "single_agent_turn", "environment_server_routes": {"words": "environment"}}


def lengths(conversations):
    """A reply of several words has no score; the others have their number of letters."""
    return [None if " " in (text := turns[-1]["content"]) else float(len(text)) for turns in conversations]


def collected(app, replies, folder, **options):
    """Collect one task, with a rollout for each reply."""
    row = materialize_task(ROW, taskset="words", task_index=0) if options else ROW
    options = options or {"agent_name": "agent"}
    return collect(app, [row], {"Say words.": replies}, folder, num_repeats=len(replies), **options)


def numbers(written):
    """Return the metrics of our server, and the mean that NeMo Gym itself computes from the rollouts."""
    ((metrics,), rollouts) = written["aggregate_metrics"], written["rollouts"]
    _, measured, *_ = select_measured(rollouts, rollouts)
    return metrics["agent_metrics"], compute_aggregate_metrics(measured).agent_metrics["mean/reward"]


@pytest.mark.parametrize("options", [{}, EPISODES], ids=["legacy_agent", "single_agent_turn"])
def test_a_masked_row_is_in_no_number_of_a_collection(tmp_path, options):
    folders = [tmp_path / "all", tmp_path / "others"]
    for folder in folders:
        folder.mkdir()
    with_failed = collected(make_app(lengths, failed_rows="mask"), ["a", "two words", "bbb"], folders[0], **options)
    others = collected(make_app(lengths), ["a", "bbb"], folders[1], **options)
    assert numbers(with_failed) == numbers(others) == ({"mean/reward": 2.0}, 2.0)
    (failed,) = [row for row in with_failed["rollouts"] + with_failed["failures"] if row["mask_sample"]]
    assert failure_kinds.is_registered(failed["failure_kind"])
    assert len(with_failed["failures"]) == (0 if options else 1)  # those that the collection repeats


def test_an_error_ends_a_collection_or_is_a_failure_of_the_episode(tmp_path):
    with pytest.raises(Exception, match="Internal Server Error"):
        collected(make_app(lengths), ["a", "two words"], tmp_path)
    written = collected(make_app(lengths), ["a", "two words"], tmp_path, **EPISODES)
    assert [row["reward"] for row in written["rollouts"]] == [1.0]
    (failure,) = written["failures"]
    assert "reward" not in failure
    assert failure["_ng_failure_stage"] == "verification"


def test_the_replies_of_a_task_are_compared_in_one_call(tmp_path):
    class Ranks:
        relative = True

        def score(self, conversations, prompts=None):
            texts = [turns[-1]["content"] for turns in conversations]
            return Scores.from_rewards([sorted(texts).index(text) for text in texts])

    written = collected(make_app(Ranks(), group_size=3), ["b", "c", "a"], tmp_path)
    texts = [row["response"]["output"][0]["content"][0]["text"] for row in written["rollouts"]]
    rewards = {text: row["reward"] for text, row in zip(texts, written["rollouts"], strict=True)}
    assert rewards == {"a": 0, "b": 1, "c": 2}


def test_sessions_keep_the_contract_of_nemo_gym():
    seed = {"resources_session_id": "s", "episode_id": {"rollout_id": "0-0", "attempt": 0}, "task_data": {}}
    seed["task_id"] = {"taskset": "words", "task_id": "0"}
    app = make_app(reward_model={"kind": "math"})
    check_resources_session_contract(app, ResourcesSeedSessionRequest(**seed), keeps_state=False)


# --- its own servers, asked by our scorer --------------------------------------------------------------------------


@contextlib.contextmanager
def served(app):
    """Serve an application in a thread, and return its address."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def server_of(name, kind, **config):
    module = importlib.import_module(f"resources_servers.{name}.app")
    kind = getattr(module, f"{kind}ResourcesServer")
    settings = {"name": name, "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", **config}
    return kind(config=settings, server_client=mock.create_autospec(ServerClient, instance=True)).setup_webserver()


def asked(row):
    """Return the texts of a prompt, by which a rollout is that of a data row."""
    contents = [item["content"] for item in row["responses_create_params"]["input"]]
    return [text if isinstance(text, str) else "".join(part["text"] for part in text) for text in contents]


def examples(name):
    """Return the data rows of a server that come with NeMo Gym, each with the replies of its example."""
    folder = PACKAGES / "resources_servers" / name / "data"
    files = (folder / "example.jsonl", folder / "example_rollouts.jsonl")
    rows, rollouts = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    return [(row, each["response"]) for each in rollouts for row in rows if asked(row) == asked(each)]


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [
        ("mcqa", "MCQA", {"domain": "knowledge"}),
        ("equivalence_rule", "EquivalenceRule", {"domain": "knowledge"}),
        ("xlam_fc", "XlamFc", {"domain": "agent"}),
        ("example_tool_call_multireward", "ToolCallMultiReward", {"domain": "agent"}),
        ("example_multi_step", "ExampleMultiStep", {"domain": "agent"}),
    ],
)
def test_a_server_of_nemo_gym_gives_our_scorer_its_rewards(name, kind, config):
    app = server_of(name, kind, **config)
    rows, responses = zip(*examples(name), strict=True)
    prompts = load_prompts(rows)
    replies = [messages_of_items(response["output"], "output") for response in responses]
    conversations = [[*prompt.messages, *said] for prompt, said in zip(prompts, replies, strict=True)]
    with served(app) as url:
        scores = load_scorer({"kind": "nemo_gym", "url": url}).score(conversations, prompts)
    with TestClient(app) as client:
        bodies = [row | {"response": response} for row, response in zip(rows, responses, strict=True)]
        verified = [client.post("/verify", json=body).json() for body in bodies]
    assert scores.rewards.tolist() == [each["reward"] for each in verified]
    for part, values in scores.components.items():
        assert values.tolist() == [each["reward_components"][part] for each in verified]


def test_the_session_of_a_server_with_state_is_that_of_the_row():
    rows = [ROW | {"initial_count": 3, "expected_count": count} for count in (3, 4)]
    prompts = load_prompts(rows)
    with served(server_of("example_session_state_mgmt", "StatefulCounter", domain="agent")) as url:
        conversations = [[*prompt.messages, {"role": "assistant", "content": "Done."}] for prompt in prompts]
        assert load_scorer({"kind": "nemo_gym", "url": url}).score(conversations, prompts).rewards.tolist() == [
            1.0,
            0.0,
        ]


def test_a_masked_row_of_another_server_has_no_score():
    with served(make_app(lengths, failed_rows="mask")) as url:
        question, texts = {"role": "user", "content": "Say words."}, ("a", "b c")
        conversations = [[question, {"role": "assistant", "content": text}] for text in texts]
        scores = try_score(load_scorer({"kind": "nemo_gym", "url": url}), conversations)
    assert scores.rewards[0] == 1.0
    assert "verifier_error" in scores.errors[1]
