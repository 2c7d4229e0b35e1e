import pytest

import gym_rm
from tests.cli.command import LengthScorer


@pytest.fixture
def scorer(monkeypatch):
    """Scorer that `load_scorer` returns to `gym-rm score` for all arguments."""
    scorer = LengthScorer()
    monkeypatch.setattr(gym_rm, "load_scorer", lambda model, **options: scorer)
    return scorer
