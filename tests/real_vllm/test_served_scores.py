"""Faults that are planted in a real vLLM, or in what it is compared with, are named by the probe."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from vllm_servers import Server

pytest.importorskip("httpx")

import gym_rm
from gym_rm.evaluation.served_scores import ServedScores, probe_rows
from gym_rm.scorers.remote.asked import AskedServer

ASSETS = Path(gym_rm.__file__).parent / "assets"
ROWS = probe_rows(None)[:28]  # up to 1200 tokens
BOS = "<|endoftext|>"


def copied(folder, *, template="{}", noise=0.0, bos=False):
    """Return a copy of the embedded reward model with another template, noise in its weights, or a BOS."""
    shutil.copytree(ASSETS / "reward_model", folder)
    jinja = folder / "chat_template.jinja"
    jinja.write_text(template.format(jinja.read_text()))
    if noise:
        torch.manual_seed(0)
        tensors = load_file(folder / "model.safetensors")
        moved = {
            name: each + noise * each.std() * torch.randn_like(each) for name, each in tensors.items() if each.dim() > 1
        }
        save_file(tensors | moved, folder / "model.safetensors", metadata={"format": "pt"})
    if bos:
        tokenizer, settings = Tokenizer.from_file(str(folder / "tokenizer.json")), folder / "tokenizer_config.json"
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": BOS}))
        jinja.write_text(BOS + jinja.read_text())
    return folder


@pytest.fixture(scope="module")
def model():
    return ServedScores(ASSETS / "reward_model", ROWS)


def causes(model, url, **fields):
    """Return the names of the causes by form, None where the scores are equal, and "?" where nothing explains them."""
    found = [*model.compare(AskedServer(url, fields=fields))]
    assert not any(each.refused for each in found)
    equal = {each.form: each.difference <= each.allowed for each in found}
    return {each.form: None if equal[each.form] else each.cause.name if each.cause else "?" for each in found}


def test_the_server_of_a_model_gives_its_scores(model, pooling_server):
    assert causes(model, pooling_server.url) == {"token ids": None, "texts": None, "messages": None}
    assert causes(model, pooling_server.url + "/pooling") == {"token ids": None, "texts": None, "messages": None}


def test_an_activation_and_a_cut_behind_it_are_named(model, pooling_server):
    found = causes(model, pooling_server.url, use_activation=True, truncate_prompt_tokens=200, truncation_side="left")
    assert set(found) == {f"{form} before a sigmoid" for form in ("token ids", "texts", "messages")}
    assert set(found.values()) == {"a sigmoid is applied, and texts are cut to 200 tokens, on the left"}


def test_a_generation_prompt_is_named(model, pooling_server):
    found = causes(model, pooling_server.url, add_generation_prompt=True)
    assert found == {"token ids": None, "texts": None, "messages": "a generation prompt follows"}


def test_another_chat_template_is_shown(pooling_server, tmp_path):
    template = "{{{{ '<|im_start|>system\nBe strict.<|im_end|>\n' }}}}{}"
    found = causes(ServedScores(copied(tmp_path / "model", template=template), ROWS), pooling_server.url)
    assert (found["token ids"], found["texts"]) == (None, None)
    assert "the server's text has '', the model's 'system\\nBe strict.<|im_end|>" in found["messages"]


def test_other_weights_are_named_if_they_are_given(pooling_server, tmp_path):
    folder = copied(tmp_path / "model", noise=0.5)
    assert set(causes(ServedScores(folder, ROWS), pooling_server.url).values()) == {"?"}
    named = causes(ServedScores(folder, ROWS, [ASSETS / "reward_model"]), pooling_server.url)
    assert set(named.values()) == {f"the weights of {ASSETS / 'reward_model'}"}


def test_precision_and_a_doubled_bos_are_named(vllm, tmp_path):
    folder = copied(tmp_path / "model", bos=True)
    server = Server(vllm, folder, tmp_path / "log", "--runner", "pooling", dtype="bfloat16")
    try:
        found = causes(ServedScores(folder, ROWS), server.start().wait().url)
    finally:
        server.kill()
    assert found["token ids"].startswith("precision: as different as bfloat16 is")
    assert found["messages"].startswith("precision: as different as bfloat16 is")
    assert found["texts"] == "the BOS is doubled, beside rounding as of bfloat16"
