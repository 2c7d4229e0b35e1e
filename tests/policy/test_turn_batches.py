"""Micro-batches have every turn once, the tokens that it sampled, and a shared prompt once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.token_tree import TokenTree
from gym_rm.policy.turn_batches import policy_batches
from tests.policy.turns import random_turns, turn


def text_before(batch, value):
    """Return the tokens up to a position that is read."""
    (only,) = batch.batches
    if isinstance(only, TokenTree):
        return only.input_ids[only.ancestors(only.read_indices[value])].tolist()
    row, position = only.read_positions[value]
    return only.input_ids[row, : position + 1].tolist()


@pytest.mark.parametrize("layout", ["tree", "padded", "one_by_one"])
@settings(max_examples=25)
@given(made=random_turns(), budget=st.integers(1, 80), longest=st.sampled_from([None, 12]))
def test_every_token_is_predicted_once_after_what_the_policy_saw(layout, made, budget, longest):
    turns, groups = made
    batches = policy_batches(turns, groups, layout=layout, max_num_batched_tokens=budget, max_batchable_length=longest)
    seen = []
    for batch in batches:
        assert batch.turns == tuple(sorted(set(batch.rows.tolist())))
        seen += batch.turns
        sampled = [token for row in batch.turns for token in turns[row].completion.token_ids.tolist()]
        assert batch.targets[batch.token_index].tolist() == sampled
        before = [text_before(batch, value) for value in batch.value_index[batch.token_index]]
        expected = [
            [*turns[row].prompt, *turns[row].completion.token_ids[:k]]
            for row in batch.turns
            for k in range(len(turns[row].completion.token_ids))
        ]
        assert before == expected
        pairs = list(zip(batch.value_index.tolist(), batch.targets.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        size = max(len(turns[row].prompt) + len(turns[row].completion.token_ids) - 1 for row in batch.turns)
        if layout == "tree" and len(batch.turns) > 1 and size <= budget:
            assert batch.batches[0].num_tokens <= budget
    assert sorted(seen) == list(range(len(turns)))


def test_a_prompt_is_computed_once_per_group_and_once_per_part_of_a_divided_group():
    prompt = range(10, 40)
    turns = [turn(prompt, [50 + k, 60, 61, 62]) for k in range(8)]
    (whole,) = policy_batches(turns, [0] * 8, layout="tree", max_num_batched_tokens=1000)
    assert whole.batches[0].num_tokens == 30 + 8 * 3
    parts = policy_batches(turns, [0] * 8, layout="tree", max_num_batched_tokens=42)
    assert [each.batches[0].num_tokens for each in parts] == [30 + 4 * 3] * 2


def test_equal_turns_are_computed_once():
    turns = [turn([5, 6, 7], [8, 9, 10])] * 4
    (batch,) = policy_batches(turns, [0] * 4, layout="tree", max_num_batched_tokens=1000)
    assert (batch.num_tokens, len(batch.targets), batch.batches[0].num_tokens) == (12, 3, 5)


def test_a_turn_larger_than_the_budget_runs_alone():
    turns = [turn(range(5, 10), [20, 21]), turn(range(5, 90), [20]), turn(range(5, 10), [22])]
    for layout in ("tree", "padded"):
        batches = policy_batches(turns, [0] * 3, layout=layout, max_num_batched_tokens=64)
        assert sorted(each.turns for each in batches) == [(0, 2), (1,)]
