import importlib
import importlib.resources
import importlib.util

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
