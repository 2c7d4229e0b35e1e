"""Two replies in one text: how much better an encoder finds the first than the second (PairRM)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gym_rm.errors import RenderError
from gym_rm.engine.backbones.heads import in_float32
from gym_rm.engine.kinds.reward_model import Batch, RewardModel, as_plain
from gym_rm.engine.text.renderer import Presentation, Rendered
from gym_rm.engine.token_tree import IntArray, PaddedBatch

MARKERS = ("<|source|>", "<|candidate1|>", "<|candidate2|>")
TEMPLATE = "{% for m in messages %}{{ cls_token + '<|' + m['role'] + '|>' + m['content'] + sep_token }}{% endfor %}"


class PairEncoderRewardModel(RewardModel):
    """PairRM (arXiv 2306.02561, section 3.2): `head(source, candidate 1) - head(source, candidate 2)`.

    The hidden states at the three marker tokens stand for the texts after them. Conversations for this model have
    three messages, of the roles `source`, `candidate1` and `candidate2`; `PairwiseScorer` writes them.

    Args:
        model: an encoder with a head on two concatenated hidden states.
        tokenizer: to look up the markers.
        head: name of the head in the model.
    """

    kind = "pair_encoder"

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, head: str = "head_layer") -> None:
        super().__init__(model)
        self._head: nn.Module = model.get_submodule(head)
        self._markers = tokenizer.convert_tokens_to_ids(list(MARKERS))
        self.presentation = Presentation(encoder=True, control_tokens=MARKERS)

    def reads(self, rendered: Rendered) -> IntArray:
        """The marker of the second candidate; the others are found from it."""
        places = [np.flatnonzero(rendered.input_ids == marker) for marker in self._markers]
        if [len(place) for place in places] != [1, 1, 1]:
            raise RenderError(
                "this reward model compares two replies; use load_scorer({'kind': 'pairwise', 'path': ...}) and its "
                "score_pairs, or give it a reference reply."
            )
        return places[-1]

    def forward(self, batch: Batch) -> Tensor:
        """Log-odds that the first candidate is better, float32 `[R, 1]`."""
        assert isinstance(batch, PaddedBatch), "encoders take padded batches"
        hidden = self._hidden_states(batch)
        rows = batch.reads[:, 0]
        at = [(batch.input_ids[rows] == marker).argmax(axis=1) for marker in self._markers]
        places = torch.from_numpy(np.stack([rows, *at])).to(hidden.device)
        source, first, second = (hidden[places[0], place] for place in places[1:])
        left = in_float32(self._head, torch.cat([source, first], dim=1))
        right = in_float32(self._head, torch.cat([source, second], dim=1))
        return (left - right).mean(dim=1, keepdim=True)

    def trial(self, batch: Batch) -> Tensor:
        """Hidden states: a text without markers has no pair to compare."""
        assert isinstance(batch, PaddedBatch), "encoders take padded batches"
        hidden = self._hidden_states(batch)
        rows, positions = torch.from_numpy(batch.reads.T).to(hidden.device)
        return hidden[rows, positions]

    def _hidden_states(self, batch: PaddedBatch) -> Tensor:
        inputs = as_plain(batch, self.device, self.model.config.pad_token_id or 0)
        inputs.pop("token_type_ids", None)
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden
