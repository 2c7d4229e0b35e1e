"""Small real models for the tests of this folder, all marked `real`: `make test-real`, or pytest -m real."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gym_rm.cli.real_models import fetch
from gym_rm.errors import ConfigError


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("real")


@pytest.fixture(scope="session")
def real_model(request):
    """Function that returns the folder of a real model."""
    if "real" not in request.config.getoption("markexpr"):
        pytest.skip("needs real models: make test-real")

    def folder(name):
        try:
            return fetch(name)
        except ConfigError as error:
            pytest.skip(str(error))

    return folder


@pytest.fixture(scope="session")
def smollm2(real_model):
    """Folder of SmolLM2-135M-Instruct: a Llama with 30 layers and a chat template."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def minilm(real_model):
    """Folder of all-MiniLM-L6-v2: a BERT encoder without a head or a chat template."""
    return real_model("minilm")


def save_with_head(source, folder):
    """Save a real model with a random head of one number, in float32, and return the folder."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_reward_model(smollm2, tmp_path_factory):
    """Folder of SmolLM2 as a reward model: the same with a random head."""
    return save_with_head(smollm2, tmp_path_factory.mktemp("smollm2") / "reward_model")


@pytest.fixture(scope="session")
def minilm_reward_model(minilm, tmp_path_factory):
    """Folder of MiniLM as a reward model: the same with a random head."""
    return save_with_head(minilm, tmp_path_factory.mktemp("minilm") / "reward_model")
