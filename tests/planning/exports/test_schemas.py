"""Every setting of an export is one of its library, with a value of its type: read from the library's own files.

A library that is not installed is skipped; none is imported.
"""

import ast
import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gym_rm.documents import parse_yaml
from gym_rm.planning.exports import flags
from tests.planning.exports.test_fields import base


@functools.cache
def folder(library):
    """Return the folder of a library."""
    found = importlib.util.find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def overrides(found):
    """Return the keys and values of Hydra's overrides; a key with ++ may be new."""
    return [(key, parse_yaml(value)) for key, value in (shlex.split(line)[0].split("=", 1) for line in found.lines)]


def at(values, key):
    return functools.reduce(lambda group, name: group[name], key.split("."), values)


def alike(value, default):
    """Return whether a value has the type of a default; null and an interpolation say nothing."""
    if default is None or (isinstance(default, str) and re.match(r"\$\{|\?\?\?", default)):
        return True
    number = isinstance(value, int | float) and isinstance(default, int | float)
    return type(value) is type(default) or (number and not isinstance(value, bool) and not isinstance(default, bool))


def fields(file, name):
    """Return the fields of a class in a file."""
    tree = ast.parse(file.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("lora", [False, True])
def test_verl_has_every_setting(lora):
    values = yaml.safe_load((folder("verl") / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    for key, value in overrides(flags(base("verl", lora=lora), "verl")):
        if key.startswith("++"):
            assert {"mixed_precision"} <= fields(folder("verl") / "workers/config/engine.py", "FSDPEngineConfig")
            assert re.fullmatch(r"\+\+[\w.]+\.mixed_precision\.param_dtype", key)
        else:
            assert alike(value, at(values, key)), (key, value)


def test_trl_serves_with_every_argument():
    file = folder("trl") / "scripts/vllm_serve.py"
    plan = base("trl")
    assert plan.used_gpus == 8
    known = fields(file, "ScriptArguments")
    assert {"model", "tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_model_len"} <= known
    assert "dtype" in known
