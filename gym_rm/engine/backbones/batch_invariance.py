"""The context in which a row's result is independent of the other rows, bit for bit, and a test of the hardware.

`invariant_products` has how each function is computed. On CUDA, no product is divided along K (split-K), which would
depend on the number of rows. `same_products` tests on the hardware at hand which numbers of rows suffice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from gym_rm.engine.backbones.invariant_products import (
    INPUTS,
    LADDER,
    ROWS,
    RULES,
    GemmRows,
    activation,
    added_product,
    by_rows,
    plus_linear,
)
from gym_rm.engine.backbones.low_precision import Float8Linear
from gym_rm.engine.backbones.packed_weights import MOST_BYTES, PackedWeights, can_pack
from gym_rm.engine.backbones.sharded import RowParallelLinear
from gym_rm.engine.token_tree import IntArray

Blas: TypeAlias = tuple[tuple[bool, bool], tuple[bool, bool], Any]

TESTED_ROWS = {"cpu": 2064, "cuda": 32_768}  # the most rows that `same_products` compares
TESTED_MULTIPLES = (1, 2, 3, 7, 8, 17, 32, 65, 129, 513, 2048)
EVERY_MULTIPLE_ON = ("cuda",)  # devices whose library chooses a kernel by the number of rows


def with_padding(tokens: IntArray, multiple: int | None = None) -> IntArray:
    """Return tokens `[..., T]` with copies of the first at the end, up to a multiple; None for that of the products."""
    count = tokens.shape[-1]
    extra = GemmRows(multiple or current_rows().multiple).padded(count) - count
    return np.concatenate([tokens, np.repeat(tokens[..., :1], extra, axis=-1)], axis=-1)


def current_context() -> BatchInvariant | None:
    """Return the innermost context of torch's functions if it is `BatchInvariant`."""
    depth = torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(depth - 1) if depth else None
    return mode if isinstance(mode, BatchInvariant) else None


def current_rows() -> GemmRows:
    """Return the rows of the current context; outside, any multiple of 16."""
    context = current_context()
    return GemmRows() if context is None else context.rows


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
    run on padded rows, activations on padded sizes. Results change only by rounding.
    """

    def __init__(self, rows: GemmRows | None = None) -> None:
        super().__init__()
        self.rows = rows or GemmRows()
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
                return by_rows(self.rows, product, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))
            return by_rows(self.rows, lambda part, one: product(part, plus=one), x, plus)
        if plus is None:
            output: Tensor = RULES[linear](self.rows, linear, x, weight, bias)
        else:
            add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
            output = added_product(self.rows, add, plus, x, weight.t())
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
            if rule is not None and not (whole and rule is not activation):
                return rule(self.rows, func, *args, **kwargs)
            if rule is not None or (whole and self.packed is None):
                return func(*args, **kwargs)
            with self:
                return func(*args, **kwargs)

        return call


@functools.cache
def same_products(
    rows: GemmRows, layer: type[Any], shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int
) -> bool:
    """Return whether a row's product had the same bits at random places beside any number of rows.

    `layer` is the class of a linear layer with a weight `[N, K]`. `threads` must be the current number of torch's
    threads. Results are kept, because a test takes time: on a GPU, that of 34 million rows for each shape of weight.
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
    chosen = torch.randint(ROWS, (most,), generator=generator, device=device)
    chosen[:ROWS] = torch.arange(ROWS, device=device)
    while most >= rows.multiple:
        try:
            return _same_rows(rows, product, few, chosen[:most])
        except torch.OutOfMemoryError:  # then batches cannot have so many rows either
            most //= 2
    return True


@torch.inference_mode()
def _same_rows(rows: GemmRows, product: Callable[..., Tensor], few: Tensor, chosen: Tensor) -> bool:
    """Return whether products of the first rows of `few[chosen]` have the same bits wherever they have the same row."""
    x, most, every = few[chosen], len(chosen) // rows.multiple, few.device.type in EVERY_MULTIPLE_ON
    multiples = range(most, 0, -1) if every else TESTED_MULTIPLES  # the largest first, whose memory the next ones take
    with BatchInvariant(rows):
        wanted = product(x[: rows.multiple])[:ROWS][chosen]
        same = torch.ones((), dtype=torch.bool, device=few.device)
        for number, count in enumerate((rows.multiple * each for each in multiples if each <= most), start=1):
            same &= product(x[:count]).eq_(wanted[:count]).all()
            if (number % 64 == 0 or not every) and not same:  # reading it waits for a GPU
                return False
    return bool(same)


def rows_to_try(backbones: Sequence[nn.Module]) -> Iterator[GemmRows]:
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
