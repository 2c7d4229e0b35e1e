"""Models whose weights are divided among the ranks of a group; every rank runs every batch.

- Tensor parallel (Megatron-LM, arXiv 1909.08053, section 3): a rank has some heads of each attention and some columns
  of each MLP. The output of both is a sum over ranks. It is computed in float32, in the order of the ranks: the order
  in an all-reduce depends on the place of a number in the buffer, and so on the other rows of the batch.
- Fully sharded (ZeRO stage 3, arXiv 1910.02054, section 5; FSDP, arXiv 2304.11277): a rank has some rows of each
  weight, and gathers those of one layer before it runs. Products have the same inputs as in one process, and so the
  same bits.

In both, the embeddings and the output layer are divided by vocabulary. transformers reads each rank's part of a
checkpoint as a `DTensor`; `use_local_weights` makes plain tensors of them, so that the layers run without its dispatch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that hold a model together.

    Attributes:
        group: process group of torch.distributed.
        index: index of this rank in the group.
        size: number of ranks.
    """

    group: dist.ProcessGroup
    index: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x `[..., N]` over all ranks, added in the order of the ranks."""
        rows = x.reshape(-1, x.shape[-1])
        extra = -len(rows) % self.size
        rows = pad(rows, (0, 0, 0, extra)) if extra else rows.contiguous()
        parts = torch.empty_like(rows)  # the rows that this rank adds, of every rank
        dist.all_to_all_single(parts, rows, group=self.group)
        mine, *others = parts.chunk(self.size)
        for other in others:
            mine = mine.add_(other)
        dist.all_gather_into_tensor(rows, mine.contiguous(), group=self.group)
        return rows[: len(rows) - extra].view(x.shape)

    def concatenate(self, x: Tensor, size: int, dim: int) -> Tensor:
        """Return the parts of all ranks along `dim` as one tensor of this size; each part has `ceil(size / ranks)`."""
        most = -(-size // self.size)
        mine = x.movedim(dim, 0)
        mine = pad(mine, (*(0, 0) * (mine.dim() - 1), 0, most - len(mine))) if len(mine) < most else mine.contiguous()
        whole = mine.new_empty(self.size * most, *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine, group=self.group)
        return whole[:size].movedim(0, dim)

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks."""
        numbers: list[int] = [0] * self.size
        dist.all_gather_object(numbers, number, group=self.group)
        return min(numbers)


class RowParallelLinear(nn.Linear):
    """Linear layer with some of its input features; the output is the sum over ranks, added in float32."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., N]` of the whole layer for this rank's features `[..., K / ranks]`."""
        total = self.ranks.sum(self.partial(x))
        return (total if self.bias is None else total.add_(self.bias)).to(x.dtype)

    def partial(self: nn.Linear, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, in float32."""
        if x.dtype == torch.float32:
            return linear(x, self.weight)
        if x.is_cuda:
            rows = x.reshape(-1, x.shape[-1])
            return torch.mm(rows, self.weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return linear(x.float(), self.weight.float())


class SummedExperts(nn.Module):
    """Experts with some of their intermediate features; the output is the sum over ranks, added in float32."""

    ranks: Ranks

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return the output `[tokens, hidden]` of the whole experts."""
        partial: Tensor = super().forward(*arguments, **keywords)
        return self.ranks.sum(partial.float()).to(partial.dtype)


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with some of its rows."""

    ranks: Ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[..., hidden]` of any token ids."""
        return _rows(self.weight, input_ids, self.num_embeddings, self.ranks)


def _rows(part: Tensor, indices: Tensor, size: int, ranks: Ranks) -> Tensor:
    """Return rows of a weight of this size, of which each rank has a part; the sum adds zeros to the row."""
    first = ranks.index * -(-size // ranks.size)
    own = (indices >= first) & (indices < first + len(part))
    if not len(part):  # more ranks than rows
        return ranks.sum(part.new_zeros(*indices.shape, part.shape[1]))
    rows = embedding(torch.where(own, indices - first, 0), part)
    return ranks.sum(torch.where(own[..., None], rows, 0))


class ColumnParallelLinear(nn.Linear):
    """Linear layer with some of its output features, such as the logits of some tokens; every rank returns all."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., N]` of the whole layer."""
        divided = self.bias is not None and len(self.bias) < self.out_features
        output = linear(x, self.weight, self.bias if divided else None)
        output = self.ranks.concatenate(output, self.out_features, -1)
        return output if self.bias is None or divided else output + self.bias

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows `[..., K]` of the whole weight."""
        return _rows(self.weight, indices, self.out_features, self.ranks)


class GatheredLinear(ColumnParallelLinear):
    """Output layer that gathers its weight, so that its products have the bits of the whole layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., N]` of the whole layer."""
        return linear(x, self.ranks.concatenate(self.weight, self.out_features, 0), self.bias)


class WholeWeights:
    """Context in which a module has its whole weights; outside, it has this rank's part of them.

    Its two methods are also hooks before and after the forward of a layer.

    Args:
        weights: submodule and name of each weight, and the function of this rank's part that returns the whole one.
    """

    def __init__(self, weights: Sequence[tuple[nn.Module, str, Callable[[Tensor], Tensor]]]) -> None:
        self._weights = weights
        self._parts = [module._parameters[name] for module, name, _ in weights]

    def __enter__(self, *arguments: object) -> None:
        for (module, name, gather), part in zip(self._weights, self._parts, strict=True):
            assert part is not None
            module._parameters[name] = nn.Parameter(gather(part.detach()), requires_grad=False)

    def __exit__(self, *error: object) -> None:
        for (module, name, _), part in zip(self._weights, self._parts, strict=True):
            module._parameters[name] = part

    def run_in(self, layer: nn.Module) -> None:
        """Let the forward of a module run in this context."""
        layer.register_forward_pre_hook(self.__enter__)
        layer.register_forward_hook(self.__exit__, always_call=True)


def whole_weights(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a module that is fully sharded has its whole weights; for others, do nothing."""
    context = vars(module).get("whole_weights")
    return context if isinstance(context, WholeWeights) else contextlib.nullcontext()


def is_hook_of_sharding(hook: Any) -> bool:
    """Return whether a hook is one of those that gather and free the weights of a layer."""
    return isinstance(getattr(hook, "__self__", None), WholeWeights)


ROWS = "gym_rm_rows"  # style of weights of which every rank has some rows

# Class of the linear layers of each style; None if their own forward does what the style means.
DIVIDED: dict[str, type[nn.Module] | None] = {
    "colwise": None,
    "packed_colwise": None,
    "rowwise": RowParallelLinear,
    "colwise_gather_output": ColumnParallelLinear,
    "colwise_rep": ColumnParallelLinear,
    ROWS: ColumnParallelLinear,
}
EXPERTS = "moe_tp_experts"
# Styles of modules whose own forward runs on plain tensors, and of those that transformers changes only for gradients.
TAKES_LOCAL_WEIGHTS = (EXPERTS, "local_params")
FOR_GRADIENTS = ("replicated_with_grad_allreduce", "mla_kv_a_proj")


@dataclass(frozen=True, slots=True)
class WeightShard:
    """The part of a weight that this rank has, as a `DTensor` describes it.

    Attributes:
        mesh: ranks of the `DTensor`.
        placements: how each dimension of the mesh divides the weight.
        whole_shape: shape of the whole weight.
    """

    mesh: Any
    placements: tuple[Any, ...]
    whole_shape: tuple[int, ...]

    @classmethod
    def of(cls, placed: DTensor) -> WeightShard:
        """Return the part of a sharded weight."""
        return cls(placed.device_mesh, tuple(placed.placements), tuple(placed.shape))

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole weight; all ranks must call this with their parts."""
        stride = torch.empty(self.whole_shape, device="meta").stride()
        shape = torch.Size(self.whole_shape)
        # torch 2.11 does not gather the parts of a strided split, so they are gathered one after the other and sorted.
        placements = [Shard(each.dim) if isinstance(each, _StridedShard) else each for each in self.placements]
        placed = DTensor.from_local(part, self.mesh, placements, run_check=False, shape=shape, stride=stride)
        whole = placed.full_tensor()
        for i, each in enumerate(self.placements):
            if isinstance(each, _StridedShard):
                before, after = whole.shape[: each.dim], whole.shape[each.dim + 1 :]
                of_ranks = whole.view(*before, self.mesh.size(i), each.split_factor, -1, *after)
                whole = of_ranks.transpose(each.dim, each.dim + 1).reshape(whole.shape)
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole weight: a view, or a copy if the part is one of a strided split."""
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        for i, each in enumerate(self.placements):
            if each.is_replicate():
                continue
            of_rank = []
            for group in whole.chunk(getattr(each, "split_factor", 1), each.dim):
                length = group.shape[each.dim]
                most = -(-length // self.mesh.size(i))
                start = min(self.mesh.get_local_rank(i) * most, length)
                of_rank.append(group.narrow(each.dim, start, min(most, length - start)))
            whole = torch.cat(of_rank, each.dim) if len(of_rank) > 1 else of_rank[0]
        return whole


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the ranks that hold a model together; None if it is not sharded."""
    ranks: Ranks | None = vars(model).get("ranks")
    return ranks


def use_local_weights(model: PreTrainedModel, plan: Mapping[str, str], *, gather: bool) -> PreTrainedModel:
    """Make plain tensors of a model's sharded weights, in place, and let its modules run on them.

    Other modules than linear layers, embeddings and experts keep the forward that transformers gave them.

    Args:
        model: model that `from_pretrained` loaded with a `DistributedConfig`.
        plan: style of each module and parameter, by name with `*` for numbers.
        gather: whether layers gather their weights (fully sharded); False for tensor parallel.

    Raises:
        RuntimeError: no weight is sharded, so that every rank has loaded the whole model.
    """
    placed = {name: tensor for name, tensor in model.named_parameters(remove_duplicate=False) if is_sharded(tensor)}
    if not placed:
        raise RuntimeError(f"transformers sharded no weight of {type(model).__name__}.")
    group = next(iter(placed.values())).device_mesh.get_group()
    ranks = Ranks(group, dist.get_rank(group), dist.get_world_size(group))
    local: dict[int, nn.Parameter] = {}
    layers: dict[str, list[tuple[nn.Module, str, Callable[[Tensor], Tensor]]]] = {}
    parts: dict[str, WeightShard] = {}
    for name, module in model.named_modules():
        style = plan.get(with_wildcards(name), "")
        layer = layer_of(name) if gather else None
        divided = layer is None and isinstance(module, nn.Linear | nn.Embedding) and style in DIVIDED
        experts = layer is None and style == EXPERTS and any(is_sharded(each) for each in module.parameters())
        if divided or experts or style in FOR_GRADIENTS:
            vars(module).pop("forward", None)  # of transformers
        if not (divided or layer is not None or style in TAKES_LOCAL_WEIGHTS):
            continue
        for last, tensor in list(module._parameters.items()):
            if not isinstance(tensor, DTensor):
                continue
            if id(tensor) not in local:  # tied weights stay tied
                local[id(tensor)] = nn.Parameter(tensor.to_local().detach(), requires_grad=False)
            module._parameters[last] = local[id(tensor)]
            parts[f"{name}.{last}"] = WeightShard.of(tensor)
            if layer is not None:
                gathered = functools.partial(ranks.concatenate, size=len(tensor), dim=0)
                layers.setdefault(layer, []).append((module, last, gathered))
        if divided:
            _change_class(module, GatheredLinear if gather else DIVIDED[style], ranks)
        if experts:
            module.__class__ = type(f"Divided{type(module).__name__}", (SummedExperts, type(module)), {})
            vars(module)["ranks"] = ranks
    for name, weights in layers.items():
        module = model.get_submodule(name)
        context = vars(module)["whole_weights"] = WholeWeights(weights)
        context.run_in(module)
    vars(model).update(ranks=ranks, parts=parts)
    return model


def with_wildcards(name: str) -> str:
    """Return the name of a module with `*` for the number of its layer, as in the plans of transformers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a rank has a part of this tensor."""
    return isinstance(tensor, DTensor) and not all(each.is_replicate() for each in tensor.placements)


def local_part(model: nn.Module, name: str, weight: Any) -> Any:
    """Return this rank's part of a whole weight that is divided among ranks; anything else as it is."""
    part: WeightShard | None = vars(model).get("parts", {}).get(name)
    if part is None or not isinstance(weight, Tensor) or tuple(weight.shape) != part.whole_shape:
        return weight
    return part.take(weight)


def _change_class(module: nn.Module, divided: type[nn.Module] | None, ranks: Ranks) -> None:
    """Change the class of a module whose output needs the other ranks."""
    divided = VocabParallelEmbedding if isinstance(module, nn.Embedding) else divided
    own = type(module)
    if divided is None or issubclass(own, divided):
        return
    # An embedding of another class may scale its rows; its forward calls that of nn.Embedding.
    module.__class__ = divided if issubclass(divided, own) else type(f"Divided{own.__name__}", (own, divided), {})
    vars(module)["ranks"] = ranks


def layer_of(name: str) -> str | None:
    """Return the name of the layer that a module belongs to: its path up to the first number."""
    path = name.split(".")
    numbers = [k for k, each in enumerate(path) if each.isdigit()]
    return ".".join(path[: numbers[0] + 1]) if numbers else None


@torch.inference_mode()
def difference_to_whole(model: PreTrainedModel, input_ids: Tensor) -> float:
    """Return the largest difference of last hidden states to those of the whole model, relative to the largest.

    All ranks must call this.

    Args:
        model: model whose weights are divided among ranks, on plain tensors.
        input_ids: int64 `[1, L]`.
    """
    expected = _whole_model(model).base_model(input_ids=input_ids, use_cache=False).last_hidden_state.float()
    got = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.float()
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def _whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the tensors that every rank has, and whose other weights are gathered when needed."""
    with torch.device("meta"):
        whole: PreTrainedModel = type(model)(model.config)
    whole.eval()
    parts: dict[str, WeightShard] = vars(model)["parts"]
    layers: dict[str, list[tuple[nn.Module, str, Callable[[Tensor], Tensor]]]] = {}
    for name, module in whole.named_modules():
        divided = model.get_submodule(name)
        module._buffers.update(divided._buffers)
        for last in module._parameters:
            part, local = parts.get(f"{name}.{last}"), divided._parameters[last]
            if isinstance(local, DTensor):
                part, local = WeightShard.of(local), nn.Parameter(local.to_local(), requires_grad=False)
            module._parameters[last] = local
            if part is None or local is None:
                continue
            if layer := layer_of(name):
                layers.setdefault(layer, []).append((module, last, part.whole))
            else:
                module._parameters[last] = nn.Parameter(part.whole(local), requires_grad=False)
    for layer, weights in layers.items():
        WholeWeights(weights).run_in(whole.get_submodule(layer))
    return whole
