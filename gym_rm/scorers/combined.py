"""Several scorers as one: a weighted sum of what they say, or an ensemble of the same opinion held several times.

A row counts only if every member scored it: a sum with a part missing is another reward.
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

from gym_rm.errors import ConfigError, ScoringError, nearest
from gym_rm.scorer import Scorer, ScorerLike, load_scorer
from gym_rm.types import Conversation, Provenance, Scores

FloatArray: TypeAlias = NDArray[np.float32]
EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std"]
ENSEMBLE_REDUCTIONS = ("mean", "min", "mean_minus_std")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean and standard deviation of a part on a frozen set of conversations, which make parts comparable.

    Attributes:
        mean, std: of the part; it enters a sum as `(value - mean) / std`.
        data_hash: first 16 hex digits of the SHA-256 of the conversations that it was fitted on, if it was.
        num_conversations: how many those were.

    Raises:
        ConfigError: a standard deviation that nothing can be divided by.
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
    """Named members, scored one after the other; subclasses make one reward of theirs.

    Args:
        members: what `load_scorer` takes, by name; a sequence gets the names `member_0`, `member_1`, ...

    Raises:
        ConfigError: no members.
    """

    def __init__(self, members: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> None:
        if isinstance(members, str | bytes) or not isinstance(members, Mapping | Sequence):
            raise ConfigError(
                f"a {type(self).__name__} takes scorers by name, or a list of them; got {type(members).__name__} "
                f"{members!r}."
            )
        named = members if isinstance(members, Mapping) else {f"member_{k}": one for k, one in enumerate(members)}
        if not named:
            raise ConfigError(f"a {type(self).__name__} needs at least one scorer.")
        self.members: dict[str, Scorer] = {name: load_scorer(member) for name, member in named.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinedScorer:
        """Itself: `gym.make_vec` deep-copies its keywords, and models must not be loaded twice."""
        return self

    def score(self, conversations: Sequence[Conversation]) -> Scores:
        """Score N conversations with every member.

        Raises:
            ScoringError: some member has no score for some row; the other rows are in its `scores`.
        """
        results = {name: attempt(member, conversations) for name, member in self.members.items()}
        errors: list[str | None] = [None] * len(conversations)
        parts: dict[str, FloatArray] = {}
        for name, scores in results.items():
            mine = {name: scores.rewards, **{f"{name}/{head}": values for head, values in scores.heads.items()}}
            if twice := sorted(parts.keys() & mine.keys()):
                raise ConfigError(f"two scorers give the part {twice[0]!r}; rename one of {list(self.members)}.")
            parts |= mine
            for row in scores.failed_rows:
                errors[row] = errors[row] or f"{name}: {scores.errors[row]}"
        rewards = self._reduce(parts).astype(np.float32)
        plain = Scores.from_rewards(rewards, heads=parts, errors=errors, provenance=self._provenance(results))
        combined = dataclasses.replace(
            plain,
            num_tokens=np.max([scores.num_tokens for scores in results.values()], axis=0),
            truncated_tokens=np.max([scores.truncated_tokens for scores in results.values()], axis=0),
        )
        if combined.failed_rows:
            raise ScoringError(combined)
        return combined

    def sleep(self) -> None:
        """Let every member that can free its device."""
        self._tell("sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._tell("wake")

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """How one reward is made of the members', for `Scores.provenance`."""

    @abc.abstractmethod
    def _reduce(self, parts: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        """Rewards `[N]` from the members' and their parts, by name."""

    def _provenance(self, results: Mapping[str, Scores]) -> Provenance:
        members = {
            name: None if scores.provenance is None else dataclasses.asdict(scores.provenance)
            for name, scores in results.items()
        }
        return Provenance(type(self).__name__, "+".join(results), settings={**self.settings, "members": members})

    def _tell(self, verb: str) -> None:
        for member in self.members.values():
            if hasattr(member, verb):
                getattr(member, verb)()


class EnsembleScorer(CombinedScorer):
    """Several reward models of the same thing; their disagreement can count against a reply.

    Args:
        members: see `CombinedScorer`; each one's rewards are a head under its name.
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
        members: Mapping[str, ScorerLike] | Sequence[ScorerLike],
        *,
        reduction: EnsembleReduction = "mean",
        coefficient: float = 1.0,
    ) -> None:
        super().__init__(members)
        if reduction not in ENSEMBLE_REDUCTIONS:
            raise ConfigError(
                f"reduction must be one of {ENSEMBLE_REDUCTIONS}; got {reduction!r}."
                + nearest(str(reduction), ENSEMBLE_REDUCTIONS)
            )
        self.reduction = reduction
        self.coefficient = float(coefficient)

    @property
    def settings(self) -> dict[str, Any]:
        """The reduction."""
        return {"reduction": self.reduction, "coefficient": self.coefficient}

    def _reduce(self, parts: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        stacked = np.stack([parts[name] for name in self.members]).astype(np.float64)
        match self.reduction:
            case "mean":
                return np.asarray(stacked.mean(axis=0))
            case "min":
                return np.asarray(stacked.min(axis=0))
            case _:
                return np.asarray(stacked.mean(axis=0) - self.coefficient * stacked.std(axis=0))


class WeightedScorer(CombinedScorer):
    """`sum_k weight_k * (part_k - mean_k) / std_k` over the parts that several scorers give.

    Args:
        scorers: see `CombinedScorer`. The parts are each scorer's rewards, under its name, and each of its heads, as
            `"name/head"`; all of them are heads of the result, as they came.
        weights: by part; None weighs every scorer's rewards 1.
        normalization: `Calibration` (or its fields) by part, or a JSON file that `save_calibration` wrote; a part
            without one enters as it is.

    Raises:
        ConfigError: weights or calibrations of parts that nobody gives.

    Example:
        >>> import gym_rm
        >>> lengths = lambda conversations: [len(c[-1]["content"]) for c in conversations]
        >>> parts = {"length": lengths, "bonus": lambda conversations: [1.0] * len(conversations)}
        >>> scorer = WeightedScorer(parts, weights={"length": 0.5, "bonus": 2})
        >>> scores = scorer.score([[{"role": "assistant", "content": "four"}]])
        >>> scores.rewards.tolist(), scores.heads["length"].tolist()
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
        names = list(self.members)
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
                "normalization must give mean and std by part; got "
                f"{type(normalization).__name__} {normalization!r:.80}."
            )
        self.weights = {part: float(weight) for part, weight in weights.items()}
        self.normalization = {part: _calibration(part, value) for part, value in (normalization or {}).items()}
        for part in [*self.weights, *self.normalization]:
            if not any(part == name or part.startswith(f"{name}/") for name in names):
                hint = nearest(part, names) or nearest(part.partition("/")[0], names)
                raise ConfigError(f"{part!r} is no part of the scorers {names}.{hint}")

    @property
    def settings(self) -> dict[str, Any]:
        """Weights and calibrations."""
        return {
            "weights": self.weights,
            "normalization": {part: dataclasses.asdict(value) for part, value in self.normalization.items()},
        }

    def calibrate(self, conversations: Sequence[Conversation]) -> WeightedScorer:
        """This scorer with every weighted part normalised to mean 0 and standard deviation 1 on these conversations.

        Raises:
            ConfigError: a part that says the same of all of them.
            ScoringError: some of them have no score.
        """
        heads = self.score(conversations).heads
        fitted = {part: Calibration.fit(_part(heads, part), conversations) for part in self.weights}
        return WeightedScorer(self.members, weights=self.weights, normalization=fitted)

    def save_calibration(self, file: str | os.PathLike[str]) -> None:
        """Write the calibrations, with the hash of what they were fitted on, as JSON for `normalization=`."""
        Path(file).write_text(json.dumps(self.settings["normalization"], indent=2) + "\n")

    def _reduce(self, parts: Mapping[str, FloatArray]) -> NDArray[np.float64]:
        terms = []
        for part, weight in self.weights.items():
            values = _part(parts, part).astype(np.float64)
            scale = self.normalization.get(part)
            terms.append(weight * (values if scale is None else (values - scale.mean) / scale.std))
        return np.asarray(np.sum(terms, axis=0, dtype=np.float64))


def attempt(scorer: Scorer, conversations: Sequence[Conversation]) -> Scores:
    """What a scorer says, with the reasons of failed rows in `errors` instead of an exception."""
    try:
        return scorer.score(conversations)
    except ScoringError as error:
        return error.scores


def hash_conversations(conversations: Sequence[Conversation]) -> str:
    """First 16 hex digits of the SHA-256 of roles and contents."""
    plain = [[[message["role"], message["content"]] for message in conversation] for conversation in conversations]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=True).encode()).hexdigest()[:16]


def _part(parts: Mapping[str, FloatArray], name: str) -> FloatArray:
    if name not in parts:
        raise ConfigError(f"no scorer gives the part {name!r}; there are {sorted(parts)}.{nearest(name, parts)}")
    return parts[name]


def _calibration(part: str, value: Calibration | Mapping[str, Any]) -> Calibration:
    if isinstance(value, Calibration):
        return value
    try:
        return Calibration(**value)
    except TypeError as error:
        raise ConfigError(f"normalization of {part!r} must have mean and std; got {value!r}.") from error


def _read_calibration(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a calibration from {os.fspath(file)!r}: {error}") from error
    return found
