"""Cache of keys and values across calls, looked up by token ids.

The next turn of a dialogue, or a prompt that is drawn again in the next epoch, starts with tokens that an earlier call
computed. The cache finds them by their token ids, block by block from the start of the text (as in vLLM's prefix
caching, arXiv 2309.06180, section 4). If a template rewrites earlier turns, nothing is found and scores stay correct.
Shapes: a tree has T tokens, of which C are computed and G are cached; key and value `[tokens, H_kv, D]`.
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

from gym_rm.engine.backbones.devices import to_device
from gym_rm.engine.token_tree import IntArray, TokenTree

CACHE_BLOCK_SIZE = 16  # tokens per block of the prefix cache; a block is kept or evicted as a whole

# Key of a block: index of the block before it (-1 at the start of a text), and its own token ids.
BlockKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class KnownPrefixes:
    """Cached tokens of one tree, and new tokens to cache.

    Attributes:
        computed: int64 `[C]`, increasing tree indices of the tokens to compute; on the host.
        pools: cached keys and values `[slots, H_kv, D]` of each layer.
        num_slots: number of slots in a pool.
        indices: int64 `[C]`, `computed` on the device.
        given, given_slots: int64 `[G]` on the device, tree indices of the cached tokens, and their slots.
        kept, kept_slots: int64 `[S]` on the device, tree indices of the tokens to cache, and their slots.
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
        """Cache the computed keys and values `[>= C, H_kv, D]`, and return those of the whole tree `[T, H_kv, D]`."""
        if layer not in self.pools:
            shape = (self.num_slots, *key.shape[1:])
            self.pools[layer] = (key.new_empty(shape), value.new_empty(shape))
        whole = []
        for states, pool in zip((key, value), self.pools[layer], strict=True):
            tree = states.new_empty(len(self.indices) + len(self.given), *states.shape[1:])
            tree[self.indices] = states[: len(self.indices)]
            tree[self.given] = pool[self.given_slots]
            pool[self.kept_slots] = tree[self.kept]
            whole.append(tree)
        return whole[0], whole[1]


class PrefixCache:
    """Keys and values of up to `num_tokens` tokens; the least recently used blocks are evicted first.

    Args:
        num_tokens: capacity in tokens, rounded down to whole blocks of 16.

    Attributes:
        num_blocks: capacity in blocks.
        reused_tokens: number of tokens that came from the cache so far.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_blocks = num_tokens // CACHE_BLOCK_SIZE
        self.reused_tokens = 0
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.clear()

    def clear(self) -> None:
        """Remove all blocks and free their memory; needed after the model's weights change."""
        self._pools = {}
        self._blocks: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first
        self._num_children: dict[int, int] = {}
        self._free = list(range(self.num_blocks))

    @contextlib.contextmanager
    def reuse(self, tree: TokenTree, device: torch.device) -> Iterator[KnownPrefixes]:
        """Yield the cached tokens of a tree; new tokens are cached if the forward inside the context succeeds."""
        try:
            yield from self._reuse(tree, device)
        except BaseException:
            self.clear()  # an interrupt can leave blocks that are neither free nor found
            raise

    def _reuse(self, tree: TokenTree, device: torch.device) -> Iterator[KnownPrefixes]:
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
            for key in reversed(found):  # so that a block is evicted before the block that it continues
                self._blocks.move_to_end(key)
        slots[tree.read_indices] = -1  # tokens that are read must be computed, to get their hidden states
        computed, given = np.flatnonzero(slots < 0), np.flatnonzero(slots >= 0)
        kept = [indices for _, indices in new.values()]
        kept_slots = [block * CACHE_BLOCK_SIZE + np.arange(CACHE_BLOCK_SIZE) for block, _ in new.values()]
        nothing = np.empty(0, dtype=np.int64)
        new_tokens = (np.concatenate([nothing, *arrays]) for arrays in (kept, kept_slots))
        on_device = (to_device(indices, device) for indices in (computed, given, slots[given], *new_tokens))
        yield KnownPrefixes(computed, self._pools, self.num_blocks * CACHE_BLOCK_SIZE, *on_device)
        self.reused_tokens += len(given)
        for key, (block, _) in reversed(new.items()):
            self._blocks[key] = block
            if key[0] >= 0:
                self._num_children[key[0]] = self._num_children.get(key[0], 0) + 1

    def _take(self, in_use: set[int]) -> int | None:
        """Return a free block, after evicting the least recently used one if needed; None if all are in use."""
        if not self._free:
            for key, block in self._blocks.items():
                if block not in in_use and not self._num_children.get(block):
                    del self._blocks[key]
                    if key[0] >= 0:
                        self._num_children[key[0]] -= 1
                    self._free.append(block)
                    break
        return self._free.pop() if self._free else None
