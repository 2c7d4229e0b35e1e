import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.batch_planning import padded_width, plan_padded, plan_trees
from gym_rm.engine.token_tree import TokenSequence


def sequence(ids, reads=None, second_segment=None):
    reads = [len(ids) - 1] if reads is None else reads
    return TokenSequence(np.array(ids, dtype=np.int32), np.array(reads, dtype=np.int64), second_segment)


@st.composite
def families(draw, max_size=24):
    """Sequences with nested shared prefixes and duplicates, read at any positions."""
    few = st.integers(0, 3)
    roots = draw(st.lists(st.lists(few, min_size=1, max_size=12), min_size=1, max_size=4))
    sequences = []
    for _ in range(draw(st.integers(1, max_size))):
        base = draw(st.sampled_from(roots + [list(each.input_ids) for each in sequences]))
        ids = [*base[: draw(st.integers(0, len(base)))], *draw(st.lists(few, max_size=6))] or [0]
        positions = draw(st.sets(st.integers(0, len(ids) - 1), min_size=1, max_size=3))
        sequences.append(sequence(ids, sorted(positions)))
    return sequences


def longest(sequences):
    return max(len(each.input_ids) for each in sequences)


def budgets(sequences):
    return st.integers(longest(sequences), 2 * longest(sequences) + 20)


def nodes_of(sequences):
    """Return the tokens of the prefix tree, each as the tuple of all ids up to it."""
    return {tuple(each.input_ids[: k + 1]) for each in sequences for k in range(len(each.input_ids))}


@given(st.data(), st.booleans())
def test_trees_are_trees_within_the_budget_that_read_after_the_tokens_of_each_sequence(data, alone):
    sequences = data.draw(families())
    budget = data.draw(budgets(sequences))
    plan = plan_trees(sequences, max_num_batched_tokens=budget, alone=alone)
    plan.check(sequences, budget)
    assert not alone or sorted(plan.batch_of) == list(range(len(sequences)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("parents", [-1, 0, 0]), ("subtree_end", [3, 3, 2]), ("read_indices", [2, 2]), ("read_indices", [3])],
)
def test_what_is_no_tree_fails_the_check(field, value):
    (tree,) = plan_trees([sequence([1, 2, 3])], max_num_batched_tokens=3).batches
    tree.check()
    with pytest.raises(AssertionError):
        dataclasses.replace(tree, **{field: np.array(value)}).check()


def test_a_plan_that_mixes_up_values_fails_the_check():
    sequences = [sequence([1, 2]), sequence([1, 3])]
    plan = plan_trees(sequences, max_num_batched_tokens=4)
    with pytest.raises(AssertionError, match="after other tokens"):
        dataclasses.replace(plan, value_index=plan.value_index[::-1]).check(sequences, 4)
    with pytest.raises(AssertionError):
        plan.check(sequences, 2)


@given(families())
def test_a_tree_contains_every_shared_prefix_once(sequences):
    (tree,) = plan_trees(sequences, max_num_batched_tokens=10_000).batches
    assert len(tree) == len(nodes_of(sequences))


@given(families())
def test_attention_over_a_tree_is_causal_attention_of_every_sequence(sequences):
    (tree,) = plan_trees(sequences, max_num_batched_tokens=10_000).batches
    query, key = np.ogrid[: len(tree), : len(tree)]
    attends = (key <= query) & (query < tree.subtree_end[key])
    for index in range(len(tree)):
        ancestors, ancestor = [index], tree.parents[index]
        while ancestor >= 0:
            ancestors.append(ancestor)
            ancestor = tree.parents[ancestor]
        assert np.flatnonzero(attends[index]).tolist() == ancestors[::-1] == tree.ancestors(index).tolist()


limits = st.none() | st.integers(1, 100)


@given(st.data(), limits, st.booleans(), st.booleans())
def test_padded_batches_contain_every_sequence(data, limit, alone, exact):
    sequences = data.draw(families())
    budget = data.draw(budgets(sequences))
    plan = plan_padded(sequences, max_num_batched_tokens=budget, max_width=limit, alone=alone, exact=exact)
    plan.check(sequences, budget)
    rows = [tuple(batch.input_ids[k, :n]) for batch in plan.batches for k, n in enumerate(batch.lengths)]
    assert sorted(rows) == sorted(tuple(each.input_ids) for each in sequences)
    assert not alone or all(len(batch.lengths) == 1 for batch in plan.batches)
    assert not exact or all(batch.input_ids.size == batch.num_tokens for batch in plan.batches)


@pytest.mark.parametrize(
    ("length", "limit", "width"),
    [(31, None, 32), (32, None, 64), (32, 32, 32), (33, 40, 40), (41, 40, 41)],
)
def test_a_width_is_the_next_multiple_above_the_length_up_to_the_limit(length, limit, width):
    assert padded_width(length, limit) == width


@given(st.data(), limits)
def test_rows_with_and_without_padding_do_not_share_a_batch(data, limit):
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=12))
    sequences = [sequence([k] * length) for k, length in enumerate(lengths)]
    for batch in plan_padded(sequences, max_num_batched_tokens=500, max_width=limit).batches:
        assert len(set(batch.lengths == batch.input_ids.shape[1])) == 1


def test_ids_of_any_size_sort_as_numbers():
    ids = [0, 1, 255, 256, 65_535, 65_536, 2**31 - 1]
    sequences = [sequence([a, b]) for a in ids for b in ids]
    (tree,) = plan_trees(sequences[::-1], max_num_batched_tokens=10_000).batches
    assert len(tree) == len(ids) + len(ids) ** 2


def test_trees_are_cut_where_sequences_share_least():
    """Each group has 100 shared tokens and four replies of 20 tokens; the budget fits one group, but not two."""
    groups = [[[g] * 100 + [10 * g + k] * 20 for k in range(4)] for g in (1, 2, 3)]
    sequences = [sequence(ids) for group in groups for ids in group]
    plan = plan_trees(sequences, max_num_batched_tokens=240)
    assert [len(tree) for tree in plan.batches] == [180, 180, 180]


def test_the_plan_of_no_sequences_is_empty():
    for plan in (plan_trees([], max_num_batched_tokens=1), plan_padded([], max_num_batched_tokens=1)):
        assert (plan.batches, plan.value_index.tolist()) == ((), [])


@pytest.mark.parametrize("plan", [plan_trees, plan_padded])
def test_a_sequence_of_invalid_length_is_an_error(plan):
    with pytest.raises(ValueError, match=r"sequence 1 has 4 tokens; expected 1 to max_num_batched_tokens=3"):
        plan([sequence([1]), sequence([1, 2, 3, 4])], max_num_batched_tokens=3)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        plan([sequence([], reads=[])], max_num_batched_tokens=3)


# --- groups ----------------------------------------------------------------------------------------------------------


def tokens_of_group(sequences, groups, group):
    return len(nodes_of([each for each, mine in zip(sequences, groups, strict=True) if mine == group]))


@given(st.data())
def test_a_group_is_cut_only_if_it_exceeds_the_budget_on_its_own(data):
    sequences = data.draw(families())
    groups = [data.draw(st.integers(0, 5)) for _ in sequences]
    budget = data.draw(budgets(sequences))
    plan = plan_trees(sequences, max_num_batched_tokens=budget, groups=groups)
    plan.check(sequences, budget)
    for group in set(groups):
        trees = {int(plan.batch_of[row]) for row, mine in enumerate(groups) if mine == group}
        assert len(trees) == 1 or tokens_of_group(sequences, groups, group) > budget


def test_a_wrong_number_of_groups_is_an_error():
    with pytest.raises(ValueError, match="one entry for each of the 2 sequences, got 1"):
        plan_trees([sequence([1]), sequence([2])], max_num_batched_tokens=9, groups=[0])
