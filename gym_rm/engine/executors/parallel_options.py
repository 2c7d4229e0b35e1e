"""Options for a model that is divided over several processes, or copied to them."""

from __future__ import annotations

import pydantic

from gym_rm.config import Config, Finite, PositiveInt


class ParallelOptions(Config):
    """Options for a model that is divided over several processes, or copied to them."""

    tensor_parallel_size: PositiveInt = 1
    """Number of processes that share every layer of a model: each has some of its heads and columns."""
    fsdp_size: PositiveInt = 1
    """Number of processes that share the weights of a model: each computes whole layers, with gathered weights."""
    num_replicas: PositiveInt = 1
    """Number of copies of the model, which score different batches at the same time."""
    batch_timeout: Finite = pydantic.Field(default=300.0, gt=0)
    """Seconds after which a copy that has not answered a batch is started again, and the batch runs elsewhere."""
