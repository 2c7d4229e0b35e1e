"""The best models of a run by a metric; the others are removed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path


class BestModels:
    """Folders `step-<number>` of the best models of a run.

    Args:
        folder: where they are.
        most: number of models to keep.
        higher_is_better: whether a higher value of the metric is better.

    Attributes:
        values: metric of each model that is kept, by step.

    Example:
        >>> best = BestModels(Path("run/best"), most=2, higher_is_better=True)
        >>> [best.offer(k, value, lambda folder: None, is_main=False) for k, value in enumerate([0.5, 0.7, 0.1], 1)]
        [True, True, False]
        >>> best.folder_of_best.name
        'step-00000002'
    """

    def __init__(self, folder: Path, *, most: int, higher_is_better: bool) -> None:
        self.folder, self.most, self.higher_is_better = folder, most, higher_is_better
        self.values: dict[int, float] = {}

    @property
    def folder_of_best(self) -> Path | None:
        """Folder of the best model, or None."""
        return self.folder_of(min(self.values, key=self._order)) if self.values else None

    def folder_of(self, step: int) -> Path:
        """Return the folder of the model after a step."""
        return self.folder / f"step-{step:08d}"

    def offer(self, step: int, value: float, export: Callable[[Path], None], *, is_main: bool) -> bool:
        """Keep the model after a step if it is among the best; return whether it is.

        Args:
            step: number of steps.
            value: its metric.
            export: writes the model to a folder; all ranks must call this.
            is_main: whether this rank removes the others.
        """
        self.values[step] = value
        best = sorted(self.values, key=self._order)[: self.most]
        self.values = {each: self.values[each] for each in best}
        if step in best:
            export(self.folder_of(step))
        if is_main and self.folder.exists():
            for other in set(self.folder.iterdir()) - {self.folder_of(each) for each in best}:  # also of a killed run
                shutil.rmtree(other, ignore_errors=True)
        return step in best

    def _order(self, step: int) -> float:
        """Return the sort key of a model, the best first."""
        value = self.values[step]
        return math.inf if math.isnan(value) else -value if self.higher_is_better else value
