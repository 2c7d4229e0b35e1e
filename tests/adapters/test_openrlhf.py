import asyncio
import base64
import http.client
import importlib.util
import json
import math
import re
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from recording import RecordingScorer, chat
from transformers import AutoTokenizer

from gym_rm import ConfigError, ConversationError, ScoringError
from gym_rm.adapters.openrlhf import RewardFunction
from gym_rm.server.get_reward import RewardServer

PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"
REPLIES = ["It is 40.", "It is 37."]


def query(reply):
    return PROMPT + reply + "<|im_end|>"


def expected_rewards(scorer):
    rewards = scorer.score([chat("How much is 90 - 50?", reply) for reply in REPLIES]).rewards.tolist()
    return pytest.approx(rewards, abs=1e-5)


@pytest.fixture
def reward_function(recorder, policy_path):
    return RewardFunction(recorder, policy_tokenizer=policy_path)


@pytest.fixture
def server(reward_function):
    with RewardServer(reward_function, port=0) as server:
        yield server


def post(url, body, headers=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# --- the Python form -----------------------------------------------------------------------------------------------


def test_the_function_returns_what_openrlhf_reads(reward_function, recorder):
    result = reward_function([query("four"), query("4")], [PROMPT] * 2, ["4", "4"])
    assert recorder.calls == [[chat("How much is 90 - 50?", "four"), chat("How much is 90 - 50?", "4")]]
    assert result.keys() == {"rewards", "scores", "extra_logs"}
    torch.testing.assert_close(result["rewards"], torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(result["scores"], torch.sigmoid(torch.tensor([1.0, 0.25])))
    assert result["extra_logs"].keys() == {"score_ok", "num_tokens", "truncated_tokens", "head_length"}
    assert all(values.shape == (2,) for values in result["extra_logs"].values())


def test_what_cannot_be_scored_is_never_a_zero(recorder, policy_path):
    queries, prompts = [query("FAIL"), query("four")], [PROMPT] * 2
    with pytest.raises(ScoringError):
        RewardFunction(recorder, policy_tokenizer=policy_path)(queries, prompts, ["", ""])
    result = RewardFunction(recorder, policy_tokenizer=policy_path, fallback_reward=-3.0)(queries, prompts, ["", ""])
    assert result["rewards"].tolist() == [-3.0, 1.0]
    assert result["extra_logs"]["score_ok"].tolist() == [0.0, 1.0]


def test_the_row_that_cannot_be_read_is_named(reward_function):
    with pytest.raises(ConversationError, match="query 1: the text does not begin with its prompt"):
        reward_function([query("four"), "cut"], [PROMPT] * 2, ["", ""])


def test_the_file_form_loads_as_openrlhf_loads_it(tmp_path, policy_path, embedded_scorer):
    file = tmp_path / "reward_func.py"
    file.write_text(
        textwrap.dedent(f"""
            from gym_rm.adapters.openrlhf import RewardFunction

            reward_func = RewardFunction(policy_tokenizer={policy_path!r})
        """)
    )
    spec = importlib.util.spec_from_file_location("reward_func", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = module.reward_func([query(reply) for reply in REPLIES], [PROMPT] * 2, ["", ""])["rewards"]
    assert rewards.tolist() == expected_rewards(embedded_scorer)


def test_the_reward_is_the_environments(policy_path, embedded_scorer):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    envs = gym.make_vec("RewardModel-v0", num_envs=4, reward_model=embedded_scorer)
    observations, _ = envs.reset(seed=0)
    replies = ["It is 40.", "The answer is 12.", "", "<|im_end|> or not"]
    prompts = [
        tokenizer.apply_chat_template(observation, tokenize=False, add_generation_prompt=True)
        for observation in observations
    ]
    queries = [prompt + reply + "<|im_end|>" for prompt, reply in zip(prompts, replies, strict=True)]
    reward_function = RewardFunction(embedded_scorer, policy_tokenizer=policy_path)
    rewards = reward_function(queries, prompts, [""] * 4)["rewards"]
    assert rewards.tolist() == pytest.approx(envs.step(replies)[1].tolist(), abs=1e-5)


# --- the HTTP form -------------------------------------------------------------------------------------------------


def test_the_endpoint_follows_the_protocol(server, recorder):
    body = {"query": [query("four"), query("4")], "prompts": [PROMPT] * 2, "labels": ["4", {"any": "thing"}]}
    status, reply = post(server.url, body)
    assert status == 200
    assert server.url.startswith("http://127.0.0.1:")
    assert reply["rewards"] == [1.0, 0.25]
    assert reply["scores"] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-0.25))])
    assert reply["extra_logs"]["num_tokens"] == [24.0, 21.0]
    assert recorder.calls[0][0] == chat("How much is 90 - 50?", "four")


@pytest.mark.parametrize("body", [{"query": []}, {"query": [], "prompts": [], "labels": []}])
def test_an_empty_query_gets_empty_lists(server, body):
    status, reply = post(server.url, body)
    assert status == 200
    assert reply["rewards"] == reply["scores"] == []
    assert all(values == [] for values in reply["extra_logs"].values())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ([], "expected an object with 'query'"),
        ({"query": "text"}, "expected an object with 'query'"),
        ({"query": [1]}, "expected an object with 'query'"),
        ({"query": ["a"]}, "expected 'prompts'"),
        ({"query": ["a"], "prompts": []}, "expected one prompt for each query"),
        ({"query": ["a"], "prompts": ["b"]}, "query 0: the text does not begin with its prompt"),
        ({"query": [PROMPT + "FAIL"], "prompts": [PROMPT]}, "asked to fail"),
    ],
)
def test_a_bad_request_says_what_is_wrong(server, body, reason):
    status, reply = post(server.url, body)
    assert status == 422
    assert re.search(reason, reply["error"])


def test_other_paths_and_a_health_check(server):
    status, reply = post(server.url.replace("get_reward", "score"), {})
    assert (status, "get_reward" in reply["error"]) == (404, True)
    with urllib.request.urlopen(server.url.replace("get_reward", "health"), timeout=10) as response:
        assert json.loads(response.read()) == {"status": "ok"}


def test_the_size_of_a_request_is_limited(reward_function):
    with RewardServer(reward_function, port=0, max_request_bytes=100) as server:
        connection = http.client.HTTPConnection(*server._http.server_address, timeout=10)
        connection.putrequest("POST", "/get_reward")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        assert response.getheader("Connection") == "close"
        connection.close()


def test_a_length_is_needed(server):
    with socket.create_connection(server._http.server_address, timeout=10) as connection:
        connection.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"411" in connection.recv(100)


def test_a_key_can_be_asked_for(reward_function):
    with RewardServer(reward_function, port=0, key="secret") as server:
        assert post(server.url, {"query": []})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Bearer wrong"})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Basic ???"})[0] == 401
        assert post(server.url, {"query": []}, {"Authorization": "Bearer secret"})[0] == 200
        basic = base64.b64encode(b"any:secret").decode()
        assert post(server.url, {"query": []}, {"Authorization": f"Basic {basic}"})[0] == 200


def test_other_machines_need_a_key(reward_function):
    with pytest.raises(ConfigError, match="Pass key="):
        RewardServer(reward_function, host="0.0.0.0", port=0)


def test_a_crash_of_the_scorer_is_told_and_survived(server):
    crash = {"query": [query("CRASH")], "prompts": [PROMPT]}
    assert post(server.url, crash) == (500, {"error": "OSError: the scorer crashed"})
    assert post(server.url, {"query": [query("four")], "prompts": [PROMPT]})[0] == 200


def test_a_request_is_given_up_at_its_deadline(policy_path):
    reward_function = RewardFunction(RecordingScorer(seconds=1.0), policy_tokenizer=policy_path)
    with RewardServer(reward_function, port=0, timeout=0.05) as server:
        status, reply = post(server.url, {"query": [query("four")], "prompts": [PROMPT]})
    assert (status, reply["error"]) == (503, "not scored within 0.05 seconds")


def test_256_single_posts_become_few_score_calls(policy_path):
    recorder = RecordingScorer(seconds=0.2)
    with RewardServer(RewardFunction(recorder, policy_tokenizer=policy_path), port=0) as server:

        def ask(length):
            return post(server.url, {"query": [query("x" * length)], "prompts": [PROMPT], "labels": [""]})

        with ThreadPoolExecutor(256) as pool:
            answers = list(pool.map(ask, range(256)))
    assert [reply["rewards"] for _, reply in answers] == [[length / 4] for length in range(256)]
    assert recorder.num_conversations == 256
    assert recorder.num_conversations / len(recorder.calls) > 16


def test_the_command_serves(policy_path, embedded_scorer):
    command = [sys.executable, "-m", "gym_rm.adapters.openrlhf", "--policy-tokenizer", policy_path, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1]
            status, reply = post(url, {"query": [query(reply) for reply in REPLIES], "prompts": [PROMPT] * 2})
        finally:
            process.terminate()
    assert (status, reply["rewards"]) == (200, expected_rewards(embedded_scorer))


# --- OpenRLHF's own client -----------------------------------------------------------------------------------------


class OneReply:
    """The part of an inference engine that OpenRLHF's executor uses."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        output = SimpleNamespace(token_ids=self.token_ids, finish_reason="stop", logprobs=None, text="")
        return SimpleNamespace(outputs=[output])


def run_executors(executor, tokenizer, replies):
    params = SimpleNamespace(max_tokens=32, logprobs=None)

    async def rollouts():
        return await asyncio.gather(
            *(
                executor.execute(PROMPT, "4", params, 512, tokenizer, OneReply(tokenizer(reply)["input_ids"]))
                for reply in replies
            )
        )

    return asyncio.run(rollouts())


def test_openrlhfs_executor_over_http(policy_path):
    agent = pytest.importorskip("openrlhf.utils.agent", reason="OpenRLHF is not installed")
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    recorder = RecordingScorer(seconds=0.1)
    with RewardServer(RewardFunction(recorder, policy_tokenizer=policy_path), port=0, key="secret") as server:
        executor = agent.SingleTurnAgentExecutor(server.url.replace("http://", "http://any:secret@"))
        results = run_executors(executor, tokenizer, [f"{'x' * n}<|im_end|>" for n in range(32)])
    assert [result["reward"] for result in results] == [[n / 4] for n in range(32)]
    assert len(recorder.calls) < 16


def test_openrlhfs_executor_with_the_file(tmp_path, policy_path, embedded_scorer):
    agent = pytest.importorskip("openrlhf.utils.agent", reason="OpenRLHF is not installed")
    file = tmp_path / "reward_func.py"
    file.write_text(
        "from gym_rm.adapters.openrlhf import RewardFunction\n"
        f"reward_func = RewardFunction(policy_tokenizer={policy_path!r})\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    results = run_executors(
        agent.SingleTurnAgentExecutor(str(file)), tokenizer, [f"{reply}<|im_end|>" for reply in REPLIES]
    )
    assert [result["reward"].shape for result in results] == [(1,), (1,)]
    assert [result["reward"].item() for result in results] == expected_rewards(embedded_scorer)
