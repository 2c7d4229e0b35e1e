"""A bidirectional encoder with a classification head, over padded batches sorted by length."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gym_rm.engine.kinds.reward_model import Batch, RewardModel, as_plain
from gym_rm.engine.text.renderer import Presentation
from gym_rm.engine.token_tree import PaddedBatch


class EncoderRewardModel(RewardModel):
    """A `...ForSequenceClassification` that pools by itself; modules above the backbone run in float32.

    Args:
        model: the classifier, with `num_labels` 1.
    """

    kind = "encoder"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.presentation = Presentation(encoder=True)
        self.num_values = model.config.num_labels
        for name, module in model.named_children():
            if name != model.base_model_prefix:
                module.float()
                module.register_forward_pre_hook(_to_float32)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits of the rows that the batch reads, float32 `[R, num_labels]`."""
        assert isinstance(batch, PaddedBatch), "encoders take padded batches"
        inputs = as_plain(batch, self.device, self.model.config.pad_token_id or 0)
        if getattr(self.model.config, "type_vocab_size", 0) < 2:
            inputs.pop("token_type_ids", None)
        logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()[torch.from_numpy(batch.reads[:, 0]).to(logits.device)]


def _to_float32(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in inputs
    )
