"""Several objectives that become one number by a gating network, which reads the prompt.

Shapes: `[H]` objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gym_rm.engine.kinds.component_names import component_names
from gym_rm.engine.kinds.decoder import LastTokenKind, PoolingOptions, padding_of
from gym_rm.engine.kinds.kind import ModelFacts, Reduction
from gym_rm.engine.kinds.readouts import GatedHead
from gym_rm.engine.text.rendered import Rendered
from gym_rm.engine.token_tree import IntArray
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scores import FloatArray

# Start of the assistant's turn, at whose first token the gating networks of these backbones were trained to read.
PROMPT_ENDS = {
    "llama": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma2": "<end_of_turn>\n<start_of_turn>model\n",
}


@dataclass(frozen=True, slots=True)
class GatedKind(LastTokenKind):
    """Objectives weighted by a gating network: `sum_h gate_h(prompt) * (objectives(reply) @ transform)_h`.

    ArmoRM (arXiv 2406.12845, section 3.2); with several numbers per objective the mean over its quantiles, QRM
    (arXiv 2409.10164, section 3); or the means of its normal distributions, URM (arXiv 2410.00847, section 4).
    The components are the objectives; the gates that are read have the transform folded in.

    Attributes:
        prompt_end: token ids whose last occurrence ends the prompt: the gate reads the first of them. None: it reads
            where the objectives are read.
    """

    name = "gated"

    prompt_end: tuple[int, ...] | None = None

    class Options(PoolingOptions):
        """Options of `kind="gated"`."""

        names: Sequence[str] | None = None
        """Of the objectives; None for the checkpoint's labels, or numbers."""
        regression: str = "regression_layer"
        """Name of the head of the objectives in the model."""
        gate: str = "gating"
        """Name of the gating network in the model."""
        outputs: Literal["quantiles", "normal"] = "quantiles"
        """What an objective's numbers are: quantiles next to each other, or (mean, log variance)."""
        prompt_end: str | None = "auto"
        """The text with which the chat template starts the assistant's turn; the gate reads its first token. None: the
        gate reads where the objectives are read. `"auto"` knows the text for Llama 3 and Gemma 2."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> GatedKind:
        """See `Kind.of`."""
        prompt_end = options.prompt_end
        if prompt_end == "auto":
            prompt_end = PROMPT_ENDS.get(facts.config.model_type)
            if prompt_end is None:
                raise ConfigError(
                    f"where a prompt ends is not known for {facts.config.model_type!r}: pass prompt_end= the text with "
                    "which the chat template starts the assistant's turn; the gate reads its first token."
                )
        size = facts.outputs_of(options.gate)
        names = tuple(options.names or component_names(facts.config, size, facts.name))
        if len(names) != size:
            raise ConfigError(f"{len(names)} names for the {size} objectives of {facts.name!r}.")
        facts.outputs_of(options.regression)
        ids = None if prompt_end is None else facts.tokenizer(prompt_end, add_special_tokens=False)["input_ids"]
        return cls(
            GatedHead(options.regression, options.gate, options.outputs),
            component_names=names,
            settings={"pooling": options.pooling},
            pooling=options.pooling,
            padding=padding_of(facts.config),
            prompt_end=None if ids is None else tuple(ids),
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """The end of the prompt, where the gate reads, and the end of the text, where the objectives are read."""
        last = LastTokenKind.read_positions(self, rendered)
        if self.prompt_end is None:
            return last
        found = np.empty(0, dtype=np.int64)
        if len(rendered.input_ids) >= len(self.prompt_end):
            windows = np.lib.stride_tricks.sliding_window_view(rendered.input_ids, len(self.prompt_end))
            found = np.flatnonzero((windows == np.array(self.prompt_end)).all(axis=1))
        if not len(found) or found[-1] >= last[0]:
            raise ConversationError(
                "the text has no start of an assistant's turn, where the gating network reads: the conversation must "
                "hold a reply, under the chat template that the reward model was trained with."
            )
        return np.array([found[-1], last[0]])

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Gated sums `[M]` and objectives `[M, H]`."""
        size = len(self.component_names)
        gates, objectives = values[starts[:-1], size:], values[starts[1:] - 1, :size]
        return Reduction((gates * objectives).sum(axis=1).astype(np.float32), objectives)
