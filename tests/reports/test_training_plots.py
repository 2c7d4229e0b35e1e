import pytest
from matplotlib.image import imread

from gym_rm.errors import ConfigError
from gym_rm.reports.curves import Curve
from gym_rm.reports.plots import plot_training


def run_with(folder, *, steps: int) -> None:
    training, validation = (Curve(folder / name, after=0) for name in ("metrics.csv", "validation.csv"))
    for step in range(1, steps + 1):
        training.add({"step": step, "loss": 1 / step, "accuracy": step / steps})
    validation.add({"step": steps, "set": "held_out", "loss": 0.5, "accuracy": 0.8})


def test_loss_and_accuracy_are_two_panels(tmp_path):
    run_with(tmp_path, steps=4)
    picture = imread(plot_training(tmp_path, tmp_path / "curves.png"))
    assert picture.shape[1] > 2 * picture.shape[0]
    assert picture.std() > 0.02


def test_one_step_is_enough(tmp_path):
    run_with(tmp_path, steps=1)
    assert plot_training(tmp_path, tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_a_folder_without_steps_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no training step"):
        plot_training(tmp_path, tmp_path / "curves.png")
