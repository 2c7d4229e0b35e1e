"""Data rows from which a judge is trained: the questions that `JudgeScorer` asks about pairs, with what is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gym_rm.config import parse_settings
from gym_rm.data.comparisons import ComparisonSet, prompt_of
from gym_rm.data.formats.reply_lists import OVERALL
from gym_rm.errors import ConfigError
from gym_rm.scorers.judge.forms import TIED_RANK
from gym_rm.scorers.judge.options import JudgeOptions
from gym_rm.scorers.judge.plan import JudgeRow
from gym_rm.scorers.judge.scorer import judge_mode

PLACES = ("first", "second")  # of the better reply, at the end of the name of a row


def judgement_rows(pairs: ComparisonSet, *, style: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield two rows for `VerdictScorer` for every two replies with different ranks, one for each order.

    A row has `messages`, the label (with a `ranking` of a signed preference, or scores of overall ratings), and a
    `prompt_id` that ends with the place of the better reply. The options are those of the judge that is trained.

    Raises:
        ConfigError: an option is invalid, the style does not compare two replies, or a reply cannot be judged.
    """
    mode = judge_mode(parse_settings(JudgeOptions, {**options, "comparisons": "all_pairs", "style": style}))
    if mode.questions.decides:
        raise ConfigError("a judge that is trained writes its verdicts; leave out verdict='probabilities'.")
    for number, each in enumerate(pairs.comparisons):
        prompts = [prompt_of(each, str(number))] * len(each.replies)
        conversations, _, _ = mode.options.read(each.conversations, prompts)
        if len(conversations) < len(prompts):
            raise ConfigError(f"{each.where}: the thinking of a reply has not ended; judged=all shows it as it is.")
        plan = mode.plan(list(map(JudgeRow.read, conversations, prompts)))
        if plan.errors:
            raise ConfigError(f"{each.where}: {next(iter(plan.errors.values()))}.")
        known = [each.scores[name] for name in OVERALL if all(map(math.isfinite, each.scores.get(name, (math.nan,))))]
        for pair, case in enumerate(plan.cases):
            for order, question in case.samples[0]:
                one, other = (case.rows[place][0] for place in order)
                if each.ranks is None or each.ranks[one] == each.ranks[other]:
                    continue
                better, label = int(each.ranks[one] > each.ranks[other]), dict[str, float]()
                # Ratings against the ranks would be paid for the other reply.
                if known and (known[0][one] - known[0][other]) * (each.ranks[other] - each.ranks[one]) >= 0:
                    label = {"score_1": known[0][one], "score_2": known[0][other]}
                elif each.margin and pairs.shapes.keys() == {"signed"}:
                    away = max(each.margin - 0.5, each.margin / 2)  # a mean of several people can be below 1
                    label = {"ranking": TIED_RANK + away if better else TIED_RANK - away}
                yield {
                    "prompt_id": f"{number}.{pair}/{PLACES[better]}",
                    "messages": list(question.messages),
                    "preferred": 1 + better,
                    **({"ground_truth_overall": label} if label else {}),
                    **({"judge_mark": question.mark} if question.mark else {}),
                }
