"""Causal language models as reward models: log-odds of two answers to a question, and the implicit reward of DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.config import Config, Finite
from gym_rm.engine.kinds.decoder import LastTokenKind, padding_of
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import TokenLogits, TokenLogProbabilities
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.tokenizers import answer_tokens
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConversationError
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class GenerativeKind(LastTokenKind):
    """Kind whose reward is `log p(good answer) - log p(bad answer)` for the first token of the model's own turn.

    The question comes after the conversation, so that conversations with the same prompt can share it in the tree.
    """

    name = "generative"

    class Options(Config):
        """Options of `kind="generative"`."""

        question: str | None = "Is the reply correct? Answer Yes or No."
        """User message to add after the conversation; None to add none."""
        answers: tuple[str, str] = ("Yes", "No")
        """The good and the bad answer. Each must be a single token."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> GenerativeKind:
        """See `Kind.of`."""
        good, bad = answer_tokens(facts.tokenizer, options.answers)
        return cls(
            TokenLogits((good, bad)),
            InputFormat(question=options.question, generation_prompt=True, joins_pairs=True),
            settings={"question": options.question, "answers": list(options.answers)},
            pooling="last",
            padding=padding_of(facts.config),
        )

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return the log-odds of each sequence, which are equal to the difference of the two logits."""
        last = values[starts[1:] - 1]
        return Reduction(last[:, 0] - last[:, 1], no_components(len(last)))


@dataclass(frozen=True, slots=True)
class ImplicitKind(Kind):
    """Kind whose reward is `beta * (log pi(reply | prompt) - log pi_ref(reply | prompt))`, as in DPO.

    See arXiv 2305.18290, equation 5. The term `beta * log Z(prompt)` is omitted, so only rewards of replies to the same
    prompt can be compared. The reply consists of the tokens after the generation prompt, including the tokens with
    which the template ends the turn, as in TRL. Both models run over the same tree. The log-probability of a token is
    read at its parent in the tree.

    Attributes:
        beta: the beta of the DPO training.
    """

    name = "implicit"

    beta: float = 0.1

    class Options(Config):
        """Options of `kind="implicit"`."""

        reference: Any
        """The model before preference tuning: a folder, a hub id or a loaded model, with the same vocabulary."""
        beta: Finite = 0.1
        """The beta of the DPO training."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> ImplicitKind:
        """See `Kind.of`."""
        reference = getattr(options.reference, "name_or_path", None) or str(options.reference)
        return cls(
            TokenLogProbabilities(),
            InputFormat(mark_reply=True),
            ("policy_logprob", "reference_logprob"),
            {"beta": options.beta, "reference": reference[:200]},
            options.beta,
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the positions of all reply tokens, except the first token of a text: it has no log-probability."""
        assert rendered.reply_start is not None
        positions = np.arange(max(1, rendered.reply_start), len(rendered.input_ids))
        if not len(positions):
            raise ConversationError("the reply has no tokens, so it has no log-probability.")
        return positions

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return rewards `[M]` and two log-probabilities `[M, 2]` of the replies."""
        sums = np.add.reduceat(values.astype(np.float64), starts[:-1], axis=0)
        rewards = self.beta * (sums[:, 0] - sums[:, 1])
        return Reduction(rewards.astype(np.float32), sums.astype(np.float32))
