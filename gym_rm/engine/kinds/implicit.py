"""The reward that a policy implies: how much likelier it made the reply than its reference does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.config import Config, Finite, Flag
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction
from gym_rm.engine.kinds.readouts import TokenLogProbabilities
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConversationError
from gym_rm.scores import FloatArray


@dataclass(frozen=True, slots=True)
class ImplicitKind(Kind):
    """`beta * (log pi(reply | prompt) - log pi_ref(reply | prompt))`: DPO (arXiv 2305.18290, equation 5).

    The constant of the prompt, `beta * log Z`, is left out, so rewards compare replies to one prompt. The reply's
    tokens are those after the prompt and the start of the assistant's turn, including what the template writes to end
    the turn, as TRL trains it. Both models run over the same tree; the log-probability of a token is read at its
    parent.

    Attributes:
        beta: of the training.
        length_normalised: divide by the number of the reply's tokens, as SimPO (arXiv 2405.14734) does.
    """

    name = "implicit"

    beta: float = 0.1
    length_normalised: bool = False

    class Options(Config):
        """Options of `kind="implicit"`."""

        reference: Any
        """The model before preference tuning: a folder, a hub id or a loaded model, with the same vocabulary."""
        beta: Finite = 0.1
        """Of the training."""
        length_normalised: Flag = False
        """Divide by the number of the reply's tokens, as SimPO (arXiv 2405.14734) does."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> ImplicitKind:
        """See `Kind.of`."""
        reference = getattr(options.reference, "name_or_path", None) or str(options.reference)
        return cls(
            TokenLogProbabilities(),
            InputFormat(mark_reply=True),
            ("policy_logprob", "reference_logprob"),
            {"beta": options.beta, "length_normalised": options.length_normalised, "reference": reference[:200]},
            options.beta,
            options.length_normalised,
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Every token of the reply; the first token of a text has no log-probability."""
        assert rendered.reply_start is not None
        positions = np.arange(max(1, rendered.reply_start), len(rendered.input_ids))
        if not len(positions):
            raise ConversationError("the reply has no tokens, so it has no log-probability.")
        return positions

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Rewards `[M]` and the two log-probabilities `[M, 2]` of the replies (per token when normalised)."""
        sums = np.add.reduceat(values.astype(np.float64), starts[:-1], axis=0)
        if self.length_normalised:
            sums /= np.diff(starts)[:, None]
        rewards = self.beta * (sums[:, 0] - sums[:, 1])
        return Reduction(rewards.astype(np.float32), sums.astype(np.float32))
