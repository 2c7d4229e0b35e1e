"""Weights go from the files to the device one by one: the host never has a model in its private memory."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from tests import private_memory, tiny_models

ALLOWED = 2 * 16 + 50  # MiB: two of the largest tensors in float32, and what Python needs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with 121 MiB of weights in bfloat16, so 242 MiB in float32."""
    place = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    tokenizer = tiny_models.tokenizer("qwen")
    config = tiny_models._config("qwen3", tokenizer, num_key_value_heads=8, head_dim=64, num_labels=1, **sizes)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    weights = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in model.named_parameters()}
    save_file(weights, place / "model.safetensors")
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.save_pretrained(place)
    tokenizer.save_pretrained(place)
    yield str(place)
    (place / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def process():
    """A process of its own, whose memory no earlier test has used."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
def test_loading_to_another_device_takes_no_memory_of_the_host_for_the_model(process, folder):
    # The device "meta" stands for a GPU: its tensors are not in the host's memory.
    assert process.submit(private_memory.of_loading, folder, "meta", "float32").result() < ALLOWED


def test_weights_of_a_folder_are_taken_over_one_by_one(process, folder):
    assert process.submit(private_memory.of_update, folder, folder).result() < ALLOWED
