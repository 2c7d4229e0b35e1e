"""The python of docs/reward-models.md and docs/scoring.md runs, with small checkpoints under the names that it uses."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import gym_rm
from gym_rm.engine.kinds import FAMILIES
from tests import tiny_models
from tests.checkpoints import HIDDEN, save_with_heads, tensor

try:
    import peft
except ImportError:  # the block about adapters is left out
    peft = None

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reward-models.md").read_text(encoding="utf-8")
RANDOM = {"initializer_range": 0.3}


def armo(folder):
    heads = {
        "regression_layer.weight": tensor(19, HIDDEN, seed=1),
        "reward_transform_matrix": tensor(19, 19, seed=2),
        "gating.logit_scale": tensor(1, seed=3),
        "gating.layers.0.weight": tensor(8, HIDDEN, seed=4),
        "gating.layers.0.bias": tensor(8, seed=5),
        "gating.layers.1.weight": tensor(19, 8, seed=6),
        "gating.layers.1.bias": tensor(19, seed=7),
    }
    save_with_heads(Path(folder), heads, class_name="LlamaForRewardModelWithGating", gating_temperature=10.0)


def process(folder):
    tokenizer = tiny_models.tokenizer("qwen")
    tokenizer.add_tokens(["<extra_0>"])
    heads = {"score.0.weight": tensor(HIDDEN, HIDDEN, seed=1), "score.2.weight": tensor(2, HIDDEN, seed=2)}
    save_with_heads(
        Path(folder), heads, architecture="qwen2", class_name="Qwen2ForProcessRewardModel", tokenizer=tokenizer
    )


def judge(folder):
    tokenizer = tiny_models.tokenizer("qwen")
    tokenizer.add_tokens(["Yes", "No"])
    tiny_models.save_policy(folder, "qwen3", vocab_size=len(tokenizer), **RANDOM)
    tokenizer.save_pretrained(folder)


def pair_rm(folder):
    tokenizer = tiny_models.tokenizer("bert")
    tokenizer.add_tokens(["<|source|>", "<|candidate1|>", "<|candidate2|>"])
    heads = {"head_layer.1.weight": tensor(8, 2 * HIDDEN, seed=1), "head_layer.4.weight": tensor(1, 8, seed=2)}
    save_with_heads(
        Path(folder),
        heads,
        architecture="deberta_v2",
        class_name="DebertaV2PairRM",
        prefix="pretrained_model",
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
    )


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_models.save_reward_model("Skywork/Skywork-Reward-V2-Qwen3-0.6B")
    tiny_models.save_reward_model("my/helpsteer-rm", num_labels=2, id2label={0: "helpfulness", 1: "verbosity"})
    armo("RLHFlow/ArmoRM-Llama3-8B-v0.1")
    process("Qwen/Qwen2.5-Math-PRM-7B")
    judge("Qwen/Qwen3-4B")
    tiny_models.save_policy("my/dpo-policy", seed=1, **RANDOM)
    tiny_models.save_policy("my/sft-policy", seed=2, **RANDOM)
    tiny_models.save_policy("RLHFlow/pair-preference-model-LLaMA3-8B", "llama", **RANDOM)
    pair_rm("llm-blender/PairRM-hf")
    for seed in (1, 2):
        tiny_models.save_reward_model(f"my/rm-seed-{seed}", seed=seed)
    if peft is not None:
        tiny_models.save_reward_model("my/base")
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
        peft.get_peft_model(tiny_models.reward_model(), config).save_pretrained("my/adapter")


@pytest.mark.slow
def test_the_python_blocks_run_one_after_the_other(checkpoints):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if peft is not None or "my/adapter" not in block:
            exec(block, names)
    for name in ("rewards", "helpfulness", "safety", "log_odds", "tournament", "absolute"):
        assert np.isfinite(names[name]).all(), name
        assert names[name].shape == (2,)
    assert names["better"].shape == (1,)
    assert Path("calibration.json").exists()


def test_every_kind_and_family_is_on_the_page():
    kinds = {*gym_rm.scorer.REWARD_MODEL_KINDS, *gym_rm.scorer.SCORER_KINDS} - {"pair_encoder", "reward_model"}
    shown = {"decoder", "encoder", "multi_head", "gated", "process", "generative", "implicit"}
    shown |= {"pairwise", "weighted", "ensemble"}
    assert shown <= kinds
    assert all(f"| `{kind}` |" in PAGE for kind in shown)
    for family in FAMILIES:
        assert family.name.split()[0].split("-")[0] in PAGE, family.name


SCORING = (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")


def test_the_examples_of_scoring_run():
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", SCORING, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["scores"].rewards.argmax() == 0
    assert names["second"].workload.reused_tokens > 0
    assert names["scorer"].provenance.layout == "tree"


def test_the_options_of_scoring_exist():
    known = {*inspect.signature(gym_rm.RewardModelScorer).parameters}
    known |= {*inspect.signature(gym_rm.engine.reward_model_scorer.load_reward_model).parameters}
    rows = re.findall(r"^\| (`.*?) \|", SCORING, re.MULTILINE)
    assert len(rows) > 8
    for name in re.findall(r"`(\w+)`", " ".join(rows)):
        assert name in known, name
