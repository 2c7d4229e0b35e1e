"""How a model reads conversations, without its weights: for numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.engine.text.renderer import Renderer


@dataclass(frozen=True, slots=True)
class TextReader:
    """How a model reads conversations.

    Attributes:
        renderer: the renderer of the model, without `max_length`.
        max_length: maximum number of tokens of a conversation, or None.
        name: folder or hub id of the model or tokenizer.
    """

    renderer: Renderer
    max_length: int | None
    name: str
