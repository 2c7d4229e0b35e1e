"""Products in 8 bits: several times the rate of the full ones, and no longer exactly the plain model's number.

Weights are scaled per output channel once, activations per token at every product (vector-wise quantisation, arXiv
2208.07339, section 3). A token's scale depends on that token alone. Still, a last bit that differs with the batch can
turn a rounding round: a score moves with its neighbours by about a percent of the spread of scores, where full
precision moves by 1e-5. Norms, attention, residuals and heads keep their precision. `benchmarks/precision.py` measures
what it costs. Shapes: x `[..., K]`, weight `[N, K]`, products `[..., N]`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError

Quantization: TypeAlias = Literal["int8", "fp8"]
Scaled: TypeAlias = tuple[Tensor, Tensor]  # 8-bit rows [T, K] and float32 scales [T, 1]


class LowPrecisionLinear(nn.Module, abc.ABC):
    """A linear layer whose products are computed in 8 bits; made from an `nn.Linear`, without gradients."""

    most: ClassVar[float]  # the largest number of the format
    multiple: ClassVar[int]  # of which K and N must be multiples

    def __init__(self, linear: nn.Linear, *, keep_source: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight: Tensor
        self.scale: Tensor
        self.assign(linear.weight)
        # In a tuple, so that torch does not take it for a part of this module.
        self.source: tuple[nn.Linear, ...] = (linear,) if keep_source else ()

    def assign(self, weight: Tensor) -> None:
        """Take the weight `[N, K]`, quantised."""
        quantized, scale = self.quantize(weight.detach())
        self.register_buffer("weight", quantized)
        self.register_buffer("scale", scale.T.contiguous())

    def quantize(self, x: Tensor) -> Scaled:
        """Rows `[T, K]` in 8 bits with their scales `[T, 1]`; a row of NaN keeps a scale of NaN."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30).div_(self.most)
        return self.to_format(x / scale.to(x.dtype)), scale

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output `[..., N]` in the precision of x."""
        return self.product(self.quantize(x.reshape(-1, x.shape[-1])), x.dtype).view(*x.shape[:-1], -1)

    def product(self, x: Scaled, dtype: torch.dtype) -> Tensor:
        """The layer's output `[T, N]` for rows that are quantised already, as layers with the same input share them."""
        output = self.matmul(*x, dtype)
        return output if self.bias is None else output.add_(self.bias)

    @abc.abstractmethod
    def to_format(self, x: Tensor) -> Tensor:
        """Numbers within `most` to the nearest of the format."""

    @abc.abstractmethod
    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product with the weight, both scales applied."""


class Int8Linear(LowPrecisionLinear):
    """Integers of 8 bits, summed in 32: for CPUs, whose vector units multiply them four times as fast as float32."""

    most = 127.0
    multiple = 1

    def to_format(self, x: Tensor) -> Tensor:
        """Rounded, ties to even."""
        return x.round_().to(torch.int8)

    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The exact sum of the 8-bit products, scaled."""
        return torch._int_mm(x, self.weight.T).to(torch.float32).mul_(self.scale).mul_(scale).to(dtype)


class Float8Linear(LowPrecisionLinear):
    """Floats of 8 bits in the format E4M3 (arXiv 2209.05433): for GPUs from Ada and Hopper on."""

    most = 448.0
    multiple = 16

    def to_format(self, x: Tensor) -> Tensor:
        """Rounded by the hardware's conversion."""
        return x.to(torch.float8_e4m3fn)

    def matmul(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product as the tensor cores sum it, in bfloat16."""
        return torch._scaled_mm(x, self.weight.T, scale, self.scale, out_dtype=torch.bfloat16).to(dtype)


FORMATS: dict[str, type[LowPrecisionLinear]] = {"int8": Int8Linear, "fp8": Float8Linear}


def quantize_layers(
    model: PreTrainedModel, quantization: Quantization, device: torch.device, *, keep_source: bool = False
) -> None:
    """Replace the linear layers of a model's backbone, in place; its head stays as it is.

    Args:
        model: to change.
        quantization: the format.
        device: where the model is.
        keep_source: keep the layers that are replaced, for `requantize`.

    Raises:
        ConfigError: the device does not compute in this format, or the backbone has no such layers.
    """
    if quantization not in FORMATS:
        raise ConfigError(f"quantization must be None, 'int8' or 'fp8'; got {quantization!r}.")
    if quantization_of(model) == quantization:
        return
    if quantization == "int8" and device.type != "cpu":
        raise ConfigError(f"quantization='int8' is for CPUs and the model is on {device}; use 'fp8' there.")
    if quantization == "fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(f"quantization='fp8' needs a GPU from Ada or Hopper on, and the model is on {device}.")
    make = FORMATS[quantization]
    replaced = 0
    for parent in list(model.base_model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.in_features == 1:  # whose integer product torch gets wrong
                continue
            if not any(size % make.multiple for size in child.weight.shape):
                setattr(parent, name, make(child, keep_source=keep_source))
                replaced += 1
    if not replaced:
        raise ConfigError(f"quantization={quantization!r} found no linear layers in {type(model).__name__}.")


def requantize(model: nn.Module) -> None:
    """Quantise again the layers that kept their source, whose weights may have changed."""
    for module in model.modules():
        if isinstance(module, LowPrecisionLinear):
            for source in module.source:
                module.assign(source.weight)


def assign_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by name into a model, quantising them where its layers are.

    Buffers of its state dict may be missing, and so may all but one name of a tensor that has several.

    Raises:
        ConfigError: a name or shape that the model does not have, something that is not a tensor with data, or a weight
            of the model that is missing; nothing has changed then.
    """
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LowPrecisionLinear)}
    quantized = {f"{name}.weight": layer for name, layer in layers.items()}
    in_8_bits = {*quantized, *(f"{name}.scale" for name in layers)}
    held = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in in_8_bits}
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    shapes |= {name: (layer.out_features, layer.in_features) for name, layer in quantized.items()}
    given = {id(held[name]) for name in weights if name in held}  # tied tensors have several names
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in given)
    missing += sorted(quantized.keys() - weights.keys())
    unknown = sorted(weights.keys() - shapes.keys())
    wrong = [
        f"{name} {_shape(tensor)} instead of {shapes[name]}"
        for name, tensor in weights.items()
        if name in shapes and _shape(tensor) != shapes[name]
    ]
    if unknown or missing or wrong:
        raise ConfigError(
            f"these weights do not fit {type(model).__name__}: missing {missing[:3]}, unknown {unknown[:3]}, of "
            f"another shape {wrong[:3]}."
        )
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        for name, tensor in weights.items():
            if name not in quantized:
                held[name].copy_(tensor)
                continue
            layer = quantized[name]
            for source in layer.source:
                source.weight.copy_(tensor)
            layer.assign(layer.source[0].weight if layer.source else tensor.to(layer.weight.device, dtype))


def _shape(value: object) -> tuple[int, ...] | str:
    """The shape of a tensor; of anything else, what it is."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "without data" if value.is_meta else tuple(value.shape)


def quantization_of(model: nn.Module) -> Quantization | None:
    """In which format a model computes, if any of its layers were replaced."""
    kinds = {type(module) for module in model.modules() if isinstance(module, LowPrecisionLinear)}
    return "fp8" if Float8Linear in kinds else "int8" if Int8Linear in kinds else None
