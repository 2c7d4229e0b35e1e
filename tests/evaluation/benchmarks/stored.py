"""A scorer that returns given scores, one after the other, and rows of benchmarks without texts."""

import dataclasses

import gym_rm
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS, benchmark_result
from gym_rm.evaluation.benchmarks.rows import read_benchmark
from gym_rm.evaluation.scored import ScoredComparisons, score_comparisons
from gym_rm.scorer import provenance_of


def evaluate_benchmark(name, scorer, rows):
    """Return the result of a scorer on the rows of a benchmark."""
    read = read_benchmark(rows, BENCHMARKS[name].read_row)
    comparisons, made = tuple(row.comparison for row in read), provenance_of(scorer)
    plain = None if made is None else dataclasses.asdict(made)
    scored = ScoredComparisons(comparisons, score_comparisons(scorer, comparisons), "m", plain)
    return benchmark_result(name, read, scored)


class StoredScores:
    """Return these scores in the order of the conversations."""

    def __init__(self, scores):
        self.scores = list(scores)

    def score(self, conversations, prompts=None):
        scores, self.scores = self.scores[: len(conversations)], self.scores[len(conversations) :]
        errors = [None if score is not None else "no score" for score in scores]
        rewards = [float("nan") if score is None else score for score in scores]
        return gym_rm.Scores.from_rewards(rewards, errors=errors).raise_for_errors()


class LengthOfReply:
    """Scorer whose reward is the length of the last message; replies that begin with "no" cannot be scored."""

    def score(self, conversations, prompts=None):
        texts = [conversation[-1]["content"] for conversation in conversations]
        errors = ["the reply begins with no" if text.startswith("no") else None for text in texts]
        return gym_rm.Scores.from_rewards([len(text) for text in texts], errors=errors).raise_for_errors()
