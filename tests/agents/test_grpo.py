import json
from pathlib import Path

import pytest
import tiny_models
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from agents import grpo, two_questions
from gym_rm.config import Config, load_config
from gym_rm.errors import ConfigError
from gym_rm.policy.grpo_settings import settings_help
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.reports.runs import read_run

ROOT = Path(__file__).parents[2]
SMALL = ("env.num_prompts=4", "env.group_size=4", "eval.num_prompts=16")


def train(folder: Path, *overrides: str):
    """Run a short training and return its results."""
    settings = grpo.fill_defaults(load_config(grpo.GRPOSettings, overrides=(*SMALL, f"output={folder}", *overrides)))
    grpo.train(settings, Console(quiet=True))
    return read_run(folder)


def save_prompts(path, size):
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {n}."}) + "\n" for n in range(size)))
    return path


def held_out(run, step):
    return [row for row in run.conversations if row["step"] == step and row["phase"] == "held_out"]


@pytest.mark.slow
def test_a_run_with_replicas_of_the_reward_model_has_the_same_rewards(tmp_path):
    few = ("steps=3", "eval.every=3")
    plain = train(tmp_path / "one", *few)
    replicated = train(tmp_path / "two", *few, "env.reward_model_kwargs={num_replicas: 2, executor: processes}")
    assert [row["reward"] for row in replicated.conversations] == [row["reward"] for row in plain.conversations]
    assert len(replicated.training) == 3


# --- runs ------------------------------------------------------------------------------------------------------------


def test_the_script_learns_and_saves_plain_folders_and_prints_a_table(tmp_path, monkeypatch, capsys):
    options = ("steps=5", "env.num_prompts=16", "eval.num_prompts=64", "eval.every=5", f"output={tmp_path / 'run'}")
    monkeypatch.setattr("sys.argv", ["grpo.py", *options])
    with pytest.raises(SystemExit, match="0"):
        grpo.main()
    assert "checked without the reward model" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    assert run.settings["steps"] == 5
    assert run.held_out[-1]["reward_mean"] > run.held_out[0]["reward_mean"] + 0.5
    assert run.held_out[-1]["accuracy"] > run.held_out[0]["accuracy"]
    before = AutoModelForCausalLM.from_pretrained(ROOT / "gym_rm" / "assets" / "policy")
    for name in ("final", "best"):
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name)
        assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    own = (f"policy.model={tmp_path / 'run' / 'final'}", "sampling.max_new_tokens=24", "eval.num_prompts=64")
    again = train(tmp_path / "next", "steps=1", *own)
    assert again.held_out[0]["accuracy"] == run.held_out[-1]["accuracy"]


def test_the_same_seed_repeats_a_run(tmp_path):
    def curve(name, seed):
        run = train(tmp_path / name, "steps=2", "eval.num_prompts=0", f"seed={seed}")
        return [(row["reward_mean"], row["loss"], row["kl"]) for row in run.training]

    first, again, other = curve("a", 3), curve("b", 3), curve("c", 4)
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "options",
    [
        ("loss.kl_coef=0.1", "optimizer.updates_per_step=2", "advantage.estimator=rloo"),
        ("advantage.estimator=dr_grpo", "loss.normalisation=constant_length", "loss.entropy_coef=0.01"),
        ("advantage.dynamic_sampling=1", "advantage.overlong=filter", "advantage.overlong_buffer=8"),
    ],
    ids=lambda options: options[0],
)
def test_runs_with_other_estimators_and_losses_learn_finite_weights(tmp_path, options):
    run = train(tmp_path, "steps=2", "eval.num_prompts=0", *options)
    assert [row["step"] for row in run.training] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in run.training)
    assert run.training[1]["kl"] is not None


def test_gdpo_learns_from_the_components_of_a_dialogue_and_replaces_groups_without_a_signal(tmp_path, monkeypatch):
    two_questions.write_prompts(tmp_path)
    task = (f"env.prompts={tmp_path / 'prompts.jsonl'}", "env.reward_model=two_questions:score")
    options = ("env.max_turns=2", "advantage.estimator=gdpo", "advantage.dynamic_sampling=3")
    run = train(tmp_path, "steps=2", "eval.num_prompts=0", *task, *options)
    for row in run.training:
        assert row["grad_norm"] > 0
        assert {"component/right", "component/listed", "component/sentence"} <= row.keys()
        assert row["extra_batches"] <= 3


def test_the_divergence_is_not_measured_if_it_is_switched_off(tmp_path):
    assert "kl" not in train(tmp_path, "steps=1", "eval.num_prompts=0", "loss.measure_kl=false").training[0]


def test_the_token_budget_changes_the_loss_only_by_rounding(tmp_path):
    def first(name, *options):
        return train(tmp_path / name, "steps=1", "eval.num_prompts=0", *options).training[0]

    one, small = first("a"), first("b", "optimizer.max_num_batched_tokens=64")
    padded = first("c", "optimizer.tree=false")
    for other in (small, padded):
        for name in ("loss", "kl", "entropy"):
            assert one[name] == pytest.approx(other[name], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_step_whose_rows_all_failed_changes_no_weight(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("def score(conversations):\n    return [float('nan')] * len(conversations)\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = ("steps=2", "eval.num_prompts=0", "env.reward_model=failing:score", "env.fallback_reward=0")
    run = train(tmp_path / "run", *options, "optimizer.weight_decay=0.1")
    assert [row["grad_norm"] for row in run.training] == [0.0, 0.0]
    assert [run.training[0][name] for name in ("failed", "entropy", "kl", "clipped")] == [1.0, None, None, None]
    before = AutoModelForCausalLM.from_pretrained(ROOT / "gym_rm" / "assets" / "policy")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert all(torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))


def test_a_scorer_that_cannot_sleep_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "agents")
    with pytest.raises(ConfigError, match="can sleep"):
        train(tmp_path / "run", "env.sleep=true", "env.reward_model=two_questions:score")
    assert not (tmp_path / "run").exists()


def test_training_visits_all_prompts_that_are_not_held_out(tmp_path, monkeypatch):
    play, seen = grpo.play, set()

    def record(*arguments):
        rollouts = play(*arguments).rollouts
        if len(rollouts) == 16:
            seen.update(rollout.conversation[0]["content"] for rollout in rollouts)
        return RolloutTable(rollouts)

    monkeypatch.setattr(grpo, "play", record)
    run = train(tmp_path / "run", "steps=2", f"env.prompts={save_prompts(tmp_path / 'prompts.jsonl', 8)}")
    measured = {row["messages"][0]["content"] for row in held_out(run, 0)}
    assert len(measured) == 2
    assert seen == {f"Tell me about {n}." for n in range(8)} - measured


def test_training_with_another_policy_reward_model_and_prompts(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "llama")
    reward_model = tiny_models.save_reward_model(tmp_path / "rm", "bert")
    prompts, held_out_prompts = save_prompts(tmp_path / "a.jsonl", 4), save_prompts(tmp_path / "b.jsonl", 5)
    own = (f"policy.model={policy}", f"env.reward_model={reward_model}", f"env.prompts={prompts}")
    run = train(tmp_path / "run", "steps=1", "sampling.max_new_tokens=8", f"eval.prompts={held_out_prompts}", *own)
    assert run.training[-1]["accuracy"] is None
    assert {row["messages"][0]["content"] for row in held_out(run, 1)} == {f"Tell me about {n}." for n in range(5)}


def test_every_setting_has_a_description_and_is_in_the_help():
    text = settings_help()

    def check(schema, prefix):
        for name, field in schema.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                check(field.annotation, f"{name}.")
            else:
                assert field.description, name
                assert f"  {prefix}{name}  [" in text

    check(grpo.GRPOSettings, "")


@pytest.mark.parametrize("ignored", ["advantage.per_turn=true", "advantage.overlong_buffer=4"])
def test_settings_that_gdpo_would_ignore_are_refused(ignored):
    with pytest.raises(ConfigError, match=ignored.split("=")[0]):
        load_config(grpo.GRPOSettings, overrides=("advantage.estimator=gdpo", ignored))
