"""8-bit matrix products: faster than full precision, with a rounding error in the scores.

Weights are scaled once per output channel, activations per token at every product (vector-wise quantisation, arXiv
2208.07339, section 3). In int8, activations have two terms instead of that paper's columns of outliers, which would
have to be chosen on data. The scale of a token does not depend on other tokens, and integer sums are exact, so a score
has the same bits in every batch wherever the other operations of the model keep them (see `batch_invariance`). Where
they do not, the last bit of an activation can change how it is rounded, and a score varies with its batch by about one
percent of the spread of scores. Norms, attention, residuals and heads keep their precision. `benchmarks/precision.py`
measures the error.

Shapes: x `[..., K]`, weight `[N, K]`, products `[..., N]`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gym_rm.engine.backbones.sharded import Ranks, RowParallelLinear, WeightShard, local_part, ranks_of
from gym_rm.errors import ConfigError

Quantization: TypeAlias = Literal["int8", "fp8"]
Scaled: TypeAlias = tuple[Tensor, Tensor]  # 8-bit rows [T, K] and float32 scales [T, 1]


class LowPrecisionLinear(nn.Module, abc.ABC):
    """Linear layer with 8-bit products, made from an `nn.Linear`. It has no gradients."""

    most: ClassVar[float]  # largest number of the format
    multiple: ClassVar[int]  # K and N must be multiples of this number

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.ranks: Ranks | None = vars(linear).get("ranks")  # of a row-parallel layer
        self.weight: Tensor
        self.scale: Tensor
        self.assign(linear.weight)

    def assign(self, weight: Tensor) -> None:
        """Quantise and store the weight `[N, K]`."""
        quantized, scale = self.quantize(weight.detach())
        self.register_buffer("weight", quantized[: len(weight)].clone())  # in int8, without what rounding leaves
        self.register_buffer("scale", scale.T.contiguous())

    @classmethod
    def quantize(cls, x: Tensor) -> Scaled:
        """Return rows `[T, K]` in 8 bits, and their scales `[T, 1]`; a row with NaN has a scale of NaN."""
        if x.device.type not in COMPILED_ON:
            return cls.quantized(x)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        with torch._C.DisableTorchFunction():
            scaled: Scaled = _compiled(cls)(x)
        return scaled

    @classmethod
    def quantized(cls, x: Tensor) -> Scaled:
        """Return what `quantize` returns, one operation after another."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30).div_(cls.most)
        # In float32, because the rounded scale of a lower precision can be too small for the largest number.
        return cls.to_format((x.float() / scale).clamp_(-cls.most, cls.most)), scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., N]` in the precision of x."""
        return self.product(self.quantize(x.reshape(-1, x.shape[-1])), x.dtype).view(*x.shape[:-1], -1)

    def product(self, x: Scaled, dtype: torch.dtype) -> Tensor:
        """Return the output `[T, N]` for quantised rows, which layers with the same input can share."""
        if self.ranks is None:
            output = self.matmul(*x, dtype)
            return output if self.bias is None else output.add_(self.bias)
        total = self.ranks.sum(self.matmul(*x, torch.float32))
        return (total if self.bias is None else total.add_(self.bias)).to(dtype)

    @staticmethod
    @abc.abstractmethod
    def to_format(x: Tensor) -> Tensor:
        """Convert numbers between -`most` and `most` to the nearest numbers of the format."""

    @abc.abstractmethod
    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product with the weight, with both scales applied."""


class Int8Linear(LowPrecisionLinear):
    """Linear layer with 8-bit integer products, for CPUs, which compute them four times as fast as float32 products.

    Activations of real models have outliers, beside which 8 bits leave little of the other numbers of a token (arXiv
    2208.07339, section 3). So an activation has two terms of 8 bits, the nearest integer and what it leaves, each with
    its own rows: quantised rows are `[2 T, K]`.
    """

    most = 127.0
    multiple = 1

    @classmethod
    def quantized(cls, x: Tensor) -> Scaled:
        """Return both terms of the rows, and the scales of the first one; that of the second is a part of it."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30).div_(cls.most)
        whole = (x.float() / scale).clamp_(-cls.most, cls.most)
        terms = whole.new_empty(2, *whole.shape, dtype=torch.int8)
        nearest = whole.round()
        terms[0] = nearest
        terms[1] = whole.sub_(nearest).mul_(PARTS).round_().clamp_(-cls.most, cls.most)
        return terms.flatten(0, 1), scale

    @staticmethod
    def to_format(x: Tensor) -> Tensor:
        """Round to integers, ties to even."""
        return x.round_().to(torch.int8)

    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums of the 8-bit products of both terms, exact but for one addition, with both scales applied."""
        whole, rest = torch._int_mm(x, self.weight.T).chunk(2)
        return whole.to(torch.float32).add_(rest, alpha=1 / PARTS).mul_(self.scale).mul_(scale).to(dtype)


class Float8Linear(LowPrecisionLinear):
    """Linear layer with 8-bit float products in the format E4M3 (arXiv 2209.05433), for Ada, Hopper and newer GPUs.

    Tensor cores accumulate fast, with fewer bits (arXiv 2412.19437, section 3.3.2): the row-wise kernel of torch that
    adds in float32 is so slow that little of the gain is left (pytorch/pytorch issue 147971).
    """

    most = 448.0
    multiple = 16

    @staticmethod
    def to_format(x: Tensor) -> Tensor:
        """Convert to the format; the hardware rounds."""
        return x.to(torch.float8_e4m3fn)

    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product, computed by tensor cores and rounded to bfloat16."""
        given = x, self.weight.T, scale, self.scale
        return torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=True).to(dtype)


@functools.cache
def _compiled(layer: type[LowPrecisionLinear]) -> Callable[[Tensor], Scaled]:
    """Return `quantized` of a class as one pass over memory, which torch compiles once for each K."""
    compiled: Callable[[Tensor], Scaled] = torch.compile(layer.quantized, dynamic=False)
    return compiled


PARTS = 256.0  # of the unit of an activation in int8: a power of two, so that every way to add the terms is the same
COMPILED_ON = ("cuda",)  # devices for which `quantize` is compiled
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that need no scale
FORMATS: dict[str, type[LowPrecisionLinear]] = {"int8": Int8Linear, "fp8": Float8Linear}


def quantize_layers(model: PreTrainedModel, quantization: Quantization, device: torch.device) -> None:
    """Replace the linear layers of a model's backbone in place; the head does not change.

    Raises:
        ConfigError: the device does not support the format, or the backbone has no linear layers.
    """
    if quantization not in FORMATS:
        raise ConfigError(f"quantization must be None, 'int8' or 'fp8'; got {quantization!r}.")
    if quantization == "int8" and device.type != "cpu":
        raise ConfigError(f"quantization='int8' needs a CPU, but the model is on {device}; use 'fp8' on a GPU.")
    if quantization == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(f"quantization='fp8' needs an Ada, Hopper or newer GPU, but the model is on {device}.")
    make = FORMATS[quantization]
    # Names, so that each full-precision weight is freed before the next layer is replaced.
    layers = [
        (parent, name)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        # For a single input feature, torch computes wrong int8 products.
        if type(child) in (nn.Linear, RowParallelLinear)
        and child.weight.shape[1] > 1
        and not any(size % make.multiple for size in child.weight.shape)
    ]
    if not layers:
        raise ConfigError(f"quantization={quantization!r} found no linear layers to replace in {type(model).__name__}.")
    for parent, name in layers:
        setattr(parent, name, make(getattr(parent, name)))


def assign_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by name into a model, and quantise those of its 8-bit layers.

    Buffers may be missing. A tied tensor, which has several names, needs only one of them. Of a whole weight that is
    divided among ranks, each rank takes its part.

    Raises:
        ConfigError: a weight is missing, has an unknown name, another shape or another type of numbers (floats of 16
            bits and more are converted), is not a dense tensor with data, or has values that are not finite in the
            model's precision. The model is then unchanged.
    """

    def parts() -> Iterator[tuple[str, Tensor]]:
        return ((name, local_part(model, name, weight)) for name, weight in weights.items())

    layers = {f"{name}.": part for name, part in model.named_modules() if isinstance(part, LowPrecisionLinear)}
    quantized = {f"{name}weight": layer for name, layer in layers.items()}
    held = model.state_dict(keep_vars=True)
    dtype = next(model.parameters()).dtype
    forms = {
        name: (dtype if name in quantized else tensor.dtype, tuple(tensor.shape))
        for name, tensor in held.items()
        if name.removesuffix("scale") not in layers
    }
    given = {id(held[name]) for name in weights if name in held}  # tied tensors have several names
    required = {*quantized, *(name for name, tensor in held.items() if isinstance(tensor, nn.Parameter))}
    missing = sorted(name for name in required if id(held[name]) not in given)
    unknown = sorted(weights.keys() - forms.keys())
    wrong = [
        f"{name} {_form(tensor)} instead of {forms[name]}"
        for name, tensor in parts()
        if name in forms and not _fits(tensor, *forms[name])
    ]
    if unknown or missing or wrong:
        raise ConfigError(
            f"weights do not fit {type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}, wrong type or "
            f"shape {wrong[:3]}."
        )
    infinite = [name for name, tensor in parts() if not _is_finite(tensor, forms[name][0])]
    ranks = ranks_of(model)
    if infinite if ranks is None else not ranks.smallest(not infinite):  # each rank has seen its own parts
        raise ConfigError(
            f"weights do not fit {type(model).__name__}: {infinite[:3]} have numbers that are not finite in its "
            "precision; the training that made them has diverged."
        )
    with torch.no_grad():
        for name, tensor in parts():
            if name in quantized:
                quantized[name].assign(tensor.to(held[name].device, dtype))
            elif isinstance(target := held[name], DTensor) and not isinstance(tensor, DTensor):
                target.to_local().copy_(WeightShard.of(target).take(tensor))
            else:
                target.copy_(tensor)


def _form(value: object) -> object:
    """Return type and shape of a dense tensor with data; for anything else, the type of the object."""
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return value.dtype, tuple(value.shape)
    return type(value).__name__


def _fits(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a dense tensor has this shape, and numbers that can be converted to this type."""
    return _form(tensor) in {(each, shape) for each in (FLOATS if dtype in FLOATS else (dtype,))}


def _is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all numbers of a tensor are finite in a precision."""
    if not dtype.is_floating_point or not tensor.numel():
        return True
    low, high = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().aminmax()
    return bool(torch.maximum(-low, high) <= torch.finfo(dtype).max)


def quantization_of(model: nn.Module) -> Quantization | None:
    """Return the format of a model's 8-bit layers; None if it has none."""
    kinds = {type(module) for module in model.modules() if isinstance(module, LowPrecisionLinear)}
    return "fp8" if Float8Linear in kinds else "int8" if Int8Linear in kinds else None
