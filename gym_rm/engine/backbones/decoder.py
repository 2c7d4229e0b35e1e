"""Hidden states of a causal language model at the positions that are read, for trees and for padded batches."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gym_rm.engine.backbones.batch_invariance import with_padding
from gym_rm.engine.backbones.devices import device_of, to_device
from gym_rm.engine.backbones.llama import forward_fingerprint, llama_forward, rotary_positions
from gym_rm.engine.backbones.node_attention import NodeAttention
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.backbones.tree_attention import TreeAttention, UnsupportedByTree, attending_to_trees, page_size
from gym_rm.engine.token_tree import Batch, PaddedBatch, TokenTree
from gym_rm.errors import ConfigError

# Names of tables with one row per position of a text.
POSITION_TABLE = re.compile(
    r"^(?!.*(vision|visual|audio)).*\b(wpe|(char_)?position_embeddings?|positions_embed|embed_positions|pos_encoding)$"
)


class DecoderBackbone:
    """Backbone of a model; every call uses the model's current weights, adapters and hooks.

    Args:
        model: the whole model; only its `base_model` runs.
        prefix_cache: cache of keys and values across calls without gradients, or None.

    Attributes:
        code: code that `llama_forward` may replace; if the modules change, the model's own forward runs.
        fuse: whether `llama_forward` may replace the model's own.
        kernels: whether Triton computes the elementwise operations of `llama_forward`.
        paths: whether Triton computes attention to trees, along paths.
        checkpointing: whether `llama_forward` keeps only the input of each layer.
        same_as_training: whether trees run without gradients as with them, so that values have the same bits.
    """

    def __init__(self, model: PreTrainedModel, prefix_cache: PrefixCache | None = None) -> None:
        require_supported(model)
        if model.base_model is model:
            raise ConfigError(
                f"{type(model).__name__} has no backbone {model.base_model_prefix!r} that runs without the output "
                "layer; pass a function that calls the model as the reward model."
            )
        self.model = model
        self.prefix_cache = prefix_cache
        self.code = forward_fingerprint(model.base_model)
        self.fuse = self.code is not None
        self.kernels = self.paths = self.checkpointing = self.same_as_training = False

    def use(self, *, fuse: bool, kernels: bool) -> None:
        """Choose what computes: `llama_forward` or the model's own layers, and the package's kernels or torch."""
        self.fuse, self.kernels, self.paths = fuse, kernels, kernels

    @property
    def page_size(self) -> int:
        """Number of positions in a page of the attention to trees, on the model's device."""
        return page_size(device_of(self.model))

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the last hidden states where the batch is read, `[R, hidden_size]`; with gradients if enabled."""
        backbone = self.model.base_model
        device = device_of(self.model)
        if isinstance(batch, PaddedBatch):
            rows, positions = to_device(batch.read_positions.T, device)
            hidden: Tensor = backbone(**plain_inputs(batch, self.model), use_cache=False).last_hidden_state
            return hidden[rows.to(hidden.device), positions.to(hidden.device)]
        training = torch.is_grad_enabled() or self.same_as_training
        nodes = NodeAttention(batch) if training and device.type != "cuda" and not self.paths else None
        if self.fuse and forward_fingerprint(backbone) == self.code:
            return self._llama_states(batch, device, nodes)
        # The layers' own forward, whose attention alone is replaced.
        tree = self._attention(batch, device, nodes=nodes)
        inputs = to_device(with_padding(np.stack([batch.input_ids, batch.position_ids])), device)
        with attending_to_trees(backbone):
            output = backbone(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, tree=tree)
        layers = self.model.config.get_text_config().num_hidden_layers
        if tree.num_calls != layers:
            raise UnsupportedByTree(
                f"{type(backbone).__name__} has {layers} layers, but {tree.num_calls} of them attended to the tree."
            )
        hidden = output.last_hidden_state[0]
        return hidden[to_device(batch.read_indices, hidden.device)]

    def _attention(self, batch: TokenTree, device: torch.device, **others: Any) -> TreeAttention:
        return TreeAttention(batch, device, paths=self.paths, same_as_training=self.same_as_training, **others)

    def _llama_states(self, batch: TokenTree, device: torch.device, nodes: NodeAttention | None) -> Tensor:
        """Return the hidden states by `llama_forward`, with attention by nodes or by pages."""
        backbone = self.model.base_model
        cache = None if torch.is_grad_enabled() or self.same_as_training else self.prefix_cache
        with contextlib.nullcontext() if cache is None else cache.reuse(batch, device) as known:
            tokens, reads = np.stack([batch.input_ids, batch.position_ids]), batch.read_indices
            if known is not None:
                tokens, reads = tokens[:, known.computed], np.searchsorted(known.computed, reads)
            if nodes is None:
                tokens, reads = with_padding(tokens), with_padding(reads)
            input_ids, positions = to_device(tokens, device)
            x = backbone.embed_tokens(input_ids)
            hidden = llama_forward(
                backbone,
                x,
                rotary_positions(backbone, x, positions),
                self._attention(batch, device, prefix=known) if nodes is None else nodes,
                reads=to_device(reads, device),
                checkpointing=self.checkpointing and torch.is_grad_enabled(),
                onednn=nodes is not None and not torch.is_autocast_enabled(device.type),
                kernels=self.kernels,
            )
        return hidden[: batch.num_reads]


def require_supported(model: PreTrainedModel) -> None:
    """Raise ConfigError for an encoder-decoder, and for values that depend on the texts before."""
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{type(model).__name__} is an encoder and a decoder; expected a decoder or an encoder.")
    if any("dynamic" in str(getattr(part, "rope_type", "")) for part in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has rotary positions of type 'dynamic', which keep the frequencies of the longest "
            "text so far; write rope_type 'default' into its config.json, and pass max_length= with the original "
            "context."
        )


def plain_inputs(batch: PaddedBatch, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a padded batch as keyword arguments of a Hugging Face model; without a mask if nothing is padded."""
    device = device_of(model)
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    table: Any = _embedding_table(model)
    if table is not None and not 0 <= padding < table.num_embeddings:
        padding = 0  # the id is -1 or out of range; any valid id works, because padding is masked
    columns = np.arange(batch.input_ids.shape[1])
    real = columns < batch.lengths[:, None]
    inputs = {"input_ids": to_device(np.where(real, batch.input_ids, padding).astype(np.int64), device)}
    if not real.all():
        inputs["attention_mask"] = to_device(real.astype(np.int64), device)
    if getattr(model.config, "type_vocab_size", 0) >= 2 and (batch.second_segments < batch.lengths).any():
        types = (columns >= batch.second_segments[:, None]) & real
        inputs["token_type_ids"] = to_device(types.astype(np.int64), device)
    return inputs


def num_embeddings(model: PreTrainedModel) -> int | None:
    """Return the number of token ids that have an embedding; None if the model has no embedding table."""
    table = _embedding_table(model)
    return None if table is None else int(table.num_embeddings)


def num_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in a model's tables; None if it has no table (rotary, relative, linear bias)."""
    sizes = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        table = name.removesuffix(".weight")
        if tensor.dim() != 2 or len(tensor) == 1 or not POSITION_TABLE.search(table):
            continue
        module = model.get_submodule(table) if table != name else None
        padding = getattr(module, "padding_idx", None)
        # The positions of OPT start at an offset, and those of RoBERTa after the padding index.
        sizes.append(len(tensor) - (getattr(module, "offset", 0) if padding is None else padding + 1))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min([*sizes, limit] if limit and limit > 0 else sizes) if sizes else None


def _embedding_table(model: PreTrainedModel) -> torch.nn.Embedding | None:
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return table if isinstance(table, torch.nn.Embedding) else None
