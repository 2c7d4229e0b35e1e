import importlib
import importlib.resources
import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pytest
from recording import RecordingScorer, Verifier

import gym_rm

ASSETS = importlib.resources.files("gym_rm") / "assets"

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # models this small run faster on one thread


@pytest.fixture
def recorder():
    return RecordingScorer()


@pytest.fixture
def verifier():
    return Verifier()


@pytest.fixture(scope="session")
def embedded_scorer():
    return gym_rm.load_scorer()


@pytest.fixture(scope="session")
def policy_path():
    return str(ASSETS / "policy")


@pytest.fixture
def model_folder(tmp_path):
    """A copy of the embedded reward model, which no other test has loaded."""
    return str(shutil.copytree(ASSETS / "reward_model", tmp_path / "reward_model"))


@pytest.fixture
def loads(monkeypatch):
    """The folders that shared scorers were loaded from."""
    folders = []
    load_scorer = gym_rm.load_scorer

    def load(reward_model=None, **options):
        if isinstance(reward_model, str):
            folders.append(reward_model)
        return load_scorer(reward_model, **options)

    monkeypatch.setattr("gym_rm.scorers.load.load_scorer", load)
    return folders


@pytest.fixture
def import_adapter(monkeypatch):
    """Function that imports an adapter; modules that are not installed are replaced by stand-ins."""

    def load(name, stand_ins):
        module = f"gym_rm.adapters.{name}"
        if not all(map(is_installed, stand_ins)):
            monkeypatch.setitem(sys.modules, module, None)  # makes monkeypatch remove the module after the test
            del sys.modules[module]
            for library, names in stand_ins.items():
                monkeypatch.setitem(sys.modules, library, SimpleNamespace(**names))
        return importlib.import_module(module)

    return load


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the parent package is not installed
        return False
