"""Wrong attention, positions and products. A model with any of them must not run as a tree.

`MUTATIONS` maps a name to a function that returns a context in which the package computes something wrong; it may need
a model with a soft cap, a window or sinks. That a model is refused says something only if `require_tree` accepts the
same model without a mutation, and if the trial compared values: see `failures`.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from gym_rm.engine.backbones import decoder, flex_attention, tree_attention
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.backbones.llama import MODEL_TYPES
from gym_rm.engine.backbones.tree_attention import TreeAttention
from gym_rm.engine.executors import loaded_model
from gym_rm.engine.executors.executor import ModelInfo
from gym_rm.engine.pages import Pages, Tiles
from gym_rm.errors import logger

Context = contextlib.AbstractContextManager
# Windows of 4096 tokens, as in Gemma 2 and gpt-oss: no text of the trial is as long.
MODELS = {
    "qwen3": {},
    "mistral": {"sliding_window": 4096},
    "gemma2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 4096},
}
BLOCK = flex_attention.FLEX_BLOCK_SIZE


FAILED = re.compile(r"^ *tree.* fails: (.*)$", re.MULTILINE)  # in the table that is logged after a load


def require_tree(architecture: str, info: ModelInfo) -> None:
    """Raise AssertionError if a model without a mutation does not run as a tree, fused where the package can."""
    found, expected = (info.layout, info.fused), ("tree", architecture in MODEL_TYPES)
    assert found == expected, f"{architecture} without a mutation: layout and fused are {found} instead of {expected}"


@contextlib.contextmanager
def failures():
    """Context in which a model loads; a list of why trees failed with an error, whose values say nothing then."""
    found = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.extend(FAILED.findall(record.getMessage()))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def mask(change) -> Context:
    """Change which keys a query attends to in flex_attention: `change(rule, q, k)` instead of `rule(q, k)`."""
    plain = torch.nn.attention.flex_attention.BlockMask.from_kv_blocks

    def from_kv_blocks(*blocks, mask_mod, **options):
        return plain(*blocks, **options, mask_mod=lambda b, h, q, k: change(lambda q, k: mask_mod(b, h, q, k), q, k))

    return mock.patch.object(flex_attention, "BlockMask", SimpleNamespace(from_kv_blocks=from_kv_blocks))


def tiles(change) -> Context:
    """Change the tiles of attention by pages."""
    plain = tree_attention.make_tiles

    def make_tiles(*arguments):
        return tuple([change(each) for each in part] for part in plain(*arguments))

    return mock.patch.object(tree_attention, "make_tiles", make_tiles)


def pages(change) -> Context:
    """Change the pages of a tree, for both attentions."""
    plain = tree_attention.make_pages
    return mock.patch.object(tree_attention, "make_pages", lambda tree, size: change(plain(tree, size), size))


def attend(change) -> Context:
    """Change the inputs of attention."""
    plain = TreeAttention.__call__

    def attend(self, call, query, key, value):
        fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        given = fields | {"query": query, "key": key, "value": value}
        given |= change(SimpleNamespace(**given))
        states = [given.pop(name) for name in ("query", "key", "value")]
        return plain(self, type(call)(**given), *states)

    return mock.patch.object(TreeAttention, "__call__", attend)


def copies_of_a_sibling(made: Pages, size: int) -> Pages:
    """Let the pages of branches have the tokens of the page before them, which is a sibling's."""
    tokens = made.tokens.copy()
    for page in range(1, len(tokens)):
        shared = np.flatnonzero(tokens[page] < made.first[page])
        tokens[page, shared] = tokens[page - 1, shared]
    return Pages(tokens, made.previous, made.numbers, made.first)


def without_a_single_shared_token(made: Pages, size: int) -> Pages:
    """Let a branch after the first token of a page have its own token there, twice."""
    tokens = made.tokens.copy()
    single = (tokens < made.first[:, None]).sum(axis=1) == 1
    tokens[single, 0] = tokens[single, 1]
    return Pages(tokens, made.previous, made.numbers, made.first)


def neighbours(each: Tiles) -> Tiles:
    """Let a single tile attend to the pages beside its last one, instead of those of its path."""
    if len(each.pages) > 1:
        return each
    last, count = each.pages[0, -1], each.pages.shape[1]
    return Tiles(each.queries, np.arange(last + 1 - count, last + 1)[None] if last + 1 >= count else each.pages)


def inputs(change) -> Context:
    """Change the padded token ids and positions `[2, T]`."""
    plain = decoder.with_padding
    return mock.patch.object(decoder, "with_padding", lambda tokens: change(plain(tokens)))


def late_positions(tokens):
    if tokens.ndim == 2:
        tokens[1] += tokens[1] >= 32
    return tokens


@contextlib.contextmanager
def chunks(change):
    """Let products run in the smallest chunks of rows, and change the chunks `[n, ...]` of more than one."""
    plain = GemmRows.split

    def split(self, x):
        parts = plain(self, x)
        return change(parts) if len(parts) > 1 else parts

    def smallest(backbones):
        return [LADDER[next(backbones[0].parameters()).device.type][-1]]

    with mock.patch.object(GemmRows, "split", split), mock.patch.object(loaded_model, "rows_to_try", smallest):
        yield


MUTATIONS: dict[str, Callable[[], Context]] = {
    "flex: keys after the first page are lost": lambda: mask(lambda rule, q, k: rule(q, k) & (k < BLOCK)),
    "flex: keys of the last pages are lost": lambda: mask(lambda rule, q, k: rule(q, k) & (k < 3 * BLOCK)),
    "flex: one key of each later page is lost": lambda: mask(
        lambda rule, q, k: rule(q, k) & ((k < BLOCK) | (k % BLOCK != 5))
    ),
    "flex: the next token is visible": lambda: mask(lambda rule, q, k: rule(q, k) | rule((q + 1).clamp(max=300), k)),
    "flex: the query itself is hidden": lambda: mask(lambda rule, q, k: rule(q, k) & rule((q - 1).clamp(min=0), k)),
    "flex: siblings are visible": lambda: mask(lambda rule, q, k: rule(q, k) | rule((q - 60).clamp(min=0), k)),
    "pages: the first page is lost": lambda: tiles(
        lambda each: Tiles(each.queries, each.pages[:, 1:] if each.pages.shape[1] > 1 else each.pages)
    ),
    "pages: a single tile takes the pages beside it": lambda: tiles(neighbours),
    "pages lose a token before a branch": lambda: pages(without_a_single_shared_token),
    "pages have copies of a sibling": lambda: pages(copies_of_a_sibling),
    "positions from 32 on are late by one": lambda: inputs(late_positions),
    "the soft cap is forgotten": lambda: attend(lambda given: {"softcap": None}),
    "the soft cap is doubled": lambda: attend(lambda given: {"softcap": given.softcap and 2 * given.softcap}),
    "the window is forgotten": lambda: attend(lambda given: {"window": None}),
    "the window is larger by one": lambda: attend(lambda given: {"window": given.window and given.window + 1}),
    "sinks are dropped": lambda: attend(lambda given: {"sinks": None}),
    "heads are swapped": lambda: attend(lambda given: {"query": given.query.roll(1, dims=1)}),
    "key heads are swapped": lambda: attend(lambda given: {"key": given.key.roll(1, dims=1)}),
    "scores are not scaled": lambda: attend(lambda given: {"scale": 1.0}),
    "values are shifted": lambda: attend(lambda given: {"value": given.value.roll(1, dims=0)}),
    "the last chunk of products is skipped": lambda: chunks(lambda parts: (*parts[:-1], torch.zeros_like(parts[-1]))),
    "the second chunk of products is that of the first": lambda: chunks(
        lambda parts: (*parts[:1], *parts[:1], *parts[2:])
    ),
    "rows of a chunk are shifted": lambda: chunks(lambda parts: (parts[0], parts[1].roll(1, dims=0), *parts[2:])),
}
# That change values by less than rounding to 16 bits, so that they are found in float32 only.
SMALL = ("pages lose a token before a branch", "the soft cap is doubled")
