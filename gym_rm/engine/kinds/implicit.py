"""Implicit reward of a policy: how much more likely the reply is under the policy than under its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gym_rm.config import Config, Finite
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction
from gym_rm.engine.kinds.readouts import TokenLogProbabilities
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConversationError
from gym_rm.scores import FloatArray


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
