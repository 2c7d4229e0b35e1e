"""Several scorers as one: the base class, and ensembles of reward models.

A row has a score only if every scorer that it needs returned one, because a sum without one component is a different
reward.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import numpy as np

from gym_rm.checks import describe, finite, one_of
from gym_rm.errors import ConfigError, RowError, brief, logger
from gym_rm.scorer import (
    CALLS_THAT_WAIT,
    NeverCopied,
    Scorer,
    ScorerLike,
    check_conversations,
    is_relative,
    max_concurrent_calls,
    try_score,
)
from gym_rm.scorers.batching import SerialCalls, serial_calls
from gym_rm.scorers.load import acquire_scorer, release_scorer
from gym_rm.scores import RewardArray, Scores
from gym_rm.types import Conversation, Prompts, Provenance

EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std", "mean_minus_variance"]
ENSEMBLE_REDUCTIONS = ("mean", "min", "mean_minus_std", "mean_minus_variance")


class CombinedScorer(NeverCopied, abc.ABC):
    """Base class of scorers that call several named scorers and reduce their rewards to one.

    Scorers with a model in this process run one after the other, because they share its device. All others, such as
    servers, judges, verifiers and functions, run in threads beside them. Several threads may call `score` at the same
    time: calls that wait for a scorer that accepts one at a time (`max_concurrent_calls`) are then merged into one.

    The rewards of each scorer become the component with its name. Its own components become `"name/component"`, and
    its infos become `"name/info"`. An episode ends if any of the scorers ends it. If one of them rates steps, its
    `step_rewards` are kept as they are; those of several are left out, because they can have other steps.

    Args:
        scorers: arguments of `load_scorer` by name; a sequence gets the names `scorer_0`, `scorer_1`, ...

    If a scorer raises an exception, the rows that it was asked for have no score, and the traceback is logged.

    Raises:
        ConfigError: `scorers` is empty, or not a mapping or sequence.
    """

    def __init__(self, scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> None:
        self.scorers: dict[str, Scorer] = {}
        self._acquired: list[Scorer] = []
        self._serial: dict[str, SerialCalls] = {}
        try:
            for name, one in self._named(scorers).items():
                self.scorers[name] = acquire_scorer(one, {})
                self._acquired.append(self.scorers[name])
                if max_concurrent_calls(self.scorers[name]) < 2:
                    self._serial[name] = serial_calls(self.scorers[name])
        except BaseException:
            self.close()
            raise

    @classmethod
    def _named(cls, scorers: Mapping[str, ScorerLike] | Sequence[ScorerLike]) -> Mapping[str, ScorerLike]:
        """Return the arguments of `load_scorer` by name, without loading them."""
        is_list = isinstance(scorers, Sequence) and not isinstance(scorers, str | bytes)
        named = {f"scorer_{k}": one for k, one in enumerate(scorers)} if is_list else scorers
        if not isinstance(named, Mapping) or not named or not all(isinstance(name, str) for name in named):
            raise ConfigError(
                f"scorers of {cls.__name__} must be a dict of scorers by name, or a list, of at least one; got "
                f"{describe(scorers)}."
            )
        return named

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self.settings.items() if value)
        return f"{type(self).__name__}({self.scorers!r}{settings})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations with every scorer.

        Raises:
            ScoringError: a score is missing in some rows; the attribute `scores` has the other rows.
        """
        check_conversations(conversations, prompts)
        results = self._results(conversations, prompts)
        errors = self._row_errors(len(conversations), prompts)
        components: dict[str, RewardArray] = {}
        for name, scores in results.items():
            mine = {name: scores.rewards, **{f"{name}/{key}": values for key, values in scores.components.items()}}
            if twice := sorted(components.keys() & mine.keys()):
                raise ConfigError(
                    f"scorers: two of them return the component {twice[0]!r}; rename one of {list(self.scorers)}."
                )
            components |= mine
            for row in scores.failed_rows:
                error = scores.errors[row]
                assert error is not None
                errors[row] = errors[row] or RowError(f"{name}: {error}", error.kind)
        components |= {name: np.full(len(conversations), np.nan) for name in self.scorers if name not in components}
        ends = [scores.terminations for scores in results.values() if scores.terminations is not None]
        rewards, infos = self._reduce(components, conversations, prompts)
        combined = Scores.from_rewards(
            rewards,
            components=components,
            errors=errors,
            terminations=np.logical_or.reduce(ends) if ends else None,
            provenance=self._provenance(results),
        )
        named = {f"{name}/{key}": values for name, each in results.items() for key, values in each.infos.items()}
        others: dict[str, Any] = {"infos": {**named, **infos}}
        others |= {
            name: np.max([getattr(combined, name), *(getattr(each, name) for each in results.values())], axis=0)
            for name in ("num_tokens", "truncated_tokens")
        }
        rate_steps = [each for each in results.values() if each.step_rewards is not None]
        if len(rate_steps) == 1:
            others |= {"step_rewards": rate_steps[0].step_rewards, "step_ends": rate_steps[0].step_ends}
        return dataclasses.replace(combined, **others).raise_for_errors()

    def _row_errors(self, size: int, prompts: Prompts) -> list[str | None]:
        """Return why a row cannot be scored, or None, for each of N rows."""
        return [None] * size

    def _results(self, conversations: Sequence[Conversation], prompts: Prompts) -> dict[str, Scores]:
        """Return the scores of every scorer, `[N]` each; NaN without an error where a scorer was not asked."""
        every = list(range(len(conversations)))
        return self._ask(dict.fromkeys(self.scorers, every), conversations, prompts)

    def _ask(
        self, rows: Mapping[str, Sequence[int]], conversations: Sequence[Conversation], prompts: Prompts
    ) -> dict[str, Scores]:
        """Score some rows with each of the named scorers, and return `[N]` scores of each."""

        def ask(names: Sequence[str]) -> list[tuple[str, Scores]]:
            return [(name, self._score_rows(name, rows[name], conversations, prompts)) for name in names]

        jobs: dict[object, list[str]] = {}  # the names of one scorer, and of all models, run one after the other
        for name in rows:
            jobs.setdefault("models" if _has_model(self.scorers[name]) else id(self.scorers[name]), []).append(name)
        ours = jobs.pop("models", None) or (jobs.popitem()[1] if jobs else [])
        with ThreadPoolExecutor(max(1, len(jobs)), thread_name_prefix="gym_rm scorer") as threads:
            others = [threads.submit(ask, names) for names in jobs.values()]
            found = [*ask(ours), *(pair for other in others for pair in other.result())]
        scores = dict(found)
        return {name: scores[name] for name in rows}

    def _score_rows(
        self, name: str, rows: Sequence[int], conversations: Sequence[Conversation], prompts: Prompts
    ) -> Scores:
        asked = [conversations[row] for row in rows]
        given = None if prompts is None else [prompts[row] for row in rows]
        try:
            if name in self._serial:
                scores = self._serial[name].try_score(asked, given)
            else:
                scores = try_score(self.scorers[name], asked, given)
        except ConfigError:
            raise
        except Exception as error:
            logger.warning("the scorer %r raised an exception, so its rows have no score", name, exc_info=error)
            scores = Scores.from_rewards(
                [np.nan] * len(rows), errors=[RowError.of(error, f"raised {brief(error)}")] * len(rows)
            )
        return scores.scatter(rows, len(conversations))

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        return any(map(is_relative, self.scorers.values()))

    @property
    def max_concurrent_calls(self) -> int:
        """0 if it is so for all scorers, else many: one that takes a call at a time has it here too."""
        return CALLS_THAT_WAIT if any(map(max_concurrent_calls, self.scorers.values())) else 0

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
    def _reduce(
        self, components: Mapping[str, RewardArray], conversations: Sequence[Conversation], prompts: Prompts
    ) -> tuple[RewardArray, Mapping[str, RewardArray]]:
        """Return rewards `[N]` from the components by name, and infos `[N]` about the reduction by name."""

    def _provenance(self, results: Mapping[str, Scores]) -> Provenance:
        scorers = {
            name: None if (made := results[name].provenance) is None else dataclasses.asdict(made)
            for name in self.scorers
            if name in results
        }
        settings = {**self.settings, "scorers": scorers, **({"relative": True} if self.relative else {})}
        return Provenance(type(self).__name__, "+".join(scorers), settings=settings)

    def _call(self, method: str) -> None:
        for scorer in self.scorers.values():
            if callable(function := getattr(scorer, method, None)):
                function()


class EnsembleScorer(CombinedScorer):
    """Mean or minimum of several reward models, or their mean lowered by their disagreement.

    Members need a common scale first, or the one with the largest numbers decides: `{"kind": "weighted", "scorers":
    {"name": ...}, "weights": {"name": 1 / deviation}}` gives a member one, with the deviation of its rewards on rows of
    yours. The info `disagreement` is the standard deviation of the members.

    Args:
        scorers: see `CombinedScorer`.
        reduction: `"mean"`; `"min"`; `"mean_minus_std"`, mean - coefficient * population standard deviation; or
            `"mean_minus_variance"`, mean - coefficient * population variance (uncertainty-weighted optimisation, arXiv
            2310.02743, section 3).
        coefficient: of the two discounts; one that suits the deviation does not suit the variance.

    Raises:
        ConfigError: an argument is invalid, or there is a coefficient for a reduction without one.

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
        if self.reduction in ("mean", "min") and self.coefficient != 1.0:
            raise ConfigError(f"coefficient={coefficient} has no effect with reduction={reduction!r}; leave it out.")
        super().__init__(scorers)

    @property
    def settings(self) -> dict[str, Any]:
        """Reduction and coefficient."""
        return {"reduction": self.reduction, "coefficient": self.coefficient}

    def _reduce(
        self, components: Mapping[str, RewardArray], conversations: Sequence[Conversation], prompts: Prompts
    ) -> tuple[RewardArray, Mapping[str, RewardArray]]:
        # One row per conversation: numpy then adds in the same order for one conversation and for many.
        stacked = np.stack([components[name] for name in self.scorers], axis=1)
        disagreement = np.asarray(stacked.std(axis=1))
        discounts = {"mean_minus_std": disagreement, "mean_minus_variance": stacked.var(axis=1)}
        value = stacked.min(axis=1) if self.reduction == "min" else stacked.mean(axis=1)
        return np.asarray(value - self.coefficient * discounts.get(self.reduction, 0.0)), {"disagreement": disagreement}


def _has_model(scorer: Any) -> bool:
    """Return whether a scorer, or one that it combines, has a model in this process."""
    inner = getattr(scorer, "scorers", None)
    return hasattr(scorer, "executor") or (isinstance(inner, Mapping) and any(map(_has_model, inner.values())))
