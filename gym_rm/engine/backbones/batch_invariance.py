"""Make the result of a row independent of the other rows, bit for bit.

- A matrix product of few rows, or the last rows of a product, can run in another kernel, which adds in another order.
  So products have a multiple of 16 rows; where that does not suffice, a larger multiple, or always the same number of
  rows (`LADDER`). All can fail: with several threads and sizes that are not multiples of 16, a row can depend on its
  place. On CUDA, no product is divided along K (split-K), which would depend on the number of rows.
- On a CPU, elements after the last whole vector are computed by scalar code, which rounds some functions differently.
  So activations have a size that torch divides among its threads at whole vectors.
- Products of several matrices, as in attention, run in another kernel if their numbers do not follow each other in
  memory, and torch copies them only if there are several sequences. So they are always copied.
- On a CPU, convolutions of one sequence and of several run in other kernels. So each sequence runs alone.
- Reductions over a row (norms, softmax) and exact operations (sums, products) need nothing.

`same_products` tests on the hardware at hand which numbers of rows suffice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import celu, elu, gelu, linear, logsigmoid, mish, pad, selu, silu, softplus
from torch.overrides import TorchFunctionMode

from gym_rm.engine.backbones.low_precision import Float8Linear
from gym_rm.engine.backbones.packed_weights import MOST_BYTES, PackedWeights, can_pack, packs
from gym_rm.engine.backbones.sharded import RowParallelLinear
from gym_rm.engine.token_tree import IntArray

Blas: TypeAlias = tuple[tuple[bool, bool], tuple[bool, bool], Any]

ROWS = 16  # products have a multiple of this number of rows
PARALLEL_ELEMENTS = 32_768  # torch computes up to this many elements in one thread (at::internal::GRAIN_SIZE)
GELU_ELEMENTS = 16_384  # gelu computes up to this many in one thread, and more in all threads
VECTOR_ELEMENTS = 64  # a multiple of the number of elements that torch's vectorised loops compute at once
TESTED_ROWS = {"cpu": 2064, "cuda": 32_768}  # the most rows that `same_products` compares
TESTED_MULTIPLES = (1, 2, 3, 7, 8, 17, 32, 65, 129, 513, 2048)
WIDE = 65_536  # outputs of a layer over a vocabulary, whose product of many rows needs too much memory


@dataclass(frozen=True, slots=True)
class Rows:
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
    "cpu": (*((Rows(packed=True),) if packs() else ()), Rows(), Rows(256, in_chunks=True)),
    "cuda": (Rows(), Rows(1024), Rows(8192), *(Rows(size, in_chunks=True) for size in (8192, 4096, 1024))),
}


def with_padding(tokens: IntArray, multiple: int | None = None) -> IntArray:
    """Return tokens `[..., T]` with copies of the first at the end, up to a multiple; None for that of the products."""
    count = tokens.shape[-1]
    extra = Rows(multiple or current_rows().multiple).padded(count) - count
    return np.concatenate([tokens, np.repeat(tokens[..., :1], extra, axis=-1)], axis=-1)


def current_context() -> BatchInvariant | None:
    """Return the innermost context of torch's functions if it is `BatchInvariant`."""
    depth = torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(depth - 1) if depth else None
    return mode if isinstance(mode, BatchInvariant) else None


def current_rows() -> Rows:
    """Return the rows of the current context; outside, any multiple of 16."""
    context = current_context()
    return Rows() if context is None else context.rows


def blas_settings() -> Blas:
    """Return how torch divides products on CUDA: for float16, for bfloat16, and the library."""
    of = torch._C
    return (
        of._get_cublas_allow_fp16_reduced_precision_reduction(),
        of._get_cublas_allow_bf16_reduced_precision_reduction(),
        of._get_blas_preferred_backend(),
    )


def set_blas(settings: Blas) -> None:
    """Set what `blas_settings` returns."""
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction, library = settings
    torch.backends.cuda.preferred_blas_library(library)


WITHOUT_SPLIT_K: Blas = ((False, False), (False, False), "cublaslt")  # which cuBLAS cannot switch off


class BatchInvariant(TorchFunctionMode):
    """Context in which a row's result has the same bits beside any other rows, where the kernels allow it.

    It changes how the functions of `RULES` are computed, also in the code of a model: products with a weight `[K, N]`
    run on padded rows, convolutions on one sequence at a time, activations on padded sizes. Results change only by
    rounding.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        super().__init__()
        self.rows = rows or Rows()
        self.packed = PackedWeights() if self.rows.packed else None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call a torch function, with its rows in chunks or padded."""
        rule = RULES.get(func)
        if rule is None or (kwargs and "out" in kwargs):
            return func(*args, **(kwargs or {}))
        named = dict(kwargs or {})
        inputs = (*args, *(named.pop(name) for name in INPUTS if name in named))
        return self.linear(*inputs, **named) if func is linear else rule(self.rows, func, *inputs, **named)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, plus: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, or the sum with `plus` `[T, N]`, which is overwritten without gradients."""
        if self.packed is not None and can_pack(weight) and x.dtype is weight.dtype and x.numel():
            if x.dim() == 2 and len(x) % self.rows.multiple == 0:  # what follows takes time, even for whole rows
                return self.packed.linear(x.contiguous(), weight, bias, plus=plus)
            product = functools.partial(self.packed.linear, weight=weight, bias=bias)
            if plus is None:
                return _by_rows(self.rows, product, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))
            return _by_rows(self.rows, lambda part, one: product(part, plus=one), x, plus)
        if plus is None:
            output: Tensor = RULES[linear](self.rows, linear, x, weight, bias)
        else:
            add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
            output = _added_product(self.rows, add, plus, x, weight.t())
        return output

    def caller(self, *counts: int) -> Callable[..., Any]:
        """Return a function that calls another as in this context, for products of so many rows, outside of it.

        In the context, every call of torch takes Python code.
        """
        whole = not self.rows.in_chunks and not any(count % self.rows.multiple for count in counts)

        def call(func: Any, *args: Any, **kwargs: Any) -> Any:
            if func is linear:
                return self.linear(*args, **kwargs)
            if func is plus_linear:
                return self.linear(*args[1:], plus=args[0])
            rule = RULES.get(func)
            if rule is not None and not (whole and rule is not _activation):
                return rule(self.rows, func, *args, **kwargs)
            if rule is not None or (whole and self.packed is None):
                return func(*args, **kwargs)
            with self:
                return func(*args, **kwargs)

        return call


def plus_linear(added: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return `added + x @ weight.T`; `added` `[T, N]` is overwritten without gradients."""
    return torch.addmm(added, x, weight.t()) if torch.is_grad_enabled() else added.addmm_(x, weight.t())


def _product(rows: Rows, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)`, a product of the rows of x `[..., K]`."""
    if weight.dim() == 1 and x.dim() > 1:  # a vector
        return _product(rows, torch.matmul, x, weight[:, None]).squeeze(-1)
    if x.dim() == weight.dim() == 3 and len(x) == weight.shape[0] == weight.shape[2] == 1:
        # On a CPU, one matrix times a vector runs in another kernel than several.
        return func(torch.cat([x, x]), torch.cat([weight, weight]), *args, **kwargs)[:1]
    if x.dim() > 2 and weight.dim() > 2:
        return _batched_product(rows, func, x, weight, *args, **kwargs)
    if weight.dim() != 2 or x.dim() == 0 or not x.shape[:-1].numel() or x.layout is not torch.strided:
        return func(x, weight, *args, **kwargs)
    func = WITH_OUT.get(func, func)
    width = weight.shape[0 if func is linear else 1]
    if width >= WIDE and rows.multiple > 1024:
        rows = Rows(1024, in_chunks=True)
    product = _by_rows(
        rows,
        lambda part, **into: func(part, weight, *args, **kwargs, **into),
        x.reshape(-1, x.shape[-1]),
        width=width if func in (linear, torch.mm, torch.matmul) else None,
        dtype=kwargs.get("out_dtype", x.dtype),
    )
    return product if x.dim() == 2 else product.view(*x.shape[:-1], width)


def _batched_product(rows: Rows, func: Any, *tensors: Tensor, **kwargs: Any) -> Any:
    """Compute `func` of matrices `[..., M, K]` and `[..., K, N]`, and of what is added first if there is anything."""
    *added, x, weight = tensors
    return func(*added, x.contiguous(), weight.contiguous(), **kwargs)


def _added_product(rows: Rows, func: Any, added: Tensor, x: Tensor, weight: Tensor, **kwargs: Any) -> Any:
    """Compute `addmm(added, x, weight)`, or `addmm_`."""
    if not len(x):
        return func(added, x, weight, **kwargs)
    if func is Tensor.addmm_ and len(x) % rows.multiple == 0:  # without a copy
        for into, part in zip(rows.split(added), rows.split(x.contiguous()), strict=True):
            into.addmm_(part, weight, **kwargs)
        return added
    if added.dim() == 2 and len(added) == len(x):
        product = _by_rows(rows, lambda part, one: torch.addmm(one, part, weight, **kwargs), x, added)
    else:
        product = _by_rows(rows, lambda part: torch.addmm(added, part, weight, **kwargs), x)
    return added.copy_(product) if func is Tensor.addmm_ else product


def _scaled_product(rows: Rows, func: Any, x: Tensor, weight: Tensor, scale: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a product of 8-bit rows x `[T, K]`, with a scale for each row `[T, 1]` or one for all."""
    if len(scale.shape) == 2 and len(scale) == len(x) > 0:
        return _by_rows(
            rows,
            lambda part, each, **into: func(part, weight, each, *args, **kwargs, **into),
            x,
            scale,
            width=weight.shape[1] if "out_dtype" in kwargs else None,
            dtype=kwargs.get("out_dtype"),
        )
    return _product(rows, func, x, weight, scale, *args, **kwargs)


def _grouped_product(
    rows: Rows, func: Any, x: Tensor, weights: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any
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


def _convolution(rows: Rows, func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `func(x, weight, ...)` for each sequence of x `[B, C, T]` alone."""
    if x.device.type != "cpu" or x.dim() != 3 or len(x) < 2:
        return func(x, weight, *args, **kwargs)
    return torch.cat([func(one, weight, *args, **kwargs) for one in torch.split(x.contiguous(), 1)])


def _by_rows(
    rows: Rows,
    call: Callable[..., Tensor],
    *tensors: Tensor,
    width: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `call(*tensors)` `[count, N]`, computed for the padded rows of all tensors `[count, ...]`, or for chunks.

    If the call has an argument `out`, its width is N and its dtype that of the result.
    """
    count = len(tensors[0])
    parts = list(zip(*(_parts(rows, tensor) for tensor in tensors), strict=True))
    if len(parts) == 1:
        result = call(*parts[0])
        return result if len(result) == count else result[:count]
    if width is None or not torch.is_inference_mode_enabled():  # torch does not differentiate through `out`
        return torch.cat([call(*part) for part in parts])[:count]
    output = tensors[0].new_empty(rows.padded(count), width, dtype=dtype)
    for part, into in zip(parts, torch.split(output, rows.multiple), strict=True):
        call(*part, out=into)
    return output[:count]


def _parts(rows: Rows, x: Tensor) -> list[Tensor]:
    """Return chunks of the rows `[multiple, K]`, or all; the last one is padded with zeros."""
    *parts, last = rows.split(x.contiguous())
    extra = rows.padded(len(last)) - len(last)
    return [*parts, pad(last, (0, 0, 0, extra)) if extra else last]


def _activation(rows: Rows, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
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
WITH_OUT = {Tensor.matmul: torch.matmul, Tensor.mm: torch.mm}  # methods, and the same functions with an argument `out`
# Names of a function's inputs, in the order of its arguments.
INPUTS = ("input", "mat1", "batch1", "weight", "other", "mat2", "batch2")


@functools.cache
def same_products(
    rows: Rows, layer: type[Any], shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int
) -> bool:
    """Return whether a row's product had the same bits at random places beside any number of rows.

    `layer` is the class of a linear layer with a weight `[N, K]`. `threads` must be the current number of torch's
    threads. Results are kept, because a test takes time.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if layer is Float8Linear else dtype
    few = torch.randn(ROWS, shape[1], generator=generator, device=device).to(dtype)
    plain = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(torch.randn(shape, generator=generator, device=device).to(dtype), requires_grad=False)
    product: Callable[..., Tensor] = plain
    if layer is not nn.Linear:
        product = functools.partial(layer.partial, plain) if layer is RowParallelLinear else layer(plain)
    most = 2 * rows.multiple if rows.in_chunks else TESTED_ROWS.get(device.type, TESTED_ROWS["cuda"])
    expected = None
    for count in (rows.multiple * each for each in TESTED_MULTIPLES if rows.multiple * each <= most):
        chosen = torch.randint(ROWS, (count,), generator=generator, device=device)
        chosen[:ROWS] = torch.arange(ROWS)
        try:
            with torch.inference_mode(), BatchInvariant(rows):
                result: Tensor = product(few[chosen])
        except torch.OutOfMemoryError:  # then batches cannot have so many rows either
            break
        expected = result[:ROWS].clone() if expected is None else expected
        parts = zip(torch.split(result, 1024), torch.split(chosen, 1024), strict=True)
        if not all(torch.equal(part, expected[each]) for part, each in parts):
            return False
    return True


def rows_to_try(backbones: Sequence[nn.Module]) -> Iterator[Rows]:
    """Yield rows for `BatchInvariant`, the fastest first: those that all products allow, and the last of `LADDER`.

    Products are tested when the next rows are asked for, because a test takes time.
    """
    products: set[Any] = {
        (type(module), tuple(module.weight.shape), module.weight.dtype, module.weight.device)
        for backbone in backbones
        for module in backbone.modules()
        if isinstance(module, nn.Linear | Float8Linear) and type(module) in (nn.Linear, RowParallelLinear, Float8Linear)
    }
    device = next(backbones[0].parameters()).device
    *ladder, last = LADDER.get(device.type, LADDER["cuda"])
    if sum(each.numel() * each.element_size() for backbone in backbones for each in backbone.parameters()) > MOST_BYTES:
        ladder = [rows for rows in ladder if not rows.packed]
    for rows in ladder:
        before = blas_settings()
        try:
            if device.type == "cuda":
                set_blas(WITHOUT_SPLIT_K)
            same = all(same_products(rows, *each, torch.get_num_threads()) for each in products)
        finally:
            set_blas(before)
        if same:
            yield rows
    yield last
