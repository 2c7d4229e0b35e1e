import itertools
import json
import math

import numpy as np
import pytest

from gym_rm.data.rollouts import Rollout
from gym_rm.data.scored_rows import row_to_score
from gym_rm.errors import ConfigError
from gym_rm.policy.advantages import estimate_advantages
from gym_rm.reports.evaluation.rescoring import compare_rewards, rescored_rows

NAN = math.nan


def advantages(rewards):
    return estimate_advantages(rewards, np.zeros(len(rewards)), estimator="grpo", std_floor=1e-4)


def compare(*rows):
    """Compare rows of group, old reward, new reward and, where they have them, grade and name."""
    made = []
    for line, (group, old, new, *known) in enumerate(rows, start=1):
        right, name = [*known, *(NAN, None)[len(known) :]]
        row = row_to_score({"prompt": "q", "response": f"reply {line}"}, "here")
        made.append((line, new, None if new is None else Rollout(row, old, group, name, right)))
    return compare_rewards(lambda: iter(made), advantages)


def test_pairs_inside_of_groups_are_counted_one_by_one():
    random = np.random.default_rng(0)
    rows = [(f"g{i % 7}", *random.integers(0, 3, 2).tolist(), float(random.integers(0, 2))) for i in range(60)]
    numbers = compare(*rows).numbers
    pairs = [(a, b) for a, b in itertools.combinations(rows, 2) if a[0] == b[0]]
    signs = [(np.sign(b[1] - a[1]), np.sign(b[2] - a[2])) for a, b in pairs]
    assert numbers["pairs"] == len(pairs)
    assert numbers["share of pairs in the other order"] * len(pairs) == sum(x * y < 0 for x, y in signs)
    assert numbers["share of pairs no longer equal"] * len(pairs) == sum(x == 0 != y for x, y in signs)
    assert numbers["share of pairs now equal"] * len(pairs) == sum(x != 0 == y for x, y in signs)
    decided = [sorted(pair, key=lambda row: row[3]) for pair in pairs if pair[0][3] != pair[1][3]]
    for place, name in ((1, "accuracy, old"), (2, "accuracy, new")):
        wins = [(good[place] > bad[place]) + (good[place] == bad[place]) / 2 for bad, good in decided]
        assert numbers[name] == pytest.approx(sum(wins) / len(decided))
    assert numbers["pairs of a right and a wrong reply"] == len(decided)


def test_correlations_are_those_of_rewards_and_of_their_mean_ranks():
    numbers = compare(*((f"g{i}", *each) for i, each in enumerate([(0, 0), (1, 1), (1, 10), (2, 100)]))).numbers
    assert numbers["Pearson"] == pytest.approx(np.corrcoef([0, 1, 1, 2], [0, 1, 10, 100])[0, 1])
    assert numbers["Spearman"] == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1])
    assert "groups" not in numbers
    assert "Pearson" not in compare(("g", 1.0, 0.0), ("g", 1.0, 2.0)).numbers


def test_advantages_are_those_of_the_estimator_and_the_largest_changes_come_first():
    rows = [("a", 0.0, 0.0), ("a", 1.0, 1.0), ("b", 0.0, 1.0), ("b", 1.0, 0.0), ("lone", 0.0, 9.0)]
    found = compare(*rows)
    assert found.numbers["mean change of an advantage"] == pytest.approx(2**0.5 / 2)
    assert [line for _, line, _, _ in found.most_changed] == [3, 4, 1, 2, 5]
    assert [round(change, 3) for *_, change in found.most_changed] == [1.414, 1.414, 0, 0, 0]
    assert found.most_changed[0][2][-1]["content"] == "reply 3"
    assert compare(*((f"g{i}", i, -i) for i in range(20))).most_changed[0][3] == pytest.approx(2 * 9.5 / 35**0.5)


def test_groups_that_become_flat_or_stop_being_flat_are_counted():
    rows = [
        ("a", 0, 1),
        ("a", 1, 1),
        ("b", 1, 2),
        ("b", 1, 3),
        ("b", 1, 3),
        ("c", 1, 0),
        ("c", 1, 0),
        ("d", 0, 1),
        ("d", 1, 0),
    ]
    numbers = compare(*rows).numbers
    assert (numbers["groups that become flat"], numbers["groups that stop being flat"]) == (1, 1)


def test_rows_without_a_reward_and_repeated_rollouts_never_vote():
    good = [("a", 0.0, 1.0, 1.0, "0"), ("a", 1.0, 0.0, 0.0, "1")]
    bad = [("a", NAN, 5.0, 1.0, "2"), ("a", 5.0, None), ("a", 0.0, 1.0, 1.0, "0"), ("b", NAN, 1.0)]
    numbers = dict(compare(*good, *bad).numbers)
    alone = dict(compare(*good).numbers)
    assert numbers.pop("conversations") == 6
    counts = [numbers.pop(name) for name in ("without a new reward", "without an old reward", "repeated rollouts")]
    assert counts == [1, 2, 1]
    assert numbers.items() <= alone.items()
    assert compare(("a", 1.0, 1.0), ("a", 1.0, 1.0)).numbers["pairs"] == 1  # equal replies that have no names


def test_no_row_with_two_rewards_is_an_error():
    with pytest.raises(ConfigError, match="'without a new reward': 1, 'without an old reward': 1"):
        compare(("a", NAN, 1.0), ("a", 0.0, None))


def test_rows_are_read_without_the_fields_that_were_added(tmp_path):
    rows = [{"a": 1, "new": 0.5, "new_components": {}}, {"a": 2, "new": None, "new_error": "no"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(rescored_rows(tmp_path / "rows.jsonl", "new", lambda row, where: (row, where)))
    assert found == [(1, 0.5, ({"a": 1}, f"{tmp_path}/rows.jsonl line 1")), (2, None, None)]
