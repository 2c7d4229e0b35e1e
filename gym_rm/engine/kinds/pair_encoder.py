"""Encoders that compare two replies in one text (PairRM)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gym_rm.config import Config
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction, no_components
from gym_rm.engine.kinds.readouts import MarkerPairs
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConversationError
from gym_rm.scores import FloatArray

MARKERS = ("<|source|>", "<|candidate1|>", "<|candidate2|>")
TEMPLATE = "{% for m in messages %}{{ cls_token + '<|' + m['role'] + '|>' + m['content'] + sep_token }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class PairEncoderKind(Kind):
    """Kind whose reward is `head(source, candidate 1) - head(source, candidate 2)`.

    This is PairRM (arXiv 2306.02561, section 3.2). The hidden states at three marker tokens represent the texts after
    them. A conversation for this model has three messages, with the roles `source`, `candidate1` and `candidate2`.
    `PairwiseScorer` creates these conversations.

    Attributes:
        markers: ids of the marker tokens.
    """

    name = "pair_encoder"

    markers: tuple[int, int, int] = (-1, -1, -1)

    class Options(Config):
        """Options of `kind="pair_encoder"`."""

        head: str = "head_layer"
        """Name of the head in the model. Its input is two concatenated hidden states."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> PairEncoderKind:
        """See `Kind.of`."""
        facts.outputs_of(options.head)
        source, first, second = facts.tokenizer.convert_tokens_to_ids(list(MARKERS))
        markers = (int(source), int(first), int(second))
        return cls(
            MarkerPairs(options.head, markers), InputFormat(encoder=True, control_tokens=MARKERS), markers=markers
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the position of the marker of the second candidate."""
        found = [np.flatnonzero(rendered.input_ids == marker) for marker in self.markers]
        if [len(positions) for positions in found] != [1, 1, 1]:
            raise ConversationError(
                "this reward model compares two replies; use load_scorer({'kind': 'pairwise', 'path': ...}) and its "
                "score_pairs, or pass reference= to compare with a reference reply."
            )
        return found[-1]

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return the log-odds that the first candidate is better."""
        return Reduction(values[starts[1:] - 1, 0], no_components(len(starts) - 1))
