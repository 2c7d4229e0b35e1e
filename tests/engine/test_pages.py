"""Pages and tiles of random trees: what a token attends to depends on its own path alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.pages import make_pages, make_tiles
from gym_rm.engine.token_tree import TokenSequence, plan_trees

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
    pages, page_of = pages_of(tree, size)
    for token, page in enumerate(page_of):
        path = pages.paths[page]
        position = tree.position_ids[token]
        assert len(path) == position // size + 1 == pages.numbers[page] + 1
        assert pages.tokens[path].reshape(-1)[: position + 1].tolist() == tree.ancestors(token).tolist()


@given(trees, SIZES)
def test_every_token_is_a_query_of_one_page(tree, size):
    pages, page_of = pages_of(tree, size)
    assert pages.first[0] == 0
    assert np.all(np.diff(pages.first) > 0)
    assert pages.size == size
    assert pages.tokens[page_of, tree.position_ids % size].tolist() == list(range(len(tree)))
    for page, (first, stop) in enumerate(zip(pages.first, [*pages.first[1:], len(tree)], strict=True)):
        assert pages.tokens[page, -1] == stop - 1, "places after the end repeat the last query"
        assert tree.position_ids[first:stop].tolist() == list(
            range(tree.position_ids[first], tree.position_ids[first] + stop - first)
        )


@given(trees, SIZES)
def test_a_page_stands_after_the_pages_before_it_on_its_path(tree, size):
    pages = make_pages(tree, size)
    assert (pages.previous < np.arange(len(pages.first))).all()
    for page, path in enumerate(pages.paths):
        assert path[-1] == page
        assert pages.previous[path].tolist() == [-1, *path[:-1]]
        assert pages.numbers[path].tolist() == list(range(len(path)))


# --- tiles


@st.composite
def tilings(draw):
    """A tree, its pages, some of its tokens as queries, a window, and a maximum number of pages."""
    tree = draw(trees)
    pages = make_pages(tree, draw(SIZES))
    chosen = draw(st.sets(st.integers(0, len(tree) - 1), min_size=1))
    queries = np.array(sorted(chosen)) if draw(st.booleans()) else np.arange(len(tree))
    return tree, pages, queries, draw(st.none() | st.integers(1, 50)), draw(st.integers(1, 20))


def rows_of(tiles, places, size):
    """Return for each query the group, the tile and the row at its place."""
    starts = np.cumsum([0, *(len(group.queries) for group in tiles)])
    for place in places.tolist():
        number = int(np.searchsorted(starts, place // size, side="right")) - 1
        yield tiles[number], place // size - starts[number], place % size


@given(tilings())
def test_a_query_is_in_the_row_of_its_position_with_the_last_pages_of_its_path(given):
    tree, pages, queries, window, _ = given
    tiles, places = make_tiles(*given)
    assert len(places) == len(queries)
    page_of = np.searchsorted(pages.first, queries, side="right") - 1
    for number, (group, tile, row) in enumerate(rows_of(tiles, places, pages.size)):
        query, path = queries[number], pages.paths[page_of[number]]
        assert group.queries[tile, row] == number
        assert row == tree.position_ids[query] % pages.size
        # The first query of a page has the oldest keys, so it decides which pages a tile has.
        oldest = 0 if window is None else max(0, len(path) * pages.size - pages.size - window + 1)
        needed = [page for page in path if (pages.numbers[page] + 1) * pages.size > oldest]
        assert group.pages[tile].tolist() == needed


@given(tilings())
def test_every_key_of_the_window_is_in_the_pages_of_the_tile(given):
    tree, pages, queries, window, _ = given
    tiles, places = make_tiles(*given)
    for query, (group, tile, row) in zip(queries, rows_of(tiles, places, pages.size), strict=True):
        keys = pages.tokens[group.pages[tile]].reshape(-1)
        at = len(keys) - pages.size + row  # the query itself
        start = 0 if window is None else max(0, at - window + 1)
        expected = tree.ancestors(query)
        expected = expected if window is None else expected[-window:]
        assert keys[start : at + 1].tolist() == expected.tolist()


@given(tilings())
def test_groups_have_equally_many_pages_and_are_bounded(given):
    _, pages, queries, _, most_pages = given
    tiles, places = make_tiles(*given)
    page_of = np.searchsorted(pages.first, queries, side="right") - 1
    last = [page for group in tiles for page in group.pages[:, -1].tolist()]
    assert sorted(last) == np.unique(page_of).tolist(), "one tile for each page that has queries"
    for group in tiles:
        assert group.queries.shape == (len(group.pages), pages.size)
        assert group.pages.size <= most_pages or len(group.pages) == 1
    assert len(np.unique(places)) == len(queries)


def keys_of(tree, query, size, window):
    """Return the row of one query, and the token ids of the keys of its tile up to the query."""
    pages = make_pages(tree, size)
    tiles, places = make_tiles(tree, pages, np.arange(len(tree)), window, 2048)
    ((group, tile, row),) = rows_of(tiles, places[[query]], size)
    keys = tree.input_ids[pages.tokens[group.pages[tile]].reshape(-1)]
    return row, len(keys), keys[: len(keys) - size + row + 1].tolist()


@given(families(), SIZES, st.none() | st.integers(1, 50))
def test_a_sequence_has_the_same_rows_and_keys_alone_and_in_any_tree(sequences, size, window):
    together = plan_trees(sequences, max_num_batched_tokens=1_000_000)
    (tree,) = together.batches
    for index, each in enumerate(sequences):
        alone = tree_of([each])
        last = tree.read_indices[together.value_index[index]]
        for position in {0, len(alone) // 2, len(alone) - 1}:
            found = keys_of(tree, tree.ancestors(last)[position], size, window)
            assert found == keys_of(alone, position, size, window)
