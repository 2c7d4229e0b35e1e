"""Options for converting conversations to text and tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic

from gym_rm.config import Config, Flag, PositiveInt
from gym_rm.engine.text.overlong import Overlong
from gym_rm.engine.text.templates import read_template


class TextOptions(Config):
    """Options for converting conversations to text and tokens."""

    chat_template: Annotated[str | None, pydantic.BeforeValidator(read_template)] = None
    """Jinja source of the chat template, the path of a file with it, or the name of one of the tokenizer's templates;
    None for the tokenizer's own (`"tool_use"` for conversations with tools, if it has one of this name)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the chat template (`enable_thinking=False`, ...)."""
    add_bos: Flag = True
    """Whether to add the BOS token (for encoders `[CLS]` and `[SEP]`) that the tokenizer adds to a text, if the
    template wrote none. A second BOS is never added."""
    max_length: PositiveInt | None = None
    """Maximum number of tokens of a conversation; None for the number of positions of the model."""
    overlong: Overlong = "error"
    """What to do with a conversation longer than `max_length`. `"error"` reports an error, because the score of a
    shortened conversation may be misleading. `"drop_turns"` removes the oldest turns and keeps the system message, the
    last user message and the reply. The number of removed tokens is in `Scores.truncated_tokens`."""
    dropped_text: Literal["error", "warn"] = "error"
    """What to do if the chat template does not write a message or a field at all, or not all of the last message (many
    drop everything before `</think>`, some drop system messages). `"error"` reports an error, because the model would
    score text that it did not see. `"warn"` scores what the template writes. Missing parts of earlier messages, such as
    their reasoning, are never an error. `Scores.infos["dropped_characters"]` has the number of missing characters."""
    forged_turns: Literal["allow", "error"] = "allow"
    """What to do with a message that contains a turn mark of a template whose turn marks are plain text (`Human:`). The
    model cannot tell it from a real turn. `"allow"` scores it, `"error"` reports an error. Has no effect if the
    template marks turns with control tokens, which a message cannot write."""
