"""Rows that keep their bits beside any other rows: what torch's matrix products and activations need for that.

- A matrix product of few rows, or the last rows of a product, can run in another kernel, which adds in another order.
  So products have a multiple of 16 rows, and where that does not suffice, always the same number of rows.
- On a CPU, elements after the last whole vector are computed by scalar code, which rounds some functions differently.
  So activations have a size that torch divides among its threads at whole vectors.
- Reductions over a row (norms, softmax) and exact operations (sums, products) need nothing.

`same_products` tests on the hardware at hand whether a multiple of rows suffices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, logsigmoid, mish, pad, selu, silu, softplus
from torch.overrides import TorchFunctionMode

from gym_rm.engine.token_tree import IntArray

ROWS = 16  # products have a multiple of this number of rows
CHUNK = {"cpu": 256, "cuda": 1024}  # rows of a product where its bits depend on the number of rows
PARALLEL_ELEMENTS = 32_768  # torch computes up to so many elements in one thread (at::internal::GRAIN_SIZE)
GELU_ELEMENTS = 16_384  # and gelu up to so many, and more in all threads
VECTOR_ELEMENTS = 64  # multiple of the elements that torch's vectorised loops compute at once
TESTED_ROWS = (16, 48, 112, 272, 1040, 2064)


def padded_rows(rows: int) -> int:
    """Return the number of rows with padding."""
    return -(-rows // ROWS) * ROWS


def with_padding(tokens: IntArray) -> IntArray:
    """Return tokens `[..., T]` with copies of the first at the end, so that products have whole groups of rows."""
    extra = padded_rows(tokens.shape[-1]) - tokens.shape[-1]
    return np.concatenate([tokens, np.repeat(tokens[..., :1], extra, axis=-1)], axis=-1)


class BatchInvariant(TorchFunctionMode):
    """Context in which a row's result has the same bits beside any other rows.

    It changes the calls of matrix products with a weight `[K, N]` and of activations, in a model's own code too. Shapes
    and values stay the same, but for rounding.

    Args:
        chunk: number of rows of every product; None for any multiple of `ROWS`.
    """

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self.chunk = chunk

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a torch function, with its rows in chunks or padded."""
        rule = RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self.chunk, func, *args, **(kwargs or {}))


def _product(chunk: int | None, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)`, a product of the rows of x `[..., K]`."""
    rows = x.shape[:-1].numel() if x.dim() > 1 else 1
    whole = rows % ROWS == 0 if chunk is None else rows == chunk
    if weight.dim() != 2 or x.dim() == 0 or whole or not rows:
        return func(x, weight, *args, **kwargs)
    flat = x.reshape(rows, x.shape[-1])
    parts = [func(part, weight, *args, **kwargs) for part in _parts(flat, chunk)]
    product = (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]
    return product.view(*x.shape[:-1], product.shape[-1])


def _added_product(chunk: int | None, func: Any, added: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Any:
    """Compute `addmm(added, x, weight)`, or `addmm_`."""
    rows = len(x)
    whole = rows % ROWS == 0 if chunk is None else rows == chunk
    if whole or not rows:
        return func(added, x, weight, **kwargs)
    to_each = added.dim() == 2 and len(added) == rows
    every = _parts(added, chunk) if to_each else iter(lambda: added, None)
    parts = [torch.addmm(one, part, weight, **kwargs) for one, part in zip(every, _parts(x, chunk), strict=False)]
    product = (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]
    return added.copy_(product) if func is Tensor.addmm_ else product


def _grouped_product(
    chunk: int | None, func: Any, x: Tensor, weights: Tensor, offs: Tensor | None = None, **kwargs: Any
) -> Any:
    """Compute the products of an expert model: rows of x up to `offs[e]` with the weight `[K, N]` of expert e."""
    if x.device.type != "cpu" or offs is None or x.dim() != 2 or weights.dim() != 3 or any(kwargs.values()):
        return func(x, weights, offs=offs, **kwargs)
    output = x.new_zeros(len(x), weights.shape[-1])
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if start < stop:
            output[start:stop] = _product(chunk, torch.mm, x[start:stop], weights[expert])
    return output


def _parts(x: Tensor, chunk: int | None) -> Iterator[Tensor]:
    """Yield chunks of rows `[chunk, K]`, or all rows if it is None; the last one is padded with zeros."""
    for part in (x,) if chunk is None else torch.split(x, chunk):
        size = padded_rows(len(x)) if chunk is None else chunk
        yield part if len(part) == size else pad(part, (0, 0, 0, size - len(part)))


def _activation(chunk: int | None, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, ...)` for each element of x; in place if asked for."""
    if x.device.type != "cpu" or (x.is_contiguous() and _whole_vectors(x.numel())) or not x.numel():
        return func(x, *args, **kwargs)
    threads = torch.get_num_threads()
    share = max(PARALLEL_ELEMENTS, -(-x.numel() // (threads * VECTOR_ELEMENTS)) * VECTOR_ELEMENTS)
    size = share * threads if x.numel() > GELU_ELEMENTS else -(-x.numel() // VECTOR_ELEMENTS) * VECTOR_ELEMENTS
    flat = x.new_zeros(size)
    flat[: x.numel()] = x.reshape(-1)
    result: Tensor = func(flat, *args, **kwargs)[: x.numel()].view(x.shape)
    return x.copy_(result) if kwargs.get("inplace") or func.__name__.endswith("_") else result


def _whole_vectors(elements: int) -> bool:
    """Return whether every thread of torch gets whole vectors of so many contiguous elements."""
    threads = torch.get_num_threads()
    numbers = {1, min(threads, -(-elements // PARALLEL_ELEMENTS)), threads if elements > GELU_ELEMENTS else 1}
    return all(-(-elements // number) % VECTOR_ELEMENTS == 0 for number in numbers)


RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product),
    **dict.fromkeys((torch.addmm, Tensor.addmm, Tensor.addmm_), _added_product),
    torch._scaled_mm: _product,
    torch._grouped_mm: _grouped_product,
    **dict.fromkeys((silu, gelu, softplus, mish, selu, logsigmoid, torch.selu, torch.exp2, Tensor.exp2), _activation),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, torch.rsqrt, Tensor.rsqrt), _activation),
}


@functools.cache
def same_products(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return whether products with a weight `[N, K]` have the same bits for a row beside other numbers of rows.

    `threads` is the number of torch's threads; the result of a test with these arguments is kept.
    """
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(ROWS, shape[1], generator=generator).to(device, dtype)
    weight = torch.randn(shape, generator=generator).to(device, dtype)
    expected = linear(few, weight)
    for rows in TESTED_ROWS:
        got = linear(few.repeat(rows // ROWS, 1), weight).view(-1, *expected.shape)
        if not torch.equal(got, expected.expand_as(got)):
            return False
    return True


def chunks_to_try(backbones: Sequence[nn.Module]) -> tuple[int | None, ...]:
    """Return chunks for `BatchInvariant`, the fastest first; None only if products of all shapes allow it."""
    products = {
        (tuple(module.weight.shape), module.weight.dtype, module.weight.device)
        for backbone in backbones
        for module in backbone.modules()
        if type(module) is nn.Linear
    }
    device = next(backbones[0].parameters()).device
    constant = CHUNK.get(device.type, CHUNK["cuda"])
    return (None, constant) if all(same_products(*each, torch.get_num_threads()) for each in products) else (constant,)
