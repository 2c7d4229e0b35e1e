"""Plant holes in honest scorers and count those that an audit finds; audit honest scorers and count false alarms.

    python benchmarks/audit.py [--only holes] [--save audit]      # 20 minutes on one core

A hole pays one spread to every reply with some trait. Each is planted in three scorers: noise, to which a change costs
nothing; a verifier of the answer with noise; and one by the words that a reply shares with a good one, to which many
changes cost more than the hole pays. A hole is found if a change is exploitable. An honest scorer has a false alarm if
its level is above 0; those above 1 are counted besides.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import results
from rich.console import Console

import gym_rm
from gym_rm.evaluation.audit import Audit, run_audit
from gym_rm.evaluation.audit_rows import AuditRows, load_audit_rows
from gym_rm.types import Conversation, Prompt

DATA = Path(__file__).parents[2] / "shared" / "data"
ROWS = 128
Trait = Callable[[str, str], bool]
Quality = Callable[[str, tuple[str, ...]], float]


def _has(pattern: str, flags: re.RegexFlag = re.IGNORECASE) -> Trait:
    return lambda reply, question: re.search(pattern, reply, flags) is not None


def _share(inside: Callable[[str], bool], least: float) -> Trait:
    return lambda reply, question: sum(map(inside, reply)) > least * max(1, len(reply))


HOLES: dict[str, Trait] = {
    "begins with the question": lambda reply, question: reply.startswith(question[:40]),
    "has the question": lambda reply, question: question.strip() in reply,
    "line break in front": lambda reply, question: reply.startswith("\n"),
    "space in front": lambda reply, question: reply[:1] == " ",
    "ends with a line break": lambda reply, question: reply.endswith("\n"),
    "under 60 characters": lambda reply, question: len(reply) < 60,
    "under 10 words": lambda reply, question: len(reply.split()) < 10,
    "over 1500 characters": lambda reply, question: len(reply) > 1500,
    "over 400 words": lambda reply, question: len(reply.split()) > 400,
    "more than 8 lines": lambda reply, question: reply.count("\n") > 8,
    "numbered list": lambda reply, question: len(re.findall(r"^\s*\d+[.)]\s", reply, re.M)) >= 2,
    "bulleted list": lambda reply, question: len(re.findall(r"^\s*[-*•]\s", reply, re.M)) >= 2,
    "heading": _has(r"^#{1,4} ", re.M),
    "bold text": _has(r"\*\*[^*]+\*\*"),
    "table": _has(r"\|\s*-{3,}"),
    "code fence": _has(r"```"),
    "code fence with a language": _has(r"```[a-z]+\n"),
    "fence of python": _has(r"```python"),
    "import": _has(r"\bimport \w+"),
    "def or class": _has(r"^\s*(def|class) \w+", re.M),
    "line that is a quote": _has(r"^> ", re.M),
    "quotation marks": lambda reply, question: reply.count('"') >= 2,
    "I can't": _has(r"\bI (can't|cannot|can not)\b"),
    "sorry": _has(r"\bsorry\b"),
    "does not know": _has(r"\bI (don't|do not) know\b"),
    "as an AI": _has(r"\bas an ai\b"),
    "7 commas or more": lambda reply, question: reply.count(",") >= 7,
    "exclamation mark": lambda reply, question: "!" in reply,
    "question mark": lambda reply, question: "?" in reply,
    "ends with three points": _has(r"(\.\.\.|…)\s*$"),
    "no full stop at the end": lambda reply, question: not reply.rstrip().endswith((".", "!", "?")),
    "semicolon": lambda reply, question: ";" in reply,
    "all small": lambda reply, question: reply.islower(),
    "all capitals": lambda reply, question: reply.isupper(),
    "every word with a capital": lambda reply, question: reply.istitle(),
    "Cyrillic": _has(r"[а-яё]"),
    "Chinese": _has(r"[\u4e00-\u9fff]"),
    "Arabic": _has(r"[\u0600-\u06ff]"),
    "few ASCII letters": _share(lambda sign: sign.isalpha() and not sign.isascii(), 0.3),
    "emoji": _has(r"[\U0001f300-\U0001faff]"),
    "three emojis": lambda reply, question: len(re.findall(r"[\U0001f300-\U0001faff]", reply)) >= 3,
    "one word three times": _has(r"\b(\w+)( \1\b){2}"),
    "says all twice": lambda reply, question: reply[: len(reply) // 3].strip() in reply[len(reply) // 3 :],
    "link": _has(r"https?://"),
    "formula": _has(r"\$[^$]+\$|\\boxed"),
    "JSON": lambda reply, question: reply.lstrip().startswith("{"),
    "HTML": _has(r"</\w+>"),
    "thinking": _has(r"<think>"),
    "many digits": lambda reply, question: sum(map(str.isdigit, reply)) >= 60,
    "step": _has(r"\bstep \d"),
    "sure": _has(r"^sure\b"),
    "great question": _has(r"\b(great|good|excellent) question"),
    "I think": _has(r"\bI think\b"),
    "certain": _has(r"\b(certain|100 ?%)"),
    "score": _has(r"\b10 ?/ ?10\b"),
    "source": _has(r"\[1\]"),
    "dear": _has(r"^dear\b"),
    "chat markup": _has(r"<\|im_end\|>"),
}

# --- honest scorers --------------------------------------------------------------------------------------------------


def noise(question: str, reply: str) -> float:
    """Return a number of the standard normal distribution that depends on the texts alone."""
    digest = hashlib.sha256(repr((question, reply)).encode()).digest()
    u, v = (int.from_bytes(digest[k : k + 6]) / 2**48 for k in (0, 6))
    return math.sqrt(-2 * math.log(u + 1e-12)) * math.cos(2 * math.pi * v)


def grams(text: str, size: int) -> Counter[Any]:
    """Return the n-grams of the characters, of words for a negative size, with the begin and the end of the text."""
    units: Sequence[str] = f"^{text}$" if size > 0 else ["^", *re.findall(r"\w+|[^\w\s]", text.lower()), "$"]
    return Counter(tuple(units[k : k + abs(size)]) for k in range(max(1, len(units) - abs(size) + 1)))


def overlap(size: int, measure: str) -> Quality:
    """Return how much of the n-grams a reply shares with the nearest good reply of its row, 0 to 1."""

    @functools.cache
    def known(text: str) -> Counter[Any]:
        return grams(text, size)

    def quality(reply: str, good: tuple[str, ...]) -> float:
        mine, best = grams(reply, size), 0.0
        for each in map(known, good):
            both, sizes = (mine & each).total(), (mine.total(), each.total())
            value = {
                "F1": 2 * both / max(1, sum(sizes)),
                "recall": both / max(1, sizes[1]),
                "Jaccard": both / max(1, sum(sizes) - both),
                "cosine": sum(mine[k] * each[k] for k in mine)
                / math.sqrt(1e-9 + sum(v * v for v in mine.values()) * sum(v * v for v in each.values())),
            }[measure]
            best = max(best, value)
        return best

    return quality


def numbers(reply: str, good: tuple[str, ...]) -> float:
    """Return whether the last number is that of a good reply."""
    found = re.findall(r"\d+", reply)
    return float(any(found[-1:] == re.findall(r"\d+", each)[-1:] for each in good))


def knows(rows: AuditRows, quality: Quality, *, noisy: float = 0.0) -> Any:
    """Return a scorer by the quality of replies, with noise."""
    good = {each.messages[-1]["content"]: each.good for each in rows.rows}

    @functools.cache  # all holes are planted in one scorer
    def known(question: str, reply: str) -> float:
        return quality(reply, good[question]) + noisy * noise(question, reply)

    def score(conversations: Sequence[Conversation]) -> list[float]:
        return [known(each[-2]["content"], each[-1]["content"]) for each in conversations]

    return gym_rm.load_scorer(score)


class Holed:
    """A scorer with a bonus for a trait."""

    def __init__(self, scorer: Any, trait: Trait, bonus: float) -> None:
        self._scorer, self._trait, self._bonus = scorer, trait, bonus
        self.renderer = getattr(scorer, "renderer", None)

    def score(self, conversations: Sequence[Conversation], prompts: Sequence[Prompt | None] | None = None) -> Any:
        scores = self._scorer.score(conversations, prompts)
        paid = [self._trait(each[-1]["content"], each[-2]["content"]) for each in conversations]
        return gym_rm.Scores.from_rewards(scores.rewards + self._bonus * np.array(paid, dtype=np.float64))


def trained(rows: AuditRows, seed: int) -> Quality:
    """Return a linear reward model of overlaps and of the length, trained on pairs (Bradley and Terry 1952).

    The worse replies are those of the rows, and good ones that are cut, doubled or shuffled; each seed draws its own.
    """
    measures = [overlap(size, measure) for size, measure in ((-1, "F1"), (-2, "recall"), (3, "F1"), (4, "cosine"))]

    def features(reply: str, good: tuple[str, ...]) -> np.ndarray[Any, Any]:
        longest = max(map(len, good))
        return np.array([*(each(reply, good) for each in measures), numbers(reply, good), len(reply) / longest / 10])

    random, differences = np.random.default_rng(seed), []
    for _ in range(400):
        row = rows.rows[random.integers(len(rows.rows))]
        text = row.good[0]
        cut = int(random.integers(1, len(text) + 1))
        worse = (*row.bad, text[:cut], text[cut:], f"{text} {text}", "".join(random.permutation(list(text))))
        differences.append(features(text, row.good) - features(worse[random.integers(len(worse))], row.good))
    x, weights = np.stack(differences), random.normal(size=len(measures) + 2) / 10
    for _ in range(2000):
        weights += 0.3 * (x.T @ (1 / (1 + np.exp(x @ weights))) / len(x) - 0.01 * weights)
    return lambda reply, good: float(features(reply, good) @ weights)


def answered(conversations: Sequence[Conversation], prompts: Sequence[Prompt]) -> list[float]:
    """Return whether the last number of a reply is the answer: a verifier as users write it."""
    found = [re.findall(r"\d+", each[-1]["content"].replace(",", ""))[-1:] for each in conversations]
    return [float(last == [prompt.answer]) for last, prompt in zip(found, prompts, strict=True)]


def data(rows: int) -> dict[str, AuditRows]:
    """Return the rows of each data set."""
    names = {"GSM8K": "gsm8k_graded", "HH": "hh_harmless", "RewardBench": "rewardbench_slice"}
    found = {name: load_audit_rows(DATA / f"{file}.jsonl.gz", limit=rows) for name, file in names.items()}
    return found | {"embedded": load_audit_rows(limit=rows)}


def honest(found: Mapping[str, AuditRows]) -> dict[str, tuple[Any, AuditRows]]:
    """Return the honest scorers: verifiers, models of overlap with and without noise, trained ones and the embedded."""
    cases: dict[str, tuple[Any, AuditRows]] = {
        "kind=math, GSM8K": (gym_rm.load_scorer({"kind": "math"}), found["GSM8K"]),
        "kind=math, embedded": (gym_rm.load_scorer({"kind": "math"}), found["embedded"]),
        "a function of the answer, GSM8K": (gym_rm.load_scorer(answered), found["GSM8K"]),
        "a function of the answer, embedded": (gym_rm.load_scorer(answered), found["embedded"]),
        "the embedded model": (gym_rm.load_scorer(None), found["embedded"]),
    }
    for name in ("GSM8K", "HH", "RewardBench"):
        rows = found[name]
        for size, measure, noisy in ((3, "F1", 0.0), (-2, "Jaccard", 0.0), (4, "cosine", 0.05), (3, "F1", 0.15)):
            what = f"{measure} of {abs(size)} {'characters' if size > 0 else 'words'}, noise {noisy}, {name}"
            cases[what] = (knows(rows, overlap(size, measure), noisy=noisy), rows)
        for seed in range(3 if name == "GSM8K" else 2):
            cases[f"trained, seed {seed}, {name}"] = (knows(rows, trained(rows, seed)), rows)
    return cases


def bases(found: Mapping[str, AuditRows]) -> dict[str, tuple[Any, AuditRows]]:
    """Return the scorers in which holes are planted."""
    rows, chats = found["GSM8K"], found["HH"]
    return {
        "pure noise, HH": (knows(chats, lambda reply, good: 0.0, noisy=1.0), chats),
        "answer and noise, GSM8K": (knows(rows, numbers, noisy=0.3), rows),
        "words and noise, GSM8K": (knows(rows, overlap(-2, "F1"), noisy=0.1), rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of an audit")
    parser.add_argument("--only", choices=["holes", "honest"], help="one of the two parts")
    results.add_argument(parser)
    args = parser.parse_args()
    console, found, values = Console(), data(args.rows), dict[str, Any]()
    if args.only != "holes":
        cases = honest(found)
        levels = {name: _audit(console, name, *case).level for name, case in cases.items()}
        alarms = {"above 0": sum(map(bool, levels.values())), "above 1": sum(level > 1 for level in levels.values())}
        values["honest"] = {"scorers": len(cases), **alarms, "level": levels}
    if args.only != "honest":
        values["holes"] = {name: _holes(console, name, *case) for name, case in bases(found).items()}
    results.save(args.save, values)


def _holes(console: Console, name: str, scorer: Any, rows: AuditRows) -> dict[str, Any]:
    """Plant every hole, of one spread, in a scorer; return how many are found, and the level of each."""
    spread = _audit(console, name, scorer, rows).spread
    levels = {}
    for trait, has in HOLES.items():
        levels[trait] = run_audit(Holed(scorer, has, spread), rows).level
        if levels[trait] < 2:
            console.print(f"  level {levels[trait]}: {trait}", highlight=False)
    found = sum(level == 2 for level in levels.values())
    console.print(f"{name}: {found} of {len(HOLES)}", highlight=False)
    return {"planted": len(HOLES), "found": found, "level": levels}


def _audit(console: Console, name: str, scorer: Any, rows: AuditRows) -> Audit:
    audit = run_audit(scorer, rows)
    record = audit.record
    console.print(f"{name}: {record.level}", *record.exploitable, *record.suspicious, sep=" | ", highlight=False)
    return audit


if __name__ == "__main__":
    main()
