"""Weighted sums of several scorers, with gates between them, and routes of rows to some of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic
from numpy.typing import NDArray

from gym_rm.config import Config, Finite, parse_settings
from gym_rm.errors import ConfigError, nearest
from gym_rm.scorer import ScorerLike
from gym_rm.scorers.combined import CombinedScorer
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompt, Prompts


class Gate(Config):
    """When a scorer counts: only in rows where the reward of another scorer, which has no gate, is large enough."""

    scorer: str
    """The scorer whose reward opens the gate."""
    at_least: Finite = 1.0
    """The gate is open where the reward has at least this value."""
    otherwise: Finite = 0.0
    """Value of the gated scorer where the gate is closed; it is not called for these rows. Below the lowest reward of
    this scorer, or a policy learns to close the gate."""


class _Settings(Config):
    weights: Annotated[dict[str, Finite], pydantic.Field(min_length=1)]
    gates: dict[str, Gate]
    route: str | None
    routes: dict[str, list[str]]


class WeightedScorer(CombinedScorer):
    """`sum_k weight_k * component_k` over the components of several scorers.

    Components are NaN, and add nothing, in rows that are routed to other scorers. Where a gate is closed, the gated
    scorer is not called: its reward is `otherwise`, and its info `"scorer/gate_open"` is False.

    Args:
        scorers: see `CombinedScorer`.
        weights: weight by component, `"scorer"` or `"scorer/component"`. None is a weight of 1 for the rewards
            of every scorer.
        gates: `Gate` (or its fields) by scorer: the scorer counts only where the gate is open.
        route: field of the data rows (a key of `Prompt.metadata`) that says which scorers score a row.
        routes: names of scorers by the value of this field; `"*"` is for all other values. None: each value is the name
            of one scorer.

    Raises:
        ConfigError: a weight is for a component that no scorer returns, or a route or gate names no scorer.

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
        weights: Mapping[str, float] | None = None,
        gates: Mapping[str, Gate | Mapping[str, Any]] | None = None,
        route: str | None = None,
        routes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        names = list(self._named(scorers))
        if route is None and routes is not None:
            raise ConfigError("routes needs route, the field of the data rows that has their values.")
        given = {
            "weights": dict.fromkeys(names, 1.0) if weights is None else weights,
            "gates": {} if gates is None else gates,
            "route": route,
            "routes": {name: [name] for name in names} if routes is None else routes,
        }
        settings = parse_settings(_Settings, given)
        self.weights, self.gates = settings.weights, settings.gates
        self.route, self.routes = settings.route, settings.routes
        openers = [gate.scorer for gate in self.gates.values()]
        for name in itertools.chain(self.gates, openers, *self.routes.values()):
            if name not in names:
                raise ConfigError(
                    f"gates and routes: {name!r} is not one of the scorers {names}.{nearest(name, names)}"
                )
        for name, gate in self.gates.items():
            if gate.scorer in self.gates:
                raise ConfigError(f"gates[{name!r}]: {gate.scorer!r} has a gate itself; use a scorer without one.")
        for component in self.weights:
            owner = _owner(component, names)
            if owner in self.gates and owner != component:
                raise ConfigError(f"weights: {owner!r} has a gate, so only its reward can have a weight.")
            if owner is None:
                hint = nearest(component, names) or nearest(component.partition("/")[0], names)
                raise ConfigError(f"{component!r} is not a component of the scorers {names}.{hint}")
        super().__init__(scorers)  # last, so that an invalid setting loads nothing

    @property
    def settings(self) -> dict[str, Any]:
        """Weights, gates and routes."""
        return {
            "weights": self.weights,
            "gates": {name: gate.model_dump() for name, gate in self.gates.items()},
            "route": self.route,
            "routes": self.routes if self.route is not None else {},
        }

    def route_of(self, prompt: Prompt | None) -> str:
        """Return the key of `routes` that a data row has; those that have none share `"*"`."""
        value = None if prompt is None or self.route is None else prompt.metadata.get(self.route)
        return str(value) if str(value) in self.routes else "*"

    def _reduce(
        self, components: Mapping[str, RewardArray], conversations: Sequence[Conversation], prompts: Prompts
    ) -> tuple[RewardArray, Mapping[str, RewardArray]]:
        terms = [np.zeros(len(next(iter(components.values()))))]
        for name, weight in self.weights.items():
            unscored = np.isnan(components[_owner(name, list(self.scorers)) or name])
            if name not in components:
                if unscored.all():
                    continue  # no row of this batch was scored by its scorer
                raise ConfigError(
                    f"component {name!r} is not returned by any scorer; expected one of {sorted(components)}."
                    f"{nearest(name, components)}"
                )
            # Not asked for this row, or failed, which is an error of the row; a component alone cannot be missing.
            terms.append(np.where(unscored, 0.0, weight * components[name]))
        return np.asarray(np.stack(terms, axis=1).sum(axis=1, dtype=np.float64)), {}

    def _results(self, conversations: Sequence[Conversation], prompts: Prompts) -> dict[str, Scores]:
        size = len(conversations)
        routed, _ = self._routed(size, prompts)
        results: dict[str, Scores] = {}
        for names in ([name for name in self.scorers if name not in self.gates], list(self.gates)):
            open_rows = {name: routed[name] & self._open(name, results, size) for name in names}
            asked = {name: np.flatnonzero(rows).tolist() for name, rows in open_rows.items() if rows.any()}
            answered = self._ask(asked, conversations, prompts)
            for name in names:
                if name in answered or routed[name].any():
                    scores = answered.get(name) or Scores.from_rewards([]).scatter([], size)
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
            names = self.routes.get(self.route_of(prompt))
            if names is None:
                value = None if prompt is None else prompt.metadata.get(self.route)
                errors[row] = f"the data row has {self.route}={value!r:.80}; expected one of {list(self.routes)}"
            for name in names or ():
                rows[name][row] = True
        return rows, errors

    def _open(self, name: str, results: Mapping[str, Scores], size: int) -> NDArray[np.bool_]:
        """Return where the gate of a scorer is open, bool `[N]`; also where its gate has no value."""
        gate = self.gates.get(name)
        if gate is None or gate.scorer not in results:
            return np.ones(size, dtype=np.bool_)
        values = results[gate.scorer].rewards
        return np.isnan(values) | (values >= gate.at_least)

    def _gated(self, name: str, scores: Scores, routed: NDArray[np.bool_], open_rows: NDArray[np.bool_]) -> Scores:
        """Return the scores of a scorer with `otherwise` where its gate is closed."""
        if name not in self.gates:
            return scores
        rewards = np.where(routed & ~open_rows, self.gates[name].otherwise, scores.rewards)
        infos = {**scores.infos, "gate_open": np.where(routed, open_rows, None)}  # type: ignore[call-overload]
        return dataclasses.replace(scores, rewards=rewards, infos=infos)


def _owner(component: str, names: Sequence[str]) -> str | None:
    """Return the scorer that a component belongs to, the one with the longest name."""
    owners = [name for name in names if component == name or component.startswith(f"{name}/")]
    return max(owners, key=len, default=None)
