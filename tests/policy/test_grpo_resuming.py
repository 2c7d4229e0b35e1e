"""A GRPO run that was killed or stopped at any moment resumes as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from agents import grpo
from gym_rm.checks import model_source
from gym_rm.errors import ConfigError
from gym_rm.generation.sampling import LocalSampler
from gym_rm.policy import learner, run_folder
from gym_rm.policy.learner import Learner
from tests.policy.policy_runs import require_same_run, train
from tests.training.runs import Killed, kill_at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) is None
    return folder


# Moments: the owner and name of a function, and the call that does not return.
MOMENTS = {
    "in the first measurement": (LocalSampler, "sample", 1),
    "while a step is sampled": (LocalSampler, "sample", 5),
    "while it learns": (Learner, "optimizer_step", 3),
    "while the best policy is written": (learner, "save_policy", 1),
    "before a checkpoint": (run_folder, "save_checkpoint", 2),
    "while the last policy is written": (grpo.RunFolder, "finish", 1),
}


QUICK = ("while it learns", "before a checkpoint", "while the best policy is written")


@pytest.mark.parametrize(
    "moment", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS]
)
def test_a_killed_run_resumes_to_the_same_end(moment, tmp_path, monkeypatch, uninterrupted):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, *MOMENTS[moment])
        with pytest.raises(Killed):
            train(run)
    assert not (run / "final").exists()
    torch.manual_seed(len(moment))  # nothing may depend on the state of another process
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


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_run_resumes(number, tmp_path, monkeypatch, uninterrupted):
    update, handler = Learner.optimizer_step, signal.getsignal(number)

    def signalled(self):
        if self.version == 2:
            os.kill(os.getpid(), number)
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "optimizer_step", signalled)
        stop = train(tmp_path / "run")
    assert stop == number
    assert signal.getsignal(number) == handler
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "run" / "final").exists()
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    monkeypatch.setattr(grpo, "train_step", None)
    assert train(tmp_path / "run") is None
    require_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_finished_run_resumes_with_more_steps(tmp_path):
    for steps in (2, 4):
        train(tmp_path / "run", "optimizer.warmup_share=0", f"steps={steps}")
    train(tmp_path / "whole", "optimizer.warmup_share=0")
    require_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.clip_low=0.1", "loss.clip_low: now 0.1, before 0.2"),
        ("steps=2", "has 4 steps already, more than steps=2"),
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


@pytest.mark.parametrize("field", ["answer", "user_turns", "a field of its own"])
def test_what_a_row_of_data_says_beside_its_prompt_is_compared(field, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    options = (f"env.prompts={prompts}", "steps=1", "eval.num_prompts=0")
    for value in ("one", "two"):
        row = {"prompt": "Which is it?", field: [value] if field == "user_turns" else value}
        prompts.write_text("".join(json.dumps({**row, "id": n}) + "\n" for n in range(4)))
        if value == "one":
            train(tmp_path / "run", *options)
    with pytest.raises(ConfigError, match="contents of prompts"):
        train(tmp_path / "run", *options)


def test_a_run_is_not_resumed_with_a_changed_function_of_its_environment(tmp_path):
    code = "def answer(conversations, prompts, scores):\n    return [None] * len(conversations)\n"
    (tmp_path / "changing_user.py").write_text(code)
    options = (f"env.respond={tmp_path}/changing_user.py:answer", "env.max_turns=2", "steps=1", "eval.num_prompts=0")
    train(tmp_path / "run", *options)
    (tmp_path / "changing_user.py").write_text(code + "# changed\n")
    with pytest.raises(ConfigError, match=r"source of .*changing_user\.py:answer: now 'sha256:"):
        train(tmp_path / "run", *options)
