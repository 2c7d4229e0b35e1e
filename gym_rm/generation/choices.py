"""How likely a model finds each of a few texts as its reply, from log-probabilities of their tokens.

A text may have a space before it, or a capital letter. It counts however the reply goes on, unless another of the texts
begins so: the probability of 1 is without that of 10.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def ids_after(tokenizer: Any, text: str, before: str) -> list[int]:
    """Return the token ids of a text after another one; those of the text alone if tokens would be merged."""
    alone, stem, both = (
        tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, before, before + text)
    )
    return list(both[len(stem) :] if both[: len(stem)] == stem else alone)


def spellings(tokenizer: Any, texts: Sequence[str], before: str) -> dict[tuple[int, ...], str]:
    """Return the token ids that write each text after another one."""
    return {tuple(ids_after(tokenizer, form, before)): text for form, text in _written(texts).items()}


def masses_of(found: Mapping[tuple[int, ...], tuple[str, float]]) -> dict[str, float]:
    """Return the probability of each text from those of its spellings, token ids."""
    masses: dict[str, float] = {}
    for ids, (text, probability) in found.items():
        longer = [each for each in found if len(each) > len(ids) and each[: len(ids)] == ids]
        nearest = [each for each in longer if not any(each != one and each[: len(one)] == one for one in longer)]
        rest = probability - math.fsum(found[each][1] for each in nearest)
        masses[text] = masses.get(text, 0.0) + max(0.0, rest)
    return masses


def told_masses(
    told: Sequence[tuple[str, Mapping[str, float]]], texts: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Return the least probability of each text, and how much more all of them together may have.

    `told` are the tokens of one reply, each with the log-probabilities of the most likely ones in its place.
    """
    forms, masses, unknown, reached, before = _written(texts), dict.fromkeys(texts, 0.0), 0.0, 1.0, ""
    for token, likely in told:
        ended = forms.pop(before, None)
        chances = {each: math.exp(min(0.0, value)) for each, value in likely.items()}
        divided = {form for form in forms if form[len(before) :] not in chances}  # perhaps not a token of its own
        hidden = min(max(0.0, 1 - math.fsum(chances.values())), len(divided) * min(chances.values()))
        unknown += reached * hidden
        on = hidden
        for each, chance in chances.items():
            text, goes_on = before + each, bool(each) and any(form.startswith(before + each) for form in divided)
            on += chance * (goes_on or text in forms)
            if goes_on and each != token:  # what follows it was not told
                unknown += reached * chance
            elif text in forms and not goes_on:
                masses[forms[text]] += reached * chance
        if ended is not None:
            masses[ended] += reached * max(0.0, 1 - on)
        reached, before = reached * chances.get(token, 0.0), before + token
        forms = {form: forms[form] for form in forms if form == before or (form in divided and form.startswith(before))}
        if not token or not forms.keys() - {before}:
            return masses, unknown
    return masses, unknown + reached


def _written(texts: Sequence[str]) -> dict[str, str]:
    """Return what may be written, with the text that it stands for."""
    forms = [*((text[:1].upper() + text[1:], text) for text in texts), *((text, text) for text in texts)]
    return {space + form: text for form, text in forms for space in ("", " ")}
