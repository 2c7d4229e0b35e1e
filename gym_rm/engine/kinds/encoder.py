"""A bidirectional encoder, or another classifier that pools by itself: its one logit is the reward."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.config import Config
from gym_rm.engine.kinds.decoder import require_one_output
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import ClassifierLogits
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.token_tree import IntArray
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class EncoderKind(Kind):
    """The logit of a `...ForSequenceClassification` with one label."""

    name = "encoder"

    class Options(Config):
        """`kind="encoder"` has no options."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> EncoderKind:
        """See `Kind.of`."""
        require_one_output(facts, facts.config.num_labels, "encoder")
        return cls(ClassifierLogits(), InputFormat(encoder=True))

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """The logit of each sequence."""
        return Reduction(values[starts[1:] - 1, 0], no_components(len(starts) - 1))
