"""A causal language model that answers a question about the conversation: the log-odds of two answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.backbones.heads import TokenLogits
from gym_rm.engine.kinds.reward_model import Batch
from gym_rm.engine.text.renderer import Presentation, token_of


class GenerativeRewardModel(DecoderRewardModel):
    """`log p(good answer) - log p(bad answer)` as the first token of the model's own turn.

    The question comes after the conversation, so conversations share their prompts in the tree as ever.

    Args:
        model: a `...ForCausalLM`.
        tokenizer: its tokenizer.
        question: what the user asks after the conversation; None asks nothing.
        answers: the good and the bad answer, each one token.
        generation_prompt: whether the template starts the model's turn before the answer is read.

    Raises:
        ConfigError: an answer is more than one token, or the model is no causal language model.
    """

    kind = "generative"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        question: str | None = "Is the reply correct? Answer Yes or No.",
        answers: tuple[str, str] = ("Yes", "No"),
        generation_prompt: bool = True,
    ) -> None:
        good, bad = (token_of(tokenizer, answer) for answer in answers)
        if good == bad:
            raise ConfigError(f"answers must be two different tokens; got {answers!r}.")
        super().__init__(model, head=TokenLogits(model, [good, bad]), pooling="last")
        self.presentation = Presentation(question=question, generation_prompt=generation_prompt)
        self.answers = tuple(answers)
        self.num_values = 1

    @property
    def settings(self) -> dict[str, Any]:
        """What is asked, and what may be answered."""
        return {"question": self.presentation.question, "answers": list(self.answers)}

    def forward(self, batch: Batch) -> Tensor:
        """Log-odds at the batch's reads, float32 `[R, 1]`."""
        logits = super().forward(batch)
        return logits[:, :1] - logits[:, 1:]
