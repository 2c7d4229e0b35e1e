"""Small training runs for the tests: rows to learn from, settings, and what a run wrote. Not a test."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gym_rm
from agents import train_reward_model
from gym_rm.config import load_config
from gym_rm.training.reward_learner import RewardLearner
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.training.reward_run_folder import RewardRunFolder

TIMES = ("seconds", "comparisons_per_second", "tokens_per_second")


def pairs(count: int = 12, **fields: Any) -> list[dict[str, Any]]:
    """Return pairs that are easy to learn; every prompt has two of them."""
    return [
        {
            "prompt": f"Question {index // 2}: what is {index // 2} + {3 * (index // 2)}?",
            "chosen": f"The sum is {4 * index}.",
            "rejected": f"I do not know, maybe {index}?" + " Sorry!" * (index % 4),
            **fields,
        }
        for index in range(count)
    ]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings_of(folder: Path, model: str | Path, rows: list[Any] | None = None, *overrides: str) -> RewardModelTraining:
    """Return the settings of a run of a few steps in `folder`."""
    data = write_rows(folder / "rows.jsonl", pairs() if rows is None else rows)
    return load_config(
        RewardModelTraining,
        {
            "output": str(folder / "run"),
            "evaluate_every": 2,
            "model": {"path": str(model)},
            "data": {"train": str(data)},
            "batch": {"batch_size": 4},
            "optimizer": {"learning_rate": 3e-3},
        },
        overrides,
    )


def open_run(settings: RewardModelTraining) -> RewardRunFolder:
    settings = settings.with_output()
    return RewardRunFolder(settings, RewardLearner(settings))


def train(settings: RewardModelTraining) -> RewardRunFolder:
    run = open_run(settings)
    train_reward_model.train(run)
    return run


def trained(folder: Path, model: str | Path, rows: list[Any] | None = None, *overrides: str) -> RewardRunFolder:
    return train(settings_of(folder, model, rows, *overrides))


def curve(path: Path, *, without: tuple[str, ...] = TIMES) -> list[dict[str, str]]:
    """Return the lines of a curve without the columns that depend on the time."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if name not in without} for row in csv.DictReader(file)]


def losses(run: Path) -> list[float]:
    return [float(row["loss"]) for row in curve(run / "metrics.csv")]


def trained_rewards(learner: RewardLearner, examples: Any) -> np.ndarray[Any, Any]:
    """Return the rewards that the learner computes, in the order of the conversations of the examples."""
    learner.plain.eval()
    rewards = []
    with torch.no_grad():
        for example in examples:
            for micro in learner.micro_batches([example]):
                values = learner.forward(micro.batches)[torch.from_numpy(micro.value_index)]
                rewards.append(learner.objective.rewards(values, micro).numpy())
    return np.concatenate(rewards)


def served_rewards(folder: Path, rows: list[Any], **options: Any) -> np.ndarray[Any, Any]:
    """Return the rewards of the same conversations by the scorer of a saved folder."""
    from gym_rm.data.comparisons import load_comparisons

    scorer = gym_rm.load_scorer(str(folder), **options)
    return scorer.score([each for row in load_comparisons(rows).comparisons for each in row.conversations]).rewards


def assert_served(run: RewardRunFolder, rows: list[Any], *, rtol: float = 1e-4) -> None:
    """Require of the saved folder the rewards of the learner; without `rtol`, near them on the scale of the largest."""
    ours = trained_rewards(run.learner, run.learner.training.examples)
    atol = 2e-5 * (1 if rtol else abs(ours).max())
    np.testing.assert_allclose(ours, served_rewards(run.folder / "final", rows), rtol=rtol, atol=atol)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of a run catches it."""


def kill_at(monkeypatch: Any, owner: Any, name: str, call: int) -> None:
    """Raise Killed at a call of a function, counted from 1; earlier calls run."""
    function, calls = getattr(owner, name), []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, dying)
