"""The verdicts of public generative reward models, in the forms that they were trained to write.

An answer ends with it, after the model's reasoning; see `verdicts.read_last`. It must be on the scale. Anything else is
no verdict, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pydantic
import regex

from gym_rm.config import Config, Finite, Flag
from gym_rm.generation.chat import ChatReply
from gym_rm.scorers.judge.verdicts import ENDS, NUMBER, NoVerdict, line_of, number_on, object_at, read_last

Scale: TypeAlias = tuple[float, float]

FLOOR = -50.0
"""Log-probability of an answer that is not among the most likely tokens (Qwen3-Nemotron-32B-GenRM-Principle)."""
MOST_UNKNOWN = 0.1  # of the verdicts' probability, that a server may hide
RANKS = (1.0, 6.0)
TIED_RANK = 3.5
_BOX = r"\s*(-?\d+(?:\.\d+)?)\s*"
_BOXED_PAIR = rf"\\boxed\{{{_BOX},{_BOX}\}}(?:[^\\]{{0,200}}\\boxed\{{{_BOX}\}})?"


class VerdictForm(Config):
    """How an answer ends; see `read_verdict`."""

    form: Literal["json_pair", "boxed_pair", "last", "json_scores", "log_odds"]
    """Name of the form."""
    line: str = ""
    """Name before the value of `last` or the object of `json_scores`, as in `Score: 7`. With `{{ mark }}` in the mode's
    `ending`, only a line with the mark is a verdict."""
    pattern: str = ""
    """Regular expression of `last`, with one group; instead of `line`."""
    values: dict[str, Finite] | None = None
    """Value of the first reply for each text of the group of `last`, from 0 to 1; None if it is a number."""
    sole: Flag = False
    """Whether an answer has no verdict if `pattern` matches two different ones in it, even in what it quotes."""
    name: str = "{number}"
    """Name of a reply in `json_scores`."""
    listed: Flag = False
    """Whether the scores of `json_scores` are a list of objects with a `trajectory_id` and a `score`, as in RULER."""
    answers: tuple[str, str] = (" Yes", " No")
    """The two answers of `log_odds`."""

    @pydantic.model_validator(mode="after")
    def _require_readable(self) -> VerdictForm:
        if self.form == "last" and not self.line:
            try:
                groups = regex.compile(self.pattern).groups
            except regex.error as error:
                raise ValueError(f"pattern is no regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"pattern must have one group, got {self.pattern!r}")
        if any(not 0 <= value <= 1 for value in (self.values or {}).values()):
            raise ValueError(f"values must be from 0 to 1, got {self.values}")
        if self.name.replace("{number}", "").count("{"):
            raise ValueError(f"name can have {{number}}, got {self.name!r}")
        return self


def read_verdict(
    reply: ChatReply, form: VerdictForm, *, size: int, scale: Scale, mark: str = "", choices: Sequence[str] = ()
) -> tuple[float, ...]:
    """Return the values of the replies that a judge was shown.

    - `json_pair`: an object with two scores and a ranking (see `tiebroken`).
    - `boxed_pair`: `\\boxed{x, y}` and then, if it is there, the ranking `\\boxed{z}`.
    - `last`: the last match of a pattern, or the last line with a name.
    - `json_scores`: an object or list with a score for each reply by its name.
    - `log_odds`: log-probability of the first answer minus that of the second, as the last token.

    Args:
        reply: the judge's answer, without its reasoning.
        form: the form.
        size: number of replies that it was shown.
        scale: lowest and highest value.
        mark: the word that must stand in the line of the verdict; empty without.
        choices: the answers to a criterion from worst to best, whose values go from 0 to 1 in equal steps.

    Raises:
        NoVerdict: there is no verdict, or it is malformed or off the scale.
    """
    text = reply.text
    match form.form:
        case "json_pair":
            return _json_pair(text, scale)
        case "boxed_pair":
            return _boxed_pair(text, scale)
        case "last":
            value = _last_value(text, form, _values(form, choices), scale, mark)
            return (value,) if size == 1 else (value, 1 - value)
        case "json_scores":
            return _json_scores(text, form, size, scale, mark)
        case _:
            return (_log_odds(reply, form.answers),)


def verdicts_of(form: VerdictForm, choices: Sequence[str], scale: Scale, size: int) -> dict[str, float]:
    """Return the verdicts that a judge decides between, and their values; of two replies, without a tie."""
    levels = {str(level): float(level) for level in range(math.ceil(scale[0]), math.floor(scale[1]) + 1)}
    values = _values(form, choices) or levels
    return {name: value for name, value in values.items() if size == 1 or value != 0.5}


def read_masses(reply: ChatReply, verdicts: Mapping[str, float], *, size: int, least: float) -> tuple[float, ...]:
    """Return the values of the replies from the probabilities of all verdicts.

    Raises:
        NoVerdict: the model gave the verdicts less than `least`, or its server did not tell enough of them.
    """
    masses, hidden = reply.masses or {}, f"; up to {reply.unknown:.3g} more were not told" if reply.unknown else ""
    mass = math.fsum(masses.values())
    told = f"the probabilities of {[*verdicts]} sum up to {mass:.3g}{hidden}"
    if not mass or not mass >= least:  # also NaN
        raise NoVerdict(f"{told}, below min_mass={least:g}")
    if reply.unknown > MOST_UNKNOWN * mass:
        raise NoVerdict(f"{told}, so the verdict is not known")
    value = math.fsum(masses[name] * value for name, value in verdicts.items()) / mass
    return (value,) if size == 1 else (value, 1 - value)


def tiebroken(first: float, second: float, ranking: float | None) -> tuple[float, float]:
    """Return two scores, moved by the ranking if they are equal.

    `first + (3.5 - ranking), second - (3.5 - ranking)`: the aggregator `simple_tiebreaker` of NeMo Gym's
    genrm_compare. A ranking of 1 says that the first reply is much better, 6 that the second is.
    """
    if first != second or ranking is None:
        return first, second
    return first + (TIED_RANK - ranking), second - (TIED_RANK - ranking)


def _json_pair(text: str, scale: Scale) -> tuple[float, ...]:
    values = last_object(text, ("score_1", "score_2", "ranking"))
    ranking = number_on(RANKS, values["ranking"]) if "ranking" in values else None
    if "score_1" not in values and "score_2" not in values:
        middle = (scale[0] + scale[1]) / 2  # the ranking alone: two equal scores and the tiebreaker
        return tiebroken(middle, middle, ranking)
    return tiebroken(number_on(scale, values.get("score_1")), number_on(scale, values.get("score_2")), ranking)


def last_object(text: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return the JSON object that an answer ends with. Raises NoVerdict if there is none with one of the keys."""

    def read(match: Any) -> tuple[Mapping[str, Any], int]:
        found, end = object_at(match.string, match.end())
        inner = found.get("overall")
        values = inner if isinstance(inner, dict) and not set(keys) & found.keys() else found
        if not set(keys) & values.keys():
            raise NoVerdict(f"the JSON object at the end has none of the keys {list(keys)}")
        return values, end

    return read_last(text, r"(?=\{\s*\")", read)


def _boxed_pair(text: str, scale: Scale) -> tuple[float, ...]:
    def read(match: Any) -> tuple[tuple[float, ...], int]:
        first, second = number_on(scale, match[1]), number_on(scale, match[2])
        return tiebroken(first, second, None if match[3] is None else number_on(RANKS, match[3])), match.end()

    return read_last(text, _BOXED_PAIR, read)


def _values(form: VerdictForm, choices: Sequence[str]) -> Mapping[str, float] | None:
    return {choice: place / (len(choices) - 1) for place, choice in enumerate(choices)} or form.values


def _last_value(text: str, form: VerdictForm, values: Mapping[str, float] | None, scale: Scale, mark: str) -> float:
    if form.sole and len(said := set(regex.findall(form.pattern, text))) > 1:
        raise NoVerdict(f"there are different verdicts, {sorted(said)}")
    pattern, known = form.pattern, {name.casefold(): value for name, value in (values or {}).items()}
    if form.line and values is not None:
        texts = "|".join(regex.escape(name) for name in sorted(values, key=len, reverse=True))
        pattern = rf"{line_of(form.line, mark)}(?i:(?:reply |response )?({texts}))(?!\w)"
    elif form.line:
        most = rf"[ \t(*]*+(?:/|out of\b)[ \t]*+{regex.escape(f'{scale[1]:g}')}(?![\d.]*\d)"
        pattern = f"{line_of(form.line, mark)}({NUMBER})(?:{most})?"

    def read(match: Any) -> tuple[float, int]:
        if values is None:
            return number_on(scale, match[1]), match.end()
        if (said := match[1].casefold()) not in known:
            raise NoVerdict(f"the verdict {match[1]!r:.20} is none of {list(values)}")
        return known[said], match.end()

    return read_last(text, pattern, read, mark=mark)


def _json_scores(text: str, form: VerdictForm, size: int, scale: Scale, mark: str) -> tuple[float, ...]:
    names = [form.name.format(number=number) for number in range(1, size + 1)]
    if form.line:
        opener = rf"{line_of(form.line, mark)}[\s`]*+(?:json\s*+)?(?=\{{)"
        told: Any = read_last(text, opener, lambda match: object_at(match.string, match.end()), mark=mark)
    else:
        told = last_object(text, ("scores",))["scores"]
    pairs = []
    if form.listed and isinstance(told, list):
        entries = [each for each in told if isinstance(each, dict)]
        pairs = [(str(each.get("trajectory_id")), each.get("score")) for each in entries]
    elif not form.listed and isinstance(told, Mapping):
        pairs = list(told.items())
    if sorted(name for name, _ in pairs) != sorted(names):
        raise NoVerdict(f"expected a score for each of {names}, once, got {[name for name, _ in pairs]}")
    scores = dict(pairs)
    return tuple(number_on(scale, scores[name]) for name in names)


def _log_odds(reply: ChatReply, answers: tuple[str, str]) -> float:
    if not reply.top_log_probs:
        raise NoVerdict("the model gave no log-probabilities of its last tokens; a server needs top_logprobs")
    wanted, only = [answer.strip() for answer in answers], len(reply.top_log_probs) == 1
    for token, likely in reversed(reply.top_log_probs):
        if token.strip() in wanted or only:  # a judge that writes one token answers by its log-probabilities
            known = {name: [value for each, value in likely.items() if each.strip() == name] for name in wanted}
            if not (any(known.values()) if only else known[token.strip()]):
                break
            good, bad = (max(FLOOR, max(known[name], default=FLOOR)) for name in wanted)
            return good - bad
        if token.strip() and ENDS.fullmatch(token) is None and not token.startswith("<"):
            break
    raise NoVerdict(f"the last token is none of {wanted} with a log-probability; the answer ends {reply.text[-20:]!r}")
