import pytest

from gym_rm.sandbox import Sandbox
from gym_rm.sandbox.layers import LAYERS, detect, find_interpreter, sandbox_user


@pytest.fixture(scope="session", params=LAYERS[:2])
def sandbox(request):
    """Return a sandbox of every safe layer that this machine offers."""
    if reason := detect(request.param, find_interpreter(None, sandbox_user())):
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(layer=request.param, num_workers=2) as made:
        yield made


@pytest.fixture
def session(sandbox):
    with sandbox.session() as made:
        yield made
