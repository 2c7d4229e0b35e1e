"""GRPO runs whose sampler is a real vLLM that is killed and started again."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_servers import Server

from agents import grpo
from gym_rm.errors import ConfigError, RemoteError
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.rollout_batch import RolloutBatch
from tests.policy.policy_runs import require_same_run, train


@pytest.fixture(scope="module")
def untied_server(vllm, servers, tmp_path_factory):
    """Return a server of the embedded policy with an output layer of its own, which tests may kill."""
    folder = tmp_path_factory.mktemp("untied")
    source = servers["policy"].folder
    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "policy")
    server = Server(vllm, folder / "policy", folder / "log", "--logprobs-mode", "processed_logprobs")
    try:
        yield server.start().wait()
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(grpo, "SECONDS_BETWEEN_CALLS", 0.5)


def options(server, *others):
    at = (f"policy.model={server.folder}", f"sampling.server={server.url}")
    return (*at, "sampling.max_retries=1", "optimizer.learning_rate=0.005", *others)


def at_call(monkeypatch, owner, name, number, act):
    """Act before a call of a method, counted from 1."""
    real, calls = getattr(owner, name), itertools.count(1)

    def acting(*args, **kwargs):
        if next(calls) == number:
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, acting)


def test_a_run_whose_server_is_killed_in_every_phase_is_the_undisturbed_run(untied_server, tmp_path, monkeypatch):
    kills = []

    def kill():
        untied_server.kill()
        untied_server.start()
        kills.append(1)

    assert train(tmp_path / "whole", *options(untied_server)) is None
    at_call(monkeypatch, RemoteSampler, "_complete", 8 + 16 + 5, kill)  # in step 2; 8 are held out, a step has 16
    at_call(monkeypatch, Learner, "update", 2, kill)
    at_call(monkeypatch, RemoteSampler, "_load", 7, kill)  # of the fourth weights
    at_call(monkeypatch, RolloutBatch, "replies", 8, kill)  # before the last completions are scored
    assert train(tmp_path / "killed", *options(untied_server)) is None
    assert len(kills) == 4
    require_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint(untied_server, tmp_path, monkeypatch):
    away = options(untied_server, "sampling.timeout=15", "eval.every=4")
    with monkeypatch.context() as patch:
        at_call(patch, Learner, "update", 2, untied_server.kill)
        with pytest.raises(RemoteError, match="ConnectError"):
            train(tmp_path / "run", *away)
    untied_server.start().wait()
    assert train(tmp_path / "whole", *away) is None
    assert train(tmp_path / "run", *away) is None
    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_weights_that_cannot_be_loaded_are_an_error_at_once(untied_server, tmp_path):
    """This stops vLLM 0.32: keep it the last test of its server."""
    sampler = RemoteSampler(
        untied_server.url,
        model=str(untied_server.folder),
        tokenizer=AutoTokenizer.from_pretrained(untied_server.folder),
        ends=[2],
        save=lambda folder, weights: (folder / "model.safetensors").write_bytes(b"no weights"),
        weights_folder=tmp_path,
        max_new_tokens=4,
    )
    with pytest.raises(ConfigError, match=r"did not load the weights in .*version-00000001"):
        sampler.update_weights({}, version=1)
