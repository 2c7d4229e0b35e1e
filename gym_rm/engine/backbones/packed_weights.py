"""Products with weights in the format of oneDNN, for float32 on a CPU.

They are up to twice as fast as torch's own (a third for large batches), and round about 1.5 times as much: up to 1,024
terms are added in order, and in torch's 192. A row's result has the same bits beside any number of other rows but none,
and with any number of threads. Compilers of torch run the same two operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

SMALLEST_WIDTH = 512  # for each number of rows oneDNN compiles kernels, which takes as long as a narrower product
MOST_BYTES = 2**32  # of a model's weights: packed weights take the same memory again


class OneDNNLinear(torch.autograd.Function):
    """A product with a weight as it is or packed; the gradient of x is a product of oneDNN too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None, plus: Tensor | None
    ) -> Tensor:
        """Return the product; keeps the weight, and x unless the weight is frozen."""
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _product(x, packed, bias, plus)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the weight, of the bias and of what was added."""
        (x, weight), grad = ctx.saved_tensors, grads[0]
        for_x, for_weight, _, for_bias, for_plus = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if for_x else None,
            grad.t() @ x if for_weight else None,
            None,
            grad.sum(dim=0) if for_bias else None,
            grad if for_plus else None,
        )


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, plus: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, and the sum with `plus`; x `[T, K]` with T > 0, weight `[N, K]`, plus `[T, N]`.

    Without `packed`, oneDNN packs the parts of the weight that it is at: slower for few rows only.
    """
    packed = weight if packed is None else packed
    if not torch.is_grad_enabled():
        return _product(x, packed, bias, plus)
    product: Tensor = OneDNNLinear.apply(x, weight, packed, bias, plus)  # type: ignore[no-untyped-call]
    return product


class PackedWeights:
    """Weights that were packed when they were first used.

    A weight that another tensor replaces, or that an operation of torch changes, is packed again. A change through
    `weight.data` is not noticed: call `clear`.
    """

    def __init__(self) -> None:
        self._packed = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[()]]:
        """Copy without weights, because their format is that of this machine."""
        return PackedWeights, ()

    def clear(self) -> None:
        """Forget all weights, and free their memory."""
        self._packed.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, plus: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, and the sum with `plus`; x `[T, K]`, weight `[N, K]`, plus `[T, N]`."""
        return onednn_linear(x, weight, bias, plus=plus, packed=self._of(weight))

    def _of(self, weight: Tensor) -> Tensor:
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        found = self._packed.get(weight)  # type: ignore[no-untyped-call]
        if found is None or found[0] != state:
            found = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            self._packed[weight] = found
        packed: Tensor = found[1]
        return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None, plus: Tensor | None = None) -> Tensor:
    if plus is None:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        product = torch.ops.mkldnn._linear_pointwise.binary(x, plus, packed, bias, "add")
    return product


def can_pack(weight: Tensor) -> bool:
    """Return whether products with a weight can run with it packed."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype is torch.float32 and weight.device.type == "cpu"
    return plain and weight.dim() == 2 and weight.is_contiguous()


def onednn_is_faster(weight: Tensor) -> bool:
    """Return whether products of many rows with a weight as it is are faster in oneDNN."""
    return weight.shape[1] >= SMALLEST_WIDTH and can_pack(weight) and packs()


def packs() -> bool:
    """Return whether this build of torch has the operations."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
