"""A run from rows to a folder: what it learns, and that the folder is served with the rewards of training."""

import json
import math

import gymnasium
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from agents import train_reward_model
from gym_rm.errors import ConfigError
from tests import checkpoints
from tests.training.runs import (
    assert_served,
    curve,
    losses,
    open_run,
    pairs,
    served_rewards,
    settings_of,
    train,
    trained,
)

# The layout that training chooses for each architecture.
LAYOUTS = {
    "llama": "tree",
    "qwen2": "tree",
    "mistral": "tree",
    "gemma2": "tree",
    "gpt_neox": "tree",
    "mixtral": "tree",
    "jamba": "padded",
    "bert": "padded",
    "deberta_v2": "padded",
    "modernbert": "padded",
    "xlnet": "one_by_one",
}
QUICK = ("llama", "gemma2", "bert", "xlnet")  # one of each layout, and one that is not fused
NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "deberta_v2": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "xlnet": {"dropout": 0.0, "summary_last_dropout": 0.0},
}


@pytest.mark.parametrize(
    "architecture", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_the_loss_falls_and_the_folder_is_served_with_the_rewards_of_training(architecture, saved_model, tmp_path):
    model = saved_model(architecture, **NO_DROPOUT.get(architecture, {}))
    run = trained(tmp_path, model, None, "epochs=3", "batch.batch_size=12")
    assert run.learner.layout.layout == LAYOUTS[architecture]
    assert run.learner.layout.fuse == (architecture in ("llama", "qwen2", "mistral"))
    first, *_, last = losses(run.folder)
    assert last < first
    assert_served(run, pairs(), rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_how_a_step_is_divided(architecture, saved_model, tmp_path):
    found = []
    for number, options in enumerate(
        (
            (),
            ("batch.gradient_checkpointing=true",),
            ("batch.max_num_batched_tokens=1",),
            ("batch.max_num_batched_tokens=150",),
            ("batch.tree=false", "batch.max_num_batched_tokens=300"),
        )
    ):
        (tmp_path / f"{number}").mkdir()
        found.append(losses(trained(tmp_path / f"{number}", saved_model(architecture), None, *options).folder))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


def test_conversations_beyond_the_original_context_run_one_by_one(saved_model, tmp_path):
    """Their rotary frequencies depend on the longest text of a batch."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.5, 1.5]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, "original_max_position_embeddings": 48}
    sizes = {"original_max_position_embeddings": 48, "max_position_embeddings": 256}
    model = saved_model("phi3", rope_parameters=rope, **sizes)
    rows = [*pairs(4), {"prompt": "Count.", "chosen": "1 2 3 " * 10, "rejected": "I cannot count."}]
    run = trained(tmp_path, model, rows)
    assert {max(each.num_tokens) > 48 for each in run.learner.training.examples} == {False, True}
    assert_served(run, rows, rtol=0)


def test_transformers_alone_reads_the_folder(saved_model, tmp_path):
    run = trained(tmp_path, saved_model("qwen3"))
    model = AutoModelForSequenceClassification.from_pretrained(run.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    rows = pairs(2)
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
        for row in rows
        for key in ("chosen", "rejected")
    ]
    with torch.no_grad():
        plain = [model(**tiny_models.plain_ids(tokenizer, each)).logits.item() for each in conversations]
    np.testing.assert_allclose(plain, served_rewards(run.folder / "final", rows), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("architecture", "head"), [("qwen3", "score"), ("bert", "classifier")])
def test_adapters_are_saved_with_the_head(architecture, head, saved_model, tmp_path):
    pytest.importorskip("peft")
    run = trained(tmp_path, saved_model(architecture), None, "model.lora={rank: 4}")
    assert run.learner.layout.fuse == (architecture == "qwen3")
    saved = load_file(run.folder / "final" / "adapter_model.safetensors")
    assert any(head in name for name in saved)
    assert any("lora_A" in name for name in saved)
    assert not any("embed" in name for name in saved)
    assert_served(run, pairs())


def test_adapters_with_gradient_checkpointing_give_the_same_losses(saved_model, tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "other").mkdir()
    options = ("model.lora={rank: 4, dropout: 0.1}",)
    plain = trained(tmp_path, saved_model("qwen3"), None, *options)
    other = trained(tmp_path / "other", saved_model("qwen3"), None, *options, "batch.gradient_checkpointing=true")
    assert losses(other.folder) == pytest.approx(losses(plain.folder), rel=1e-5)


def test_a_new_head_has_named_outputs(tmp_path):
    chat = tiny_models.save_policy(tmp_path / "policy", "qwen3", initializer_range=0.3)
    names = ["helpfulness", "verbosity"]
    rows = [
        {"prompt": f"Say {n}.", "response": "yes " * (n % 5 + 1), "helpfulness": n % 5, "verbosity": n % 3}
        for n in range(12)
    ]
    options = ("model.new_head=true", f"model.outputs={json.dumps(names)}", "epochs=3")
    run = trained(tmp_path, chat, rows, *options)
    assert run.learner.start.model.config.num_labels == 2
    assert run.learner.objective.settings.objective == "ratings"
    assert losses(run.folder)[-1] < losses(run.folder)[0]
    assert {f"mse_{name}" for name in names} <= curve(run.folder / "metrics.csv")[0].keys()
    scorer = gym_rm.load_scorer(str(run.folder / "final"))
    scores = scorer.score([[{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "yes yes "}]])
    assert list(scores.components) == names
    assert_served(run, rows)


def test_the_new_head_depends_on_the_seed_alone(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(heads))
        run = open_run(settings_of(tmp_path, policy, None, "model.new_head=true", f"seed={seed}"))
        heads.append(run.learner.start.model.score.weight.detach().clone())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_labels_of_steps_are_learned_at_the_step_token(saved_model, tmp_path):
    rows = [
        {"prompt": f"Add {n} and 1.", "completions": [f"{n} + 1", f"is {n + k}"], "labels": [True, k == 1]}
        for n in range(6)
        for k in (1, 2)
    ]
    kwargs = {"kind": "process", "step_token": "<|endoftext|>"}
    options = ("model.reward_model_kwargs=" + json.dumps(kwargs), "epochs=8", "batch.batch_size=12")
    run = trained(tmp_path, saved_model("qwen3"), rows, *options)
    assert run.learner.objective.settings.objective == "steps"
    assert losses(run.folder)[-1] < losses(run.folder)[0]
    assert "step_accuracy" in curve(run.folder / "metrics.csv")[0]
    assert "step_token" in (run.folder / "final" / "README.md").read_text()
    assert np.isfinite(served_rewards(run.folder / "final", rows, **kwargs)).all()


RANKED = [
    {
        "prompt": f"Rank {n}",
        "completions": [
            {"rank": rank, "completion": [{"role": "assistant", "content": f"{n} {text}"}]}
            for rank, text in enumerate(["good", "fair", "fair, really", "bad"])
        ],
    }
    for n in range(8)
]
TIES = [{**row, "overall_preference": 0} for row in pairs(2)]
for row in TIES:
    row["context"], row["response1"], row["response2"] = row.pop("prompt"), row.pop("chosen"), row.pop("rejected")


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (RANKED, ["loss.preferences=plackett_luce"]),
        (RANKED, []),
        ([*pairs(8), *TIES], ["loss.preferences=rao_kupper"]),
        (pairs(8, margin=2), ["loss.preferences=margin_bradley_terry"]),
        (pairs(8), ["loss.centring=0.1", "optimizer.learning_rate=1e-3"]),
    ],
    ids=["plackett-luce", "all pairs", "rao-kupper", "margin", "centring"],
)
def test_every_loss_of_preferences_falls(rows, options, saved_model, tmp_path):
    run = trained(tmp_path, saved_model("qwen3"), rows, *options, "epochs=4", "batch.batch_size=16")
    assert len(run.learner.training.examples) == len(rows)
    found = losses(run.folder)
    assert found[-1] < found[0]


def test_a_nan_stops_the_run_without_changing_what_is_on_disk(saved_model, tmp_path):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, "optimizer.schedule=constant", "max_steps=1")
    train(settings)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.safetensors")}
    run = open_run(settings.model_copy(update={"max_steps": 2}))
    with torch.no_grad():
        run.learner.start.model.score.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="gradient norm of update 2 is nan"):
        train_reward_model.train(run)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.safetensors")} == before
    assert len(curve(tmp_path / "run" / "metrics.csv")) == 1


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_bfloat16_runs_on_a_cpu(architecture, saved_model, tmp_path):
    options = ("batch.precision=bf16", "data.validation_share=0.3", "epochs=2")
    run = trained(tmp_path, saved_model(architecture), None, *options)
    assert all(map(math.isfinite, losses(run.folder)))
    assert {each.dtype for each in load_file(run.folder / "final" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("metric", ["held_out/accuracy", None])
def test_the_best_model_by_a_metric_is_kept(metric, saved_model, tmp_path, monkeypatch):
    values = iter([0.5, 0.7, 0.9, 0.6])
    monkeypatch.setattr(
        train_reward_model,
        "measure",
        lambda learner: {"held_out": {"accuracy": (value := next(values)), "loss": 1 - value}},
    )
    name = f"checkpoint.metric={json.dumps(metric)}"
    run = trained(tmp_path, saved_model("qwen3"), None, name, "data.validation_share=0.33", "epochs=3")
    assert run.best_value == (0.9 if metric else pytest.approx(0.1))
    assert "for 4 steps" in (run.folder / "best" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["checkpoint.metric=held_out/accuracy"], "has none; set data.validation_share"),
        (["checkpoint.metric=other/loss", "data.validation_share=0.3"], r"has the validation sets \['held_out'\]"),
        (["checkpoint.metric=held_out/acuracy", "data.validation_share=0.3"], "not measured; known: held_out/loss"),
    ],
)
def test_an_unknown_metric_is_refused_before_the_first_step(options, message, saved_model, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, saved_model("qwen3"), None, *options)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_tensorboard_gets_the_metrics_also_without_an_output(saved_model, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path, saved_model("qwen3"), None, "report_to=tensorboard", "output=null", "max_steps=1")
    assert list(run.folder.rglob("events.out.tfevents.*"))


def test_a_tracker_that_is_not_installed_is_refused(saved_model, tmp_path, monkeypatch):
    monkeypatch.setattr("gym_rm.training.parallel_model.is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match="report_to='wandb' needs wandb"):
        open_run(settings_of(tmp_path, saved_model("qwen3"), None, "report_to=wandb"))


def test_muon_trains_matrices_inside_the_layers_only(saved_model, tmp_path):
    run = trained(tmp_path, saved_model("bert", **NO_DROPOUT["bert"]), None, "optimizer.name=muon")
    names = {id(parameter): name for name, parameter in run.learner.plain.named_parameters()}
    muon = [names[id(each)] for group in run.learner.optimizers[0].param_groups for each in group["params"]]
    assert muon
    assert all(".layer." in name or "pooler" in name for name in muon)
    assert losses(run.folder)[-1] < losses(run.folder)[0]


def test_a_family_that_transformers_lacks_keeps_its_name(tmp_path):
    """The class of its head is made at run time, so config.json must keep the name of the family."""
    heads = {
        f"score.{layer}.{name}": checkpoints.tensor(*shape, seed=layer)
        for layer, size in ((0, 32), (2, 1))
        for name, shape in (("weight", (size, 32)), ("bias", (size,)))
    }
    options = {"architecture": "qwen2", "class_name": "Qwen2ForRewardModel"}
    model = checkpoints.save_with_heads(tmp_path / "model", heads, **options)
    run = trained(tmp_path, model)
    assert losses(run.folder)[-1] < losses(run.folder)[0]
    assert_served(run, pairs())


def test_parameters_without_a_gradient_are_found(saved_model, tmp_path):
    """DistributedDataParallel waits for the gradients of all parameters unless it is told."""
    for architecture, unused in (("xlnet", True), ("qwen3", False)):
        settings = settings_of(tmp_path, saved_model(architecture), None, f"output={tmp_path / architecture}")
        assert open_run(settings).learner.plain.has_unused == unused


def test_a_running_environment_takes_the_weights_of_the_best_model_between_two_steps(saved_model, tmp_path):
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in pairs(4)]
    run = trained(tmp_path, saved_model("qwen3"), None, "data.validation_share=0.3")
    best, rewards = str(run.folder / "best"), []
    scorer = gym_rm.load_scorer(saved_model("qwen3"), prefix_cache_tokens=4096)
    for weights, used in ((None, scorer), (best, scorer), (None, gym_rm.load_scorer(best))):
        if weights is not None:
            used.update_weights(weights)
        envs = gymnasium.make_vec("gym_rm:RewardModel-v0", num_envs=2, reward_model=used, prompts=prompts)
        envs.reset(seed=0)
        rewards.append(envs.step(["The sum is 4.", "I do not know."])[1])
    assert not np.allclose(rewards[0], rewards[1])
    np.testing.assert_array_equal(rewards[1], rewards[2])
    assert scorer.score([[*prompts[0], {"role": "assistant", "content": "4."}]]).provenance.model == best
