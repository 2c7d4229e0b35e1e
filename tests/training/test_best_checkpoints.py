"""The best models of a run."""

import math

import pytest

from gym_rm.training.best_checkpoints import BestModels


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").write_text(folder.name)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize(("higher", "best", "second"), [(True, 3, 1), (False, 4, 2)])
def test_the_best_models_are_kept(higher, best, second, tmp_path):
    kept = BestModels(tmp_path, most=2, higher_is_better=higher)
    for step, value in enumerate([0.5, 0.2, 0.9, 0.1], 1):
        kept.offer(step, value, write, is_main=True)
    assert kept.folder_of_best == kept.folder_of(best)
    assert names(tmp_path) == sorted(f"step-{step:08d}" for step in (best, second))
    assert kept.values.keys() == {best, second}


def test_the_earlier_of_equal_models_is_kept_and_nan_is_the_worst(tmp_path):
    kept = BestModels(tmp_path, most=1, higher_is_better=True)
    assert [kept.offer(step, value, write, is_main=True) for step, value in enumerate([math.nan, 1.0, 1.0], 1)] == [
        True,
        True,
        False,
    ]
    assert names(tmp_path) == ["step-00000002"]


def test_what_a_killed_run_left_is_removed(tmp_path):
    for name in (".step-00000002", "step-00000007"):
        write(tmp_path / name)
    BestModels(tmp_path, most=1, higher_is_better=True).offer(2, 1.0, write, is_main=True)
    assert names(tmp_path) == ["step-00000002"]


def test_other_ranks_remove_nothing(tmp_path):
    write(tmp_path / "step-00000001")
    BestModels(tmp_path, most=1, higher_is_better=True).offer(2, 1.0, lambda folder: None, is_main=False)
    assert names(tmp_path) == ["step-00000001"]
