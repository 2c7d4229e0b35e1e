"""Several objectives, weighted by a gating network that reads the prompt.

Shapes: `[M]` sequences, `[H]` objectives.
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

# Text that starts the assistant's turn, by type of backbone. The gating network was trained to read its first token.
PROMPT_ENDS = {
    "llama": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma2": "<end_of_turn>\n<start_of_turn>model\n",
}


@dataclass(frozen=True, slots=True)
class GatedKind(LastTokenKind):
    """Kind whose reward is a gated sum of objectives: `sum_h gate_h(prompt) * (objectives(reply) @ transform)_h`.

    This is the formula of ArmoRM (arXiv 2406.12845, section 3.2). An objective of QRM (arXiv 2409.10164, section 3) is
    the mean over its quantiles. An objective of URM (arXiv 2410.00847, section 4) is the mean of its normal
    distribution. The components are the objectives. The gates that the executor returns include the transform.

    Attributes:
        prompt_end: token ids that end the prompt. The gate reads the first token of their last occurrence. None: the
            gate reads at the same position as the objectives.
    """

    name = "gated"

    prompt_end: tuple[int, ...] | None = None

    class Options(PoolingOptions):
        """Options of `kind="gated"`."""

        names: Sequence[str] | None = None
        """Names of the objectives; None for the checkpoint's labels, or numbered names if it has none."""
        regression: str = "regression_layer"
        """Name of the head for the objectives in the model."""
        gate: str = "gating"
        """Name of the gating network in the model."""
        outputs: Literal["quantiles", "normal"] = "quantiles"
        """Outputs of the regression head per objective: its quantiles, or (mean, log variance)."""
        prompt_end: str | None = "auto"
        """The text with which the chat template starts the assistant's turn; the gate reads its first token. None: the
        gate reads at the same position as the objectives. `"auto"` uses the text of Llama 3 or Gemma 2."""

    @classmethod
    def of(cls, facts: ModelFacts, options: Options) -> GatedKind:
        """See `Kind.of`."""
        prompt_end = options.prompt_end
        if prompt_end == "auto":
            prompt_end = PROMPT_ENDS.get(facts.config.model_type)
            if prompt_end is None:
                raise ConfigError(
                    f"prompt_end has no default for models of type {facts.config.model_type!r}; pass the text with "
                    "which the chat template starts the assistant's turn (the gate reads its first token)."
                )
        size = facts.outputs_of(options.gate)
        names = tuple(options.names or component_names(facts.config, size, facts.name))
        if len(set(names)) != size:
            raise ConfigError(
                f"names must have a different name for each of the {size} objectives of {facts.name!r}, got {names}."
            )
        facts.outputs_of(options.regression)
        ids = None if prompt_end is None else facts.tokenizer(prompt_end, add_special_tokens=False)["input_ids"]
        if ids == []:
            raise ConfigError(f"prompt_end must have at least one token, or be None; got {prompt_end!r}.")
        return cls(
            GatedHead(options.regression, options.gate, options.outputs),
            component_names=names,
            settings={"pooling": options.pooling},
            pooling=options.pooling,
            padding=padding_of(facts.config),
            prompt_end=None if ids is None else tuple(ids),
        )

    def read_positions(self, rendered: Rendered) -> IntArray:
        """Return the position of the gate, at the end of the prompt, and of the objectives, at the end of the text."""
        last = LastTokenKind.read_positions(self, rendered)
        if self.prompt_end is None:
            return last
        found = np.empty(0, dtype=np.int64)
        if len(rendered.input_ids) >= len(self.prompt_end):
            windows = np.lib.stride_tricks.sliding_window_view(rendered.input_ids, len(self.prompt_end))
            found = np.flatnonzero((windows == np.array(self.prompt_end)).all(axis=1))
        if not len(found) or found[-1] >= last[0]:
            raise ConversationError(
                "the gating network reads the start of the assistant's turn, which is missing in the text; the "
                "conversation must contain a reply, and the chat template must be that of the model's training."
            )
        return np.array([found[-1], last[0]])

    def reduce(self, values: FloatArray, starts: IntArray) -> Reduction:
        """Return gated sums `[M]` as rewards and objectives `[M, H]` as components."""
        size = len(self.component_names)
        gates, objectives = values[starts[:-1], size:], values[starts[1:] - 1, :size]
        return Reduction((gates * objectives).sum(axis=1).astype(np.float32), objectives)
