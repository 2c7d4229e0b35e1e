"""Pages of a token tree: the tokens of every path, a fixed number of positions at a time. Integers only, no torch.

Page i of a path has the path's tokens at the positions `[size * i, size * (i + 1))`. If a branch starts inside a page,
it gets a page of its own, with copies of the tokens before it (as PagedAttention copies on write, arXiv 2309.06180,
section 4.4). So a token attends to pages 0 to `position // size` of its own path, in order: the number of keys and the
place of each key depend on the token's position alone, not on the other sequences of the tree.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.token_tree import IntArray, TokenTree

BLOCK = 3  # pages of a block, whose queries attend to all blocks before it in one product
FEW = 8  # positions of a tile for short branches
ROWS = 16  # tiles of more queries than a page have a multiple of this number


@dataclass(frozen=True)
class Pages:
    """P pages, in the preorder of the tree: a page stands after the pages before it on its path.

    The queries of a page are the tokens `[first, next page's first)`. They follow each other in the tree, and are the
    last tokens of the page, because the tokens before them belong to the page that the branch was copied from.

    Attributes:
        tokens: int64 `[P, size]`, tree indices; places after the end of a path repeat its last token.
        previous: int64 `[P]`, page with the positions before this page; -1 at the start of a path.
        numbers: int64 `[P]`, number of pages before this page on its path.
        first: int64 `[P]`, increasing, first query of each page.
    """

    tokens: IntArray
    previous: IntArray
    numbers: IntArray
    first: IntArray

    @property
    def size(self) -> int:
        """Number of positions in a page."""
        return int(self.tokens.shape[1])

    def path(self, last: int, length: int) -> IntArray:
        """Return the last pages of the path up to and including page `last`, in order."""
        path = [int(last)]
        while len(path) < length:
            path.append(self.previous[path[-1]])
        return np.array(path[::-1])

    def check(self, tree: TokenTree) -> None:
        """Assert that each page has the tokens of its queries' path, at their positions."""
        stops = np.append(self.first[1:], len(tree))
        assert self.first[0] == 0
        assert (np.diff(self.first) > 0).all()
        assert (self.previous < np.arange(len(self.first))).all(), "a page stands before one that it continues"
        assert (self.numbers == np.where(self.previous < 0, 0, self.numbers[self.previous] + 1)).all()
        for page, (first, stop) in enumerate(zip(self.first.tolist(), stops.tolist(), strict=True)):
            path = tree.ancestors(stop - 1)
            start = self.numbers[page] * self.size
            assert np.array_equal(path[first - stop :], np.arange(first, stop)), "queries are not one run of a path"
            padded = np.minimum(start + np.arange(self.size), len(path) - 1)
            assert start <= tree.depths[first], "a query is before its page"
            assert len(path) <= start + self.size, "a query is after its page"
            assert np.array_equal(self.tokens[page], path[padded]), "a page has other tokens than its path"
            if self.previous[page] >= 0:
                assert self.tokens[self.previous[page], -1] == path[start - 1], "a page continues another path"

    @functools.cached_property
    def before_block(self) -> IntArray:
        """The last page of the blocks before each page's own block, int64 `[P]`; -1 in the first block."""
        found: list[int] = []
        for previous, number in zip(self.previous.tolist(), self.numbers.tolist(), strict=True):
            found.append(-1 if number < BLOCK else previous if number % BLOCK == 0 else found[previous])
        return np.array(found)


def make_pages(tree: TokenTree, size: int) -> Pages:
    """Return the pages of a tree."""
    places = tree.depths % size
    branches = tree.parents != np.arange(-1, len(tree) - 1)
    starts = branches | (places == 0)
    first = np.flatnonzero(starts)
    page_of = np.cumsum(starts) - 1
    stops = np.append(first[1:], len(tree))
    tokens = np.minimum((first - places[first])[:, None] + np.arange(size), stops[:, None] - 1)
    parents = tree.parents[first]
    previous = np.where(parents < 0, -1, page_of[parents])
    for page in np.flatnonzero(places[first]).tolist():  # a branch starts inside this page
        copied, place = previous[page], places[first[page]]
        tokens[page, :place] = tokens[copied, :place]
        previous[page] = previous[copied]
    return Pages(tokens, previous, tree.depths[first] // size, first)


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries that attend to equally many pages.

    Attributes:
        queries: int64 `[tiles, height]`, index of each query among the queries asked for; -1 where there is none.
        pages: int64 `[tiles, n]`, pages of each tile's keys, in the order of their positions.
    """

    queries: IntArray
    pages: IntArray


def make_tiles(
    tree: TokenTree, pages: Pages, queries: IntArray, window: int | None, most_pages: int
) -> tuple[list[Tiles], ...]:
    """Divide the keys of queries into three parts by position, and group the queries that share a part.

    The parts of a query are its own page; the pages before it in its block of `BLOCK` pages; and the blocks before.
    What is shared by many branches is one product of all their queries. A query has as many parts, with as many pages,
    as its position says (and those that a window reaches).

    Args:
        tree, pages: the tree and its pages.
        queries: int64 `[Q]`, increasing tree indices.
        window: sliding window of the attention, or None.
        most_pages: maximum number of pages of keys of several tiles together, to bound memory.

    Returns:
        The tiles of each part. Tiles of a query's own page have the queries in the order of their positions.
    """
    page_of = np.searchsorted(pages.first, queries, side="right") - 1
    ends_block = pages.numbers % BLOCK == 0
    before = np.where(ends_block, -1, pages.previous)[page_of]
    blocks = pages.before_block[page_of]
    own = _tiles_of_own_page(pages, page_of, tree.depths[queries] % pages.size, most_pages)
    if window is not None:
        reach = tree.depths[queries] - window + 1
        before, blocks = (
            np.where((pages.numbers[last] + 1) * pages.size > reach, last, -1) for last in (before, blocks)
        )
    shared = (_tiles_of_shared_pages(pages, last, window, most_pages) for last in (before, blocks))
    return own, *shared


def _tiles_of_own_page(pages: Pages, page_of: IntArray, places: IntArray, most_pages: int) -> list[Tiles]:
    """Return tiles of whole pages, and of `FEW` positions where a page has at most so many queries."""
    few = np.bincount(page_of, minlength=len(pages.first))[page_of] <= FEW
    found = []
    for height, chosen in ((FEW, np.flatnonzero(few)), (pages.size, np.flatnonzero(~few))):
        parts = -(-pages.size // height)
        used, tile_of = np.unique(page_of[chosen] * parts + places[chosen] // height, return_inverse=True)
        rows = np.full((len(used), height), -1)
        rows[tile_of, places[chosen] % height] = chosen
        for start in range(0, len(used), most_pages):
            found.append(Tiles(rows[start : start + most_pages], used[start : start + most_pages, None] // parts))
    return found


def _tiles_of_shared_pages(pages: Pages, last: IntArray, window: int | None, most_pages: int) -> list[Tiles]:
    """Return a tile for each page that is the last of a part, `last` `[Q]`; -1 for queries without the part."""
    chosen = np.flatnonzero(last >= 0)
    used, tile_of = np.unique(last[chosen], return_inverse=True)
    counts = np.bincount(tile_of)
    heights = np.where(counts <= pages.size, pages.size, -(-counts // ROWS) * ROWS)
    numbers = pages.numbers[used]
    firsts = np.where((numbers + 1) % BLOCK == 0, 0, numbers // BLOCK * BLOCK)
    if window is not None:  # the first query after the last page has the oldest keys
        firsts = np.maximum(firsts, ((numbers + 1) * pages.size - window + 1) // pages.size)
    lengths = numbers - firsts + 1
    rows = chosen[np.argsort(tile_of, kind="stable")]
    starts = np.cumsum(counts) - counts
    order = np.lexsort((lengths, heights)).tolist()
    found = []
    for (height, length), members in itertools.groupby(
        order, key=lambda tile: (int(heights[tile]), int(lengths[tile]))
    ):
        step = max(1, most_pages // length) if height == pages.size else 1
        every = list(members)
        for some in (every[start : start + step] for start in range(0, len(every), step)):
            queries = np.full((len(some), height), -1)
            for tile, into in zip(some, queries, strict=True):
                into[: counts[tile]] = rows[starts[tile] : starts[tile] + counts[tile]]
            found.append(Tiles(queries, np.stack([pages.path(used[tile], length) for tile in some])))
    return found
