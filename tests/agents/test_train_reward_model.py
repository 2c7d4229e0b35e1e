"""The agent is what the command runs; alone, it prints its steps."""

from agents.train_reward_model import main
from tests.training.runs import pairs, write_rows


def test_the_agent_prints_its_steps_and_measurements(saved_model, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", pairs())
    options = [f"data.train={data}", f"model.path={saved_model('qwen3')}", f"output={tmp_path / 'run'}"]
    main([*options, "data.validation_share=0.33", "batch.batch_size=4"])
    shown = capsys.readouterr().out
    assert "step 2/2: loss" in shown
    assert "held_out: loss" in shown
