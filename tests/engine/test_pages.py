"""Pages and tiles of random trees: what a token attends to depends on its own path alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.pages import make_pages, make_tiles
from gym_rm.engine.token_tree import TokenSequence

SIZES = st.sampled_from([1, 2, 3, 4, 8, 32])


def sequence(ids):
    ids = np.array(ids, dtype=np.int32)
    return TokenSequence(ids, np.array([len(ids) - 1]))


def tree_of(sequences):
    (tree,) = plan_trees(sequences, max_num_batched_tokens=1_000_000).batches
    return tree


@st.composite
def families(draw):
    """Sequences that branch off each other at any positions."""
    few = st.integers(0, 2)
    grown = [draw(st.lists(few, min_size=1, max_size=40))]
    for _ in range(draw(st.integers(0, 10))):
        base = draw(st.sampled_from(grown))
        kept = base[: draw(st.integers(0, len(base)))]
        grown.append([*kept, *draw(st.lists(few, max_size=20))] or [0])
    return [sequence(ids) for ids in grown]


trees = families().map(tree_of)


def pages_of(tree, size):
    """Return the pages, and the page of each token."""
    pages = make_pages(tree, size)
    return pages, np.searchsorted(pages.first, np.arange(len(tree)), side="right") - 1


@given(trees, SIZES)
def test_the_pages_of_a_path_hold_the_ancestors_at_their_positions(tree, size):
    pages = make_pages(tree, size)
    pages.check(tree)
    assert pages.size == size


def test_a_page_with_other_tokens_fails_the_check():
    tree = tree_of([sequence(range(20)), sequence([*range(5), *range(30, 40)])])
    pages = make_pages(tree, 8)
    tokens = pages.tokens.copy()
    tokens[-1, 0] -= 1
    for changed in ({"tokens": tokens}, {"previous": pages.previous[::-1]}, {"first": pages.first + 1}):
        with pytest.raises(AssertionError):
            dataclasses.replace(pages, **changed).check(tree)


# --- tiles


@st.composite
def tilings(draw):
    """A tree, its pages, some of its tokens as queries, a window, and a maximum number of pages."""
    tree = draw(trees)
    pages = make_pages(tree, draw(SIZES))
    chosen = draw(st.sets(st.integers(0, len(tree) - 1), min_size=1))
    queries = np.array(sorted(chosen)) if draw(st.booleans()) else np.arange(len(tree))
    return tree, pages, queries, draw(st.none() | st.integers(1, 50)), draw(st.integers(1, 20))


def parts_of(parts, number):
    """Return the pages of the parts that a query has, from the start of its path, and the row of its own page."""
    found = []
    for part in reversed(parts):
        places = [(tiles, *np.argwhere(tiles.queries == number)[0]) for tiles in part if number in tiles.queries]
        assert len(places) <= 1, "a query is in one tile of a part"
        found += [(tiles.pages[tile], row) for tiles, tile, row in places]
    return [pages for pages, _ in found], found[-1][1]


@given(tilings())
def test_the_pages_of_a_query_are_the_last_of_its_path(given):
    tree, pages, queries, window, _ = given
    parts = make_tiles(*given)
    for number, query in enumerate(queries):
        found, row = parts_of(parts, number)
        path = np.concatenate(found)
        page = np.searchsorted(pages.first, query, side="right") - 1
        assert path.tolist() == pages.path(page, len(path)).tolist()
        assert (tree.position_ids[query] - row) % pages.size in range(0, pages.size, 8), "rows are in order"
        needed = tree.ancestors(query) if window is None else tree.ancestors(query)[-window:]
        assert set(needed) <= set(pages.tokens[path].reshape(-1)), "every key in the window is there"


@given(tilings())
def test_tiles_that_are_computed_together_are_bounded(given):
    _, _, queries, _, most_pages = given
    for part in make_tiles(*given):
        for tiles in part:
            assert len(tiles.queries) == len(tiles.pages)
            assert tiles.pages.size <= most_pages or len(tiles.pages) == 1
            assert (tiles.queries >= 0).any(axis=1).all()
            assert (tiles.queries < len(queries)).all()


@given(trees)
def test_queries_that_share_a_part_are_in_one_tile(tree):
    pages = make_pages(tree, 4)
    shared = make_tiles(tree, pages, np.arange(len(tree)), None, 20)[1:]
    for part in shared:
        keys = [tuple(keys) for tiles in part for keys in tiles.pages.tolist()]
        assert len(keys) == len(set(keys))


def parts_in(tree, query, size, window):
    """Return the token ids of the keys of each part of one query."""
    pages = make_pages(tree, size)
    found, _ = parts_of(make_tiles(tree, pages, np.arange(len(tree)), window, 2048), query)
    return [tree.input_ids[pages.tokens[part].reshape(-1)].tolist() for part in found[:-1]], len(found[-1])


@given(families(), SIZES, st.none() | st.integers(1, 50))
def test_a_sequence_has_the_same_parts_alone_and_in_any_tree(sequences, size, window):
    together = plan_trees(sequences, max_num_batched_tokens=1_000_000)
    (tree,) = together.batches
    for index, each in enumerate(sequences):
        alone = tree_of([each])
        last = tree.read_indices[together.value_index[index]]
        for position in {0, len(alone) // 2, len(alone) - 1}:
            found = parts_in(tree, tree.ancestors(last)[position], size, window)
            assert found == parts_in(alone, position, size, window)
