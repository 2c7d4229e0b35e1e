"""A server as sampler, against a small server with a real policy that replies as vLLM does, by recorded replies."""

import copy
import json
import select
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")

from generation.sampled_models import largest_error, plain_log_probs, policy, prompts
from safetensors.torch import load_file, save_file

from gym_rm.errors import ConfigError, RemoteError
from gym_rm.generation.sampling import LocalSampler, end_tokens
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.testing import check_sampler

REPLIES = json.loads((Path(__file__).parents[1] / "vllm_replies.json").read_text())


def recorded(name):
    """Return status and body of a recorded reply of vLLM."""
    return REPLIES[name]["status"], copy.deepcopy(REPLIES[name]["body"])


class Engine:
    """State of the server: its policy, what it was asked, and what it does wrong."""

    def __init__(self):
        self.model, self.tokenizer = policy()
        self.first = copy.deepcopy(self.model.state_dict())
        self.requests = []
        self.faults = []  # statuses of the next replies, or recorded ones by name
        self.version = "default"
        self.dtype = "float32"
        self.has_routes_for_weights = True
        self.loads = True  # whether it really loads weights that it says it loaded
        self.change = lambda reply: reply
        self.lock = threading.Lock()
        self.samplers = {}
        self.gates = {}  # events by seed: until one is set, its completion does not end
        self.begun, self.dropped = [], []  # seeds of these completions, and of those whose clients went away meanwhile

    def restart(self):
        """Have what a new server of the policy has."""
        self.model.load_state_dict(self.first)
        self.version = "default"

    def answer(self, path, body):
        """Return status and reply."""
        with self.lock:
            self.requests.append((path, body))
            if self.faults and path in ("/v1/completions", "/collective_rpc"):
                fault = self.faults.pop(0)
                return recorded(fault) if isinstance(fault, str) else (fault, {"error": {"message": "too much"}})
            routes = {
                "/v1/completions": self.completion,
                "/v1/models": lambda body: {"object": "list", "data": [{"id": "other"}, {"id": "policy"}]},
                "/collective_rpc": self.reload,
                "/reset_prefix_cache": lambda body: recorded("reset_prefix_cache")[1],
                "/update_weight_version": self.update_version,
                "/weight_info": lambda body: recorded("weight_info")[1] | {"weight_version": self.version},
                "/server_info": lambda body: {"vllm_config": f"model='policy', dtype=torch.{self.dtype}, seed=0"},
            }
            known = path in routes and (self.has_routes_for_weights or path.startswith("/v1/"))
            return (200, self.change(routes[path](body))) if known else recorded("no_route")

    def update_version(self, body):
        self.version = body["new_version"]
        return recorded("update_weight_version")[1] | {"new_version": self.version}

    def sample(self, ids, seed, options, longest):
        assert (options["top_p"], options["top_k"], options["skip_special_tokens"]) == (1.0, -1, False)
        assert options["stop_token_ids"] == end_tokens(self.model, self.tokenizer)
        key = (longest, options["temperature"])
        if key not in self.samplers:
            self.samplers[key] = LocalSampler(self.model, self.tokenizer, max_new_tokens=longest, temperature=key[1])
        return self.samplers[key].sample([np.array(ids, dtype=np.int32)], seeds=[seed])[0]

    def completion(self, body):
        assert body["model"] == "policy"
        assert body["return_token_ids"]
        assert body["logprobs"] == 0
        found = self.sample(body["prompt"], body["seed"], body, body["max_tokens"])
        _, reply = recorded("completion")
        reply["choices"][0] |= {
            "text": found.text,
            "logprobs": {"token_logprobs": found.log_probs.tolist()},
            "finish_reason": "stop" if found.finished else "length",
            "token_ids": found.token_ids.tolist(),
            "prompt_token_ids": body["prompt"],
        }
        return reply

    def reload(self, body):
        assert body["method"] == "reload_weights"
        self.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def load(self, folder):
        weights = load_file(f"{folder}/model.safetensors")
        if self.loads:
            self.model.load_state_dict(weights, strict=False)


def save(folder, weights):
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, folder / "model.safetensors")


@contextmanager
def serve(engine):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def is_gone(self):
            return bool(select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK))

        def reply(self, body):
            if (gate := engine.gates.get((body or {}).get("seed"))) is not None:
                engine.begun.append(body["seed"])
            while gate is not None and not gate.wait(0.005):
                if self.is_gone():
                    engine.dropped.append(body["seed"])
                    self.close_connection = True
                    return
            status, reply = engine.answer(self.path, body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def connect(engine, tmp_path):
    """Return a function that makes a sampler at the engine's server."""
    with serve(engine) as url:
        yield lambda **options: RemoteSampler(
            url,
            tokenizer=engine.tokenizer,
            ends=end_tokens(engine.model, engine.tokenizer),
            **{"model": "policy", "save": save, "weights_folder": tmp_path, "max_new_tokens": 6, "max_retries": 2}
            | {"timeout": 60.0}
            | options,
        )


def trainer(seed):
    """Return the trainer's model and its calibration."""
    model, _ = policy(seed=seed)
    return model, lambda prompts, completions: [
        plain_log_probs(model, prompt, each.token_ids, 0.8) for prompt, each in zip(prompts, completions, strict=True)
    ]


def test_completions_are_those_of_the_servers_policy(engine, connect):
    rows = [text for text in prompts(engine.tokenizer, (4, 9)) for _ in range(3)]
    completions = connect(temperature=0.8).sample(rows, seeds=range(6))
    local = LocalSampler(engine.model, engine.tokenizer, max_new_tokens=6, temperature=0.8).sample(rows, seeds=range(6))
    assert [each.token_ids.tolist() for each in completions] == [each.token_ids.tolist() for each in local]
    assert [each.text for each in completions] == [each.text for each in local]
    assert [each.finished for each in completions] == [each.finished for each in local]
    assert largest_error(engine.model, rows, completions, 0.8) < 1e-4


def test_new_weights_reach_the_server_through_a_folder(engine, connect, tmp_path):
    model, calibrate = trainer(1)

    def save_alone(folder, weights):
        assert list(tmp_path.glob("version-*")) == [], "the disk may have room for one"
        save(folder, weights)

    sampler = connect(temperature=0.8, calibrate=calibrate, full_precision=True, save=save_alone)
    rows = prompts(engine.tokenizer, (5,))
    for version in (1, 2):
        sampler.update_weights(dict(model.named_parameters()), version=version)
    assert largest_error(model, rows, sampler.sample(rows, seeds=[0]), 0.8) < 1e-4
    assert [folder.name for folder in tmp_path.iterdir()] == ["version-00000002"]
    paths = [path for path, _ in engine.requests]
    assert paths.count("/collective_rpc") == 2
    assert paths.index("/collective_rpc") < paths.index("/reset_prefix_cache") < paths.index("/update_weight_version")
    sampler.load_if_lost()
    assert [path for path, _ in engine.requests].count("/collective_rpc") == 2, "the server has them"


def test_a_restarted_server_is_noticed_before_and_after_completions_and_gets_the_weights_again(engine, connect):
    model, calibrate = trainer(1)
    sampler = connect(temperature=0.8, calibrate=calibrate)
    sampler.update_weights(dict(model.named_parameters()), version=1)
    rows = prompts(engine.tokenizer, (5,))
    expected = sampler.sample(rows, seeds=[0])[0]
    engine.restart()
    with pytest.raises(RemoteError, match=r"has weights of version 'default' instead of '.*version-00000001'"):
        sampler.sample(rows, seeds=[0])
    sampler.load_if_lost()
    engine.change = lambda reply: engine.restart() or reply if "choices" in reply else reply
    with pytest.raises(RemoteError, match="it was restarted"):
        sampler.sample(rows, seeds=[0])
    engine.change = lambda reply: reply
    sampler.load_if_lost()
    assert sampler.sample(rows, seeds=[0])[0].log_probs.tolist() == expected.log_probs.tolist()


def test_a_server_that_keeps_old_weights_is_noticed(engine, connect):
    model, calibrate = trainer(1)
    engine.loads = False
    sampler = connect(temperature=0.8, calibrate=calibrate)
    sampler.update_weights(dict(model.named_parameters()), version=3)
    for error in (RemoteError, ConfigError):  # it loads them again after the first
        with pytest.raises(error, match=r"other log-probabilities than the trainer for weights of version 3"):
            sampler.sample(prompts(engine.tokenizer, (5,)), seeds=[0])


def test_weights_that_something_else_loaded_are_replaced(engine, connect):
    model, calibrate = trainer(1)
    sampler = connect(temperature=0.8, calibrate=calibrate)
    sampler.update_weights(dict(model.named_parameters()), version=1)
    engine.model.load_state_dict(engine.first)
    rows = prompts(engine.tokenizer, (5, 7, 9))
    with pytest.raises(RemoteError, match="it has loaded them again, so sample again"):
        sampler.sample(rows, seeds=[0, 1, 2])
    assert largest_error(model, rows, sampler.sample(rows, seeds=[0, 1, 2]), 0.8) < 1e-4


@pytest.mark.parametrize(("dtype", "factor", "noticed"), [("float32", 1.01, True), ("bfloat16", 1.1, False)])
def test_a_small_difference_is_noticed_where_nothing_is_rounded(engine, connect, dtype, factor, noticed):
    engine.dtype = dtype
    _, calibrate = trainer(0)
    with torch.no_grad():
        engine.model.lm_head.weight *= factor  # by 1.1, log-probabilities differ by 0.13 on average
    sampler = connect(temperature=0.8, calibrate=calibrate, full_precision=True)
    rows, seeds = prompts(engine.tokenizer, (5, 7, 9)), [0, 1, 2]
    if noticed:
        with pytest.raises(ConfigError, match=r"0\.001 and 0\.05 are allowed"):
            sampler.sample(rows, seeds=seeds)
    else:
        assert len(sampler.sample(rows, seeds=seeds)) == 3


def test_log_probabilities_at_another_temperature_are_noticed(engine, connect):
    _, calibrate = trainer(0)
    with pytest.raises(ConfigError, match="other log-probabilities"):
        connect(temperature=2.0, calibrate=calibrate).sample(prompts(engine.tokenizer, (5,)), seeds=[0])


def test_a_busy_server_is_asked_again_and_one_that_stays_broken_or_refuses_is_an_error_with_the_row(engine, connect):
    rows = prompts(engine.tokenizer, (5,))
    engine.faults = [503, 429]
    assert len(connect(max_retries=4).sample(rows, seeds=[0])) == 1
    for faults, error, message in (
        ([500] * 2, RemoteError, r"row 0: no completion: .*2 attempts failed.*status 500"),
        ([400], ConfigError, r"row 0 \(5 tokens\): http.* refused it: status 400"),
        (["unknown_model"], ConfigError, r"row 0 \(5 tokens\): http.* refused it: .*`another` does not exist"),
    ):
        engine.faults = faults
        with pytest.raises(error, match=message):
            connect(max_retries=1).sample(rows, seeds=[0])
    assert len(engine.requests) == 3 + 2 + 1 + 1


def with_choice(**changes):
    """Return a change of a reply, given functions of what is there."""

    def changed(reply):
        choice = reply["choices"][0]
        for name, change in changes.items():
            choice[name] = change(choice[name])
        return reply

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_choice(logprobs=lambda found: None), "TypeError: .* may be too old"),
        (with_choice(token_ids=lambda tokens: [10**6, *tokens[1:]]), "are not ids of the policy's"),
        (with_choice(token_ids=lambda tokens: []), "are not ids of the policy's"),
        (with_choice(token_ids=lambda tokens: tokens * 9), "log-probabilities|of at most 6 tokens"),
        (with_choice(finish_reason=lambda reason: "tool_calls"), "finish_reason='tool_calls'"),
        (with_choice(prompt_token_ids=lambda ids: [1, *ids]), "another prompt, of 6 instead of 5 tokens"),
        (lambda reply: [reply], "TypeError: .* may be too old"),
    ],
)
def test_replies_that_cannot_be_used_are_named(engine, connect, change, message):
    engine.change = change
    with pytest.raises(ConfigError, match=f"row 0: the reply of http.*{message}"):
        connect().sample(prompts(engine.tokenizer, (5,)), seeds=[0])
    assert len(engine.requests) == 1


def test_a_server_that_cannot_load_weights_says_what_it_needs(engine, connect):
    engine.has_routes_for_weights = False
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        connect().update_weights({"weight": torch.zeros(1)}, version=1)


def test_a_failed_load_is_an_error_at_once(engine, connect):
    engine.faults = ["reload_failed"]
    with pytest.raises(ConfigError, match=r"did not load the weights in .*version-00000001'.* Worker failed"):
        connect().update_weights(dict(engine.model.named_parameters()), version=1)
    assert [path for path, _ in engine.requests].count("/collective_rpc") == 1
    engine.change = lambda reply: {**reply, "success": False, "message": "shape mismatch"}
    with pytest.raises(ConfigError, match="shape mismatch"):
        connect().update_weights(dict(engine.model.named_parameters()), version=1)


def test_weights_wait_until_a_server_that_others_use_can_forget_its_prefixes(engine, connect):
    sampler = connect()
    engine.change = lambda reply: {"success": False} if reply == {"success": True} else reply
    with pytest.raises(RemoteError, match="while it answers another client"):
        sampler.update_weights(dict(engine.model.named_parameters()), version=1)
    assert engine.version == "default"
    engine.change = lambda reply: reply
    sampler.load_if_lost()
    assert engine.version.endswith("version-00000001")


def test_weights_are_not_sent_to_a_server_of_another_model(engine, connect):
    with pytest.raises(ConfigError, match=r"does not serve 'another', it serves other, policy"):
        connect(model="another").update_weights(dict(engine.model.named_parameters()), version=1)
    assert "/collective_rpc" not in [path for path, _ in engine.requests]


def test_a_server_that_is_stopped_in_a_completion_is_lost(engine, connect):
    """A vLLM that gets SIGTERM ends all completions so, with status 200."""
    engine.change = with_choice(finish_reason=lambda reason: "abort")
    with pytest.raises(RemoteError, match="aborted a completion"):
        connect().sample(prompts(engine.tokenizer, (5,)), seeds=[0])


def test_the_contract_of_samplers(engine, connect):
    model, calibrate = trainer(0)
    sampler = connect(temperature=0.8, calibrate=calibrate)
    ends = end_tokens(engine.model, engine.tokenizer)
    weights = dict(model.named_parameters())
    check_sampler(sampler, prompts(engine.tokenizer, (5, 7)), max_new_tokens=6, end_tokens=ends, weights=weights)
