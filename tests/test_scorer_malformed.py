"""Scorers that break the contract: the error names the scorer."""

import traceback

import pytest

from gym_rm import ConfigError, Scores
from gym_rm.scorer import try_score


class Malformed:
    def __init__(self, result):
        self.result = result

    def score(self, conversations, prompts=None):
        return self.result(conversations)


@pytest.mark.parametrize(
    "result",
    [
        lambda conversations: [1.0],
        lambda conversations: None,
        lambda conversations: Scores.from_rewards([]),
        lambda conversations: Scores.from_rewards(["one"]),
        lambda conversations: Scores.from_rewards([1.0], components={"part": []}),
        lambda conversations: 1 / 0,
    ],
    ids=["a list", "None", "too few", "texts", "a short component", "an exception"],
)
def test_the_error_of_a_malformed_scorer_names_it(result):
    with pytest.raises((ConfigError, ZeroDivisionError)) as failure:
        try_score(Malformed(result), [[{"role": "user", "content": "hi"}]])
    assert "Malformed" in "".join(traceback.format_exception_only(failure.value))
