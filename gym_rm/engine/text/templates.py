"""Chat templates of tokenizers, and the fixed date that they write."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError, warn_once

DATE = datetime.date(2024, 7, 26)
"""Default date for templates that write today's date. It is fixed so that scores do not depend on the day."""


TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


def read_template(value: Any) -> Any:
    """Return the Jinja source of a chat template, given as source or as the path of a file.

    Raises:
        ConfigError: the file does not exist, or it is not text.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    try:
        if Path(value).expanduser().is_file() or value.lower().endswith(TEMPLATE_SUFFIXES):
            return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={value!r:.200} is not a readable file: {error}; pass the path of a Jinja file, or Jinja "
            "source."
        ) from error
    return value


def turn_marks(text: str, contents: Iterable[str]) -> list[str]:
    """Return what a template writes between two messages.

    Args:
        text: a conversation as the template writes it.
        contents: the contents of its messages.
    """
    return re.split("|".join(map(re.escape, contents)), text)[1:-1]


def check_plain_marks(marks: Sequence[str], forged_turns: str, name: str) -> None:
    """Warn that messages can forge turns; raise ConfigError if they cannot be refused as `forged_turns` demands."""
    if forged_turns == "allow":
        warn_once(
            f"the chat template of {name!r} marks turns with plain text {list(marks)}, so a message that contains such "
            "a mark can forge a turn. Pass forged_turns='error' to report an error for these messages."
        )
    elif not all(map(str.strip, marks)):
        raise ConfigError(
            "forged_turns='error' cannot be used, because the chat template has only white space between two messages "
            f"({list(marks)}), which ordinary messages contain; pass forged_turns='allow'."
        )


def own_template(tokenizer: Any) -> str | None:
    """Return the chat template of a tokenizer, or None."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            names = sorted(template)
            raise ConfigError(
                f"the tokenizer has chat templates {names} and no default; pass chat_template= (Jinja source)."
            )
        template = template["default"]
    return template or None


def parse_date(date: datetime.date | str) -> datetime.date:
    """Return a date, given as a date or as ISO text such as `"2024-07-26"`."""
    try:
        return datetime.date.fromisoformat(date) if isinstance(date, str) else date
    except ValueError as error:
        raise ConfigError(f"date must be a date or ISO text such as {str(DATE)!r}; got {date!r}.") from error


def freeze_date(template: str, date: datetime.date) -> str:
    """Return the template with its own `strftime_now`, which always formats the given date."""
    codes = [*(f"-{code}" for code in "dmHIMS"), *"aAwdbBhmyYCHkIlpMSsfjuUWVgGcxXDFTReztZnrE", "%"]
    replacements = "".join(f" | replace('%{code}', '{date.strftime(f'%{code}')}')" for code in codes)
    frozen = f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}\n{template}"
    warn_once(
        f"the chat template writes today's date, so scores would change from day to day; the fixed date {date} is "
        "used instead. Pass date= for another date."
    )
    return frozen


def answer_tokens(tokenizer: Any, answers: tuple[str, str]) -> tuple[int, int]:
    """Return the ids of the good and the bad answer.

    Raises:
        ConfigError: an answer is not exactly one token, or both are the same token.
    """
    good, bad = (token_of(tokenizer, answer) for answer in answers)
    if good == bad:
        raise ConfigError(f"answers must be two different tokens; got {answers!r}.")
    return good, bad


def token_of(tokenizer: Any, text: str) -> int:
    """Return the id of a text that is a single token.

    Raises:
        ConfigError: the text is not exactly one token.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
        raise ConfigError(f"{text!r} is not a single token of {tokenizer.name_or_path!r}: it is encoded as {ids}.")
    return int(ids[0])
