"""Several scorers as one: a weighted sum of what they give, or an ensemble of models of the same thing.

A row has a score only if every scorer gave it one: a sum with a component missing is another reward.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import one_of
from gym_rm.errors import ConfigError, nearest
from gym_rm.scorer import Scorer, ScorerLike, acquire_scorer, release_scorer, try_score
from gym_rm.scores import FloatArray, Provenance, Scores
from gym_rm.types import Conversation, Prompts

EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std"]
ENSEMBLE_REDUCTIONS = ("mean", "min", "mean_minus_std")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean and standard deviation of a component on a fixed set of conversations, which make components comparable.

    Attributes:
        mean, std: of the component; it enters a sum as `(value - mean) / std`.
        data_hash: first 16 hex digits of the SHA-256 of the conversations that it was fitted on, if it was.
        num_conversations: how many those were.

    Raises:
        ConfigError: a mean or std that is not finite, or a std of 0 or less.
    """

    mean: float
    std: float
    data_hash: str | None = None
    num_conversations: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mean) and np.isfinite(self.std) and self.std > 0):
            raise ConfigError(f"a calibration needs a finite mean and a std above 0; got {self.mean} and {self.std}.")

    @classmethod
    def fit(cls, values: FloatArray, conversations: Sequence[Conversation]) -> Calibration:
        """The calibration under which these values have mean 0 and standard deviation 1."""
        return cls(
            float(values.mean(dtype=np.float64)),
            float(values.std(dtype=np.float64)),
            hash_conversations(conversations),
            len(conversations),
        )


class CombinedScorer(abc.ABC):
    """Named scorers, run one after the other; subclasses reduce their rewards to one.

    Each scorer's rewards are the component under its name, its own components are `"name/component"`, its infos
    `"name/info"`. An episode ends where any of them ends it.

    Args:
        scorers: what `load_scorer` takes, by name; a sequence gets the names `scorer_0`, `scorer_1`, ...

    Raises:
        ConfigError: no scorers.
    """

    def __init__(self, scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> None:
        if isinstance(scorers, str | bytes) or not isinstance(scorers, Mapping | Sequence):
            raise ConfigError(
                f"a {type(self).__name__} takes scorers by name, or a list of them; got {type(scorers).__name__} "
                f"{scorers!r}."
            )
        named = scorers if isinstance(scorers, Mapping) else {f"scorer_{k}": one for k, one in enumerate(scorers)}
        if not named:
            raise ConfigError(f"a {type(self).__name__} needs at least one scorer.")
        self.scorers: dict[str, Scorer] = {name: acquire_scorer(one, {}) for name, one in named.items()}
        self._acquired = list(self.scorers.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinedScorer:
        """Itself: `gym.make_vec` deep-copies its keywords, and models must not be loaded twice."""
        return self

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations with every scorer.

        Raises:
            ScoringError: some scorer has no score for some row; the other rows are in its `scores`.
        """
        results = {name: try_score(scorer, conversations, prompts) for name, scorer in self.scorers.items()}
        errors: list[str | None] = [None] * len(conversations)
        components: dict[str, FloatArray] = {}
        for name, scores in results.items():
            mine = {name: scores.rewards, **{f"{name}/{key}": values for key, values in scores.components.items()}}
            if twice := sorted(components.keys() & mine.keys()):
                raise ConfigError(f"two scorers give the component {twice[0]!r}; rename one of {list(self.scorers)}.")
            components |= mine
            for row in scores.failed_rows:
                errors[row] = errors[row] or f"{name}: {scores.errors[row]}"
        ends = [scores.terminations for scores in results.values() if scores.terminations is not None]
        combined = Scores.from_rewards(
            self._reduce(components),
            components=components,
            errors=errors,
            terminations=np.logical_or.reduce(ends) if ends else None,
            infos={f"{name}/{key}": values for name, each in results.items() for key, values in each.infos.items()},
            provenance=self._provenance(results),
        )
        return dataclasses.replace(
            combined,
            num_tokens=np.max([scores.num_tokens for scores in results.values()], axis=0),
            truncated_tokens=np.max([scores.truncated_tokens for scores in results.values()], axis=0),
        ).raise_for_errors()

    def sleep(self) -> None:
        """Free the device memory of every scorer that can."""
        self._call("sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._call("wake")

    def close(self) -> None:
        """Release the scorers that were loaded here."""
        while self._acquired:
            release_scorer(self._acquired.pop())

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """How the scorers' rewards become one, for `Scores.provenance`."""

    @abc.abstractmethod
    def _reduce(self, components: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        """Rewards `[N]` from the components, by name."""

    def _provenance(self, results: Mapping[str, Scores]) -> Provenance:
        scorers = {
            name: None if scores.provenance is None else dataclasses.asdict(scores.provenance)
            for name, scores in results.items()
        }
        return Provenance(type(self).__name__, "+".join(results), settings={**self.settings, "scorers": scorers})

    def _call(self, method: str) -> None:
        for scorer in self.scorers.values():
            if callable(function := getattr(scorer, method, None)):
                function()


class EnsembleScorer(CombinedScorer):
    """Several reward models of the same thing; their disagreement can lower the reward.

    Args:
        scorers: see `CombinedScorer`.
        reduction: `"mean"`, `"min"`, or `"mean_minus_std"`: mean - coefficient * population standard deviation
            (reward model ensembles against overoptimisation: arXiv 2310.02743, arXiv 2312.09244).
        coefficient: of the standard deviation.

    Example:
        >>> import gym_rm
        >>> scorer = EnsembleScorer([lambda c: [1.0] * len(c), lambda c: [3.0] * len(c)], reduction="mean_minus_std")
        >>> scorer.score([[{"role": "assistant", "content": "yes"}]]).rewards.tolist()
        [1.0]
    """

    def __init__(
        self,
        scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike],
        *,
        reduction: EnsembleReduction = "mean",
        coefficient: float = 1.0,
    ) -> None:
        super().__init__(scorers)
        self.reduction: EnsembleReduction = one_of("reduction", reduction, ENSEMBLE_REDUCTIONS)
        self.coefficient = float(coefficient)

    @property
    def settings(self) -> dict[str, Any]:
        """The reduction."""
        return {"reduction": self.reduction, "coefficient": self.coefficient}

    def _reduce(self, components: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        stacked = np.stack([components[name] for name in self.scorers]).astype(np.float64)
        match self.reduction:
            case "mean":
                return np.asarray(stacked.mean(axis=0))
            case "min":
                return np.asarray(stacked.min(axis=0))
            case _:
                return np.asarray(stacked.mean(axis=0) - self.coefficient * stacked.std(axis=0))


class WeightedScorer(CombinedScorer):
    """`sum_k weight_k * (component_k - mean_k) / std_k` over the components that several scorers give.

    Args:
        scorers: see `CombinedScorer`.
        weights: by component, that is by scorer or `"scorer/component"`; None weighs every scorer's rewards 1.
        normalization: `Calibration` (or its fields) by component, or a JSON file that `save_calibration` wrote; a
            component without one enters the sum as it is.

    Raises:
        ConfigError: weights or calibrations of components that no scorer gives.

    Example:
        >>> import gym_rm
        >>> lengths = lambda conversations: [len(c[-1]["content"]) for c in conversations]
        >>> scorers = {"length": lengths, "bonus": lambda conversations: [1.0] * len(conversations)}
        >>> scorer = WeightedScorer(scorers, weights={"length": 0.5, "bonus": 2})
        >>> scores = scorer.score([[{"role": "assistant", "content": "four"}]])
        >>> scores.rewards.tolist(), scores.components["length"].tolist()
        ([4.0], [4.0])
    """

    def __init__(
        self,
        scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        normalization: Mapping[str, Calibration | Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(scorers)
        names = list(self.scorers)
        if weights is None:
            weights = dict.fromkeys(names, 1.0)
        elif not isinstance(weights, Mapping):
            if len(weights) != len(names):
                raise ConfigError(f"weights has {len(weights)} numbers for {len(names)} scorers {names}.")
            weights = dict(zip(names, weights, strict=True))
        if isinstance(normalization, str | os.PathLike):
            normalization = _read_calibration(normalization)
        if not isinstance(normalization, Mapping | None):
            raise ConfigError(
                "normalization must give mean and std by component; got "
                f"{type(normalization).__name__} {normalization!r:.80}."
            )
        self.weights = {name: float(weight) for name, weight in weights.items()}
        self.normalization = {name: _calibration(name, value) for name, value in (normalization or {}).items()}
        for component in [*self.weights, *self.normalization]:
            if not any(component == name or component.startswith(f"{name}/") for name in names):
                hint = nearest(component, names) or nearest(component.partition("/")[0], names)
                raise ConfigError(f"{component!r} is not a component of the scorers {names}.{hint}")

    @property
    def settings(self) -> dict[str, Any]:
        """Weights and calibrations."""
        return {
            "weights": self.weights,
            "normalization": {name: dataclasses.asdict(value) for name, value in self.normalization.items()},
        }

    def calibrate(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> WeightedScorer:
        """This scorer with every weighted component normalised to mean 0 and std 1 on these conversations.

        Raises:
            ConfigError: a component that is the same for all of them.
            ScoringError: some of them have no score.
        """
        components = self.score(conversations, prompts).components
        fitted = {name: Calibration.fit(_component(components, name), conversations) for name in self.weights}
        return WeightedScorer(self.scorers, weights=self.weights, normalization=fitted)

    def save_calibration(self, file: str | os.PathLike[str]) -> None:
        """Write the calibrations, with the hash of what they were fitted on, as JSON for `normalization=`."""
        Path(file).write_text(json.dumps(self.settings["normalization"], indent=2) + "\n")

    def _reduce(self, components: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        terms = []
        for name, weight in self.weights.items():
            values = _component(components, name).astype(np.float64)
            scale = self.normalization.get(name)
            terms.append(weight * (values if scale is None else (values - scale.mean) / scale.std))
        return np.asarray(np.sum(terms, axis=0, dtype=np.float64))


def hash_conversations(conversations: Sequence[Conversation]) -> str:
    """First 16 hex digits of the SHA-256 of roles and contents."""
    plain = [[[message["role"], message["content"]] for message in conversation] for conversation in conversations]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=True).encode()).hexdigest()[:16]


def _component(components: Mapping[str, FloatArray], name: str) -> FloatArray:
    if name not in components:
        raise ConfigError(
            f"no scorer gives the component {name!r}; there are {sorted(components)}.{nearest(name, components)}"
        )
    return components[name]


def _calibration(component: str, value: Calibration | Mapping[str, Any]) -> Calibration:
    if isinstance(value, Calibration):
        return value
    try:
        return Calibration(**value)
    except TypeError as error:
        raise ConfigError(f"normalization of {component!r} must have mean and std; got {value!r}.") from error


def _read_calibration(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a calibration from {os.fspath(file)!r}: {error}") from error
    return found
