"""Exceptions of the package, and a function that logs each warning once."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import Self

logger = logging.getLogger("gym_rm")


class GymRMError(Exception):
    """Base class of all exceptions of gym_rm."""


class ConfigError(GymRMError, ValueError):
    """Invalid setting. The message has the expected value, the given value, and what to do.

    Attributes:
        expected: what the value must be, such as `"a finite number"`; None if the message alone says it.
    """

    expected: str | None = None


class MissingExtraError(ConfigError, ImportError):
    """A library that is not always installed is missing; the message has the install command."""


class RenderModeError(ConfigError, TypeError):
    """Unknown render mode. It is also a TypeError, which libraries expect that try a mode and then none."""


class ActionError(GymRMError, ValueError):
    """Invalid reply. The environment has not changed."""


class ConversationError(GymRMError, ValueError):
    """Conversation that the scorer cannot read: invalid, too long, or rejected by the chat template."""

    kind = "invalid"


class TooLongError(ConversationError):
    """Conversation with more tokens than the model reads."""

    kind = "too_long"


class RemoteError(GymRMError, ConnectionError):
    """Failure of a scorer in another process or on another host."""


class RowError(str):
    """Why a conversation has no score: a text with a `kind`.

    Attributes:
        kind: `"too_long"`, `"refused"` (by a server), `"timed_out"`, `"out_of_memory"`, `"invalid"` (a conversation or
            data row that cannot be read), or `"failed"` for everything else.

    Example:
        >>> RowError.of(TooLongError("9 tokens")).kind, RowError("no number") == "no number"
        ('too_long', True)
    """

    kind: str

    def __new__(cls, text: str, kind: str = "failed") -> Self:
        """Return the text with its kind."""
        made = super().__new__(cls, text)
        made.kind = kind
        return made

    @classmethod
    def of(cls, cause: BaseException, text: str | None = None) -> Self:
        """Return the message of an exception, or another text, with the kind of the exception."""
        known = {TimeoutError: "timed_out", MemoryError: "out_of_memory"}
        kind = next((name for each, name in known.items() if isinstance(cause, each)), "failed")
        return cls(str(cause) if text is None else text, getattr(cause, "kind", kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the known name with these initials or the most similar, else an empty text."""
    names = list(known)
    initials = [each for each in names if "_" in each and "".join(part[:1] for part in each.split("_")) == name]
    matches = initials or difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def brief(error: BaseException) -> str:
    """Return the type and the message of an exception, also of one whose message cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of the exception's `__str__`
        return f"{type(error).__name__} (its message cannot be shown)"


@functools.lru_cache(maxsize=1024)  # names in a message can come from requests
def warn_once(message: str) -> None:
    """Log a warning, but each of the last 1024 messages only once per process."""
    logger.warning(message)
