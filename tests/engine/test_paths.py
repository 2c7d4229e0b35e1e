"""Paths and tiles of random trees: every query is in one tile, whose path has its keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.paths import paths_of
from tests.engine.backbones.trees import random_tree, sequence, tree_of

HEIGHTS = st.sampled_from([1, 3, 8, 64])
trees = st.builds(
    lambda seed, sequences, node: tree_of(random_tree(seed, sequences=sequences, node=node)),
    st.integers(0, 10_000),
    st.integers(1, 14),
    st.integers(2, 40),
)


def some_queries(tree, share):
    return np.flatnonzero(np.random.default_rng(len(tree)).random(len(tree)) < share)


@given(trees, HEIGHTS, st.sampled_from([0.1, 0.6, 1.0]))
def test_the_tile_of_a_query_has_its_ancestors_as_keys(tree, height, share):
    paths, queries = paths_of(tree), some_queries(tree, share)
    tiles = paths.query_tiles(queries, height)
    found = np.concatenate([np.arange(first, stop) for _, first, stop in tiles]) if len(tiles) else []
    assert sorted(found) == list(range(len(queries))), "each query is in one tile"
    for path, first, stop in tiles.tolist():
        assert 0 < stop - first <= height
        for query in queries[first:stop].tolist():
            keys = paths.tokens[path : path + tree.depths[query] + 1]
            assert np.array_equal(keys, tree.ancestors(query))


@given(trees, HEIGHTS, st.sampled_from([0.1, 0.6, 1.0]))
def test_the_tile_of_a_key_has_all_queries_that_attend_to_it(tree, width, share):
    paths, queries = paths_of(tree), some_queries(tree, share)
    tiles = paths.key_tiles(queries, width)
    assert sorted(np.concatenate([np.arange(first, stop) for first, stop, *_ in tiles])) == list(range(len(tree)))
    for first, stop, low, high in tiles.tolist():
        assert 0 < stop - first <= width
        for key in range(first, stop):
            attends = (queries >= key) & (queries < tree.subtree_end[key])
            assert set(np.flatnonzero(attends)) <= set(range(low, high))


def test_tiles_with_the_most_keys_come_first():
    tree = tree_of([sequence(range(100)), sequence([*range(50), *range(200, 230)]), sequence(range(300, 304))])
    paths = paths_of(tree)
    tiles = paths.query_tiles(np.arange(len(tree)), 16)
    keys = tree.depths[tiles[:, 2] - 1]
    assert (np.diff(keys) <= 0).all()


@pytest.mark.parametrize("length", [1, 64])
def test_a_text_without_branches_is_one_chain(length):
    paths = paths_of(tree_of([sequence(range(length))]))
    assert paths.chains.tolist() == [0]
    assert paths.tokens.tolist() == list(range(length))
