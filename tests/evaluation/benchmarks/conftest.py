import importlib
import sys
import types

import pytest


@pytest.fixture(scope="module")
def reference():
    """The functions of the package rewardbench, without its models, which need other versions of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        models = types.ModuleType("rewardbench.models")
        models.REWARD_MODEL_CONFIG, models.DPO_MODEL_CONFIG = {}, {}
        patch.setitem(sys.modules, "rewardbench.models", models)
        try:
            return importlib.import_module("rewardbench.utils")
        except ImportError as error:
            pytest.skip(f"rewardbench is not installed ({error})")
