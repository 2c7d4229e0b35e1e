"""Weighted sums of several scorers, with gates between them, and routes of rows to some of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import describe, finite
from gym_rm.errors import ConfigError, nearest, warn_once
from gym_rm.scorer import ScorerLike
from gym_rm.scorers.combined import CombinedScorer
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompts


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


@dataclass(frozen=True, slots=True)
class Gate:
    """When a scorer counts: only in rows where a component of another scorer is large enough.

    Attributes:
        component: component that opens the gate, `"scorer"` or `"scorer/component"`.
        at_least: the gate is open where the component has at least this value.
        otherwise: value of the gated scorer where the gate is closed; it is not called for these rows.

    Raises:
        ConfigError: a number is not finite.
    """

    component: str
    at_least: float = 1.0
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.component, str):
            raise ConfigError(f"the component of a gate must be a text, got {describe(self.component)}.")
        finite("at_least of a gate", self.at_least)
        finite("otherwise of a gate", self.otherwise)


class WeightedScorer(CombinedScorer):
    """`sum_k weight_k * (component_k - mean_k) / std_k` over the components of several scorers.

    Components are NaN, and add nothing, in rows that are routed to other scorers. Where a gate is closed, the gated
    scorer is not called: its component is `otherwise`, and its info `"scorer/gate_open"` is False.

    Args:
        scorers: see `CombinedScorer`.
        weights: weight by component, `"scorer"` or `"scorer/component"`; or one weight per scorer. None is a weight of
            1 for the rewards of every scorer.
        normalization: `Calibration` (or its fields) by component, or a JSON file of `save_calibration`. A component
            without a calibration is not normalised.
        gates: `Gate` (its fields, or only the component) by scorer: the scorer counts only where the gate is open.
        route: field of the data rows (a key of `Prompt.metadata`) that says which scorers score a row.
        routes: names of scorers by the value of this field; `"*"` is for all other values. None: each value is the name
            of one scorer.

    Raises:
        ConfigError: a weight or calibration is for a component that no scorer returns, a route or gate names no
            scorer, or gates wait for each other.

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
        gates: Mapping[str, Gate | Mapping[str, Any] | str] | None = None,
        route: str | None = None,
        routes: Mapping[str, Sequence[str]] | None = None,
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
        self.gates = _gates(gates, names)
        self._rounds = _rounds(names, self.gates)
        self.route, self.routes = route, _routes(route, routes, names)
        super().__init__(scorers)  # last, so that an invalid setting loads nothing

    @property
    def settings(self) -> dict[str, Any]:
        """Weights and calibrations."""
        return {
            "weights": self.weights,
            "normalization": {name: dataclasses.asdict(value) for name, value in self.normalization.items()},
            "gates": {name: dataclasses.asdict(gate) for name, gate in self.gates.items()},
            "route": self.route,
            "routes": self.routes if self.route is not None else {},
        }

    def calibrate(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> WeightedScorer:
        """Return this scorer with every weighted component normalised to mean 0 and std 1 on these conversations.

        Raises:
            ConfigError: a component is equal for all conversations.
            ScoringError: some conversations have no score.
        """
        components = self.score(conversations, prompts).components
        known = {name: _component(components, name) for name in self.weights}
        known = {name: values[np.isfinite(values)] for name, values in known.items()}
        for name, values in known.items():
            if not values.size or np.ptp(values) == 0:
                raise ConfigError(
                    f"component {name!r} is equal for all {len(conversations)} conversations, so it cannot be "
                    "normalised; calibrate on more conversations, or remove its weight."
                )
        return WeightedScorer(
            self.scorers,
            weights=self.weights,
            normalization={name: Calibration.fit(values, conversations) for name, values in known.items()},
            gates=self.gates,
            route=self.route,
            routes=self.routes if self.route is not None else None,
        )

    def save_calibration(self, file: str | os.PathLike[str]) -> None:
        """Write the calibrations and the hash of their conversations to a JSON file for `normalization=`."""
        Path(file).write_text(json.dumps(self.settings["normalization"], indent=2) + "\n")

    def _reduce(self, components: Mapping[str, RewardArray]) -> RewardArray:
        terms = [np.zeros(len(next(iter(components.values()))))]
        for name, weight in self.weights.items():
            if name not in components and np.isnan(components[_owner(name, list(self.scorers)) or name]).all():
                continue  # no row of this batch was scored by its scorer
            values = _component(components, name)
            scale = self.normalization.get(name)
            term = weight * (values if scale is None else (values - scale.mean) / scale.std)
            terms.append(np.where(np.isnan(values), 0.0, term))  # a missing score is an error of the row, see `score`
        return np.asarray(np.stack(terms, axis=1).sum(axis=1, dtype=np.float64))

    def _results(self, conversations: Sequence[Conversation], prompts: Prompts) -> dict[str, Scores]:
        size = len(conversations)
        routed, _ = self._routed(size, prompts)
        results: dict[str, Scores] = {}
        for names in self._rounds:
            open_rows = {name: routed[name] & self._open(name, results, size) for name in names}
            asked = {name: np.flatnonzero(rows).tolist() for name, rows in open_rows.items() if rows.any()}
            found = self._ask(asked, conversations, prompts)
            for name in names:
                if name in found or routed[name].any():
                    scores = found.get(name) or Scores.from_rewards([]).scatter([], size)
                    results[name] = self._gated(name, scores, routed[name], open_rows[name])
        return {name: results[name] for name in self.scorers if name in results}

    def _row_errors(self, size: int, prompts: Prompts) -> list[str | None]:
        return self._routed(size, prompts)[1]

    def _routed(self, size: int, prompts: Prompts) -> tuple[dict[str, NDArray[np.bool_]], list[str | None]]:
        """Return the rows of each scorer, bool `[N]`, and what is wrong with the route of each row."""
        if self.route is None:
            return {name: np.ones(size, dtype=np.bool_) for name in self.scorers}, [None] * size
        rows = {name: np.zeros(size, dtype=np.bool_) for name in self.scorers}
        errors: list[str | None] = [None] * size
        for row in range(size):
            prompt = None if prompts is None else prompts[row]
            value = None if prompt is None else prompt.metadata.get(self.route)
            names = self.routes.get(str(value), self.routes.get("*"))
            if names is None:
                errors[row] = f"the data row has {self.route}={value!r:.80}; expected one of {list(self.routes)}"
            else:
                for name in names:
                    rows[name][row] = True
        return rows, errors

    def _open(self, name: str, results: Mapping[str, Scores], size: int) -> NDArray[np.bool_]:
        """Return where the gate of a scorer is open, bool `[N]`; also where its gate has no value."""
        if name not in self.gates:
            return np.ones(size, dtype=np.bool_)
        gate = self.gates[name]
        owner = _owner(gate.component, list(self.scorers))
        if owner is None or owner not in results:
            return np.ones(size, dtype=np.bool_)
        values = _component({owner: results[owner].rewards, **_parts(owner, results[owner])}, gate.component)
        return np.isnan(values) | (values >= gate.at_least)

    def _gated(self, name: str, scores: Scores, routed: NDArray[np.bool_], open_rows: NDArray[np.bool_]) -> Scores:
        """Return the scores of a scorer with `otherwise` where its gate is closed."""
        if name not in self.gates:
            return scores
        gate, closed = self.gates[name], routed & ~open_rows
        if closed.any() and (scores.rewards[open_rows] < gate.otherwise).any():
            warn_once(
                f"gates[{name!r}]: a closed gate gives {gate.otherwise}, more than {name} gives to some rows whose "
                "gate is open, so that it pays to close it; set `otherwise` below the lowest reward."
            )
        infos = {**scores.infos, "gate_open": open_rows}
        components = dict(scores.components)
        if not open_rows.any():  # the scorer was not called, so that its components are not known
            own = [each for each in (*self.weights, *self.normalization) if _owner(each, list(self.scorers)) == name]
            components |= {each[len(name) + 1 :]: np.full(len(closed), np.nan) for each in own if each != name}
        components = {key: np.where(closed, gate.otherwise, values) for key, values in components.items()}
        rewards = np.where(closed, gate.otherwise, scores.rewards)
        return dataclasses.replace(scores, rewards=rewards, components=components, infos=infos)


def _parts(name: str, scores: Scores) -> dict[str, RewardArray]:
    return {f"{name}/{key}": values for key, values in scores.components.items()}


def _owner(component: str, names: Sequence[str]) -> str | None:
    """Return the scorer that a component belongs to, the one with the longest name."""
    owners = [name for name in names if component == name or component.startswith(f"{name}/")]
    return max(owners, key=len, default=None)


def _gates(gates: Mapping[str, Gate | Mapping[str, Any] | str] | None, names: Sequence[str]) -> dict[str, Gate]:
    found: dict[str, Gate] = {}
    if not isinstance(gates, Mapping | None):
        raise ConfigError(f"gates must be a dict by scorer, got {describe(gates)}.")
    for name, value in (gates or {}).items():
        try:
            given: Any = {"component": value} if isinstance(value, str) else value
            found[name] = given if isinstance(given, Gate) else Gate(**given)
        except TypeError as error:
            raise ConfigError(
                f"gates[{name!r}] must be a component, or have component, at_least and otherwise; got {value!r:.100}."
            ) from error
        for each in (name, _owner(found[name].component, names)):
            if each not in names:
                wrong = found[name].component if each is None else each
                raise ConfigError(f"gates: {wrong!r} is not one of the scorers {list(names)}.{nearest(wrong, names)}")
    return found


def _rounds(names: Sequence[str], gates: Mapping[str, Gate]) -> list[list[str]]:
    """Return the scorers in the order of their gates; those of a round do not wait for each other."""
    waits = {name: _owner(gates[name].component, names) if name in gates else None for name in names}
    rounds: list[list[str]] = []
    while waits:
        ready = [name for name, gate in waits.items() if gate not in waits]
        if not ready:
            raise ConfigError(f"gates: the scorers {list(waits)} wait for each other; remove one of their gates.")
        rounds.append(ready)
        waits = {name: gate for name, gate in waits.items() if name not in ready}
    return rounds


def _routes(
    route: str | None, routes: Mapping[str, Sequence[str]] | None, names: Sequence[str]
) -> dict[str, list[str]]:
    if route is None:
        if routes is not None:
            raise ConfigError("routes needs route, the field of the data rows that has their values.")
        return {}
    if not isinstance(route, str) or not isinstance(routes, Mapping | None):
        raise ConfigError(
            f"route must be the name of a field, and routes a dict of lists of scorers; got {route!r:.80} and "
            f"{routes!r:.80}."
        )
    given = {name: [name] for name in names} if routes is None else routes
    if wrong := [each for each in given.values() if not isinstance(each, str | Sequence)]:
        raise ConfigError(f"routes must be a dict of lists of scorers, got {describe(wrong[0])} as one of the lists.")
    found = {str(value): [each] if isinstance(each, str) else list(each) for value, each in given.items()}
    for value, scorers in found.items():
        for name in scorers:
            if name not in names:
                raise ConfigError(f"routes[{value!r}]: {name!r} is not one of the scorers {list(names)}.")
    return found


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
