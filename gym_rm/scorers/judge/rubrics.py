"""Rubrics: criteria with weights, the values that a judge gave them, and the reward."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic

from gym_rm.config import Config, Finite, parse_settings
from gym_rm.errors import ConfigError, ConversationError, nearest
from gym_rm.types import Prompt

NAME_LENGTH = 60
# Names of the fields in the data sets of HealthBench, open-instruct and verifiers.
TEXT_FIELDS = ("criterion", "text", "description", "rubric_item")
WEIGHT_FIELDS = ("weight", "points")
ROW_FIELDS = ("rubric", "rubrics")


class Criterion(Config):
    """One criterion of a rubric."""

    model_config = pydantic.ConfigDict(extra="ignore")  # data sets have tags, axes, ...

    text: Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]
    """What the judge decides, such as "The reply names its source." """
    weight: Finite = 1.0
    """What the reward gains if the criterion is met; negative for a fault."""
    name: str = ""
    """Name of the component; empty for the beginning of the text. Rows whose criteria have the same names can be
    compared."""
    choices: Annotated[tuple[str, ...], pydantic.Field(min_length=2)] = ("no", "yes")
    """Answers of the judge from worst to best, whose values go from 0 to 1 in equal steps."""

    @pydantic.model_validator(mode="after")
    def _require_different(self) -> Criterion:
        if len({each.strip().casefold() for each in self.choices}) < len(self.choices):
            raise ValueError(f"choices must differ, got {list(self.choices)}")
        return self

    @property
    def component(self) -> str:
        """Name of the component: one line without slashes, which divide the names of scorers."""
        return re.sub(r"\s+", " ", (self.name or self.text).replace("/", "-")).strip()[:NAME_LENGTH].strip()


def read_rubric(value: Any) -> tuple[Criterion, ...]:
    """Return the criteria of a list, in which each is a text or a dict with a text and a weight.

    The text is in the field `criterion` (or `text`, `description`), the weight in `weight` (or `points`).

    Raises:
        ConfigError: there is no criterion, one is malformed, or two have the same name.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):  # a column of JSON
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"rubric is no valid JSON list: {error}.") from error
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ConfigError(f"rubric must be a list of {{criterion, weight}}, at least one; got {value!r:.100}.")
    criteria = tuple(_criterion(each, number) for number, each in enumerate(value, start=1))
    names = [each.component for each in criteria]
    for name in names:
        if names.count(name) > 1 and any(each.component == name and each.name for each in criteria):
            raise ConfigError(f"rubric has two criteria with the name {name!r}; give each a `name` of its own.")
    return tuple(
        each.model_copy(update={"name": f"{name} ({number})"}) if names.count(name) > 1 else each
        for number, (each, name) in enumerate(zip(criteria, names, strict=True), start=1)
    )


def _criterion(value: Any, number: int) -> Criterion:
    if isinstance(value, Criterion):
        return value
    known_fields = {*TEXT_FIELDS, *WEIGHT_FIELDS, "name", "choices"}
    fields = {"criterion": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise ConfigError(f"criterion {number} of the rubric must be a text or a dict, got {value!r:.100}.")
    for name in fields:  # data sets have other fields too, but a misspelled weight would turn a fault into a merit
        if name not in known_fields and (hint := nearest(str(name), known_fields)):
            raise ConfigError(f"criterion {number} of the rubric has the unknown field {name!r}.{hint}")
    known = {name: fields[name] for name in ("name", "choices") if fields.get(name) is not None}
    for name, spellings in (("text", TEXT_FIELDS), ("weight", WEIGHT_FIELDS)):
        given = [fields[spelling] for spelling in spellings if fields.get(spelling) is not None]
        known |= {name: given[0]} if given else {}
    try:
        return parse_settings(Criterion, known)
    except ConfigError as error:
        raise ConfigError(f"criterion {number} of the rubric, {dict(fields)!r:.200}: {error}") from error


def rubric_of_row(prompt: Prompt | None) -> tuple[Criterion, ...]:
    """Return the criteria in `prompt.metadata["rubric"]`.

    Raises:
        ConversationError: the row has none, or they are malformed.
    """
    value = next((each for name in ROW_FIELDS if (each := field_of(prompt, name)) is not None), None)
    if value is None:
        raise ConversationError("the row has no field `rubric`, a list of {criterion, weight}, and the scorer has none")
    try:
        return read_rubric(value)
    except ConfigError as error:
        raise ConversationError(str(error)) from error


def field_of(prompt: Prompt | None, name: str) -> Any:
    """Return a field of a data row as plain values, None without one."""
    value: Any = None if prompt is None else prompt.metadata.get(name)
    return value.tolist() if hasattr(value, "tolist") else value


def rubric_reward(weights: Sequence[float], values: Sequence[float]) -> float:
    """Return `sum(w v) / sum of the positive w` of weights w and values v in [0, 1].

    It is at most 1, and below 0 if faults outweigh: HealthBench, arXiv 2505.08775, section 3.

    Raises:
        ConversationError: no weight is positive.
    """
    divisor = math.fsum(weight for weight in weights if weight > 0)
    if not divisor:
        raise ConversationError("no weight of the rubric is positive")
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / divisor
