"""A loaded model, its tokenizer and the options of its kind to a `RewardModel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from gym_rm.errors import ConfigError, nearest
from gym_rm.engine.kinds.decoder import DecoderRewardModel
from gym_rm.engine.kinds.encoder import EncoderRewardModel
from gym_rm.engine.loading.families import KINDS, PROMPT_ENDS, objective_names
from gym_rm.engine.kinds.generative import GenerativeRewardModel
from gym_rm.engine.backbones.heads import Head, ModuleHead, TokenLogits, width
from gym_rm.engine.kinds.implicit import ImplicitRewardModel
from gym_rm.engine.kinds.multi_head import GatedRewardModel, MultiHeadRewardModel, Objectives, Weights
from gym_rm.engine.kinds.pair_encoder import PairEncoderRewardModel
from gym_rm.engine.kinds.process import ProcessRewardModel, Reduction
from gym_rm.engine.kinds.reward_model import Pooling, RewardModel
from gym_rm.engine.text.renderer import token_of


def make_reward_model(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    kind: str = "auto",
    pooling: Literal["auto", "last", "hf"] = "auto",
    **options: Any,
) -> RewardModel:
    """The kind of reward model that a loaded Hugging Face model is.

    Args:
        model: with its head.
        tokenizer: its tokenizer.
        kind: of `KINDS`; `"auto"` is a decoder or encoder with one output, or with weights in its configuration.
        pooling: where a decoder's head reads, see `DecoderRewardModel`; auto is `"hf"`.
        options: of the kind, see its class.

    Raises:
        ConfigError: unknown kind, unknown option, or a head of another width than the kind reads.
    """
    if kind == "auto":
        kind = _kind_of(model)
    if kind not in MAKERS:
        raise ConfigError(f"unknown kind of reward model {kind!r}; known: {sorted(KINDS)}.{nearest(kind, KINDS)}")
    if pooling not in ("auto", "last", "hf"):
        raise ConfigError(f"pooling must be 'auto', 'last' or 'hf'; got {pooling!r}.")
    parameters = inspect.signature(MAKERS[kind]).parameters
    known = [name for name in parameters if name not in ("model", "tokenizer")]
    if pooling != "auto" and "pooling" in known:
        options = {**options, "pooling": pooling}
    elif pooling == "hf":
        raise ConfigError(
            f"pooling='hf' is of no use to a reward model of the kind {kind!r}, which knows where to read."
        )
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown options {unknown} for a reward model of the kind {kind!r}; it has {known or 'none'}."
            + nearest(unknown[0], known)
        )
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in options]
    if needed:
        raise ConfigError(f"a reward model of the kind {kind!r} needs {needed}: pass {needed[0]}=.")
    return MAKERS[kind](model, tokenizer, **options)


def _kind_of(model: PreTrainedModel) -> str:
    """A decoder or an encoder; with several outputs, only what the configuration weighs."""
    if model.config.num_labels == 1:
        return "decoder" if isinstance(getattr(model, "score", None), torch.nn.Linear) else "encoder"
    if getattr(model.config, "objective_weights", None) is not None:
        return "multi_head"
    labels = [model.config.id2label[index] for index in sorted(model.config.id2label)]
    raise ConfigError(
        f"{model.name_or_path!r} has a head of {model.config.num_labels} outputs {labels[:8]}, and a reward is one "
        "number: pass kind='multi_head' with weights= ({label: weight}, a list, one label, 'mean' or 'sum'), or "
        "kind='process' with step_token= if the outputs judge steps."
    )


def _decoder(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    head: str = "score",
    token_id: int | None = None,
    pooling: Pooling = "hf",
) -> RewardModel:
    if token_id is not None:
        return DecoderRewardModel(model, head=TokenLogits(model, [token_id]), pooling=pooling)
    return _with_one_output(DecoderRewardModel(model, head=_module_head(model, head), pooling=pooling))


def _encoder(model: PreTrainedModel, tokenizer: Any) -> RewardModel:
    return _with_one_output(EncoderRewardModel(model))


def _multi_head(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    weights: Weights | None = None,
    head: str = "score",
    pooling: Pooling = "hf",
) -> RewardModel:
    weights = weights if weights is not None else getattr(model.config, "objective_weights", None)
    if weights is None:
        raise ConfigError(
            "kind='multi_head' needs weights=: {label: weight}, a list, one label, 'mean' or 'sum'; or "
            "objective_weights in config.json."
        )
    inner: DecoderRewardModel | EncoderRewardModel
    if hasattr(model, head):
        inner = DecoderRewardModel(model, head=_module_head(model, head), pooling=pooling)
    else:
        inner = EncoderRewardModel(model)
    names = objective_names(model.config, inner.num_values, model.name_or_path)
    return MultiHeadRewardModel(inner, Objectives.of(names, weights))


def _gated(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    names: Sequence[str] | None = None,
    regression: str = "regression_layer",
    gate: str = "gating",
    layout: Literal["quantiles", "normal"] = "quantiles",
    prompt_end: str | None = "auto",
    pooling: Pooling = "hf",
) -> RewardModel:
    if prompt_end == "auto":
        prompt_end = PROMPT_ENDS.get(model.config.model_type)
        if prompt_end is None:
            raise ConfigError(
                f"where a prompt ends is not known for {model.config.model_type!r}: pass prompt_end= the text with "
                "which the chat template starts the assistant's turn; the gate reads its first token."
            )
    names = names or objective_names(model.config, width(_submodule(model, gate)), model.name_or_path)
    ids = None if prompt_end is None else tokenizer(prompt_end, add_special_tokens=False)["input_ids"]
    return GatedRewardModel(
        model, names=names, regression=regression, gate=gate, layout=layout, prompt_end=ids, pooling=pooling
    )


def _process(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    step_token: str,
    step_separator: str = "\n\n",
    reduction: Reduction = "min",
    good_label: int = 1,
    head: str = "score",
    answers: tuple[str, str] | None = None,
) -> RewardModel:
    labels: Head
    if answers is None:
        labels = _module_head(model, head)
    else:
        good, bad = (token_of(tokenizer, answer) for answer in answers)
        labels = TokenLogits(model, [bad, good])
    return ProcessRewardModel(
        model,
        tokenizer,
        head=labels,
        step_token=step_token,
        step_separator=step_separator,
        reduction=reduction,
        good_label=good_label,
    )


def _implicit(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    reference: PreTrainedModel,
    beta: float = 0.1,
    length_normalised: bool = False,
) -> RewardModel:
    return ImplicitRewardModel(model, reference, beta=beta, length_normalised=length_normalised)


def _module_head(model: PreTrainedModel, name: str) -> Head:
    module = _submodule(model, name)
    return ModuleHead(module, width(module))


def _submodule(model: PreTrainedModel, name: str) -> torch.nn.Module:
    try:
        module: torch.nn.Module = model.get_submodule(name)
        return module
    except AttributeError as error:
        heads = [child for child, _ in model.named_children() if child != model.base_model_prefix]
        raise ConfigError(f"{type(model).__name__} has no head {name!r}; it has {heads}. Pass head=.") from error


def _with_one_output(made: DecoderRewardModel | EncoderRewardModel) -> RewardModel:
    if made.num_values != 1:
        raise ConfigError(
            f"{made.model.name_or_path!r} has a head of {made.num_values} outputs, and a {made.kind} reads one; "
            "kind='multi_head' with weights= makes one number of them."
        )
    return made


MAKERS: Mapping[str, Callable[..., RewardModel]] = {
    "decoder": _decoder,
    "encoder": _encoder,
    "multi_head": _multi_head,
    "gated": _gated,
    "process": _process,
    "generative": GenerativeRewardModel,
    "implicit": _implicit,
    "pair_encoder": PairEncoderRewardModel,
}
