"""Micro-batches have whole comparisons under the token budget, and every comparison once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.token_tree import TokenSequence, TokenTree
from gym_rm.training.comparison_batches import micro_batches, share_of_rank, steps_of
from gym_rm.training.comparison_sets import EncodedComparison


def example(*texts):
    sequences = tuple(TokenSequence(np.array(ids, dtype=np.int32), np.array([len(ids) - 1])) for ids in texts)
    total = sum(map(len, texts))
    unique = sum(batch.num_tokens for batch in plan_trees(sequences, max_num_batched_tokens=total).batches)
    nothing = np.empty(0)
    return EncodedComparison(sequences, np.arange(len(texts), dtype=float), np.nan, nothing, nothing, unique)


texts = st.lists(st.integers(1, 3), min_size=1, max_size=12)
examples = st.lists(st.lists(texts, min_size=2, max_size=4).map(lambda each: example(*each)), min_size=1, max_size=8)


def read_back(micro):
    """Return the text at each read of a micro-batch, in the order of its comparisons."""
    found = []
    for batch in micro.batches:
        if isinstance(batch, TokenTree):
            found += [batch.input_ids[batch.ancestors(index)].tolist() for index in batch.read_indices]
        else:
            found += [batch.input_ids[row, : position + 1].tolist() for row, position in batch.read_positions]
    return [found[index] for index in micro.value_index]


@pytest.mark.parametrize("tree", [True, False])
@given(examples=examples, budget=st.integers(1, 60), longest=st.sampled_from([None, 0, 5]))
def test_every_comparison_is_in_one_micro_batch_with_its_own_values(tree, examples, budget, longest):
    found = micro_batches(
        examples, tree=tree, max_num_batched_tokens=budget, max_width=None, max_batchable_length=longest
    )
    assert sorted(id(each) for micro in found for each in micro.examples) == sorted(map(id, examples))
    for micro in found:
        expected = [sequence.input_ids.tolist() for each in micro.examples for sequence in each.sequences]
        assert read_back(micro) == expected
        long = max(len(ids) for ids in expected)
        if longest is not None and long > longest:
            assert len(micro.examples) == 1
            assert all(batch.num_reads == 1 for batch in micro.batches)
        elif len(micro.examples) > 1 and tree:
            assert sum(batch.num_tokens for batch in micro.batches) <= budget
        elif len(micro.examples) > 1:
            assert long * len(expected) <= budget


@given(examples=examples, world=st.integers(1, 5))
def test_ranks_share_the_comparisons(examples, world):
    shares = [share_of_rank(examples, rank, world) for rank in range(world)]
    assert sorted(id(each) for share in shares for each in share) == sorted(map(id, examples))
    loads = [sum(each.unique_tokens for each in share) for share in shares]
    assert max(loads) - min(loads) <= max(each.unique_tokens for each in examples)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    batch_size=st.integers(1, 7),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_an_epoch_has_every_comparison_once_and_the_largest_one_first(sizes, batch_size, epochs, shuffle):
    options = {"batch_size": batch_size, "epochs": epochs, "seed": 3, "shuffle": shuffle}
    steps = list(steps_of(sizes, **options))
    for epoch in range(epochs):
        seen = [index for number, step in steps if number == epoch for index in step.tolist()]
        assert sorted(seen) == list(range(len(sizes)))
        assert shuffle or seen == sorted(seen)
    if shuffle:
        assert max(sizes[index] for index in steps[0][1]) == max(sizes)
    again = list(steps_of(sizes, **options))
    assert all(a == b and np.array_equal(c, d) for (a, c), (b, d) in zip(steps, again, strict=True))
