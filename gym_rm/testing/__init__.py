"""Conformance checks for what the package's parts rely on, of this package or your own.

Each check raises an `AssertionError` with the expected and the actual value, and returns None if there is no error.
"""

from gym_rm.testing.attention import check_attention
from gym_rm.testing.environments import check_vector_env
from gym_rm.testing.executors import check_executor
from gym_rm.testing.generation import check_chat_model, check_sampler
from gym_rm.testing.scorers import check_scorer

__all__ = [
    "check_attention",
    "check_chat_model",
    "check_executor",
    "check_sampler",
    "check_scorer",
    "check_vector_env",
]
