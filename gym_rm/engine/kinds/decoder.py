"""A causal language model with a score head: the reward is read at one token of the conversation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gym_rm.engine.backbones.tree_attention import TreeAttention, attending_to_trees, to_device
from gym_rm.errors import warn_once
from gym_rm.engine.backbones.fused import can_fuse, fused_forward
from gym_rm.engine.backbones.heads import Head, ModuleHead, width
from gym_rm.engine.backbones.prefix_cache import PrefixCache
from gym_rm.engine.kinds.reward_model import Batch, Pooling, RewardModel, as_plain
from gym_rm.engine.text.renderer import Rendered
from gym_rm.engine.token_tree import IntArray, TokenTree


class DecoderRewardModel(RewardModel):
    """A decoder with a head, which is applied in float32 at known indices.

    Args:
        model: the backbone with its head, for instance a `...ForSequenceClassification` with `num_labels` 1.
        head: what makes values of hidden states; None for the model's own `score`.
        pooling: `"hf"` reads where the Hugging Face head reads, at the last token whose id is not
            `config.pad_token_id`; `"last"` at the last token of the text. They differ where the text ends in the
            padding token, as with checkpoints that pad with EOS.
    """

    kind = "decoder"

    def __init__(self, model: PreTrainedModel, *, head: Head | None = None, pooling: Pooling = "hf") -> None:
        super().__init__(model)
        self.head = head or ModuleHead(model.score, width(model.score))
        self.pooling = pooling
        self.padding: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
        self.num_values = self.head.num_values
        self.fused = can_fuse(model.base_model)
        self.prefix_cache: PrefixCache | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Where the head reads."""
        return {"pooling": self.pooling}

    def reads(self, rendered: Rendered) -> IntArray:
        """The token at which the head was trained to read."""
        ids = rendered.input_ids
        last = len(ids) - 1
        if self.padding is None or ids[last] != self.padding:
            return np.array([last])
        content = np.flatnonzero(ids != self.padding)
        hugging_face = int(content[-1]) if len(content) else 0
        warn_once(
            f"texts end in the padding token {self.padding}: the Hugging Face head reads position "
            f"{hugging_face - last - 1} from the end, the last token is at -1. Reading at "
            f"{'the former' if self.pooling == 'hf' else 'the latter'}; pooling='hf' or 'last' decides."
        )
        return np.array([hugging_face if self.pooling == "hf" else last])

    def forward(self, batch: Batch) -> torch.Tensor:
        """Values of the head at the batch's reads, float32 `[R, K]`."""
        return self.head(self.hidden_states(batch))

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """The backbone's last hidden states at the batch's reads, `[R, hidden_size]`."""
        backbone = self.model.base_model
        if isinstance(batch, TokenTree):
            if self.fused and not torch.is_grad_enabled():
                return self._fused_hidden_states(batch)
            tree = TreeAttention(batch, self.device)
            inputs = to_device(np.stack([batch.input_ids, batch.position_ids]), self.device)
            reads = to_device(batch.reads, self.device)
            with attending_to_trees(backbone):
                output = backbone(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, tree=tree)
            hidden: torch.Tensor = output.last_hidden_state[0]
            return hidden[reads.to(hidden.device)]
        # What stands in the padding is masked; a padding id of -1, or of a token added later, is no embedding's.
        padding = self.padding or 0
        plain = as_plain(batch, self.device, padding if 0 <= padding < (self.num_embeddings or 0) else 0)
        plain.pop("token_type_ids", None)
        rows, positions = to_device(np.ascontiguousarray(batch.reads.T), self.device)
        hidden = backbone(**plain, use_cache=False).last_hidden_state
        return hidden[rows.to(hidden.device), positions.to(hidden.device)]

    def _fused_hidden_states(self, batch: TokenTree) -> torch.Tensor:
        ids, positions = batch.input_ids, batch.position_ids
        if self.prefix_cache is None:
            inputs = to_device(np.stack([ids, positions]), self.device)
            reads, tree = to_device(batch.reads, self.device), TreeAttention(batch, self.device)
            return fused_forward(self.model.base_model, inputs[0], inputs[1], reads, tree)
        with self.prefix_cache.reuse(batch, self.device) as known:
            inputs = to_device(np.stack([ids[known.computed], positions[known.computed]]), self.device)
            reads = to_device(np.searchsorted(known.computed, batch.reads), self.device)
            tree = TreeAttention(batch, self.device, computed=known.computed)
            return fused_forward(self.model.base_model, inputs[0], inputs[1], reads, tree, known)

    def trial(self, batch: Batch) -> torch.Tensor:
        """Hidden states: a head that was not trained yet may be all zeros."""
        return self.hidden_states(batch)
