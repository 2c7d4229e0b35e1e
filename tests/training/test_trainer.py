"""A run from rows to a folder: what it learns, and that the folder is served with the rewards of the trainer."""

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
from gym_rm.errors import ConfigError
from gym_rm.training import trainer as trainer_module
from gym_rm.training.trainer import Trainer
from tests import checkpoints
from tests.training.runs import assert_served, curve, losses, pairs, served_rewards, settings_of, train

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
def test_the_loss_falls_and_the_folder_is_served_with_the_rewards_of_the_trainer(architecture, saved_model, tmp_path):
    model = saved_model(architecture, **NO_DROPOUT.get(architecture, {}))
    trainer, finished = train(tmp_path, model, None, "epochs=3", "batch.batch_size=12")
    assert trainer.layout.layout == LAYOUTS[architecture]
    assert trainer.layout.fuse == (architecture in ("llama", "qwen2", "mistral"))
    first, *_, last = losses(finished.folder)
    assert last < first
    assert_served(trainer, finished, pairs(), rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        ("batch.gradient_checkpointing=true",),
        ("batch.tree=false",),
        ("batch.max_num_batched_tokens=1",),
        ("batch.max_num_batched_tokens=150",),
        ("batch.tree=false", "batch.max_num_batched_tokens=300"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_losses_do_not_depend_on_how_a_step_is_divided(architecture, options, saved_model, tmp_path):
    (tmp_path / "other").mkdir()
    _, plain = train(tmp_path, saved_model(architecture))
    _, other = train(tmp_path / "other", saved_model(architecture), None, *options)
    assert losses(other.folder) == pytest.approx(losses(plain.folder), rel=1e-4)


def test_conversations_beyond_the_original_context_run_one_by_one(saved_model, tmp_path):
    """Their rotary frequencies depend on the longest text of a batch."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5], "original_max_position_embeddings": 48}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    sizes = {"original_max_position_embeddings": 48, "max_position_embeddings": 256}
    model = saved_model("phi3", rope_parameters=rope, **sizes)
    rows = [*pairs(4), {"prompt": "Count.", "chosen": "1 2 3 " * 10, "rejected": "I cannot count."}]
    trainer, finished = train(tmp_path, model, rows)
    assert {max(each.num_tokens) > 48 for each in trainer.training.examples} == {False, True}
    assert_served(trainer, finished, rows, rtol=0)


def test_transformers_alone_reads_the_folder(saved_model, tmp_path):
    _, finished = train(tmp_path, saved_model("qwen3"))
    model = AutoModelForSequenceClassification.from_pretrained(finished.model)
    tokenizer = AutoTokenizer.from_pretrained(finished.model)
    rows = pairs(2)
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
        for row in rows
        for key in ("chosen", "rejected")
    ]
    with torch.no_grad():
        plain = [model(**tiny_models.plain_ids(tokenizer, each)).logits.item() for each in conversations]
    np.testing.assert_allclose(plain, served_rewards(finished.model, rows), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("architecture", "head"), [("qwen3", "score"), ("bert", "classifier")])
def test_adapters_are_saved_with_the_head(architecture, head, saved_model, tmp_path):
    pytest.importorskip("peft")
    trainer, finished = train(tmp_path, saved_model(architecture), None, "model.lora={rank: 4}")
    assert not trainer.layout.fuse  # the fused forward has no adapters
    saved = load_file(finished.model / "adapter_model.safetensors")
    assert any(head in name for name in saved)
    assert any("lora_A" in name for name in saved)
    assert not any("embed" in name for name in saved)
    assert_served(trainer, finished, pairs())


def test_adapters_with_gradient_checkpointing_give_the_same_losses(saved_model, tmp_path):
    pytest.importorskip("peft")
    (tmp_path / "other").mkdir()
    options = ("model.lora={rank: 4, dropout: 0.1}",)
    _, plain = train(tmp_path, saved_model("qwen3"), None, *options)
    _, other = train(tmp_path / "other", saved_model("qwen3"), None, *options, "batch.gradient_checkpointing=true")
    assert losses(other.folder) == pytest.approx(losses(plain.folder), rel=1e-5)


@pytest.mark.parametrize("base", ["a chat model", "a reward model with one output"])
def test_a_new_head_has_named_outputs(base, saved_model, tmp_path):
    chat = tiny_models.save_policy(tmp_path / "policy", "qwen3", initializer_range=0.3)
    names = ["helpfulness", "verbosity"]
    rows = [
        {"prompt": f"Say {n}.", "response": "yes " * (n % 5 + 1), "helpfulness": n % 5, "verbosity": n % 3}
        for n in range(12)
    ]
    options = ("model.new_head=true", f"model.outputs={json.dumps(names)}", "epochs=3")
    trainer, finished = train(tmp_path, chat if base == "a chat model" else saved_model("qwen3"), rows, *options)
    assert trainer.start.model.config.num_labels == 2
    assert trainer.objective.settings.objective == "ratings"
    assert losses(finished.folder)[-1] < losses(finished.folder)[0]
    assert {f"mse_{name}" for name in names} <= curve(finished.folder / "metrics.csv")[0].keys()
    scorer = gym_rm.load_scorer(str(finished.model))
    scores = scorer.score([[{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "yes yes "}]])
    assert list(scores.components) == names
    assert_served(trainer, finished, rows)


def test_the_new_head_depends_on_the_seed_alone(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(heads))
        trainer = Trainer(settings_of(tmp_path, policy, None, "model.new_head=true", f"seed={seed}"))
        heads.append(trainer.start.model.score.weight.detach().clone())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_model_without_a_head_is_refused_with_advice(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "qwen3")
    with pytest.raises(ConfigError, match="without a known reward head") as caught:
        Trainer(settings_of(tmp_path, policy))
    assert "model.new_head=true" in caught.value.__notes__[0]


def test_labels_of_steps_are_learned_at_the_step_token(saved_model, tmp_path):
    rows = [
        {"prompt": f"Add {n} and 1.", "completions": [f"{n} + 1", f"is {n + k}"], "labels": [True, k == 1]}
        for n in range(6)
        for k in (1, 2)
    ]
    kwargs = {"kind": "process", "step_token": "<|endoftext|>"}
    options = ("model.reward_model_kwargs=" + json.dumps(kwargs), "epochs=8", "batch.batch_size=12")
    trainer, finished = train(tmp_path, saved_model("qwen3"), rows, *options)
    assert trainer.objective.settings.objective == "steps"
    assert losses(finished.folder)[-1] < losses(finished.folder)[0]
    assert "step_accuracy" in curve(finished.folder / "metrics.csv")[0]
    assert "step_token" in (finished.model / "README.md").read_text()
    assert np.isfinite(served_rewards(finished.model, rows, **kwargs)).all()


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
        (pairs(8), ["loss.centring=0.1"]),
    ],
    ids=["plackett-luce", "all pairs", "rao-kupper", "margin", "centring"],
)
def test_every_loss_of_preferences_falls(rows, options, saved_model, tmp_path):
    trainer, finished = train(tmp_path, saved_model("qwen3"), rows, *options, "epochs=4", "batch.batch_size=16")
    assert len(trainer.training.examples) == len(rows)
    found = losses(finished.folder)
    assert found[-1] < found[0]


def test_a_nan_stops_the_run_without_changing_what_is_on_disk(saved_model, tmp_path):
    trainer = Trainer(settings_of(tmp_path, saved_model("qwen3"), None, "epochs=3"))
    trainer.train_step()
    trainer.save()
    (checkpoint,) = (trainer.folder / "checkpoints").iterdir()
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with torch.no_grad():
        trainer.start.model.score.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="gradient norm of update 2 is nan"):
        trainer.run()
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert not (trainer.folder / "final").exists()
    assert len(curve(trainer.folder / "metrics.csv")) == 1


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_bfloat16_runs_on_a_cpu(architecture, saved_model, tmp_path):
    options = ("batch.precision=bf16", "data.validation_share=0.3", "epochs=2")
    _, finished = train(tmp_path, saved_model(architecture), None, *options)
    assert all(map(math.isfinite, losses(finished.folder)))
    assert {each.dtype for each in load_file(finished.model / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("metric", ["held_out/accuracy", None])
def test_the_best_models_by_a_metric_are_kept(metric, saved_model, tmp_path, monkeypatch):
    measured = iter([0.5, 0.7, 0.9, 0.6, 0.1])
    metrics = trainer_module.Outcomes.metrics

    def planned(self):
        found = metrics(self)
        if len(self.losses) == 4 and asked:  # the validation set
            value = next(measured)
            found |= {"accuracy": value, "margin_mean": value, "loss": 1 - value}
        return found

    asked = []
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self: (asked.append(1), evaluate(self), asked.clear())[1])
    monkeypatch.setattr(trainer_module.Outcomes, "metrics", planned)
    name = f"checkpoint.metric={json.dumps(metric)}"
    _, finished = train(tmp_path, saved_model("qwen3"), None, name, "data.validation_share=0.33", "epochs=4")
    assert finished.best == finished.folder / "best"
    assert "for 4 steps" in (finished.best / "README.md").read_text()


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
        train(tmp_path, saved_model("qwen3"), None, *options)
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_tensorboard_gets_the_metrics_also_without_an_output(saved_model, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    _, finished = train(tmp_path, saved_model("qwen3"), None, "report_to=tensorboard", "output=null", "max_steps=1")
    assert list(finished.folder.rglob("events.out.tfevents.*"))


def test_a_tracker_that_is_not_installed_is_refused(saved_model, tmp_path, monkeypatch):
    monkeypatch.setattr("gym_rm.training.parallel_model.is_wandb_available", lambda: False)
    with pytest.raises(ConfigError, match="report_to='wandb' needs wandb"):
        Trainer(settings_of(tmp_path, saved_model("qwen3"), None, "report_to=wandb"))


def test_muon_trains_matrices_inside_the_layers_only(saved_model, tmp_path):
    trainer, finished = train(tmp_path, saved_model("bert", **NO_DROPOUT["bert"]), None, "optimizer.name=muon")
    names = {id(parameter): name for name, parameter in trainer.model.plain.named_parameters()}
    muon = [names[id(each)] for group in trainer.model.optimizers[0].param_groups for each in group["params"]]
    assert muon
    assert all(".layer." in name or "pooler" in name for name in muon)
    assert losses(finished.folder)[-1] < losses(finished.folder)[0]


def test_a_running_scorer_takes_the_weights_of_the_best_model(saved_model, tmp_path):
    rows = pairs()
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}] for row in rows
    ]
    scorer = gym_rm.load_scorer(saved_model("qwen3"), prefix_cache_tokens=4096)
    before = scorer.score(conversations).rewards
    scorer.score(conversations)  # fills both caches
    _, finished = train(tmp_path, saved_model("qwen3"), rows, "data.validation_share=0.3")
    scorer.update_weights(str(finished.best))
    after = scorer.score(conversations)
    fresh = gym_rm.load_scorer(str(finished.best)).score(conversations).rewards
    np.testing.assert_array_equal(after.rewards, fresh)
    assert not np.allclose(before, fresh)
    assert after.provenance.model == str(finished.best)


def test_a_family_that_transformers_lacks_keeps_its_name(tmp_path):
    """The class of its head is made at run time, so config.json must keep the name of the family."""
    heads = {
        f"score.{layer}.{name}": checkpoints.tensor(*shape, seed=layer)
        for layer, size in ((0, 32), (2, 1))
        for name, shape in (("weight", (size, 32)), ("bias", (size,)))
    }
    options = {"architecture": "qwen2", "class_name": "Qwen2ForRewardModel"}
    model = checkpoints.save_with_heads(tmp_path / "model", heads, **options)
    trainer, finished = train(tmp_path, model)
    assert losses(finished.folder)[-1] < losses(finished.folder)[0]
    assert_served(trainer, finished, pairs())


@pytest.mark.parametrize(("architecture", "unused"), [("xlnet", True), ("qwen3", False), ("bert", False)])
def test_parameters_without_a_gradient_are_found(architecture, unused, saved_model, tmp_path):
    """DistributedDataParallel waits for the gradients of all parameters unless it is told."""
    trainer = Trainer(settings_of(tmp_path, saved_model(architecture)))
    assert trainer.model.plain.has_unused == unused


def test_an_environment_takes_new_weights_between_two_steps(saved_model, tmp_path):
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in pairs(4)]
    scorer = gym_rm.load_scorer(saved_model("qwen3"), prefix_cache_tokens=4096)
    envs = gymnasium.make_vec("gym_rm:RewardModel-v0", num_envs=2, reward_model=scorer, prompts=prompts)
    _, finished = train(tmp_path, saved_model("qwen3"))
    actions = ["The sum is 4.", "I do not know."]
    rewards = []
    for weights in (None, finished.model):
        if weights is not None:
            scorer.update_weights(str(weights))
        envs.reset(seed=0)
        rewards.append(envs.step(actions)[1])
    assert not np.allclose(*rewards)
    fresh = gymnasium.make_vec(
        "gym_rm:RewardModel-v0", num_envs=2, reward_model=gym_rm.load_scorer(str(finished.model)), prompts=prompts
    )
    fresh.reset(seed=0)
    np.testing.assert_array_equal(rewards[1], fresh.step(actions)[1])
