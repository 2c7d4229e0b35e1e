import pytest

from gym_rm.cli import doctor
from tests.cli.command import runner

run = runner("doctor")


@pytest.mark.slow
def test_everything_is_found_and_works():
    shown = run().output
    assert "problem" not in shown
    assert "its bits beside other conversations are equal; checked at load: bit-equal" in shown


def test_what_is_wrong_has_advice_and_hides_nothing_else(monkeypatch):
    monkeypatch.setattr(doctor, "KNOWN_SCORE", doctor.KNOWN_SCORE + 0.01)
    monkeypatch.setattr("gym_rm.sandbox.layers.choose", lambda *given: 1 / 0)
    shown = run(code=1).output
    assert "problem  ZeroDivisionError: division by zero" in shown
    assert "problem  the score of a known conversation, 1.0e-02 beside the stored one" in shown
    for text in ("CPU cores", "transformers", "RewardModel-v0"):
        assert text in shown
