"""The folder of a run of a reward model: its curves, the best model by a metric, and what the run resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from gym_rm.engine.loading.checkpoint import EMBEDDED
from gym_rm.engine.loading.revision import revision_of_model
from gym_rm.errors import ConfigError
from gym_rm.reports.curves import Curve
from gym_rm.reports.runs import METRICS, VALIDATION, write_settings
from gym_rm.training.comparison_sets import warn_about_drops
from gym_rm.training.reward_learner import RewardLearner
from gym_rm.training.reward_model_settings import FREE_IN_RESUMING, RewardModelTraining
from gym_rm.training.run_folder import RunFolder

LOWER_IS_BETTER = ("loss", "mse", "calibration_error", "ties")


class RewardRunFolder(RunFolder):
    """The folder of a run of a reward model; see `RunFolder`.

    Args:
        settings: settings of the run, with its `output`.
        learner: the reward model and its comparisons.

    Attributes:
        measured: metrics of each validation set, when they were last measured.
    """

    learner: RewardLearner

    def __init__(self, settings: RewardModelTraining, learner: RewardLearner) -> None:
        self._keep_best = settings.checkpoint.keep_best
        self._set, self._metric = _metric_of(settings, [each.name for each in learner.validation])
        named = settings.model.path or EMBEDDED, settings.model.reward_model_kwargs.get("revision")
        (revision,) = broadcast_object_list([learner.is_main and revision_of_model(*named)])
        plain = settings.model_dump(mode="json")
        super().__init__(
            plain,
            learner,
            name="reward-model",
            identity={
                **settings.model_dump(mode="json", exclude=FREE_IN_RESUMING),
                **{f"contents of data set {each.name}": each.digest() for each in learner.sets},
                "checkpoint.metric": f"{self._set}/{self._metric}" if learner.validation else None,
                "files of model.path": revision,
            },
            num_steps=len(learner.steps),
            higher_is_better=bool(learner.validation) and not self._metric.startswith(LOWER_IS_BETTER),
        )
        self.measured: Mapping[str, Mapping[str, float]] = self.restored.get("measured", {})
        if learner.is_main:
            write_settings(self.folder, plain, settings.model_dump(mode="json", exclude_defaults=True))
            warn_about_drops(learner.sets)
            self._training = Curve(self.folder / METRICS, after=self.step)
            self._validation = Curve(self.folder / VALIDATION, after=self.step)

    def log_step(self, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        if self.learner.is_main:
            self._training.add({"step": self.step, **metrics})
        self.track("train", metrics)

    def log_measured(self, measured: Mapping[str, Mapping[str, float]]) -> None:
        """Write the metrics of each validation set, and keep the model if it is the best."""
        self.measured = measured
        for name, metrics in measured.items():
            if self.learner.is_main:
                self._validation.add({"step": self.step, "set": name, **metrics})
            self.track(name, metrics)
        found = measured.get(self._set, {})
        if self._metric in found and self.step and self._keep_best:
            self.keep_if_best(found[self._metric], self._export)
        elif measured and self._metric not in found and self.best_value is None:
            known = ", ".join(f"{self._set}/{key}" for key in found)
            raise ConfigError(f"checkpoint.metric={self._set}/{self._metric} is not measured; known: {known}.")

    def state(self) -> dict[str, Any]:
        """Return plain values that a checkpoint keeps."""
        return {**super().state(), "measured": self.measured}

    def finish(self) -> None:
        """Write the last model."""
        self._export(self.folder / "final")

    def _export(self, folder: Path) -> None:
        self.learner.export(folder, metrics=self.measured, step=self.step)


def _metric_of(settings: RewardModelTraining, sets: list[str]) -> tuple[str, str]:
    """Return the validation set and the metric by which models are kept; empty without a set.

    Raises:
        ConfigError: there is no such set.
    """
    name = settings.checkpoint.metric
    set_name, _, metric = (name or f"{sets[0]}/loss" if sets else name or "").rpartition("/")
    if name is not None and set_name not in sets:
        known = f"has the validation sets {sets}" if sets else "has none; set data.validation_share"
        raise ConfigError(f"checkpoint.metric={name!r} must be SET/METRIC of a validation set; the run {known}.")
    return set_name, metric
