import logging

import pytest


@pytest.fixture(scope="session")
def parts(saved_model):
    """A loaded model and its tokenizer, for tests that make their own executor."""
    import tiny_models
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # loads torch

    folder = saved_model("qwen3")
    model = AutoModelForSequenceClassification.from_pretrained(folder).to(tiny_models.DEVICE)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def logged(caplog):
    """Log records of this test. `warn_once` is reset, so that it logs its warnings again."""
    from gym_rm.errors import warn_once

    warn_once.cache_clear()
    caplog.set_level(logging.INFO, "gym_rm")
    return caplog
