"""Options for a model that is divided over several processes, or copied to them."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from gym_rm.checks import finite
from gym_rm.config import Config, PositiveInt
from gym_rm.errors import ConfigError


def _batch_timeout(value: Any) -> float:
    seconds = finite("batch_timeout", value)
    if seconds <= 0:
        raise ConfigError(f"batch_timeout must be positive, got {value!r}.")
    return seconds


class ParallelOptions(Config):
    """Options for a model that is divided over several processes, or copied to them."""

    tensor_parallel_size: PositiveInt = 1
    """Number of processes that share every layer of a model: each has some of its heads and columns."""
    num_replicas: PositiveInt = 1
    """Number of copies of the model, which score different batches at the same time."""
    batch_timeout: Annotated[float, pydantic.BeforeValidator(_batch_timeout)] = 300.0
    """Seconds after which a copy that has not answered a batch is started again, and the batch runs elsewhere."""
