"""How a model reads conversations, without its weights: for numbers of tokens, and to show what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_rm.engine.text.rendered import Rendered, common_prefix
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from gym_rm.types import Comparison, Message

OTHER_CONTENTS = ("7", "Q")


@dataclass(frozen=True, slots=True)
class TextReader:
    """How a model reads conversations.

    Attributes:
        renderer: the renderer of the model, without `max_length`.
        read_positions: function that returns the positions of the tokens at which the reward is read.
        max_length: maximum number of tokens of a conversation, or None.
        name: folder or hub id of the model or tokenizer.
    """

    renderer: Renderer
    read_positions: Callable[[Rendered], Any]
    max_length: int | None
    name: str

    def reply_start(self, comparison: Comparison, index: int, rendered: Rendered) -> int | None:
        """Return the index of the first token of a reply: the first one that depends on its text; None if unknown."""
        first, *later = comparison.replies[index]
        starts = []
        for content in OTHER_CONTENTS:  # one of them begins with another token than the reply
            other: Message = {**first, "content": content}
            (changed,) = self.renderer.encode([[*comparison.prompt, other, *later]])
            if not isinstance(changed, ConversationError):
                starts.append(common_prefix(rendered.input_ids, changed.input_ids))
        return min(starts, default=None)
