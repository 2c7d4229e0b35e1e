"""What `gym-rm plan` plans: a request file or a plan, with changes of settings, some of which have short names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_rm import checks
from gym_rm.config import load_config, override_values, settings_file
from gym_rm.documents import read_mapping
from gym_rm.errors import ConfigError
from gym_rm.planning.plan import Plan, load_plan
from gym_rm.planning.request_settings import ClusterSettings, PlanSettings
from gym_rm.planning.simulation import SimulationSettings

# Planned if nothing is asked for; configs/plan/h100_1x8.yaml is the same.
EXAMPLE = (
    "name=8B policy, 8B reward model",
    "cluster.gpus_per_node=8",
    "policy.model=Qwen/Qwen3-8B",
    "reward_models.helpful.model=Skywork/Skywork-Reward-V2-Llama-3.1-8B",
)
MODELS = ("policy", "critic", "reward_models", "reward_training")
SHORT_NAMES = ("gpus", "nodes", "gpus_per_node", "gpu", "memory")
FULL_NODE = 8  # GPUs; a single smaller node grows to it before there are two


def divide_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file and the `name=value` settings among the arguments of the command.

    Raises:
        ConfigError: the file does not exist, or there are several.
    """
    overrides = [each for each in arguments if "=" in each and not os.path.isfile(each)]
    files = [settings_file(each, "plan") for each in arguments if each not in overrides]
    if len(files) > 1:
        raise ConfigError(f"expected one request, got {', '.join(map(str, files))}; --what-if compares changes of one.")
    return next(iter(files), None), overrides


def is_example(file: Path | None, overrides: Sequence[str]) -> bool:
    """Return whether neither a file nor settings name a model, so that the example is planned."""
    return file is None and not any(re.split(r"[.=]", each)[0].strip() in MODELS for each in overrides)


def read_request(file: Path | None, overrides: Sequence[str]) -> PlanSettings | Plan:
    """Return the settings of a request with changes, or the plan that a file holds.

    Raises:
        ConfigError: a setting is wrong, or a plan should be changed.
    """
    if file is not None and holds_plan(file):
        if overrides:
            raise ConfigError(
                f"{str(file)!r} holds a plan, which has no settings to change ({overrides[0]}); pass the request that "
                "it was made from."
            )
        return load_plan(file)
    known = [*EXAMPLE] if is_example(file, overrides) else []
    for override in overrides:
        name, _, value = override.partition("=")
        if name.strip() in SHORT_NAMES:
            settings = load_config(PlanSettings, file, known)
            known += _expand(name.strip(), value, settings.cluster)
        else:
            known.append(override)
    return load_config(PlanSettings, file, known)


def divide_simulation(overrides: Sequence[str]) -> tuple[SimulationSettings, list[str]]:
    """Return the settings of a simulation, which begin with `simulation.`, and the others."""
    own = [each for each in overrides if each.startswith("simulation.")]
    settings = load_config(SimulationSettings, None, [each.removeprefix("simulation.") for each in own])
    return settings, [each for each in overrides if each not in own]


def divide_change(change: str) -> list[str]:
    """Return the settings of a `--what-if`, such as `nodes=2 memory=141 GiB`.

    Raises:
        ConfigError: it has another form.
    """
    parts = re.split(r"[\s,;]+(?=[A-Za-z_][\w.]*=)", change.strip())
    if not all(re.match(r"[\w.]+\s*=", part) for part in parts):
        raise ConfigError(f"--what-if must be settings such as 'gpus=16' or 'nodes=2 gpu=h200_sxm', got {change!r}.")
    return parts


def holds_plan(file: Path) -> bool:
    """Return whether a file holds a plan, not a request."""
    return "format" in read_mapping(file, "the settings")


def _expand(name: str, value: str, cluster: ClusterSettings) -> list[str]:
    """Return the settings of the cluster that a short name stands for."""
    override = f"{name}={value}"
    if name == "memory":
        base: dict[str, Any] = {"like": cluster.gpu} if isinstance(cluster.gpu, str) else dict(cluster.gpu)
        return [f"cluster.gpu={json.dumps({**base, 'memory': _value(override)})}"]
    if name != "gpus":
        return [f"cluster.{override}"]
    gpus = checks.integer("gpus", _value(override), minimum=1)
    node = cluster.gpus_per_node
    if cluster.nodes == 1:
        node = gpus if gpus <= max(node, FULL_NODE) else max(node, FULL_NODE)
    if gpus % node:
        raise ConfigError(
            f"gpus={gpus}: nodes of {node} GPUs do not make {gpus}; write nodes= and gpus_per_node= for nodes of "
            "another size."
        )
    return [f"cluster.nodes={gpus // node}", f"cluster.gpus_per_node={node}"]


def _value(override: str) -> Any:
    (value,) = override_values([override]).values()
    return value
