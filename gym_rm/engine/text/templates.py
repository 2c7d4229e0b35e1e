"""Chat templates: where they come from, and the date that they may ask for."""

from __future__ import annotations

import datetime
from typing import Any

from gym_rm.errors import ConfigError, warn_once

DATE = datetime.date(2024, 7, 26)
"""What a template that asks for today's date is told: a score must not depend on the day."""


def own_template(tokenizer: Any) -> str | None:
    """The chat template that a tokenizer came with, if any."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            names = sorted(template)
            raise ConfigError(f"the tokenizer has chat templates {names} and no default; pass chat_template=.")
        template = template["default"]
    return template or None


def parse_date(date: datetime.date | str) -> datetime.date:
    """A date, or the date that an ISO text such as `"2024-07-26"` names."""
    try:
        return datetime.date.fromisoformat(date) if isinstance(date, str) else date
    except ValueError as error:
        raise ConfigError(f"date must be a date or its ISO form, as in {str(DATE)!r}; got {date!r}.") from error


def freeze_date(template: str, date: datetime.date) -> str:
    """The template with a `strftime_now` of its own that always answers with the given date."""
    codes = [*(f"-{code}" for code in "dmHIMS"), *"aAwdbBmyYHIpMSfjUWcxX", "%"]
    told = "".join(f" | replace('%{code}', '{date.strftime(f'%{code}')}')" for code in codes)
    frozen = f"{{% macro strftime_now(format) %}}{{{{ format{told} }}}}{{% endmacro %}}\n{template}"
    warn_once(
        f"the chat template writes today's date, which would change scores from day to day: it gets {date} instead "
        "(date=... sets another one)."
    )
    return frozen


def token_of(tokenizer: Any, text: str) -> int:
    """The id of the single token that a text consists of.

    Raises:
        ConfigError: the text is not exactly one token.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
        raise ConfigError(f"{text!r} is not a single token of {tokenizer.name_or_path!r}: it becomes {ids}.")
    return int(ids[0])
