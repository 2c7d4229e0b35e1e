"""Write a trained reward model as a plain Hugging Face folder with a model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch import Tensor

from gym_rm.documents import to_yaml
from gym_rm.reports.runs import flat
from gym_rm.training.checkpoints import atomic_folder
from gym_rm.training.comparison_sets import EncodedSet
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.training.trained_reward_model import StartModel


def export(
    folder: Path,
    start: StartModel,
    weights: Mapping[str, Tensor],
    *,
    settings: RewardModelTraining,
    sets: Sequence[EncodedSet],
    metrics: Mapping[str, Mapping[str, float]],
    step: int,
) -> None:
    """Write the folder: configuration, safetensors, tokenizer with the chat template, model card.

    With adapters, it is the folder of an adapter, with the head.

    Args:
        folder: the folder to write.
        start: the model that the run started from, whose classes and configuration are saved.
        weights: the trained parameters on the CPU, by their names in `start.trained`.
        settings, sets, metrics, step: what the run was, for the model card; metrics are those of each validation set.
    """
    state = {name: tensor for name, tensor in start.trained.state_dict().items() if not tensor.is_meta} | dict(weights)
    template = start.renderer.chat_template
    with atomic_folder(folder) as unfinished:
        if start.peft is None:
            start.model.save_pretrained(unfinished, state_dict=state)
            if start.architectures:
                path = unfinished / "config.json"
                config = json.loads(path.read_text(encoding="utf-8")) | {"architectures": start.architectures}
                path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            start.peft.save_pretrained(unfinished, state_dict=state)
        tokenizer = start.tokenizer
        own = tokenizer.chat_template
        if template is not None and (own is None or "chat_template" in settings.model.reward_model_kwargs):
            tokenizer.chat_template = template
        tokenizer.save_pretrained(unfinished)
        tokenizer.chat_template = own
        (unfinished / "README.md").write_text(model_card(start, settings, sets, metrics, step), encoding="utf-8")


def model_card(
    start: StartModel,
    settings: RewardModelTraining,
    sets: Sequence[EncodedSet],
    metrics: Mapping[str, Mapping[str, float]],
    step: int,
) -> str:
    """Return the model card in Markdown, with the header that the hub reads."""
    header = {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["reward-model", "gym-rm"]}
    lines = [
        "---",
        to_yaml(header).strip(),
        "---",
        "",
        "# Reward model",
        "",
        f"A reward model of kind `{start.kind.name}`, trained from `{start.name}` for {step} steps with gym-rm "
        f"{version('gym-rm')} (torch {torch.__version__}, transformers {transformers.__version__}).",
    ]
    lines += ["", "## Data", "", "| set | comparisons | dropped | conversations cut |", "| --- | --- | --- | --- |"]
    lines += [f"| {each.name} | {len(each.examples)} | {len(each.dropped)} | {each.num_cut} |" for each in sets]
    measured = to_yaml({name: dict(values) for name, values in metrics.items()}).strip() if metrics else "Not measured."
    lines += ["", "## Metrics", "", "```yaml", measured, "```"]
    changed = flat(settings.model_dump(mode="json", exclude_defaults=True), ".")
    command = " ".join(shlex.quote(f"{name}={json.dumps(value)}") for name, value in changed)
    lines += ["", "## Command", "", "```", f"gym-rm train {command}", "```", ""]
    return "\n".join(lines)
