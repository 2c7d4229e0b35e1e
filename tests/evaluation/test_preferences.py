"""Agreement with preferences: pairs of ranked replies, ties, failures, groups, and real rows."""

import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.evaluation.preferences import evaluate_preferences
from gym_rm.evaluation.scored import pair_table
from tests import real_data
from tests.evaluation.comparisons import by, comparison, scored


def evaluate(rows, rewards):
    return evaluate_preferences(scored(rows, rewards))


def named(groups):
    return {group.name: (group.num_pairs, round(group.accuracy.value, 6)) for group in groups}


def test_ranked_replies_count_as_all_of_their_pairs():
    table = pair_table(scored([comparison("abcd", (2, 0, 1, 1))], [[0, 3, 2, 1]]))
    assert list(zip(table.first.tolist(), table.second.tolist(), table.margins.tolist(), strict=True)) == [
        (1, 0, 3.0),
        (2, 0, 2.0),
        (3, 0, 1.0),
        (1, 2, 1.0),
        (1, 3, 2.0),
    ]


def test_failures_are_counted_and_left_out():
    rows = [comparison(["a", "b", "c"], (0, 1, 2), prompt=str(i)) for i in range(3)]
    found = evaluate(rows, [[3, 2, 1], [3, None, 1], [None, None, None]])
    assert (found.num_failed, found.num_pairs_left_out, found.metrics.num_pairs) == (2, 5, 4)
    assert found.accuracy.value == 1.0
    assert found.errors == (("no reward", 4),)


def test_accuracy_where_the_better_reply_is_the_shorter_one():
    rows = [
        comparison(["x" * a, "x" * b], (0, 1), prompt=str(i))
        for i, (a, b) in enumerate([(1, 5), (2, 9), (7, 3), (4, 4)])
    ]
    found = evaluate(rows, [[1, 0], [0, 1], [1, 0], [1, 0]])
    assert (found.chosen_shorter.num_pairs, found.chosen_shorter.accuracy.value) == (2, 0.5)
    assert (found.chosen_longer.num_pairs, found.chosen_longer.accuracy.value) == (1, 1.0)


def test_ties_of_the_data_are_left_out_and_ties_of_the_model_are_wrong():
    rows = [comparison(["a", "b"], ranks, prompt=str(i)) for i, ranks in enumerate([(0, 1), (0, 1), (0, 0), (0, 0)])]
    found = evaluate(rows, [[2, 1], [1, 1], [5, 5], [1, 4]])
    assert (found.num_ties, found.metrics.num_pairs, found.accuracy.value, found.metrics.ties) == (2, 2, 0.5, 0.5)


def test_all_right_is_not_certain():
    """The bootstrap of equal values has no width; ten pairs that are right prove less than a thousand."""
    rows = [comparison(["a", "b"], (0, 1), prompt=str(i)) for i in range(10)]
    few = evaluate(rows, [[1, 0]] * 10).accuracy
    many = evaluate([comparison(["a", "b"], (0, 1), prompt=str(i)) for i in range(1000)], [[1, 0]] * 1000).accuracy
    assert few.low == pytest.approx(0.722, abs=1e-3)
    assert few.low < many.low < few.value == many.value == 1.0


@pytest.mark.data
def test_hh_by_length_agrees_with_a_count_by_hand():
    rows = load_comparisons(real_data.FOLDER / "hh_harmless.jsonl.gz").comparisons
    found = evaluate_preferences(by(rows, len))
    better, worse = zip(
        *[sorted(zip(row.ranks, (len(r[-1]["content"]) for r in row.replies), strict=True)) for row in rows],
        strict=True,
    )
    longer = sum(a[1] > b[1] for a, b in zip(better, worse, strict=True))
    assert found.metrics.num_pairs == len(rows)
    assert found.accuracy.value == pytest.approx(longer / len(rows))
    assert found.chosen_longer.num_pairs == longer
    assert found.metrics.length_correlation == pytest.approx(1.0)
