"""What an agent can say to the embedded prompts, which ask for one of three numbers: defaults of the numeric views."""

from __future__ import annotations

import re

from gym_rm.errors import ConfigError
from gym_rm.types import Conversation

VOCABULARY = ("It", " is", ".", *(f" {number}" for number in range(10, 100)))
"""Tokens of the correct replies, for example `It is 42.`"""


def candidates(conversation: Conversation) -> list[str]:
    """Return four replies to a question about three numbers: the smallest, the middle, the largest, and no answer.

    Raises:
        ConfigError: the last message does not contain exactly three numbers.
    """
    numbers = sorted(int(number) for number in re.findall(r"\d+", conversation[-1]["content"]))
    if len(numbers) != 3:
        raise ConfigError(
            "candidates: the default replies need a question with three numbers, as in the embedded prompts; got "
            f"{conversation[-1]['content']!r:.100}. Pass candidates=[...] or a function from a conversation to replies."
        )
    return [*(f"It is {number}." for number in numbers), "I do not know."]
