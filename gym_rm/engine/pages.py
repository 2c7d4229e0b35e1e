"""Pages of a token tree: the tokens of every path, a fixed number of positions at a time. Integers only, no torch.

Page i of a path has the path's tokens at the positions `[size * i, size * (i + 1))`. If a branch starts inside a page,
it gets a page of its own, with copies of the tokens before it (as PagedAttention copies on write, arXiv 2309.06180,
section 4.4). So a token attends to pages 0 to `position // size` of its own path, in order: the number of keys and the
place of each key depend on the token's position alone, not on the other sequences of the tree.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.token_tree import IntArray, TokenTree


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

    @functools.cached_property
    def paths(self) -> list[IntArray]:
        """The pages from the start of the path to each page, inclusive."""
        paths: list[IntArray] = []
        for page, previous in enumerate(self.previous.tolist()):
            paths.append(np.append(paths[previous], page) if previous >= 0 else np.array([page]))
        return paths


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
        queries: int64 `[tiles, size]`, index of each query among the queries asked for; 0 where there is none.
        pages: int64 `[tiles, n]`, pages of each tile's keys, in the order of their positions.
    """

    queries: IntArray
    pages: IntArray


def make_tiles(
    tree: TokenTree, pages: Pages, queries: IntArray, window: int | None, most_pages: int
) -> tuple[list[Tiles], IntArray]:
    """Group queries into tiles: the queries of one page, each in the row of its position.

    Args:
        tree, pages: the tree and its pages.
        queries: int64 `[Q]`, increasing tree indices.
        window: sliding window of the attention, or None.
        most_pages: maximum number of pages of keys in one group of tiles, to bound memory.

    Returns:
        The groups of tiles, and the place `[Q]` of each query in the rows of all tiles.
    """
    page_of = np.searchsorted(pages.first, queries, side="right") - 1
    used, tile_of = np.unique(page_of, return_inverse=True)
    numbers = pages.numbers[used]
    counts = numbers + 1
    if window is not None:
        counts = numbers - np.maximum(0, (numbers * pages.size - window + 1) // pages.size) + 1
    order = np.argsort(counts, kind="stable")
    place_of_tile = np.empty_like(order)
    place_of_tile[order] = np.arange(len(order))
    places: IntArray = place_of_tile[tile_of] * pages.size + tree.depths[queries] % pages.size
    rows = np.zeros(len(used) * pages.size, dtype=np.int64)
    rows[places] = np.arange(len(queries))
    tiles = rows.reshape(len(used), pages.size)
    groups = []
    for start, stop in _runs(counts[order], most_pages):
        count = int(counts[order[start]])
        keys = np.stack([pages.paths[page][-count:] for page in used[order[start:stop]].tolist()])
        groups.append(Tiles(tiles[start:stop], keys))
    return groups, places


def _runs(counts: IntArray, most_pages: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of equal counts, each of at most `most_pages` pages."""
    bounds = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    for first, last in itertools.pairwise(bounds):
        step = max(1, most_pages // int(counts[first]))
        for start in range(first, last, step):
            yield start, min(start + step, last)
