"""Names of a model's outputs, from its configuration or its model card."""

from __future__ import annotations

import re
from typing import Any

ARMO_OBJECTIVES = (
    "helpsteer-helpfulness",
    "helpsteer-correctness",
    "helpsteer-coherence",
    "helpsteer-complexity",
    "helpsteer-verbosity",
    "ultrafeedback-overall_score",
    "ultrafeedback-instruction_following",
    "ultrafeedback-truthfulness",
    "ultrafeedback-honesty",
    "ultrafeedback-helpfulness",
    "beavertails-is_safe",
    "prometheus-score",
    "argilla-overall_quality",
    "argilla-judge_lm",
    "code-complexity",
    "code-style",
    "code-explanation",
    "code-instruction-following",
    "code-readability",
)
HELPSTEER_OBJECTIVES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


def component_names(config: Any, size: int, name: str) -> tuple[str, ...]:
    """Return names for `size` outputs: the configuration's labels, the model card's names, or numbered names."""
    labels = tuple(str(label) for _, label in sorted((config.id2label or {}).items()))
    if len(labels) == size and not all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        return labels
    if size == len(ARMO_OBJECTIVES) and re.search(r"ArmoRM|QRM", name):
        return ARMO_OBJECTIVES
    if size == len(HELPSTEER_OBJECTIVES) and re.search(r"QRM|URM", name):
        return HELPSTEER_OBJECTIVES
    return tuple(f"objective_{index}" for index in range(size))
