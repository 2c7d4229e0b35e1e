"""A causal language model that answers a question about the conversation: the log-odds of two answers."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.config import Config, Flag
from gym_rm.engine.kinds.decoder import LastTokenKind, padding_of
from gym_rm.engine.kinds.kind import ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import TokenLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.templates import token_of
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class GenerativeKind(LastTokenKind):
    """`log p(good answer) - log p(bad answer)` as the first token of the model's own turn.

    The question comes after the conversation, so conversations still share their prompts in the tree.
    """

    name = "generative"

    class Options(Config):
        """Options of `kind="generative"`."""

        question: str | None = "Is the reply correct? Answer Yes or No."
        """What the user asks after the conversation; None asks nothing."""
        answers: tuple[str, str] = ("Yes", "No")
        """The good and the bad answer, each a single token."""
        generation_prompt: Flag = True
        """Whether the template starts the model's turn before the answer is read."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> GenerativeKind:
        """See `Kind.of`."""
        good, bad = (token_of(facts.tokenizer, answer) for answer in options.answers)
        if good == bad:
            raise ConfigError(f"answers must be two different tokens; got {options.answers!r}.")
        return cls(
            TokenLogits((good, bad)),
            InputFormat(question=options.question, generation_prompt=options.generation_prompt),
            settings={"question": options.question, "answers": list(options.answers)},
            pooling="last",
            padding=padding_of(facts.config),
        )

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Log-odds of each sequence: the softmax cancels in the difference of the logits."""
        last = values[starts[1:] - 1]
        return Reduction(last[:, 0] - last[:, 1], no_components(len(last)))
