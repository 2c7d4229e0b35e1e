"""Results of scoring: one reward per conversation, its named components, and the reasons of missing scores.

Shapes: `[N]` has one entry per conversation of a `score` call, in the given order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import describe, in_order
from gym_rm.errors import ConfigError, GymRMError, RowError
from gym_rm.plain_values import read_scores, to_plain
from gym_rm.score_columns import DTYPES, LISTS, Column, Key, absent, array, indices, info_array, item, join, taken
from gym_rm.types import Provenance, Workload

FloatArray: TypeAlias = NDArray[np.float32]
"""Values of a model."""

RewardArray: TypeAlias = NDArray[np.float64]
"""Rewards: float64, so that the numbers of a reward function are kept exactly."""


@dataclass(frozen=True, slots=True)
class Score:
    """One row of `Scores`, with the values of this row in its columns; `infos` has those that the row has.

    The reward is NaN if there is an `error`.
    """

    reward: float
    components: Mapping[str, float]
    num_tokens: int
    truncated_tokens: int
    error: RowError | None
    turn_rewards: RewardArray | None
    step_rewards: RewardArray | None
    step_ends: NDArray[np.int64] | None
    terminated: bool
    infos: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Scores:
    """The result of `Scorer.score` for N conversations.

    `scores[2]` and iteration give rows (`Score`); `scores[2:5]`, `take`, `scatter` and `concatenate` give `Scores`.
    The constructor accepts lists, and converts every column to the type below.

    Attributes:
        rewards: float64 `[N]`, NaN where `errors` has a message.
        components: named components of the reward, each float64 `[N]` (objectives, ensemble members, ...).
        num_tokens: int64 `[N]`, number of tokens that were scored; 0 if the scorer does not count them.
        truncated_tokens: int64 `[N]`, number of tokens that were removed to fit `max_length`.
        errors: `[N]`, None or why the score is missing: a text with a `kind`, see `RowError`.
        turn_rewards: with `turns="all"`, `[N]` arrays of float64, one value per assistant turn.
        step_rewards: for process reward models, `[N]` arrays of float64, one value per step of the last reply.
        step_ends: with `step_rewards`, `[N]` arrays of int64: the character of the last reply's content after the end
            of each step (without the separator). Empty where this is not known: for rendered texts, and for answers
            (`judged="answer"`) that are not one piece of the reply.
        terminations: bool `[N]`, whether the scorer ends the episode; None if it never does.
        infos: other results of the scorer by name (a verdict, an extracted answer, ...): arrays `[N, ...]` of float64,
            int64, bool or objects. A row without the info has NaN in an array of floats, and None in one of objects;
            an array of integers or booleans with missing rows is one of objects. Environments copy them to their
            `infos`.
        provenance: how the scores were computed.
        workload: cost of the `score` call.

    Raises:
        ConfigError: a column does not have N entries, or a row has another number of `step_ends` than of steps.

    Example:
        >>> scores = Scores.from_rewards([0.5, 1.0])
        >>> scores
        Scores(rewards=[0.5, 1])
        >>> scores[1].reward, len(scores)
        (1.0, 2)
    """

    rewards: RewardArray
    components: Mapping[str, RewardArray]
    num_tokens: NDArray[np.int64]
    truncated_tokens: NDArray[np.int64]
    errors: tuple[RowError | None, ...]
    turn_rewards: tuple[RewardArray, ...] | None = None
    step_rewards: tuple[RewardArray, ...] | None = None
    step_ends: tuple[NDArray[np.int64], ...] | None = None
    terminations: NDArray[np.bool_] | None = None
    infos: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    provenance: Provenance | None = None
    workload: Workload | None = None

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {
            name: array(name, getattr(self, name), dtype)
            for name, dtype in DTYPES.items()
            if getattr(self, name) is not None or name != "terminations"
        }
        if (errors := in_order(self.errors)) is None:
            raise ConfigError(f"errors of Scores must be a list of texts and None, got {describe(self.errors)}.")
        columns["errors"] = tuple(
            each if each is None or isinstance(each, RowError) else RowError(each) for each in errors
        )
        columns["infos"] = {name: info_array(each) for name, each in self.infos.items()}
        columns["components"] = {
            name: array(f"components[{name!r}]", each, np.float64) for name, each in self.components.items()
        }
        for name, dtype in LISTS.items():
            if (lists := getattr(self, name)) is not None:
                columns[name] = tuple(np.asarray(each, dtype=dtype) for each in lists)
        self._set(columns)
        size = self.rewards.size
        for (name, key), column in self._columns().items():
            shape = np.shape(column) if isinstance(column, np.ndarray) else (len(column),)
            if shape[:1] != (size,) or (name != "infos" and len(shape) != 1):
                shown = name if key is None else f"{name}[{key!r}]"
                raise ConfigError(f"{shown} of Scores must have one entry per reward ({size}), got the shape {shape}.")
        for row, ends in enumerate(self.step_ends or ()):
            steps = () if self.step_rewards is None else self.step_rewards[row]
            if len(ends) not in (0, len(steps)):
                raise ConfigError(f"row {row} of Scores has {len(ends)} step_ends, but {len(steps)} step_rewards.")

    @classmethod
    def from_rewards(
        cls,
        rewards: Sequence[float] | NDArray[Any],
        *,
        components: Mapping[str, Sequence[float] | NDArray[Any]] | None = None,
        errors: Sequence[str | None] | None = None,
        terminations: Sequence[bool] | NDArray[np.bool_] | None = None,
        infos: Mapping[str, Sequence[Any] | NDArray[Any]] | None = None,
        provenance: Provenance | None = None,
    ) -> Scores:
        """Create scores from rewards, with token counts of 0 and failures marked (see `mark_failures`)."""
        values = array("rewards", rewards, np.float64).reshape(-1).copy()
        num_tokens, truncated_tokens = np.zeros((2, len(values)), dtype=np.int64)
        named: dict[str, Any] = {"components": components or {}, "infos": infos or {}}
        ends = None if terminations is None else np.array(terminations, dtype=np.bool_)
        texts: Any = (None,) * len(values) if errors is None else errors
        made = cls._trusted if errors is None and terminations is None and not components and not infos else cls
        return made(
            rewards=values,
            num_tokens=num_tokens,
            truncated_tokens=truncated_tokens,
            errors=texts,
            terminations=ends,
            provenance=provenance,
            **named,
        ).mark_failures()

    @classmethod
    def concatenate(cls, parts: Iterable[Scores]) -> Scores:
        """Concatenate the rows of all parts.

        If a part lacks a component, an info or an optional column, its rows get missing values (NaN, None, 0 or empty).
        The provenance is kept if it is the same for all parts. Workloads are added.
        """
        parts = list(parts) or [cls.from_rewards([])]
        columns = [part._columns() for part in parts]
        examples = {key: column for named in reversed(columns) for key, column in named.items()}
        joined = {}
        for key, example in examples.items():
            rows = ((named.get(key), len(part)) for named, part in zip(columns, parts, strict=True))
            joined[key] = join([absent(key, example, size) if column is None else column for column, size in rows])
        provenances = [part.provenance for part in parts]
        workloads = [part.workload for part in parts if part.workload is not None]
        return cls._of_columns(
            joined,
            provenances[0] if all(each == provenances[0] for each in provenances) else None,
            functools.reduce(operator.add, workloads) if workloads else None,
        )

    def take(self, rows: Iterable[int]) -> Scores:
        """Return the given rows in the given order, or those where a mask (bool `[N]`) is True.

        Provenance and workload are still those of the whole call.
        """
        index = indices(rows, len(self))
        columns = {key: taken(column, index) for key, column in self._columns().items()}
        return self._of_columns(columns, self.provenance, self.workload)

    def scatter(self, rows: Iterable[int], size: int) -> Scores:
        """Return scores of `size` rows: row i moves to `rows[i]`, and all other rows have NaN and no error.

        Args:
            rows: one index for each of these scores, or a mask (bool `[size]`).
            size: number of rows of the result.

        Raises:
            ConfigError: `rows` does not have one index for each of these scores.
        """
        index = indices(rows, size)
        if len(index) != len(self) or len(set(index)) != len(index):
            raise ConfigError(f"rows must have a different index for each of the {len(self)} scores, got {index}.")
        sources = [len(self)] * size  # all other rows are copies of one that is absent
        for source, row in enumerate(index):
            sources[row] = source
        columns = {
            key: taken(join([column, absent(key, column, 1)]), sources) for key, column in self._columns().items()
        }
        return self._of_columns(columns, self.provenance, self.workload)

    def mark_failures(self) -> Scores:
        """Set an error for every reward that is not finite, and the reward NaN for every row with an error."""
        finite = np.isfinite(self.rewards)
        if finite.all() and not self.failed_rows:
            return self
        rewards = self.rewards.copy()
        errors = list(self.errors)
        for row in np.flatnonzero(~finite).tolist():
            errors[row] = errors[row] or RowError(f"the reward is {rewards[row]}")
        rewards[[error is not None for error in errors]] = np.nan
        columns = {**self._columns(), ("rewards", None): rewards, ("errors", None): tuple(errors)}
        return self._of_columns(columns, self.provenance, self.workload)

    def raise_for_errors(self) -> Scores:
        """Return these scores if no score is missing.

        Raises:
            ScoringError: some scores are missing. The error contains the others.
        """
        if self.failed_rows:
            raise ScoringError(self)
        return self

    @property
    def failed_rows(self) -> tuple[int, ...]:
        """Indices of the conversations without a score."""
        if self.errors.count(None) == len(self.errors):
            return ()
        return tuple(row for row, error in enumerate(self.errors) if error is not None)

    def rewards_or_none(self) -> list[float | None]:
        """Return N rewards as Python floats, with None for missing scores."""
        rewards = self.rewards.tolist()
        return [None if error is not None else reward for reward, error in zip(rewards, self.errors, strict=True)]

    def rewards_or_fallback(self, fallback_reward: float | None) -> list[float]:
        """Return N rewards as Python floats, with `fallback_reward` for missing scores.

        Raises:
            ScoringError: some scores are missing, and `fallback_reward` is None.
        """
        if fallback_reward is None:
            self.raise_for_errors()
        return [fallback_reward if reward is None else reward for reward in self.rewards_or_none()]  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values by field, ready for JSON. NaN becomes None; empty fields are omitted."""
        plain: dict[str, Any] = {name: {} for name in _BY_NAME}
        for (field_name, name), column in self._columns().items():
            values = [to_plain(value) for value in column]
            if field_name == "infos" and name is not None:
                values = [value if has else None for value, has in zip(values, self.has_info(name), strict=True)]
            if name is None:
                plain[field_name] = values
            else:
                plain[field_name][name] = values
        for record in ("provenance", "workload"):
            if getattr(self, record) is not None:
                plain[record] = to_plain(dataclasses.asdict(getattr(self, record)))
        if self.failed_rows:
            plain["error_kinds"] = [error and error.kind for error in self.errors]
        return {name: value for name, value in plain.items() if name not in _BY_NAME or value}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Scores:
        """Return the scores that `to_dict` wrote. A missing number (None) becomes NaN.

        Columns of `infos` get the dtype of their values; one of integers or booleans with None among them has objects.

        Raises:
            ConfigError: a field is unknown or missing, or is not what `to_dict` writes.
        """
        return cls(**read_scores(plain))

    def has_info(self, name: str) -> NDArray[np.bool_]:
        """Return which rows have an info, bool `[N]`."""
        values = self.infos[name]
        if values.dtype.kind not in "fO":
            return np.ones(len(self), dtype=np.bool_)
        missing = np.isnan(values) if values.dtype.kind == "f" else _is_none(values).astype(np.bool_)
        found: NDArray[np.bool_] = ~missing.all(axis=tuple(range(1, missing.ndim)))
        return found

    def __len__(self) -> int:
        return len(self.errors)

    @overload
    def __getitem__(self, rows: int | np.integer[Any]) -> Score: ...

    @overload
    def __getitem__(self, rows: slice) -> Scores: ...

    def __getitem__(self, rows: int | np.integer[Any] | slice) -> Score | Scores:
        if isinstance(rows, slice):
            return self.take(range(*rows.indices(len(self))))
        row = operator.index(rows)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for {len(self)} scores.")
        return Score(
            reward=float(self.rewards[row]),
            components={name: float(values[row]) for name, values in self.components.items()},
            num_tokens=int(self.num_tokens[row]),
            truncated_tokens=int(self.truncated_tokens[row]),
            error=self.errors[row],
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards[row],
            step_rewards=None if self.step_rewards is None else self.step_rewards[row],
            step_ends=None if self.step_ends is None else self.step_ends[row],
            terminated=bool(self.terminations is not None and self.terminations[row]),
            infos={name: item(values[row]) for name, values in self.infos.items() if self.has_info(name)[row]},
        )

    def __iter__(self) -> Iterator[Score]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        shown = ", ".join(f"{reward:.4g}" if math.isfinite(reward) else "nan" for reward in self.rewards[:6].tolist())
        parts = [f"rewards=[{shown}{', ...' if len(self) > 6 else ''}]"]
        parts += [f"of {len(self)} conversations"] if len(self) > 6 else []
        parts += [f"components={list(self.components)}"] if self.components else []
        parts += [f"{len(self.failed_rows)} failed"] if self.failed_rows else []
        parts += [f"{self.num_tokens.sum():,} tokens"] if self.num_tokens.any() else []
        return f"Scores({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return a table of the first rows with their errors, which notebooks show."""
        most, rows = 20, ["<tr><th>row</th><th>reward</th><th>error</th></tr>"]
        for row, (reward, error) in enumerate(zip(self.rewards[:most].tolist(), self.errors, strict=False)):
            cells = f"<td>{row}</td><td>{reward:.6g}</td>"
            rows.append(f'<tr>{cells}<td style="text-align:left">{escape((error or "")[:300])}</td></tr>')
        more = f"<p>and {len(self) - most:,} more rows; {len(self.failed_rows):,} of all failed</p>"
        html = f'<table class="mathjax_ignore tex2jax_ignore">{"".join(rows)}</table>{more * (len(self) > most)}'
        return html.encode("utf-8", "backslashreplace").decode()  # a notebook cannot save a lone surrogate

    def _columns(self) -> dict[Key, Column]:
        """Return all columns with one entry per row, by field and, for components and infos, by name."""
        columns: dict[Key, Column] = {}
        for name in _PER_ROW:
            value = getattr(self, name)
            if name in _BY_NAME:
                columns |= {(name, key): column for key, column in value.items()}
            elif value is not None:
                columns[name, None] = value
        return columns

    @classmethod
    def _of_columns(
        cls, columns: Mapping[Key, Column], provenance: Provenance | None, workload: Workload | None
    ) -> Scores:
        fields: dict[str, Any] = {name: {} for name in _BY_NAME}
        for (field_name, name), column in columns.items():
            if name is None:
                fields[field_name] = column
            else:
                fields[field_name][name] = column
        return cls._trusted(**fields, provenance=provenance, workload=workload)

    @classmethod
    def _trusted(cls, **columns: Any) -> Scores:
        """Make scores of columns that have their types and lengths already."""
        made = object.__new__(cls)
        made._set({**_OPTIONAL, **columns})
        return made

    def _set(self, columns: Mapping[str, Any]) -> None:
        for name, value in columns.items():
            object.__setattr__(self, name, value)


_BY_NAME = ("components", "infos")
_PER_ROW = tuple(each.name for each in dataclasses.fields(Scores) if each.name not in ("provenance", "workload"))
_OPTIONAL = dict.fromkeys((*LISTS, "terminations", "provenance", "workload"))
_is_none = np.frompyfunc(lambda value: value is None, 1, 1)


class ScoringError(GymRMError, ValueError):
    """Some conversations have no score. The error contains the scores of the others.

    Attributes:
        scores: `Scores` of the whole call. Failed rows have the reward NaN and an error message.
        rows: indices of the failed rows.
        summary: the failed rows and their errors, for readers without this object.
    """

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.rows = scores.failed_rows
        shown = [f"row {row}: {scores.errors[row]}".removesuffix(".") for row in self.rows[:5]]
        if len(self.rows) > len(shown):
            shown.append(f"and {len(self.rows) - len(shown)} more")
        scored = sum(np.isfinite(scores.rewards).tolist()) + len(self.rows)  # without rows that were not scored
        count = f"{len(self.rows)} of {scored} conversations"
        self.summary = f"{count} could not be scored: {'; '.join(shown)}."
        super().__init__(f"{self.summary} The other scores are in the `scores` attribute of this error.")

    def __reduce__(self) -> tuple[type[ScoringError], tuple[Scores]]:
        return type(self), (self.scores,)
