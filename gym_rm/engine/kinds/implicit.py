"""The reward that a policy implies: how much likelier it made the reply than its reference does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError, RenderError
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.backbones.heads import TokenLogits
from gym_rm.engine.kinds.reward_model import Batch, FloatArray, RewardModel
from gym_rm.engine.text.renderer import Presentation, Rendered
from gym_rm.engine.token_tree import IntArray, TokenTree


class ImplicitRewardModel(RewardModel):
    """`beta * (log pi(reply | prompt) - log pi_ref(reply | prompt))`: DPO (arXiv 2305.18290, equation 5).

    The constant of the prompt, `beta * log Z`, is left out, so rewards compare replies to one prompt. The reply's
    tokens are those after the prompt and the start of the assistant's turn, what the template writes to end the turn
    included, as TRL trains it. Both models run over the same tree; the log-probability of a token is read at its
    parent.

    Args:
        policy, reference: causal language models over the same vocabulary.
        beta: of the training.
        length_normalised: divide by the number of the reply's tokens, as SimPO (arXiv 2405.14734) does.

    Raises:
        ConfigError: different vocabularies, or models that make logits in an unknown way.
    """

    kind = "implicit"

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        *,
        beta: float = 0.1,
        length_normalised: bool = False,
    ) -> None:
        super().__init__(policy)
        sizes = [model.config.get_text_config().vocab_size for model in (policy, reference)]
        if sizes[0] != sizes[1]:
            raise ConfigError(f"policy and reference have vocabularies of {sizes[0]} and {sizes[1]} tokens.")
        self.reference = reference
        self.beta = float(beta)
        self.length_normalised = length_normalised
        self._logits = [TokenLogits(policy), TokenLogits(reference)]
        self._decoders = [DecoderRewardModel(logits.model, head=logits, pooling="last") for logits in self._logits]
        self.presentation = Presentation(mark_reply=True)
        self.part_names = ("policy_logprob", "reference_logprob")
        self.num_values = 2
        self.fused = all(decoder.fused for decoder in self._decoders)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Both models."""
        return (self.model, self.reference)

    @property
    def settings(self) -> dict[str, Any]:
        """Beta and the reference."""
        return {
            "beta": self.beta,
            "length_normalised": self.length_normalised,
            "reference": self.reference.name_or_path or type(self.reference).__name__,
        }

    @property
    def max_positions(self) -> int | None:
        """The shorter of both models."""
        limits = [decoder.max_positions for decoder in self._decoders]
        return min((limit for limit in limits if limit is not None), default=None)

    def reads(self, rendered: Rendered) -> IntArray:
        """Every token of the reply; the first token of a text has no log-probability."""
        assert rendered.reply_start is not None
        positions = np.arange(max(1, rendered.reply_start), len(rendered.input_ids))
        if not len(positions):
            raise RenderError("the reply has no tokens, so it has no log-probability.")
        return positions

    def forward(self, batch: Batch) -> Tensor:
        """Log-probabilities of the tokens read under policy and reference, float32 `[R, 2]`."""
        if isinstance(batch, TokenTree):
            before, tokens = batch.parents[batch.reads], batch.input_ids[batch.reads]
        else:
            before = batch.reads - np.array([0, 1])
            tokens = batch.input_ids[batch.reads[:, 0], batch.reads[:, 1]]
        # Siblings that differ from their first token share its parent: its hidden state is computed once.
        places, inverse = np.unique(before, axis=0, return_inverse=True)
        earlier = replace(batch, reads=places)
        targets = torch.from_numpy(tokens.astype(np.int64))
        columns = []
        for decoder, logits in zip(self._decoders, self._logits, strict=True):
            decoder.fused = self.fused
            hidden = decoder.hidden_states(earlier)
            index = torch.from_numpy(inverse.reshape(-1)).to(hidden.device)
            columns.append(logits.log_probabilities(hidden[index], targets.to(hidden.device)).to(self.device))
        return torch.stack(columns, dim=1)

    def trial(self, batch: Batch) -> Tensor:
        """Hidden states of both models, side by side."""
        states = []
        for decoder in self._decoders:
            decoder.fused = self.fused
            states.append(decoder.hidden_states(batch).float().to(self.device))
        return torch.cat(states, dim=1)

    def reduce(self, values: FloatArray, starts: IntArray) -> tuple[FloatArray, FloatArray]:
        """Rewards `[M]` and the two log-probabilities `[M, 2]` of the replies (per token when normalised)."""
        sums = np.add.reduceat(values.astype(np.float64), starts[:-1], axis=0)
        if self.length_normalised:
            sums /= np.diff(starts)[:, None]
        rewards = self.beta * (sums[:, 0] - sums[:, 1])
        return rewards.astype(np.float32), sums.astype(np.float32)
