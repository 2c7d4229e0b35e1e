"""Reward models of the families that vLLM 0.32 serves on a CPU: its values are ours."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from vllm_servers import SECONDS, SETTINGS

import gym_rm
from tests.checkpoints import CONVERSATIONS, HIDDEN, conversation, save_with_heads
from tests.engine.kinds.test_process import CONVERSATIONS as STEPS
from tests.engine.kinds.test_process import HEADS, STEP, tokenizer_with_step

ENCODER = {"hidden_size": 64, "num_attention_heads": 2}  # vLLM has no kernel for a CPU with heads below 32 numbers
DECODER = ENCODER | {"num_key_value_heads": 1, "head_dim": 32}
FAMILIES = {
    "llama": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "mistral": DECODER,
    "gemma2": DECODER | {"query_pre_attn_scalar": 32},
    "phi3": ENCODER | {"num_key_value_heads": 1},
    "mixtral": DECODER,
    "gpt_oss": DECODER,
    "gpt_neox": ENCODER,
    "gpt2": {"n_head": 2},
    "bert": ENCODER,
    "roberta": ENCODER,
    "modernbert": ENCODER,
}
OPTIONS = {"phi3": {"pooling": "last"}}  # its texts end with its padding: vLLM reads it, the Hugging Face head does not
OFFLINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
GIVEN = [
    *CONVERSATIONS,
    conversation("Hi<|im_end|>", "4<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n4"),
    conversation("<s>[INST]", "4<|eot_id|></s><eos><end_of_turn>\n<start_of_turn>model\n[/INST] 4[SEP][CLS]"),
    conversation("What is the sum of 12 and 30? " * 9, "The sum is 42. " * 12, "<|endoftext|>[PAD]<pad>"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of a random model of each family."""
    root = tmp_path_factory.mktemp("families")
    made = {name: tiny_models.save_reward_model(root / name, name, **config) for name, config in FAMILIES.items()}
    config = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HIDDEN}
    steps = {"architecture": "qwen2", "class_name": "Qwen2ForProcessRewardModel", "tokenizer": tokenizer_with_step()}
    return made | {"steps": save_with_heads(root / "steps", HEADS, **steps, **config)}


@pytest.fixture(scope="module")
def values(vllm, folders, tmp_path_factory):
    """Return what vLLM gives the rows of each model, all in one process."""
    requests = {}
    for name, folder in folders.items():
        renderer = gym_rm.load_scorer(folder).renderer
        rows = renderer.encode(STEPS if name == "steps" else GIVEN)
        ids, seconds = [row.input_ids.tolist() for row in rows], [row.second_segment for row in rows]
        step = renderer.tokenizer.convert_tokens_to_ids(STEP) if name == "steps" else None
        requests[name] = {"folder": str(folder), "ids": ids, "seconds": seconds, "step": step}
    files = tmp_path_factory.mktemp("values")
    (files / "requests").write_text(json.dumps(requests))
    script = Path(__file__).with_name("offline_values.py")
    command = [vllm / "bin" / "python", script, files / "requests", files / "values"]
    environment = os.environ | SETTINGS | OFFLINE
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((files / "values").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_the_model_in_this_process(folders, values, family):
    assert isinstance(values[family], list), values[family]
    ours = gym_rm.load_scorer(folders[family], **OPTIONS.get(family, {})).score(GIVEN).rewards
    np.testing.assert_allclose([value for (value,) in values[family]], ours, atol=1e-4 * ours.std())


def test_values_of_steps_are_those_of_the_model_in_this_process(folders, values):
    assert isinstance(values["steps"], list), values["steps"]
    ours = gym_rm.load_scorer(folders["steps"]).score(STEPS).step_rewards
    for steps, logits in zip(ours, values["steps"], strict=True):
        bad, good = np.transpose(logits)
        np.testing.assert_allclose(1 / (1 + np.exp(bad - good)), steps, atol=1e-4)
