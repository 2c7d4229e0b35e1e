"""Check answers without a model."""

from __future__ import annotations

import re


def is_right(completion: str, answer: str) -> bool:
    """Return whether a completion contains the right answer, without using a model.

    A numeric answer must be the last number in the completion. Any other answer must occur in it as whole words.

    Example:
        >>> is_right("27 plus 45 is 72", "72"), is_right("It is 72 or 71.", "72")
        (True, False)
    """
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion)
    try:
        truth = float(answer.replace(",", ""))
    except ValueError:
        return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", completion, re.IGNORECASE) is not None
    return bool(numbers) and float(numbers[-1].replace(",", "")) == truth
