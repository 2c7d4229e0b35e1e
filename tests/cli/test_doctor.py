from pathlib import Path

import pytest

import gym_rm
from gym_rm.cli import doctor
from tests.cli.command import runner, write

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


@pytest.mark.slow
def test_a_server_with_a_fault_is_a_problem_with_its_cause(tmp_path):
    pytest.importorskip("fastapi")
    from gym_rm.server.serve import RewardServer

    rows = write(tmp_path / "rows.jsonl", [{"prompt": f"{n} + 2?", "response": "4 " * n} for n in range(1, 9)])
    folder = Path(gym_rm.__file__).parent / "assets" / "reward_model"
    template = "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}" + (folder / "chat_template.jinja").read_text()
    with RewardServer(gym_rm.load_scorer(), port=0) as right:
        assert "problem" not in run("--server", right.url, "--reward-model", folder, "--rows", rows).output
        sent = ("--server", f"{right.url}/classify", "--request", "use_activation=true")
        shown = run(*sent, "--reward-model", folder, "--rows", rows, code=1).output
        assert shown.count("Cause: a sigmoid is applied\n           -> explains 100.0%") == 3
    with RewardServer(gym_rm.load_scorer(chat_template=template), port=0) as wrong:
        shown = run("--server", wrong.url, "--reward-model", folder, "--rows", rows, code=1).output
        assert "Cause: the server's text has 'system\\nBe brief.<|im_end|>\\n<|im_start|>', the model's ''" in shown
