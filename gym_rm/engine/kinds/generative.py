"""Causal language models that answer a question about the conversation, with log-odds as the reward."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.config import Config
from gym_rm.engine.kinds.decoder import LastTokenKind, padding_of
from gym_rm.engine.kinds.kind import ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import TokenLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.tokenizers import answer_tokens
from gym_rm.engine.token_tree import IntArray
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
            InputFormat(question=options.question, generation_prompt=True),
            settings={"question": options.question, "answers": list(options.answers)},
            pooling="last",
            padding=padding_of(facts.config),
        )

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return the log-odds of each sequence, which are equal to the difference of the two logits."""
        last = values[starts[1:] - 1]
        return Reduction(last[:, 0] - last[:, 1], no_components(len(last)))
