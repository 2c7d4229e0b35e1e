"""Inputs of other protocols as items to score: rendered texts, token ids, pairs and messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import pydantic

from gym_rm.server.door import Rendered
from gym_rm.server.errors import Refused
from gym_rm.server.service import Service

TokenId: TypeAlias = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31)]
TextInput: TypeAlias = str | list[str] | list[TokenId] | list[list[TokenId]]
PairText: TypeAlias = str | dict[str, Any]


def rendered_items(
    service: Service,
    value: TextInput,
    *,
    add_special_tokens: bool = True,
    truncate: int | None = None,
    side: Literal["left", "right"] = "right",
) -> list[Rendered]:
    """Return the items of a field with rendered texts or token ids.

    Args:
        service: the service.
        value: a text, token ids, or a list of either.
        add_special_tokens: whether to add the special tokens that a text lacks.
        truncate: maximum number of tokens; -1 for the scorer's `max_length`; None for no truncation.
        side: where tokens are removed.

    Raises:
        Refused: the scorer cannot score texts, or the field is empty.
    """
    if not service.door.scores_texts:
        raise Refused(
            "not_supported",
            f"the scorer of {service.model!r} scores conversations, and cannot read a text that is already rendered; "
            "send messages, a pair of texts, or POST /v1/rewards.",
        )
    if truncate == -1:
        truncate = service.scorer.renderer.max_length  # type: ignore[attr-defined]
    values: list[Any] = [value] if is_single(value) else list(value)
    if not values or any(len(each) == 0 for each in values):
        raise Refused("empty_request", "the input is empty; expected at least one text or token.", param="input")
    return [Rendered(each, add_special_tokens and isinstance(each, str), truncate, side) for each in values]


def is_single(value: TextInput) -> bool:
    """Return whether a field has one text or the ids of one text, and not a list of them."""
    return isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))


def pair_conversation(first: PairText, second: PairText) -> list[dict[str, Any]]:
    """Return the conversation of a pair: a user message and the reply to it."""
    return [{"role": "user", "content": _content(first)}, {"role": "assistant", "content": _content(second)}]


def _content(text: PairText) -> Any:
    return text if isinstance(text, str) else text.get("content", [])
