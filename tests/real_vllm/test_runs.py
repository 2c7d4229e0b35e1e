"""GRPO runs whose sampler is a real vLLM that is killed and started again."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents import grpo
from gym_rm.errors import RemoteError
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.rollout_batch import RolloutBatch
from tests.policy.policy_runs import finished, require_same_run, train


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
        untied_server.start()
        kills.append(1)

    assert train(tmp_path / "whole", *options(untied_server)) is None
    at_call(monkeypatch, RemoteSampler, "_complete", 8 + 16 + 5, kill)  # in step 2; 8 are held out, a step has 16
    at_call(monkeypatch, Learner, "update", 2, kill)
    at_call(monkeypatch, RemoteSampler, "_load", 7, kill)  # of the fourth weights
    at_call(monkeypatch, RolloutBatch, "table", 7, kill)  # after the last completions
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


def test_a_sharded_run_leaves_its_last_weights_in_the_server(chat_server, tmp_path):
    finished(*options(chat_server, f"output={tmp_path / 'run'}", "optimizer.fsdp=true"), processes=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    sampler = RemoteSampler(
        chat_server.url,
        model=str(chat_server.folder),
        tokenizer=AutoTokenizer.from_pretrained(chat_server.folder),
        ends=[2],
        save=lambda folder, weights: None,
        weights_folder=tmp_path / "none",
        max_new_tokens=16,
    )
    prompt = np.arange(20, 40, dtype=np.int32)
    for completion in sampler.sample([prompt] * 4, seeds=[1, 2, 3, 4]):
        ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids])).long()
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected = log_probs.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
