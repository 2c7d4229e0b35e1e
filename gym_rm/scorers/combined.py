"""Several scorers as one: a weighted sum of their rewards, or an ensemble of reward models.

A row has a score only if every scorer returned one, because a sum without one component is a different reward.
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

from gym_rm.checks import finite, one_of
from gym_rm.errors import ConfigError, nearest
from gym_rm.scorer import Scorer, ScorerLike, acquire_scorer, release_scorer, try_score
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompts, Provenance

EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std"]
ENSEMBLE_REDUCTIONS = ("mean", "min", "mean_minus_std")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean and standard deviation of a component on a fixed set of conversations, to make components comparable.

    Attributes:
        mean, std: statistics of the component; a weighted sum uses `(value - mean) / std`.
        data_hash: first 16 hex digits of the SHA-256 of the conversations that it was fitted on; None if unknown.
        num_conversations: number of conversations that it was fitted on.

    Raises:
        ConfigError: `mean` or `std` is not finite, or `std` is not positive.
    """

    mean: float
    std: float
    data_hash: str | None = None
    num_conversations: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mean) and np.isfinite(self.std) and self.std > 0):
            raise ConfigError(
                f"calibration: mean must be finite and std positive, got mean={self.mean} and std={self.std}."
            )

    @classmethod
    def fit(cls, values: RewardArray, conversations: Sequence[Conversation]) -> Calibration:
        """Return the calibration that normalises these values to mean 0 and standard deviation 1."""
        return cls(
            float(values.mean(dtype=np.float64)),
            float(values.std(dtype=np.float64)),
            hash_conversations(conversations),
            len(conversations),
        )


class CombinedScorer(abc.ABC):
    """Base class of scorers that call several named scorers and reduce their rewards to one.

    The rewards of each scorer become the component with its name. Its own components become `"name/component"`, and
    its infos become `"name/info"`. An episode ends if any of the scorers ends it.

    Args:
        scorers: arguments of `load_scorer` by name; a sequence gets the names `scorer_0`, `scorer_1`, ...

    Raises:
        ConfigError: `scorers` is empty, or not a mapping or sequence.
    """

    def __init__(self, scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> None:
        self.scorers: dict[str, Scorer] = {}
        self._acquired: list[Scorer] = []
        try:
            for name, one in self._named(scorers).items():
                self.scorers[name] = acquire_scorer(one, {})
                self._acquired.append(self.scorers[name])
        except BaseException:
            self.close()
            raise

    @classmethod
    def _named(cls, scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> Mapping[str, ScorerLike]:
        """Return the arguments of `load_scorer` by name, without loading them."""
        if isinstance(scorers, str | bytes) or not isinstance(scorers, Mapping | Sequence):
            raise ConfigError(
                f"scorers of {cls.__name__} must be a dict of scorers by name, or a list; got "
                f"{type(scorers).__name__} {scorers!r}."
            )
        named = scorers if isinstance(scorers, Mapping) else {f"scorer_{k}": one for k, one in enumerate(scorers)}
        if not named or not all(isinstance(name, str) for name in named):
            raise ConfigError(
                f"scorers of {cls.__name__} must have at least one scorer, and texts as names; got the names "
                f"{list(named)}."
            )
        return named

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinedScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and models must not be loaded twice."""
        return self

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items() if value)
        return f"{type(self).__name__}({self.scorers!r}{settings})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations with every scorer.

        Raises:
            ScoringError: a score is missing in some rows; the attribute `scores` has the other rows.
        """
        results = {name: try_score(scorer, conversations, prompts) for name, scorer in self.scorers.items()}
        errors: list[str | None] = [None] * len(conversations)
        components: dict[str, RewardArray] = {}
        for name, scores in results.items():
            mine = {name: scores.rewards, **{f"{name}/{key}": values for key, values in scores.components.items()}}
            if twice := sorted(components.keys() & mine.keys()):
                raise ConfigError(
                    f"scorers: two of them return the component {twice[0]!r}; rename one of {list(self.scorers)}."
                )
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

    @property
    def respond(self) -> Any:
        """The user simulator of the only scorer that has one, or None.

        Raises:
            ConfigError: several scorers have one.
        """
        found = {name: one for name, each in self.scorers.items() if (one := getattr(each, "respond", None))}
        first = next(iter(found.values()), None)
        if any(one != first for one in found.values()):
            raise ConfigError(f"respond: the scorers {list(found)} each have one; pass respond= to the environment.")
        return first

    def sleep(self) -> None:
        """Free the device memory of every scorer that has `sleep`."""
        self._call("sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._call("wake")

    def clear_cache(self) -> None:
        """Clear the caches of every scorer that has some; call it after the weights of a model in training change."""
        self._call("clear_cache")

    def close(self) -> None:
        """Release the scorers that were loaded here."""
        while self._acquired:
            release_scorer(self._acquired.pop())

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings of the reduction, for `Scores.provenance`."""

    @abc.abstractmethod
    def _reduce(self, components: Mapping[str, RewardArray]) -> RewardArray:
        """Return rewards `[N]` from the components by name."""

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
    """Mean or minimum of several reward models, or their mean lowered by their disagreement.

    Args:
        scorers: see `CombinedScorer`.
        reduction: `"mean"`, `"min"`, or `"mean_minus_std"`: mean - coefficient * population standard deviation
            (reward model ensembles against overoptimisation: arXiv 2310.02743, arXiv 2312.09244).
        coefficient: factor of the standard deviation.

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
        self.reduction: EnsembleReduction = one_of("reduction", reduction, ENSEMBLE_REDUCTIONS)
        self.coefficient = finite("coefficient", coefficient)
        super().__init__(scorers)

    @property
    def settings(self) -> dict[str, Any]:
        """Reduction and coefficient."""
        return {"reduction": self.reduction, "coefficient": self.coefficient}

    def _reduce(self, components: Mapping[str, RewardArray]) -> RewardArray:
        # One row per conversation: numpy then adds in the same order for one conversation and for many.
        stacked = np.stack([components[name] for name in self.scorers], axis=1)
        match self.reduction:
            case "mean":
                return np.asarray(stacked.mean(axis=1))
            case "min":
                return np.asarray(stacked.min(axis=1))
            case _:
                return np.asarray(stacked.mean(axis=1) - self.coefficient * stacked.std(axis=1))


class WeightedScorer(CombinedScorer):
    """`sum_k weight_k * (component_k - mean_k) / std_k` over the components of several scorers.

    Args:
        scorers: see `CombinedScorer`.
        weights: weight by component, `"scorer"` or `"scorer/component"`; or one weight per scorer. None is a weight of
            1 for the rewards of every scorer.
        normalization: `Calibration` (or its fields) by component, or a JSON file of `save_calibration`. A component
            without a calibration is not normalised.

    Raises:
        ConfigError: a weight or calibration is for a component that no scorer returns.

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
        names = list(self._named(scorers))
        if weights is None:
            weights = dict.fromkeys(names, 1.0)
        elif not isinstance(weights, Mapping):
            if not isinstance(weights, Sequence | np.ndarray) or len(weights) != len(names):
                raise ConfigError(f"weights must have one number for each of the scorers {names}, got {weights!r:.80}.")
            weights = dict(zip(names, weights, strict=True))
        if not weights:
            raise ConfigError(f"weights must have at least one of the components of the scorers {names}, got none.")
        if isinstance(normalization, str | os.PathLike):
            normalization = _read_calibration(normalization)
        if not isinstance(normalization, Mapping | None):
            raise ConfigError(
                "normalization must be a dict of mean and std by component; got "
                f"{type(normalization).__name__} {normalization!r:.80}."
            )
        self.weights = {name: finite(f"weights[{name!r}]", weight) for name, weight in weights.items()}
        self.normalization = {name: _calibration(name, value) for name, value in (normalization or {}).items()}
        for component in [*self.weights, *self.normalization]:
            if not any(component == name or component.startswith(f"{name}/") for name in names):
                hint = nearest(component, names) or nearest(component.partition("/")[0], names)
                raise ConfigError(f"{component!r} is not a component of the scorers {names}.{hint}")
        super().__init__(scorers)  # last, so that an invalid setting loads nothing

    @property
    def settings(self) -> dict[str, Any]:
        """Weights and calibrations."""
        return {
            "weights": self.weights,
            "normalization": {name: dataclasses.asdict(value) for name, value in self.normalization.items()},
        }

    def calibrate(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> WeightedScorer:
        """Return this scorer with every weighted component normalised to mean 0 and std 1 on these conversations.

        Raises:
            ConfigError: a component is equal for all conversations.
            ScoringError: some conversations have no score.
        """
        components = self.score(conversations, prompts).components
        for name in self.weights:
            if np.ptp(_component(components, name)) == 0:
                raise ConfigError(
                    f"component {name!r} is equal for all {len(conversations)} conversations, so it cannot be "
                    "normalised; calibrate on more conversations, or remove its weight."
                )
        fitted = {name: Calibration.fit(_component(components, name), conversations) for name in self.weights}
        return WeightedScorer(self.scorers, weights=self.weights, normalization=fitted)

    def save_calibration(self, file: str | os.PathLike[str]) -> None:
        """Write the calibrations and the hash of their conversations to a JSON file for `normalization=`."""
        Path(file).write_text(json.dumps(self.settings["normalization"], indent=2) + "\n")

    def _reduce(self, components: Mapping[str, RewardArray]) -> RewardArray:
        terms = []
        for name, weight in self.weights.items():
            values = _component(components, name)
            scale = self.normalization.get(name)
            terms.append(weight * (values if scale is None else (values - scale.mean) / scale.std))
        return np.asarray(np.stack(terms, axis=1).sum(axis=1, dtype=np.float64))


def hash_conversations(conversations: Sequence[Conversation]) -> str:
    """Return the first 16 hex digits of the SHA-256 of all roles and contents."""
    plain = [[[message["role"], message["content"]] for message in conversation] for conversation in conversations]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=True).encode()).hexdigest()[:16]


def _component(components: Mapping[str, RewardArray], name: str) -> RewardArray:
    if name not in components:
        raise ConfigError(
            f"component {name!r} is not returned by any scorer; expected one of {sorted(components)}."
            f"{nearest(name, components)}"
        )
    return components[name]


def _calibration(component: str, value: Calibration | Mapping[str, Any]) -> Calibration:
    if isinstance(value, Calibration):
        return value
    try:
        return Calibration(**value)
    except TypeError as error:
        raise ConfigError(f"normalization[{component!r}] must have mean and std, got {value!r}.") from error


def _read_calibration(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"normalization: cannot read the file {os.fspath(file)!r}: {error}") from error
    return found
