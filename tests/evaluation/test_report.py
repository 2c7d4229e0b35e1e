"""Results of a set: the sentences that a reader should not miss, the most wrong rows, and values for JSON."""

import json

import pytest

from gym_rm.data.comparisons import ComparisonSet, DroppedRow
from gym_rm.errors import ConfigError
from gym_rm.evaluation.report import evaluate_set, notes
from tests.evaluation.comparisons import comparison, scored

LONGER = [comparison(["longer", "short"], (0, 1), prompt=f"l{i}", correct=(1, 0)) for i in range(40)]
SHORTER = [comparison(["short", "longer"], (0, 1), prompt=f"s{i}", correct=(1, 0)) for i in range(40)]
ROWS = (*LONGER, *SHORTER)


def result(rewards, *, rows=ROWS, against=None, gold=None, dropped=()):
    rows = tuple(rows)
    both = [scored(rows, rewards, model="first")]
    both += [] if against is None else [scored(rows, against, model="second")]
    dropped = tuple(DroppedRow("x line 1", reason) for reason in dropped)
    return evaluate_set(ComparisonSet("set", rows, dropped), *both, gold=gold)


def words(evaluation):
    return " ".join(notes(evaluation))


def test_a_good_and_calibrated_model_needs_no_note():
    assert notes(result([[2, 0]] * 36 + [[0, 2]] * 4 + [[2, 0]] * 36 + [[0, 2]] * 4)) == []


def test_a_coin_is_called_a_coin():
    assert "do not tell the model from a coin" in words(result([[1, 0], [0, 1]] * 40))


def test_a_model_that_is_wrong_is_called_wrong():
    assert "prefers the replies that the data rejects" in words(result([[0, 1]] * 80))


@pytest.mark.parametrize(
    ("rewards", "likes"), [([[1, 0]] * 40 + [[0, 1]] * 40, "long"), ([[0, 1]] * 40 + [[1, 0]] * 40, "short")]
)
def test_a_taste_for_length_is_named(rewards, likes):
    assert f"reward {likes} replies: it is right in" in words(result(rewards))


def test_ties_dropped_rows_and_failures_are_named():
    found = words(result([[1, 1]] * 10 + [[None, 0]] * 5 + [[1, 0]] * 65, dropped=["a reply is empty"]))
    assert "13% of the pairs have equal rewards" in found
    assert "5 of 80 rows lack a reward, and 5 pairs were left out" in found
    assert "(5 replies): no reward" in found
    assert "1 rows could not be used" in found


def test_too_certain_margins_are_named():
    assert "more certain than right" in words(result([[9, 0]] * 30 + [[0, 9]] * 10 + [[9, 0]] * 30 + [[0, 9]] * 10))
    assert "less certain than right" in words(result([[0.1, 0]] * 80))


@pytest.mark.parametrize(
    ("rewards", "versus"),
    [
        ([[1, 0]] * 80, "better than"),
        ([[0, 1]] * 80, "worse than"),
        ([[1, 0], [0, 1]] * 40, "not clearly different from"),
    ],
)
def test_picking_by_reward_is_compared_with_a_random_reply(rewards, versus):
    assert f"{versus} a random reply (0.500)" in words(result(rewards, gold="correct"))


@pytest.mark.parametrize(
    ("against", "verdict"),
    [
        ([[0, 1]] * 80, "first is more accurate than second"),
        ([[1, 0]] * 80, "do not show which model"),
        ([[1, 0]] * 79 + [[0, 1]], "do not show which model"),
    ],
)
def test_the_verdict_on_two_models(against, verdict):
    assert verdict in words(result([[1, 0]] * 80, against=against))


def test_pairs_of_one_prompt_are_not_called_independent():
    rows = [comparison("abc", (0, 1, 2), prompt=str(i)) for i in range(4)]
    rewards = [[3, 2, 1]] * 4
    assert "pairs of 4 prompts as independent" in words(result(rewards, rows=rows, against=rewards))
    assert "independent" not in words(result([[1, 0]] * 80, against=[[1, 0]] * 80))


def test_the_most_wrong_pairs_come_first_and_right_ones_never():
    rewards = [[1, 0]] * 80
    rewards[7], rewards[3] = [0, 5], [0, 2]
    assert [(each["row"], each["margin"]) for each in result(rewards).worst()] == [(7, -5.0), (3, -2.0)]


def test_values_are_json_without_texts():
    found = result([[1, 0]] * 70 + [[None, 1]] * 2 + [[0, 1]] * 8, against=[[0, 1]] * 80, gold="correct").as_dict()
    text = json.dumps(found, allow_nan=False)
    assert '"short"' not in text
    assert found["preferences"]["accuracy"]["value"] == pytest.approx(70 / 78)
    assert found["best_of_n"]["ns"] == [1, 2]
    assert found["comparison"]["only_first"] == 70
    assert found["worst"][0]["where"].endswith("row")


@pytest.mark.parametrize("ranks", [(0, 0), None], ids=["all-ties", "no-ranks"])
def test_a_set_without_a_preference_is_an_error(ranks):
    rows = [comparison(["a", "b"], ranks, correct=(1, 0))]
    with pytest.raises(ConfigError, match=r"'set' has no preference: . of its 1 rows are ties.*\['correct'\]"):
        result([[1, 0]], rows=rows)
