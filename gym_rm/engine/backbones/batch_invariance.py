"""Make the result of a row independent of the other rows, bit for bit.

- A matrix product of few rows, or the last rows of a product, can run in another kernel, which adds in another order.
  So products have a multiple of 16 rows, and where that does not suffice, always the same number of rows. Both can
  fail: with several threads and sizes that are not multiples of 16, a row can depend on its place.
- On a CPU, elements after the last whole vector are computed by scalar code, which rounds some functions differently.
  So activations have a size that torch divides among its threads at whole vectors.
- Products of several matrices, as in attention, run in another kernel if their numbers do not follow each other in
  memory, and torch copies them only if there are several sequences. So they are always copied.
- On a CPU, convolutions of one sequence and of several run in other kernels. So each sequence runs alone.
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
from torch.nn.functional import celu, elu, gelu, linear, logsigmoid, mish, pad, selu, silu, softplus
from torch.overrides import TorchFunctionMode

from gym_rm.engine.backbones.sharded import RowParallelLinear
from gym_rm.engine.token_tree import IntArray

ROWS = 16  # products have a multiple of this number of rows
CHUNK = {"cpu": 256, "cuda": 1024}  # rows of a product where its bits depend on the number of rows
PARALLEL_ELEMENTS = 32_768  # torch computes up to this many elements in one thread (at::internal::GRAIN_SIZE)
GELU_ELEMENTS = 16_384  # gelu computes up to this many in one thread, and more in all threads
VECTOR_ELEMENTS = 64  # a multiple of the number of elements that torch's vectorised loops compute at once
TESTED_ROWS = (16, 48, 112, 272, 1040, 2064)  # numbers of rows that `same_products` compares


def padded_rows(rows: int) -> int:
    """Return the number of rows with padding."""
    return -(-rows // ROWS) * ROWS


def with_padding(tokens: IntArray) -> IntArray:
    """Return tokens `[..., T]` with copies of the first at the end, so that products have whole groups of rows."""
    extra = padded_rows(tokens.shape[-1]) - tokens.shape[-1]
    return np.concatenate([tokens, np.repeat(tokens[..., :1], extra, axis=-1)], axis=-1)


class BatchInvariant(TorchFunctionMode):
    """Context in which a row's result has the same bits beside any other rows, where the kernels allow it.

    It changes how the functions of `RULES` are computed, also in the code of a model: products with a weight `[K, N]`
    run on padded rows, convolutions on one sequence at a time, activations on padded sizes. Results change only by
    rounding.

    Args:
        chunk: number of rows of every product; None for any multiple of `ROWS`.
    """

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__()
        self.chunk = chunk

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a torch function, with its rows in chunks or padded."""
        rule = RULES.get(func)
        if rule is None or (kwargs and "out" in kwargs):
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        inputs = (*args, *(named.pop(name) for name in INPUTS if name in named))
        return rule(self.chunk, func, *inputs, **named)


def _product(chunk: int | None, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)`, a product of the rows of x `[..., K]`."""
    if weight.dim() == 1 and x.dim() > 1:  # a vector
        return _product(chunk, torch.matmul, x, weight[:, None]).squeeze(-1)
    if x.dim() == weight.dim() == 3 and len(x) == weight.shape[0] == weight.shape[2] == 1:
        # On a CPU, one matrix times a vector runs in another kernel than several.
        return func(torch.cat([x, x]), torch.cat([weight, weight]), *args, **kwargs)[:1]
    rows = x.shape[:-1].numel() if x.dim() > 1 else 1
    if x.dim() > 2 and weight.dim() > 2:
        return _batched_product(chunk, func, x, weight, *args, **kwargs)
    if weight.dim() != 2 or x.dim() == 0 or not rows or x.layout is not torch.strided:
        return func(x, weight, *args, **kwargs)
    product = _in_chunks(chunk, lambda part: func(part, weight, *args, **kwargs), x.reshape(rows, x.shape[-1]))
    return product.view(*x.shape[:-1], product.shape[-1])


def _batched_product(chunk: int | None, func: Any, *tensors: Tensor, **kwargs: Any) -> Any:
    """Compute `func` of matrices `[..., M, K]` and `[..., K, N]`, and of what is added first if there is anything."""
    *added, x, weight = tensors
    return func(*added, x.contiguous(), weight.contiguous(), **kwargs)


def _added_product(chunk: int | None, func: Any, added: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Any:
    """Compute `addmm(added, x, weight)`, or `addmm_`."""
    if not len(x):
        return func(added, x, weight, **kwargs)
    if func is Tensor.addmm_ and _is_whole(len(x), chunk):
        return func(added, x.contiguous(), weight, **kwargs)  # without a copy
    if added.dim() == 2 and len(added) == len(x):
        product = _in_chunks(chunk, lambda part, one: torch.addmm(one, part, weight, **kwargs), x, added)
    else:
        product = _in_chunks(chunk, lambda part: torch.addmm(added, part, weight, **kwargs), x)
    return added.copy_(product) if func is Tensor.addmm_ else product


def _scaled_product(
    chunk: int | None, func: Any, x: Tensor, weight: Tensor, scale: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a product of 8-bit rows x `[T, K]`, with a scale for each row `[T, 1]` or one for all."""
    if len(scale.shape) == 2 and len(scale) == len(x) > 0:
        return _in_chunks(chunk, lambda part, each: func(part, weight, each, *args, **kwargs), x, scale)
    return _product(chunk, func, x, weight, scale, *args, **kwargs)


def _grouped_product(
    chunk: int | None, func: Any, x: Tensor, weights: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Compute the products of an expert model: rows of x from `offs[e - 1]` to `offs[e]` with weight e `[K, N]`."""
    others = any(value is not None for value in (*args, *kwargs.values()))
    if x.device.type != "cpu" or offs is None or x.dim() != 2 or weights.dim() != 3 or others:
        return func(x, weights, offs, *args, **kwargs)
    output = x.new_zeros(len(x), weights.shape[-1])
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if start < stop:
            output[start:stop] = _product(chunk, torch.mm, x[start:stop], weights[expert])
    return output


def _convolution(chunk: int | None, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)` for each sequence of x `[B, C, T]` alone."""
    if x.device.type != "cpu" or x.dim() != 3 or len(x) < 2:
        return func(x, weight, *args, **kwargs)
    return torch.cat([func(one, weight, *args, **kwargs) for one in torch.split(x.contiguous(), 1)])


def _in_chunks(chunk: int | None, call: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `call(*tensors)` `[rows, N]`, computed for chunks of the rows of all tensors `[rows, ...]`."""
    rows = len(tensors[0])
    if _is_whole(rows, chunk):
        return call(*(tensor.contiguous() for tensor in tensors))
    parts = list(map(call, *(_parts(tensor, chunk) for tensor in tensors)))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]


def _is_whole(rows: int, chunk: int | None) -> bool:
    """Return whether a product of so many rows needs no padding and no chunks."""
    return rows % ROWS == 0 if chunk is None else rows == chunk


def _parts(x: Tensor, chunk: int | None) -> Iterator[Tensor]:
    """Yield chunks of rows `[chunk, K]`, or all rows if it is None; the last one is padded with zeros."""
    for part in (x,) if chunk is None else torch.split(x, chunk):
        size = padded_rows(len(x)) if chunk is None else chunk
        yield part.contiguous() if len(part) == size else pad(part, (0, 0, 0, size - len(part)))


def _activation(chunk: int | None, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, ...)`, a function of each element of x, on a padded size; in place if asked for."""
    if x.device.type != "cpu" or not x.numel() or (x.is_contiguous() and _whole_vectors(x.numel())):
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
    **dict.fromkeys((linear, torch.matmul, Tensor.matmul, torch.mm, Tensor.mm), _product),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm), _batched_product),
    **dict.fromkeys((torch.addmm, Tensor.addmm, Tensor.addmm_), _added_product),
    torch._scaled_mm: _scaled_product,
    torch._grouped_mm: _grouped_product,
    torch.conv1d: _convolution,
    **dict.fromkeys((silu, gelu, softplus, mish, selu, elu, celu, logsigmoid, torch.selu), _activation),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, torch.special.expit), _activation),
    **dict.fromkeys((Tensor.sigmoid, Tensor.sigmoid_), _activation),
    **dict.fromkeys((torch.rsqrt, torch.rsqrt_, Tensor.rsqrt, Tensor.rsqrt_), _activation),
    **dict.fromkeys((torch.exp2, torch.special.exp2, Tensor.exp2), _activation),
}
# Names of a function's inputs, in the order of its arguments.
INPUTS = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2")


@functools.cache
def same_products(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return whether a row's product with a weight `[N, K]` had the same bits at random places in `TESTED_ROWS` rows.

    `threads` must be the current number of torch's threads. Results are kept, because a test takes time.
    """
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(ROWS, shape[1], generator=generator).to(device, dtype)
    weight = torch.randn(shape, generator=generator).to(device, dtype)
    expected = linear(few, weight)
    for rows in TESTED_ROWS:
        chosen = torch.randint(ROWS, (rows,), generator=generator).to(device)
        if not torch.equal(linear(few[chosen], weight), expected[chosen]):
            return False
    return True


def chunks_to_try(backbones: Sequence[nn.Module]) -> tuple[int | None, ...]:
    """Return chunks for `BatchInvariant`, the fastest first; None only if products of all shapes allow it."""
    products = {
        (tuple(module.weight.shape), module.weight.dtype, module.weight.device)
        for backbone in backbones
        for module in backbone.modules()
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, RowParallelLinear)
    }
    device = next(backbones[0].parameters()).device
    constant = CHUNK.get(device.type, CHUNK["cuda"])
    return (None, constant) if all(same_products(*each, torch.get_num_threads()) for each in products) else (constant,)
