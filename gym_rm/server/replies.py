"""Replies of the routes, and the schemas of their request bodies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pydantic
from starlette.responses import Response

from gym_rm.scores import Scores
from gym_rm.server.errors import Refused, dump


def reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response; NaN is an error."""
    try:
        body = dump(content)
    except TypeError:  # an object among the infos of a function
        body = dump(json.loads(json.dumps(content, default=str)))
    return Response(body, status, dict(headers or {}), media_type="application/json")


def body_of(*models: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body that follows one of the models."""
    schemas = [_inlined(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def raise_for_rows(scores: Scores) -> Scores:
    """Return the scores; a protocol without errors of single rows refuses the request if one is missing."""
    if scores.failed_rows:
        row = scores.failed_rows[0]
        raise Refused("failed_row", f"row {row}: {scores.errors[row]}", param=f"row {row}")
    return scores


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without references to definitions, which OpenAPI would look for elsewhere."""
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inline(definitions[value["$ref"].rpartition("/")[2]])
        return {key: inline(each) for key, each in value.items()}

    inlined: dict[str, Any] = inline(schema)
    return inlined
