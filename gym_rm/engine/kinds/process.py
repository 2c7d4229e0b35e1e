"""Process reward models, which rate every step of a reply at a step token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from pydantic import Field

from gym_rm.config import Config
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import ModuleHead, Readout, TokenLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.tokenizers import answer_tokens, token_of
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scores import FloatArray

StepReduction: TypeAlias = Literal["min", "mean", "last", "product"]


@dataclass(frozen=True, slots=True)
class ProcessKind(Kind):
    """Kind whose reward is the minimum, mean, last or product of the probabilities that each step is good.

    The reply is split at `step_separator`, and `step_token` is added after every step, as on the model card of
    Qwen2.5-Math-PRM (arXiv 2501.07301). A step token in the reply itself is encoded as plain text.

    Attributes:
        step_id: id of the step token.
        reduction: how the steps are combined into one reward.
        good_label: index of the output for a good step, if there are two outputs.
    """

    name = "process"

    step_id: int = -1
    reduction: StepReduction = "min"
    good_label: int = 1

    class Options(Config):
        """Options of `kind="process"`. The head has one output (good) or two (bad and good)."""

        step_token: str
        """The token at which the model was trained to rate a step."""
        step_separator: str = Field(default="\n\n", min_length=1)
        """Text between two steps of a reply."""
        reduction: StepReduction = "min"
        """How the steps are combined into one reward."""
        good_label: Literal[0, 1] = 1
        """Index of the output for a good step, if there are two outputs."""
        head: str = "score"
        """Name of the head in the model."""
        answers: tuple[str, str] | None = None
        """Good and bad answer of a causal language model at the step token; None for a model with a head."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> ProcessKind:
        """See `Kind.of`."""
        readout: Readout
        if options.answers is None:
            outputs = facts.outputs_of(options.head)
            readout = ModuleHead(options.head)
        else:
            good, bad = answer_tokens(facts.tokenizer, options.answers)
            outputs, readout = 2, TokenLogits((bad, good))
        if outputs > 2:
            raise ConfigError(
                f"kind='process' needs a head with one output (good) or two (bad, good); this head has {outputs}."
            )
        marks = {"step_token": options.step_token, "step_separator": options.step_separator}
        return cls(
            readout,
            InputFormat(**marks),  # type: ignore[arg-type]
            settings={**dict(options), "answers": options.answers and list(options.answers)},
            step_id=token_of(facts.tokenizer, options.step_token),
            reduction=options.reduction,
            good_label=options.good_label,
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the positions of the step tokens."""
        positions = np.flatnonzero(rendered.input_ids == self.step_id)
        if not len(positions):
            raise ConversationError(
                "the conversation has no steps; its last message must be a reply of the assistant with text."
            )
        return positions

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return combined steps `[M]` as rewards, and the reward of every step `[R]`; there are no components."""
        logits = values.astype(np.float64)
        # The softmax of (bad, good) is equal to the sigmoid of their difference.
        odds = logits[:, 0] if logits.shape[1] == 1 else logits[:, self.good_label] - logits[:, 1 - self.good_label]
        steps = (0.5 * (1 + np.tanh(0.5 * odds))).astype(np.float32)
        first = starts[:-1]
        match self.reduction:
            case "min":
                rewards = np.minimum.reduceat(steps, first)
            case "mean":
                rewards = np.add.reduceat(steps, first) / np.diff(starts).astype(np.float32)
            case "product":
                rewards = np.multiply.reduceat(steps, first)
            case _:
                rewards = steps[starts[1:] - 1]
        return Reduction(rewards, no_components(len(first)), steps)
