"""Kinds of reward model: how the outputs of a model become rewards. This package holds no weights.

`KINDS` maps the name of each kind to its class. The `Options` of the class are the options of the kind.
"""

from __future__ import annotations

from collections.abc import Iterable

from gym_rm.engine.kinds.decoder import DecoderKind, EncoderKind
from gym_rm.engine.kinds.kind import Kind, ModelFacts, Reduction
from gym_rm.engine.kinds.language_models import GenerativeKind, ImplicitKind
from gym_rm.engine.kinds.multi_head import MultiHeadKind, component_names
from gym_rm.engine.kinds.process import ProcessKind
from gym_rm.errors import ConfigError, nearest

KINDS: dict[str, type[Kind]] = {
    kind.name: kind for kind in (DecoderKind, EncoderKind, MultiHeadKind, ProcessKind, GenerativeKind, ImplicitKind)
}

__all__ = ["KINDS", "Kind", "ModelFacts", "Reduction", "check_kind", "detect_kind"]


def check_kind(kind: str, *, others: Iterable[str] = ()) -> str:
    """Return the kind if it is `"auto"` or a name in `KINDS`.

    Raises:
        ConfigError: unknown kind. The message also lists the `others`, which no reward model is.
    """
    if isinstance(kind, str) and (kind == "auto" or kind in KINDS):
        return kind
    known = sorted([*KINDS, *others])
    raise ConfigError(f"kind must be 'auto' or one of {known}, got {kind!r}.{nearest(str(kind), known)}")


def detect_kind(facts: ModelFacts) -> str:
    """Return the kind of a model: `"decoder"`, `"encoder"`, or `"multi_head"` if it has several outputs.

    Raises:
        ConfigError: the model has several outputs, and its configuration has no `objective_weights`.
    """
    config = facts.config
    if config.num_labels == 1:
        return "decoder" if "score" in facts.heads else "encoder"
    if getattr(config, "objective_weights", None) is not None:
        return "multi_head"
    names = component_names(config, config.num_labels)
    raise ConfigError(
        f"{facts.name!r} has a head with {config.num_labels} outputs {list(names[:8])}, but a reward is one number; "
        "pass kind='multi_head' with weights= ({label: weight}, or a list), or kind='process' with step_token= if "
        "the outputs rate the steps of a reply."
    )
