import logging

import pytest


@pytest.fixture(scope="session")
def parts(saved_model):
    """A loaded model with its tokenizer, for scorers with an executor of the test's own."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # loads torch

    folder = saved_model("qwen3")
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def logged(caplog):
    """What was logged in this test; warnings that are given once are given anew."""
    from gym_rm.errors import warn_once

    warn_once.cache_clear()
    caplog.set_level(logging.INFO, "gym_rm")
    return caplog
