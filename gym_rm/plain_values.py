"""Values of any type as plain values for JSON, and the columns of scores back from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import numpy as np
import pydantic

from gym_rm.checks import describe
from gym_rm.errors import ConfigError, RowError, nearest
from gym_rm.types import Provenance, Workload

Number: TypeAlias = Annotated[float, pydantic.Field(allow_inf_nan=False)] | None
Count: TypeAlias = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


def to_plain(value: Any) -> Any:
    """Return a value that `json.dumps` accepts: NaN and infinities become None, and other objects become texts."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | list | tuple | set | frozenset):
        return [to_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def read_scores(plain: Any) -> dict[str, Any]:
    """Return the columns of `Scores` from what `Scores.to_dict` wrote.

    Raises:
        ConfigError: a field is unknown or missing, or is not what `to_dict` writes.
    """
    try:
        read = dict(_PlainScores.model_validate(plain))
    except pydantic.ValidationError as error:
        raise ConfigError(_explain(error)) from error
    kinds = read.pop("error_kinds") or ["failed"] * len(read["errors"])
    if len(kinds) != len(read["errors"]):
        raise ConfigError(f"error_kinds must have one entry for each of the errors, got {len(kinds)}.")
    read["errors"] = [
        text if text is None else RowError(text, kind or "failed")
        for text, kind in zip(read["errors"], kinds, strict=True)
    ]
    return {**read, "infos": {name: _column(values) for name, values in read["infos"].items()}}


class _PlainScores(pydantic.BaseModel):
    """What `Scores.to_dict` writes."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    rewards: list[Number]
    errors: list[str | None]
    error_kinds: list[str | None] | None = None
    num_tokens: list[Count]
    truncated_tokens: list[Count]
    components: dict[str, list[Number]] = {}
    turn_rewards: list[list[Number]] | None = None
    step_rewards: list[list[Number]] | None = None
    step_ends: list[list[Count]] | None = None
    terminations: list[bool] | None = None
    infos: dict[str, list[Any]] = {}
    provenance: Provenance | None = None
    workload: Workload | None = None

    @pydantic.field_validator("provenance", "workload", mode="before")
    @classmethod
    def _record(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Fill a record from a mapping, which strict models do not do by themselves."""
        record: Any = {"provenance": Provenance, "workload": Workload}[str(info.field_name)]
        return None if value is None else pydantic.TypeAdapter(record).validate_python(value)


def _explain(error: pydantic.ValidationError) -> str:
    """Return the first problem of plain scores."""
    problem = error.errors()[0]
    place = "".join(f"[{part!r}]" if depth else str(part) for depth, part in enumerate(problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"scores have the unknown field {place!r}.{nearest(place, _PlainScores.model_fields)}"
    return f"{place or 'scores'}: {problem['msg'].lower()}, got {describe(problem['input'])}."


def _column(values: list[Any]) -> Any:
    """Return a column of infos as an array if its values are numbers of one type; a missing float is NaN."""
    kinds = {type(value) for value in values}
    if float in kinds and kinds <= {float, int, type(None)}:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    if kinds == {list}:
        with contextlib.suppress(ValueError):  # lists of different lengths
            array = np.array(values)
            return array if array.size and array.dtype.kind in "fib" else values
    return values
