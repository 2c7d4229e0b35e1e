"""Chat templates of tokenizers, and the fixed date that they write."""

from __future__ import annotations

import datetime
from typing import Any

from gym_rm.errors import ConfigError, warn_once

DATE = datetime.date(2024, 7, 26)
"""Default date for templates that write today's date. It is fixed so that scores do not depend on the day."""


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
