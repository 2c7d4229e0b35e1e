"""Encoders and other classifiers with their own pooling, whose single logit is the reward."""

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
    """Kind whose reward is the logit of a `...ForSequenceClassification` model with one label."""

    name = "encoder"

    class Options(Config):
        """`kind="encoder"` has no options."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> EncoderKind:
        """See `Kind.of`."""
        require_one_output(facts, facts.config.num_labels, "encoder")
        return cls(ClassifierLogits(), InputFormat(encoder=True))

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return the logit of each sequence as its reward."""
        return Reduction(values[starts[1:] - 1, 0], no_components(len(starts) - 1))
