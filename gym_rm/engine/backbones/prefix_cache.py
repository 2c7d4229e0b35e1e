"""Keys and values of earlier calls, by the tokens that they stand for.

The next turn of a dialogue, and a prompt that comes back in the next epoch, begin with tokens that an earlier call has
computed. What is kept is found again by its token ids alone, block by block from the start of the text (as in vLLM's
prefix caching, arXiv 2309.06180, section 4), so a template that rewrites earlier turns finds nothing and loses nothing.
Shapes: T tokens of a tree, C of them computed, G given; key and value `[tokens, H_kv, D]`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gym_rm.engine.backbones.tree_attention import to_device
from gym_rm.engine.token_tree import IntArray, TokenTree

CACHE_BLOCK_SIZE = 16  # tokens that are kept or forgotten together

# A block is known by the block before it (-1 at the start of a text) and its own tokens.
BlockKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class KnownPrefixes:
    """What of one tree is given, and what is worth keeping of the rest.

    Attributes:
        computed: int64 `[C]`, increasing indices of the tree that go through the model; on the host.
        pools: keys and values `[slots, H_kv, D]` of each layer.
        num_slots: in a pool.
        indices: `computed` on the device, and there too, int64:
        given, given_slots: `[G]`, the other indices, and where their keys and values lie in the pools.
        kept, kept_slots: `[S]`, indices of the tree whose keys and values are kept, and where.
    """

    computed: IntArray
    pools: dict[int, tuple[Tensor, Tensor]]
    num_slots: int
    indices: Tensor
    given: Tensor
    given_slots: Tensor
    kept: Tensor
    kept_slots: Tensor

    def complete(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole tree `[T, H_kv, D]` from those computed `[C, H_kv, D]`; keeps the new ones."""
        if layer not in self.pools:
            shape = (self.num_slots, *key.shape[1:])
            self.pools[layer] = (key.new_empty(shape), value.new_empty(shape))
        whole = []
        for states, pool in zip((key, value), self.pools[layer], strict=True):
            tree = states.new_empty(len(self.indices) + len(self.given), *states.shape[1:])
            tree[self.indices] = states
            tree[self.given] = pool[self.given_slots]
            pool[self.kept_slots] = tree[self.kept]
            whole.append(tree)
        return whole[0], whole[1]


class PrefixCache:
    """Keys and values of up to `num_tokens` tokens, the least recently used forgotten first.

    Args:
        num_tokens: how many; rounded down to whole blocks of 16.

    Attributes:
        reused_tokens: how many tokens did not need to be computed so far.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_blocks = num_tokens // CACHE_BLOCK_SIZE
        self.reused_tokens = 0
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything and free the memory, as after the model's weights changed."""
        self._pools = {}
        self._blocks: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first
        self._num_children: dict[int, int] = {}
        self._free = list(range(self.num_blocks))

    @contextlib.contextmanager
    def reuse(self, tree: TokenTree, device: torch.device) -> Iterator[KnownPrefixes]:
        """What is known of a tree; what is new is kept once the forward inside the context has succeeded."""
        slots = np.full(len(tree), -1, dtype=np.int64)
        new: OrderedDict[BlockKey, tuple[int, IntArray]] = OrderedDict()
        in_use: set[int] = set()
        for leaf in np.flatnonzero(tree.subtree_end == np.arange(len(tree)) + 1).tolist():
            ancestors = tree.ancestors(leaf)
            found: list[BlockKey] = []
            block = -1
            for start in range(0, len(ancestors) - CACHE_BLOCK_SIZE + 1, CACHE_BLOCK_SIZE):
                indices = ancestors[start : start + CACHE_BLOCK_SIZE]
                key = (block, tree.input_ids[indices].tobytes())
                if key in self._blocks:
                    block = self._blocks[key]
                    slots[indices] = block * CACHE_BLOCK_SIZE + np.arange(CACHE_BLOCK_SIZE)
                    found.append(key)
                elif key in new:
                    block = new[key][0]
                else:
                    taken = self._take(in_use)
                    if taken is None:
                        break
                    block = taken
                    new[key] = (block, indices)
                in_use.add(block)
            for key in reversed(found):  # a block is forgotten before the one that it continues
                self._blocks.move_to_end(key)
        slots[tree.read_indices] = -1  # there, hidden states are wanted
        computed, given = np.flatnonzero(slots < 0), np.flatnonzero(slots >= 0)
        kept = [indices for _, indices in new.values()]
        kept_slots = [block * CACHE_BLOCK_SIZE + np.arange(CACHE_BLOCK_SIZE) for block, _ in new.values()]
        nothing = np.empty(0, dtype=np.int64)
        on_device = (
            computed,
            given,
            slots[given],
            np.concatenate([nothing, *kept]),
            np.concatenate([nothing, *kept_slots]),
        )
        try:
            yield KnownPrefixes(
                computed,
                self._pools,
                self.num_blocks * CACHE_BLOCK_SIZE,
                *(to_device(indices, device) for indices in on_device),
            )
        except BaseException:
            self._free += [block for block, _ in new.values()]
            raise
        self.reused_tokens += len(given)
        for key, (block, _) in reversed(new.items()):
            self._blocks[key] = block
            if key[0] >= 0:
                self._num_children[key[0]] = self._num_children.get(key[0], 0) + 1

    def _take(self, in_use: set[int]) -> int | None:
        """A free block, if need be the least recently used that nothing continues; None if all are in use."""
        if not self._free:
            for key, block in self._blocks.items():
                if block not in in_use and not self._num_children.get(block):
                    del self._blocks[key]
                    if key[0] >= 0:
                        self._num_children[key[0]] -= 1
                    self._free.append(block)
                    break
        return self._free.pop() if self._free else None
