"""Check answers without a model."""

from __future__ import annotations

import math
import re


def is_right(completion: str, answer: str) -> bool:
    """Return whether a completion contains the right answer, without using a model.

    A finite number must be the last number in the completion, where a hyphen after a digit or word is no minus sign:
    in `3-5` it is 5. Any other answer, such as a word or `Inf`, must occur in it as whole words.

    Example:
        >>> is_right("27 plus 45 is 72", "72"), is_right("It is 72 or 71.", "72"), is_right("Won 3-5", "5")
        (True, False, True)
    """
    numbers = re.findall(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", completion)
    try:
        truth = float(answer.replace(",", ""))
    except ValueError:
        truth = math.nan
    if not math.isfinite(truth):
        return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", completion, re.IGNORECASE) is not None
    return bool(numbers) and float(numbers[-1].replace(",", "")) == truth
