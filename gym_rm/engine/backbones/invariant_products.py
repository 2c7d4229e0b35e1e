"""Products and activations of rows whose results do not depend on the other rows, for `BatchInvariant`.

- A matrix product of few rows, or the last rows of a product, can run in another kernel, which adds in another order.
  So products have a multiple of 16 rows; where that does not suffice, a larger multiple, or always the same number of
  rows (`LADDER`). All can fail: with several threads and sizes that are not multiples of 16, a row can depend on its
  place.
- On a CPU, elements after the last whole vector are computed by scalar code, which rounds some functions differently.
  So activations have a size that torch divides among its threads at whole vectors.
- Products of several matrices, as in attention, run in another kernel if their numbers do not follow each other in
  memory, and torch copies them only if there are several sequences. So they are always copied.
- Reductions over a row (norms, softmax) and exact operations (sums, products) need nothing.

Convolutions and products with vectors, as in Mamba, have no rule: the trial at load says how far their values differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import celu, elu, gelu, linear, logsigmoid, mish, pad, selu, silu, softplus

from gym_rm.engine.backbones.packed_weights import packs

ROWS = 16  # products have a multiple of this number of rows
PARALLEL_ELEMENTS = 32_768  # torch computes up to this many elements in one thread (at::internal::GRAIN_SIZE)
GELU_ELEMENTS = 16_384  # gelu computes up to this many in one thread, and more in all threads
VECTOR_ELEMENTS = 64  # a multiple of the number of elements that torch's vectorised loops compute at once


@dataclass(frozen=True, slots=True)
class GemmRows:
    """Numbers of rows that matrix products have.

    Attributes:
        multiple: products have a multiple of so many rows; the last ones are padding.
        in_chunks: whether every kernel computes `multiple` rows, instead of all.
        packed: whether the weights of linear layers are packed, see `packed_weights`.
    """

    multiple: int = ROWS
    in_chunks: bool = False
    packed: bool = False

    def __str__(self) -> str:
        rows = f"{'chunks' if self.in_chunks else 'multiples'} of {self.multiple}"
        return f"{rows}, packed weights" if self.packed else rows

    def padded(self, count: int) -> int:
        """Return the number of rows with padding."""
        return -(-count // self.multiple) * self.multiple

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return x `[count, ...]` in chunks, or whole; without a copy."""
        return torch.split(x, self.multiple) if self.in_chunks else (x,)


# Numbers of rows to try, the fastest for large batches first; the last is used where no other keeps the bits.
LADDER = {
    "cpu": (*((GemmRows(packed=True),) if packs() else ()), GemmRows(), GemmRows(256, in_chunks=True)),
    "cuda": (
        *(GemmRows(size) for size in (ROWS, 128, 256, 1024, 8192)),
        *(GemmRows(size, in_chunks=True) for size in (8192, 4096, 1024)),
    ),
}


def plus_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `added + x @ weight.T`; `added` `[T, N]` is overwritten without gradients."""
    return torch.addmm(added, x, weight.t()) if torch.is_grad_enabled() else added.addmm_(x, weight.t())


def _product(rows: GemmRows, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)`, a product of the rows of x `[..., K]`."""
    if x.dim() > 2 and weight.dim() > 2:
        return _batched_product(rows, func, x, weight, *args, **kwargs)
    if weight.dim() != 2 or x.dim() == 0 or not x.shape[:-1].numel():
        return func(x, weight, *args, **kwargs)
    func = WITH_OUT.get(func, func)
    product = by_rows(
        rows,
        lambda part, **into: func(part, weight, *args, **kwargs, **into),
        x.reshape(-1, x.shape[-1]),
        width=weight.shape[0 if func is linear else 1] if func in (linear, torch.mm, torch.matmul) else None,
        dtype=kwargs.get("out_dtype", x.dtype),
    )
    return product if x.dim() == 2 else product.view(*x.shape[:-1], -1)


def _batched_product(rows: GemmRows, func: Any, *tensors: Tensor, **kwargs: Any) -> Any:
    """Compute `func` of matrices `[..., M, K]` and `[..., K, N]`, and of what is added first if there is anything."""
    *added, x, weight = tensors
    return func(*added, x.contiguous(), weight.contiguous(), **kwargs)


def added_product(rows: GemmRows, func: Any, added: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Any:
    """Compute `addmm(added, x, weight)`, or `addmm_`."""
    if not len(x):
        return func(added, x, weight, **kwargs)
    if func is Tensor.addmm_ and len(x) % rows.multiple == 0:  # without a copy
        for into, part in zip(rows.split(added), rows.split(x.contiguous()), strict=True):
            into.addmm_(part, weight, **kwargs)
        return added
    if added.dim() == 2 and len(added) == len(x):
        product = by_rows(rows, lambda part, one: torch.addmm(one, part, weight, **kwargs), x, added)
    else:
        product = by_rows(rows, lambda part: torch.addmm(added, part, weight, **kwargs), x)
    return added.copy_(product) if func is Tensor.addmm_ else product


def _scaled_product(
    rows: GemmRows, func: Any, x: Tensor, weight: Tensor, scale: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Compute a product of 8-bit rows x `[T, K]`, with a scale for each row `[T, 1]` or one for all."""
    if len(scale.shape) == 2 and len(scale) == len(x) > 0:
        return by_rows(rows, lambda part, each: func(part, weight, each, *args, **kwargs), x, scale)
    return _product(rows, func, x, weight, scale, *args, **kwargs)


def _grouped_product(
    rows: GemmRows, func: Any, x: Tensor, weights: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Compute the products of an expert model: rows of x from `offs[e - 1]` to `offs[e]` with weight e `[K, N]`."""
    others = any(value is not None for value in (*args, *kwargs.values()))
    if x.device.type != "cpu" or offs is None or x.dim() != 2 or weights.dim() != 3 or others:
        return func(x, weights, offs, *args, **kwargs)
    output = x.new_zeros(len(x), weights.shape[-1])
    for expert, (start, stop) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if start < stop:
            output[start:stop] = _product(rows, torch.mm, x[start:stop], weights[expert])
    return output


def by_rows(
    rows: GemmRows,
    call: Callable[..., Tensor],
    *tensors: Tensor,
    width: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `call(*tensors)` `[count, N]`, computed for the padded rows of all tensors `[count, ...]`, or for chunks.

    If the call has an argument `out`, its width is N and its dtype that of the result; chunks are then not copied.
    """
    count = len(tensors[0])
    parts = list(zip(*(_parts(rows, tensor) for tensor in tensors), strict=True))
    if len(parts) == 1 or width is None or not torch.is_inference_mode_enabled():  # `out` has no gradients
        results = [call(*part) for part in parts]
        output = results[0] if len(results) == 1 else torch.cat(results)
    else:
        output = tensors[0].new_empty(rows.padded(count), width, dtype=dtype)
        for part, into in zip(parts, torch.split(output, rows.multiple), strict=True):
            call(*part, out=into)
    return output if len(output) == count else output[:count]


def _parts(rows: GemmRows, x: Tensor) -> list[Tensor]:
    """Return chunks of the rows `[multiple, K]`, or all; the last one is padded with zeros."""
    *parts, last = rows.split(x.contiguous())
    extra = rows.padded(len(last)) - len(last)
    return [*parts, pad(last, (0, 0, 0, extra)) if extra else last]


def activation(rows: GemmRows, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
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
    **dict.fromkeys((torch.addmm, Tensor.addmm, Tensor.addmm_), added_product),
    torch._scaled_mm: _scaled_product,
    torch._grouped_mm: _grouped_product,
    **dict.fromkeys((silu, gelu, softplus, mish, selu, elu, celu, logsigmoid, torch.selu), activation),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, torch.special.expit), activation),
    **dict.fromkeys((Tensor.sigmoid, Tensor.sigmoid_), activation),
    **dict.fromkeys((torch.rsqrt, torch.rsqrt_, Tensor.rsqrt, Tensor.rsqrt_), activation),
    **dict.fromkeys((torch.exp2, torch.special.exp2, Tensor.exp2), activation),
}
WITH_OUT = {Tensor.matmul: torch.matmul, Tensor.mm: torch.mm}  # methods, and the functions with an argument `out`
# Names of a function's inputs, in the order of its arguments.
INPUTS = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2")
