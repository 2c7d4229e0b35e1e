"""Count the parameters of a checkpoint from the headers of its safetensors files. No tensor is read."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes; the format allows no more
FLOATS = {"F64", "F32", "F16", "BF16"}
# Tensors that some checkpoints store although the model does not learn them.
BUFFERS = re.compile(r"(inv_freq|position_ids|masked_bias|\.attn\.bias|e_score_correction_bias|attention\.bias)$")
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Counted:
    """Parameters of a checkpoint.

    Attributes:
        parameters: how many; None if they are not stored as plain floats, or the files are not there.
        why: reason why there is no number, for messages.
    """

    parameters: int | None
    why: str = ""


def count_parameters(folder: Path, num_layers: int | None = None) -> Counted:
    """Return the number of parameters in a folder's safetensors files.

    Tensors that are no parameters (buffers) are not counted, and neither are layers after the first `num_layers`, which
    predict several tokens ahead and are not loaded (DeepSeek-V3).

    Raises:
        ConfigError: a file or its index is malformed.
    """
    names = _weight_files(folder)
    if not names:
        return Counted(None, "the folder has no safetensors files")
    if missing := [name for name in names if not (folder / name).is_file()]:
        return Counted(None, f"{len(missing)} of {len(names)} safetensors files are not there, such as {missing[0]!r}")
    total = 0
    for name in names:
        for tensor, entry in _header(folder / name).items():
            layer = LAYER.search(tensor)
            if BUFFERS.search(tensor) or (num_layers and layer and int(layer[1]) >= num_layers):
                continue
            if entry["dtype"] not in FLOATS:
                return Counted(None, f"the weights are quantised ({tensor!r} has the dtype {entry['dtype']})")
            total += math.prod(entry["shape"])
    return Counted(total)


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{str(index)!r} is not an index of safetensors files: {error!r}.") from error
        if bad := [name for name in names if not isinstance(name, str) or not name.endswith(".safetensors")]:
            raise ConfigError(f"{str(index)!r} must name safetensors files; got {bad[0]!r}.")
        return sorted(names)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    return []


def _header(file: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file: dtype and shape by name."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if not 0 < size <= LARGEST_HEADER:
                raise ValueError(f"its header would have {size} bytes")
            tensors = json.loads(opened.read(size))
        tensors.pop("__metadata__", None)
        if not all(isinstance(entry["dtype"], str) and math.prod(entry["shape"]) >= 0 for entry in tensors.values()):
            raise ValueError("a tensor has no dtype or shape")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{str(file)!r} is not a whole safetensors file: {error}; download it again.") from error
    return dict(tensors)
