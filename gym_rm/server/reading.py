"""Read a request: strict JSON, then the fields of its protocol."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import pydantic
from starlette.requests import Request

from gym_rm.errors import nearest
from gym_rm.server.errors import Refused

MAX_DEPTH = 64
MAX_REPORTED = 5
LARGE = 2**18  # bytes of a body that another thread parses, so that other requests go on

AnyModel = TypeVar("AnyModel", bound=pydantic.BaseModel)


class Body(pydantic.BaseModel):
    """Base class of request bodies. Unknown fields are refused by `validate`, which names the nearest one."""

    model_config = pydantic.ConfigDict(extra="ignore", hide_input_in_errors=True, protected_namespaces=())


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body of a request as a dict.

    Raises:
        Refused: the body is not a JSON object, has another content type, or a number or key that JSON does not have.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    if kind != "application/json":
        raise Refused("unsupported_media_type", "send the body with the header Content-Type: application/json.")
    try:
        value = _parse(body) if len(body) < LARGE else await asyncio.to_thread(_parse, body)
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        shown = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "cannot be read"
        raise Refused("invalid_json", f"the body is not valid JSON: {shown}.") from None
    if not isinstance(value, dict):
        raise Refused("invalid_request", "the body must be a JSON object.")
    request.state.body = value
    return value


def validate(model: type[AnyModel], body: Mapping[str, Any], request: Request) -> AnyModel:
    """Return the fields of a body.

    Raises:
        Refused: a field is invalid or, without `?lenient=1`, unknown.
    """
    if not is_lenient(request):
        check_fields(body, model.model_fields)
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        raise invalid_fields(error) from None


def is_lenient(request: Request) -> bool:
    """Return whether the request asks to ignore unknown fields."""
    return request.query_params.get("lenient", "").lower() in ("1", "true", "yes")


def check_fields(given: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raise Refused for the first unknown field."""
    names = list(known)
    for name in given:
        if name not in names:
            field = f"{where}{name[:80]}"
            raise Refused(
                "unknown_field",
                f"unknown field {field!r}.{nearest(name[:80], names)} Fields: {', '.join(names)}. Add ?lenient=1 to "
                "the URL to ignore unknown fields.",
                param=field,
            )


def invalid_fields(error: pydantic.ValidationError) -> Refused:
    """Return the refusal of an invalid body, which names the fields and never their values."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    named = [(".".join(str(part)[:40] for part in each["loc"]) or "body", each["msg"]) for each in found]
    shown = "; ".join(f"{field}: {message}" for field, message in named[:MAX_REPORTED])
    more = f"; and {len(found) - MAX_REPORTED} more" if len(found) > MAX_REPORTED else ""
    return Refused("invalid_request", f"invalid fields: {shown}{more}.", param=named[0][0])


def _parse(body: bytes) -> Any:
    value = json.loads(body, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)
    _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("invalid_json", "the body is not valid JSON: an object has the same key twice.")
    return found


def _constant(name: str) -> NoReturn:
    raise Refused("invalid_json", f"the body is not valid JSON: {name} is not a number of JSON.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused("invalid_json", "the body has a number that is too large for a float64.")
    return value


def _int(text: str) -> int:
    if len(text) > 20:
        raise Refused("invalid_json", "the body has an integer of more than 64 bits.")
    return int(text)


def _check_depth(value: Any) -> None:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Refused("invalid_json", f"the body is nested more than {MAX_DEPTH} levels deep.")
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
