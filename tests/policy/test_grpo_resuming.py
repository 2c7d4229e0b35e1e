"""A GRPO run that was killed or stopped at any moment resumes as if nothing had happened."""

import dataclasses
import itertools
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from agents import grpo
from gym_rm.checks import model_source
from gym_rm.errors import ConfigError, RemoteError
from gym_rm.generation.sampling import LocalSampler
from gym_rm.policy import learner
from gym_rm.policy.learner import Learner
from tests.policy.policy_runs import require_same_run, train
from tests.training.runs import Killed, kill_at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) is None
    return folder


# Other moments are those of tests/training/test_resuming.py: the folders of both runs have the same parts.
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Learner, "optimizer_step", 3),
        pytest.param(LocalSampler, "stream", 5, marks=pytest.mark.slow),
        pytest.param(learner, "save_policy", 1, marks=pytest.mark.slow),  # while the best policy is written
    ],
)
def test_a_killed_run_resumes_to_the_same_end(owner, name, call, tmp_path, monkeypatch, uninterrupted):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call)
        with pytest.raises(Killed):
            train(run)
    assert not (run / "final").exists()
    torch.manual_seed(call)  # nothing may depend on the state of another process
    assert train(run) is None
    require_same_run(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("advantage.dynamic_sampling=2", "optimizer.updates_per_step=2", "optimizer.epochs=2"),
        ("policy.dtype=bfloat16", "policy.gradient_checkpointing=true", "optimizer.schedule=linear"),
    ],
    ids=lambda options: options[0],
)
def test_a_killed_run_with_other_settings_resumes_to_the_same_end(options, tmp_path, monkeypatch):
    train(tmp_path / "whole", *options)
    with monkeypatch.context() as patch:
        kill_at(patch, grpo, "estimate", 4)
        with pytest.raises(Killed):
            train(tmp_path / "run", *options)
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    train(tmp_path / "run", *options)
    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_signal_saves_and_a_finished_run_is_not_trained_again(tmp_path, monkeypatch, uninterrupted):
    update, handler = Learner.optimizer_step, signal.getsignal(signal.SIGTERM)

    def signalled(self):
        if self.version == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "optimizer_step", signalled)
        assert train(tmp_path / "run") == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert train(tmp_path / "run") is None
    monkeypatch.setattr(grpo, "train_step", None)
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


def losing_the_server(monkeypatch, at_calls, error=RemoteError):
    """Let these streams of the sampler fail, as if a server were lost."""
    stream, calls = LocalSampler.stream, itertools.count(1)

    def lost(self, **options):
        if next(calls) in at_calls:
            raise error("no answer")
        return stream(self, **options)

    monkeypatch.setattr(LocalSampler, "stream", lost)
    monkeypatch.setattr(grpo, "SECONDS_BETWEEN_CALLS", 0.01)


def test_a_lost_server_is_waited_for_and_changes_nothing(tmp_path, monkeypatch, uninterrupted):
    losing_the_server(monkeypatch, {1, 4, 5, 8})  # the first call and the last one answer held-out prompts
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(  # in step 2, and of the held-out prompts after it
    ("call", "error"), [(3, RemoteError), (4, RemoteError), (3, OSError)]
)
def test_what_stays_broken_ends_the_run_with_its_steps_saved(call, error, tmp_path, monkeypatch, uninterrupted):
    with monkeypatch.context() as patch:
        losing_the_server(patch, range(call, 100), error)
        with pytest.raises(error, match="no answer"):
            train(tmp_path / "run", "sampling.timeout=0.01")
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-0000000{call - 2}"]
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


def test_a_signal_ends_the_waiting_for_a_lost_server(tmp_path, monkeypatch, uninterrupted):
    with monkeypatch.context() as patch:
        losing_the_server(patch, range(3, 100))
        patch.setattr(grpo.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGTERM))
        assert train(tmp_path / "run") is signal.SIGTERM
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.clip_low=0.1", "loss.clip_low: now 0.1, before 0.2"),
        ("steps=2", "has 4 steps already, more than the 2 of this run"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(override, message, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    with pytest.raises(ConfigError, match=message):
        train(run, override)


def test_a_run_is_not_resumed_with_other_weights_of_its_reward_model(tmp_path, monkeypatch, uninterrupted):
    def changed(*arguments):
        scorer = open_scorer(*arguments)
        scorer.provenance = dataclasses.replace(scorer.provenance, revision="sha256:other")
        return scorer

    shutil.copytree(uninterrupted, tmp_path / "run")
    open_scorer = grpo.open_scorer
    monkeypatch.setattr(grpo, "open_scorer", changed)
    with pytest.raises(ConfigError, match=r"reward model\.revision: now 'sha256:other', before 'sha256:"):
        train(tmp_path / "run")


def test_a_run_is_not_resumed_with_another_reference(tmp_path):
    policy = shutil.copytree(model_source("policy.model", "embedded:policy"), tmp_path / "policy")
    train(tmp_path / "run", f"policy.model={policy}", "loss.kl_coef=0.1", "steps=1")
    weights = load_file(policy / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, policy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files of policy\.model: now 'sha256:"):
        train(tmp_path / "run", f"policy.model={policy}", "loss.kl_coef=0.1", "steps=1")


def test_a_run_is_not_resumed_with_other_prompts_or_a_changed_function_of_its_environment(tmp_path):
    prompts, user = tmp_path / "prompts.jsonl", tmp_path / "changing_user.py"
    code = "def answer(conversations, prompts, scores):\n    return [None] * len(conversations)\n"
    options = [f"env.prompts={prompts}", f"env.respond={user}:answer", "env.max_turns=2", "steps=1"]

    def write(**fields):
        rows = [{"prompt": "Which is it?", "id": n, **fields} for n in range(4)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    user.write_text(code)
    train(tmp_path / "run", *options, "eval.num_prompts=0")
    user.write_text(code + "# changed\n")
    with pytest.raises(ConfigError, match=r"source of .*changing_user\.py:answer: now 'sha256:"):
        train(tmp_path / "run", *options, "eval.num_prompts=0")
    user.write_text(code)
    for field, value in (("answer", "two"), ("user_turns", ["two"]), ("a field of its own", "two")):
        write(**{field: value})
        with pytest.raises(ConfigError, match="contents of prompts"):
            train(tmp_path / "run", *options, "eval.num_prompts=0")
