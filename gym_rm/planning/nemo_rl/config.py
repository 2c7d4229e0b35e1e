"""Reading the numbers of a placement from the config of a NeMo RL run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from gym_rm.errors import ConfigError, nearest
from gym_rm.planning.nemo_rl.rules import KEYS, NemoRequest

BASE = "grpo_math_1B.yaml"
DEFAULTS: dict[str, Any] = {"colocated": True} | {name: 1 for name in KEYS if name.endswith("parallel_size")}
"""What grpo_math_1B.yaml has, from which NeMo RL's own GRPO configs inherit; all else must be in the config."""

_CLUSTER = ("num_nodes", "gpus_per_node", "segment_size", "master_port_range_low", "master_port_range_high")
_RESOURCES = ("num_nodes", "gpus_per_node")
_KNOWN = {
    "cluster": _CLUSTER,
    "policy.generation.colocated": ("enabled", "resources"),
    "policy.generation.colocated.resources": _RESOURCES,
    "env.reward_model.resources": _RESOURCES,
}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def read_nemo_config(config: Mapping[str, Any], *, base: Mapping[str, Any] | None = None) -> NemoRequest:
    """Return the numbers of a NeMo RL config that decide its placement.

    Args:
        config: the YAML as a mapping. References such as `${policy.train_micro_batch_size}` are followed.
        base: the config that `defaults` names, as a mapping; not needed for grpo_math_1B.yaml, whose numbers are known.

    Raises:
        ConfigError: numbers are missing, of another type, or under unknown names; or the config asks for placements
            that are not reproduced (segments, teachers). The message lists all problems.
    """
    problems: list[str] = []
    parent = config.get("defaults") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping):
        raise ConfigError(f"a NeMo RL config must be a mapping, got {type(config).__name__}.")
    if base is None and parent is not None and PurePath(str(parent)).name != BASE:
        problems.append(f"the config inherits from {parent!r}; pass its values as base=.")
    reader = _Reader(_merged(base or {}, config), problems)
    values: dict[str, Any] = {"algorithm": "ppo" if "ppo" in reader.config and "grpo" not in reader.config else "grpo"}
    for name in ("num_nodes", "gpus_per_node"):
        values[name] = reader.integer(KEYS[name], needed=True)
    values["colocated"] = reader.flag(KEYS["colocated"], DEFAULTS["colocated"])
    for name in ("generation_nodes", "generation_gpus_per_node"):
        values[name] = reader.integer(KEYS[name])
    if _has_reward_model(reader):
        for name in ("reward_model_nodes", "reward_model_gpus_per_node"):
            values[name] = reader.integer(KEYS[name], needed=True)
        for name in ("reward_model_tensor_parallel_size", "reward_model_context_parallel_size"):
            values[name] = reader.integer(KEYS[name], default=1)
        values["reward_model_batch_size"] = reader.integer(KEYS["reward_model_batch_size"])
    section = "megatron_cfg" if reader.flag("policy.megatron_cfg.enabled", False) else "dtensor_cfg"
    tensor = "tensor_model_parallel_size" if section == "megatron_cfg" else "tensor_parallel_size"
    values["policy_tensor_parallel_size"] = reader.integer(f"policy.{section}.{tensor}", default=1)
    values["policy_context_parallel_size"] = reader.integer(f"policy.{section}.context_parallel_size", default=1)
    if (reader.at("policy.generation.backend") or "vllm") == "vllm":
        for name in ("generation_tensor_parallel_size", "generation_pipeline_parallel_size"):
            values[name] = reader.integer(KEYS[name], default=1)
    if section == "megatron_cfg":
        values["policy_pipeline_parallel_size"] = reader.integer(KEYS["policy_pipeline_parallel_size"], default=1)
    for name in ("num_prompts", "group_size"):
        values[name] = reader.integer(KEYS[name].replace("grpo.", f"{values['algorithm']}."))
    _check_known(reader)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} in the NeMo RL config:" + "".join(f"\n  {problem}" for problem in problems))
    return NemoRequest(**values)


class _Reader:
    """Values of a config by their dotted keys; problems are collected."""

    def __init__(self, config: Mapping[str, Any], problems: list[str]) -> None:
        self.config = config
        self.problems = problems

    def at(self, key: str, depth: int = 0) -> Any:
        """Return the value at a key, None if it is not there."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        if isinstance(value, str) and (match := _REFERENCE.fullmatch(value.strip())):
            if depth > 8:
                self.problems.append(f"{key} is {value!r}, which refers to itself.")
                return None
            return self.at(match[1], depth + 1)
        return value

    def integer(self, key: str, *, default: int | None = None, needed: bool = False) -> int | None:
        """Return an integer. Its range is not checked: NeMo RL's rules say what it must be."""
        value = self.at(key)
        if value is None:
            if needed:
                self.problems.append(f"{key} is missing.")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.problems.append(f"{key} must be an integer{'' if needed else ' or null'}, got {value!r}.")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.at(key)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{key} must be true or false, got {value!r}.")
        return value if isinstance(value, bool) else default


def _has_reward_model(reader: _Reader) -> bool:
    """Return whether an entry of the data uses the environment `reward_model`, the only name that NeMo RL looks for."""
    names = []
    for part in ("train", "validation", "default"):
        entries = reader.at(f"data.{part}")
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, Mapping) and "env_name" in entry:
                names.append(entry["env_name"])
                if not isinstance(entry["env_name"], str):
                    reader.problems.append(f"data.{part}.env_name must be text, got {entry['env_name']!r}.")
    unused = isinstance(reader.at("env.reward_model"), Mapping) and "reward_model" not in names
    similar = [name for name in names if isinstance(name, str) and nearest(name, ["reward_model"])]
    if unused and similar:
        reader.problems.append(
            f"env_name {similar[0]!r} is not the environment 'reward_model' that env has: NeMo RL reserves GPUs "
            "for this name only."
        )
    return "reward_model" in names


def _check_known(reader: _Reader) -> None:
    for section, known in _KNOWN.items():
        values = reader.at(section)
        if values is not None and not isinstance(values, Mapping):
            reader.problems.append(f"{section} must be a mapping, got {values!r}.")
        for name in values if isinstance(values, Mapping) else ():
            if name not in known:
                reader.problems.append(f"unknown setting {section}.{name}.{nearest(str(name), known)}")
    if reader.at("cluster.segment_size") is not None:
        reader.problems.append("cluster.segment_size: placement by segments of NVLink domains is not reproduced.")
    if reader.at("on_policy_distillation") is not None:
        reader.problems.append("on_policy_distillation: teachers on nodes of their own are not reproduced.")


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged
