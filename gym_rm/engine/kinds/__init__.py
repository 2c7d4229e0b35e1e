"""What does this model's output mean? One file per answer; no weights.

`KINDS` is the one table of kinds: a kind's name, its class, and in `Options` what it can be asked.
"""

from __future__ import annotations

from gym_rm.engine.kinds.decoder import DecoderKind
from gym_rm.engine.kinds.encoder import EncoderKind
from gym_rm.engine.kinds.gated import GatedKind
from gym_rm.engine.kinds.generative import GenerativeKind
from gym_rm.engine.kinds.implicit import ImplicitKind
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction
from gym_rm.engine.kinds.multi_head import MultiHeadKind
from gym_rm.engine.kinds.pair_encoder import PairEncoderKind
from gym_rm.engine.kinds.process import ProcessKind
from gym_rm.errors import ConfigError

KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        DecoderKind,
        EncoderKind,
        MultiHeadKind,
        GatedKind,
        ProcessKind,
        GenerativeKind,
        ImplicitKind,
        PairEncoderKind,
    )
}

__all__ = ["KINDS", "Kind", "ModelFacts", "Reduction", "detect_kind"]


def detect_kind(facts: ModelFacts) -> str:
    """A decoder or an encoder; with several outputs, only what the configuration weighs.

    Raises:
        ConfigError: several outputs and no weights for them.
    """
    config = facts.config
    if config.num_labels == 1:
        return "decoder" if "score" in facts.heads else "encoder"
    if getattr(config, "objective_weights", None) is not None:
        return "multi_head"
    labels = [config.id2label[index] for index in sorted(config.id2label)]
    raise ConfigError(
        f"{facts.name!r} has a head of {config.num_labels} outputs {labels[:8]}, and a reward is one number: pass "
        "kind='multi_head' with weights= ({label: weight}, a list, one label, 'mean' or 'sum'), or kind='process' with "
        "step_token= if the outputs judge steps."
    )
