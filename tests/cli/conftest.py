import signal

import pytest

import gym_rm
from tests.cli.command import LengthScorer


@pytest.fixture
def scorer(monkeypatch):
    """What `gym-rm score` gets from `load_scorer`, whatever it asks for."""
    scorer = LengthScorer()
    monkeypatch.setattr(gym_rm, "load_scorer", lambda model, **options: scorer)
    return scorer


@pytest.fixture
def children_hear_sigint():
    """Processes that this test starts can be interrupted, also where pytest itself cannot.

    A shell starts what it runs in the background with SIGINT ignored. That is inherited, and a Python that starts with
    SIGINT ignored installs no handler. A signal that the parent handles starts with its default action in the child.
    (`preexec_fn` would do the same, but is not safe beside the threads of torch.)
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
