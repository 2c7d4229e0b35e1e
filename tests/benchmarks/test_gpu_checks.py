"""Rows of part A of benchmarks/gpu_day.py are errors if they have shown nothing."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gym_rm.engine.backbones.tree_attention import TreeAttention

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_checks")


@pytest.fixture
def day(checks):
    return SimpleNamespace(device=torch.device("cpu"), sizes=importlib.import_module("gpu_sizes").TINY, seconds_left=60)


def test_tests_read_the_folder_of_the_day(checks, day, monkeypatch, tmp_path):
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout="3 passed, 1 skipped in 2.00s", stderr="")

    monkeypatch.setattr(checks.subprocess, "run", run)
    monkeypatch.setattr(checks.workloads, "DATA", tmp_path)
    assert checks.run_tests(day, "tests/test_x.py") == {"passed": 3, "skipped": 1}
    assert commands[0][-3:] == ["tests/test_x.py", "--data", str(tmp_path)]


@pytest.mark.parametrize(
    "printed", ["1 passed, 39 skipped in 1.00s", "no tests ran in 0.01s", "7 deselected, 2 skipped in 0.1s"]
)
def test_a_run_in_which_few_tests_pass_is_an_error(printed, checks, day, monkeypatch):
    done = SimpleNamespace(returncode=0, stdout=printed, stderr="")
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ArithmeticError, match="most tests did not run"):
        checks.run_tests(day, "tests/test_x.py")


def test_wrong_models_need_right_ones_that_run_as_trees(checks, day, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("NYI: no such heads")

    monkeypatch.setattr(TreeAttention, "__call__", fail)
    with pytest.raises(AssertionError, match="qwen3 without a mutation"):
        checks.wrong_models(day, "float32")


def test_a_wrong_model_whose_tree_fails_is_not_counted_as_refused(checks, day, monkeypatch):
    mutations = importlib.import_module("tests.engine.loading.mutations")
    monkeypatch.setattr(mutations, "require_tree", lambda *_: None)

    def fail(*_, **__):
        raise RuntimeError("NYI: no such heads")

    monkeypatch.setattr(TreeAttention, "__call__", fail)
    with pytest.raises(ArithmeticError, match=r"no wrong model was refused because of its values.*no such heads"):
        checks.wrong_models(day, "float32")
