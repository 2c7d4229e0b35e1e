"""Known families of public reward models: kind, heads and pooling.

A family is recognised by the architecture in `config.json` and by the tensors outside the backbone or, where these are
those of any language model, by its exact hub ids and its vocabulary. Other checkpoints are loaded by their
architecture, or refused with an error that lists the options to pass, because a wrong head would return plausible but
wrong scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import transformers
from transformers import PreTrainedConfig

from gym_rm.errors import ConfigError, logger

Loader = Literal["classifier", "causal", "heads"]


@dataclass(frozen=True, slots=True)
class Family:
    """How to recognise, load and read the checkpoints of one family.

    Attributes:
        name: usual name of the family.
        kind: kind of reward model.
        loader: `"classifier"` and `"causal"` use a class of transformers; `"heads"` builds heads from tensor shapes.
        architectures: architectures in `config.json`.
        heads: first names of tensors outside the backbone; the checkpoint must have all of them.
        vocabularies: hub ids of its checkpoints and the sizes of their vocabularies; empty if the class suffices.
        options: options of the kind.
    """

    name: str
    kind: str
    loader: Loader = "classifier"
    architectures: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


OUTPUT_LAYERS = ("lm_head", "embed_out", "output", "output_layer", "cls", "lm_predictions", "mask_predictions")
PROCESS_OPTIONS = {"step_token": "<extra_0>", "step_separator": "\n\n"}

FAMILIES = (
    Family(
        "Nemotron reward",
        "decoder",
        "causal",
        architectures=("LlamaForCausalLM", "Qwen3ForCausalLM"),
        vocabularies={
            "nvidia/Llama-3.1-Nemotron-70B-Reward-HF": 128_256,
            "nvidia/Llama-3.3-Nemotron-70B-Reward": 128_256,
            "nvidia/Llama-3.3-Nemotron-70B-Reward-Multilingual": 128_256,
            "nvidia/Qwen-3-Nemotron-32B-Reward": 151_936,
        },
        options={"token_id": 0, "pooling": "last"},
    ),
    Family(
        "Qwen2.5-Math-PRM", "process", "heads", ("Qwen2ForProcessRewardModel",), ("score",), options=PROCESS_OPTIONS
    ),
    Family("Qwen2.5-Math-RM and WorldPM", "decoder", "heads", ("Qwen2ForRewardModel",), ("score",)),
    Family("INF-ORM", "decoder", "heads", ("INFORMForSequenceClassification",), ("score",)),
)


def choose_family(
    config: PreTrainedConfig, tensors: Iterable[str], name: str, *, kind: str = "auto", head: str | None = None
) -> Family:
    """Return how to load a checkpoint: by the user's `head`, else by its known family, else by its architecture.

    Args:
        config, tensors: configuration of the checkpoint, and names of its tensors.
        name: hub id or folder.
        kind: a name in `gym_rm.engine.kinds.KINDS`, or `"auto"`.
        head: first name of the head's tensors, for a head that no known family has.

    Raises:
        ConfigError: the kind is undetermined or does not fit the checkpoint.
    """
    tensors = list(tensors)
    firsts = {tensor.partition(".")[0] for tensor in tensors}
    architecture = str((config.architectures or [""])[0])
    if head is not None:
        if head not in firsts:
            raise ConfigError(
                f"head={head!r}: {name!r} has no tensors {head + '.*'!r}; expected one of "
                f"{beside_backbone(tensors)[:8]}."
            )
        kind = "decoder" if kind == "auto" else kind
        return Family("named head", kind, "heads", heads=(head,), options={"head": head})
    of_class = (each for each in FAMILIES if architecture in each.architectures and firsts.issuperset(each.heads))
    size = getattr(config.get_text_config(), "vocab_size", None)
    known = next((each for each in of_class if not each.vocabularies or each.vocabularies.get(name) == size), None)
    if known is not None and kind in ("auto", known.kind):
        evidence = f"its hub id {name!r}" if known.vocabularies else f"its tensors {[*known.heads]}"
        logger.info("%r is of the family %s, by %s and its class %s", name, known.name, evidence, architecture)
        return known
    if kind in ("generative", "implicit"):
        return Family(kind, kind, "causal")
    if kind in ("decoder", "process") and architecture.endswith("ForCausalLM"):
        return Family("causal language model", kind, "causal")  # a decoder with token_id=
    if architecture.endswith("ForSequenceClassification") and hasattr(transformers, architecture):
        return Family("classifier", kind)
    if kind == "process" and architecture.endswith("ForTokenClassification"):
        return Family("token classifier", kind, "heads", heads=("score",))
    if kind == "auto" and architecture.endswith("ForCausalLM"):
        heads = [first for first in beside_backbone(tensors) if first not in OUTPUT_LAYERS]
        found = (
            f" It has tensors {heads[:8]} outside the backbone: if one of them is the head that returns the reward, "
            f"pass head={heads[0]!r}, and pooling='last' or 'hf'."
            if heads
            else ""
        )
        raise ConfigError(
            f"{name!r} is a {architecture}, a causal language model without a known reward head.{found} Pass "
            "kind='generative' (with question= and answers=) to score by its answer to a question, or kind='implicit' "
            "(with reference=) to score by its log-probabilities relative to a reference model, or kind='decoder' with "
            "token_id= and pooling='last' if the logit of one token is the reward (Nemotron reward: token_id=0)."
        )
    raise ConfigError(
        f"{name!r} is not of a known family of reward models: its architecture is {architecture or 'none'!r}, and its "
        f"tensors outside the backbone are {beside_backbone(tensors)[:8]}. If one of them is the head that returns the "
        "reward, pass head='its first name' (with kind= if the head has several outputs), chat_template= if the "
        "tokenizer has none, and pooling='last' or 'hf'. If the model needs its own code, load it yourself, and "
        "pass it with its tokenizer to RewardModelScorer."
    )


def beside_backbone(tensors: Iterable[str]) -> list[str]:
    """Return the first names of the tensors outside the backbone; the backbone is the module with the embeddings."""
    firsts = {tensor: tensor.partition(".")[0] for tensor in tensors}
    backbones = {first for tensor, first in firsts.items() if "embed" in tensor or ".wte." in tensor}
    return sorted(set(firsts.values()) - backbones)
