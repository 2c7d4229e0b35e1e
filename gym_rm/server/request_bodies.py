"""Bodies of requests: strict JSON, then pydantic models whose unknown fields are errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias

import pydantic
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from gym_rm.documents import parse_json
from gym_rm.errors import nearest
from gym_rm.server.responses import RequestError

MAX_REPORTED = 5
TokenId: TypeAlias = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31)]
# Only the first invalid item of a list is reported: a million errors take gigabytes.
Texts: TypeAlias = Annotated[list[str], pydantic.Field(fail_fast=True)]
TokenIds: TypeAlias = Annotated[list[TokenId], pydantic.Field(fail_fast=True)]
TokenLists: TypeAlias = Annotated[list[TokenIds], pydantic.Field(fail_fast=True)]
Objects: TypeAlias = Annotated[list[dict[str, Any]], pydantic.Field(fail_fast=True)]
TextInput: TypeAlias = str | Texts | TokenIds | TokenLists
NoFields: TypeAlias = Annotated[dict[str, Any], pydantic.Field(max_length=0)] | None


class RequestBody(pydantic.BaseModel):
    """Base class of request bodies."""

    model_config = pydantic.ConfigDict(extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_unknown_fields(cls, fields: Any) -> Any:
        """Refuse an unknown field with the nearest known one."""
        names = ((name, field.validation_alias) for name, field in cls.model_fields.items())
        known = [str(each) for name, alias in names for each in getattr(alias, "choices", [name])]
        for name in fields if isinstance(fields, dict) else ():
            if name not in known:
                raise ValueError(f"unknown field {name[:80]!r}.{nearest(name[:80], known)} Fields: {', '.join(known)}")
        return fields


class StrictRequest(Request):
    """A request whose JSON is that of `parse_json`, with no more rows than a request may have."""

    async def json(self) -> Any:
        """Return the value of the body."""
        try:
            value = parse_json(await self.body())
        except ValueError as error:
            raise RequestError("invalid_json", f"the body is not valid JSON: {error}.") from None
        for name, rows in value.items() if isinstance(value, dict) else ():
            if isinstance(rows, list) and rows and not isinstance(rows[0], int) and name != "messages":
                self.app.state.service.check_size(len(rows))  # before models are made of them
        return value


class StrictRoute(APIRoute):
    """A route that reads strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of FastAPI with another class of requests."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def invalid_fields(error: RequestValidationError) -> RequestError:
    """Return the refusal of an invalid body, which names the fields and never their values."""
    problems = []
    for problem in error.errors():
        parts = [str(part)[:40] for part in problem["loc"] if not str(part).startswith("body")]
        problems.append((".".join(parts) or "body", problem["msg"].removeprefix("Value error, ")))
    shown = "; ".join(f"{field}: {message}" for field, message in problems[:MAX_REPORTED])
    more = f"; and {len(problems) - MAX_REPORTED} more" if len(problems) > MAX_REPORTED else ""
    return RequestError("invalid_request", f"invalid fields: {shown}{more}.", param=problems[0][0])
