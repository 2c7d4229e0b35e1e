"""A judgement after every step of the reply, read at the step tokens that the renderer writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from gym_rm.config import Config
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import ModuleHead, Readout, TokenLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.text.templates import token_of
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scores import FloatArray

StepReduction: TypeAlias = Literal["min", "mean", "last", "product"]


@dataclass(frozen=True, slots=True)
class ProcessKind(Kind):
    """The probability that each step is good, and their minimum, mean, last or product as the reward.

    The reply is split at `step_separator` and `step_token` is written after every step, as the model card of
    Qwen2.5-Math-PRM (arXiv 2501.07301) does it. A reply that spells the step token gets it as plain text.

    Attributes:
        step_id: id of the step token.
        reduction: of the steps to one reward.
        good_label: which of two outputs is the good one.
    """

    name = "process"

    step_id: int = -1
    reduction: StepReduction = "min"
    good_label: int = 1

    class Options(Config):
        """Options of `kind="process"`. Two outputs are the logits of (bad, good), one is that of good."""

        step_token: str
        """The token at which the model was trained to judge."""
        step_separator: str = "\n\n"
        """What separates steps in a reply."""
        reduction: StepReduction = "min"
        """Of the steps to one reward."""
        good_label: Literal[0, 1] = 1
        """Which of two outputs is the good one."""
        head: str = "score"
        """Name of the head in the model."""
        answers: tuple[str, str] | None = None
        """For a causal language model without a head: the good and the bad answer that it gives at the step token."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> ProcessKind:
        """See `Kind.of`."""
        readout: Readout
        if options.answers is None:
            outputs = facts.outputs_of(options.head)
            readout = ModuleHead(options.head)
        else:
            good, bad = (token_of(facts.tokenizer, answer) for answer in options.answers)
            outputs, readout = 2, TokenLogits((bad, good))
        if outputs > 2:
            raise ConfigError(f"a process reward model says good or bad; this head has {outputs} outputs.")
        marks = {"step_token": options.step_token, "step_separator": options.step_separator}
        return cls(
            readout,
            InputFormat(**marks),  # type: ignore[arg-type]
            settings={**marks, "reduction": options.reduction},
            step_id=token_of(facts.tokenizer, options.step_token),
            reduction=options.reduction,
            good_label=options.good_label,
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """The step tokens."""
        positions = np.flatnonzero(rendered.input_ids == self.step_id)
        if not len(positions):
            raise ConversationError(
                "the conversation has no step to judge: its last message must be a reply with some text."
            )
        return positions

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Reduced steps `[M]`; no components."""
        logits = values.astype(np.float64)
        # Softmax over (bad, good) is the sigmoid of their difference.
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
