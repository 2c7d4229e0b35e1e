import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.plots import plot_run
from gym_rm.reports.runs import RunWriter, read_run


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_plot_has_one_panel_per_curve(folder, tmp_path):
    both = png_size(plot_run(read_run(folder), folder / "curve.png"))
    writer = RunWriter(tmp_path / "no answers", {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5, "accuracy": None})
    one = png_size(plot_run(read_run(writer.folder), tmp_path / "pictures" / "curve.png"))
    assert both[0] == 2 * one[0]
    assert both[1] == one[1]


def test_a_step_without_a_reward_can_be_plotted(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step, reward in enumerate((0.5, None, 1.0), start=1):
        writer.add_metrics("train", step, {"reward_mean": reward, "accuracy": None})
    assert plot_run(read_run(tmp_path), tmp_path / "curve.png").exists()


def test_a_run_without_steps_raises_config_error(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("held_out", 0, {"reward_mean": 0.5})
    with pytest.raises(ConfigError, match="has no training step to plot"):
        plot_run(read_run(tmp_path), tmp_path / "curve.png")
