"""Answers of ranks to one request, and what they mean for their group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, ModelInfo
from gym_rm.engine.executors.replica import ReplicaFailed
from gym_rm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a rank to one request: a value, or an error as text, because exceptions need not be picklable.

    Attributes:
        value: what the method returned.
        error: what it raised instead, or None.
        refused: whether the error is a ConfigError.
    """

    value: Any = None
    error: str | None = None
    refused: bool = False


def has_error(answer: Answer) -> bool:
    """Return whether a rank raised, or its batch failed."""
    return answer.error is not None or (isinstance(answer.value, BatchResult) and answer.value.error is not None)


def result_of(answer: Answer) -> BatchResult:
    """Return the result of a batch; an exception of the rank is the batch's error."""
    return answer.value if isinstance(answer.value, BatchResult) else BatchResult(error=answer.error)


def raise_if_refused(answers: Sequence[Answer]) -> None:
    """Raise the first ConfigError of the ranks, if there is one."""
    for answer in answers:
        if answer.refused and answer.error is not None:
            raise ConfigError(answer.error)


def agreed_result(answers: Sequence[Answer]) -> BatchResult:
    """Return the result of rank 0. If every rank has an error, the group is healthy and the batch has that error.

    Raises:
        ReplicaFailed: only some ranks have an error.
    """
    results = [result_of(answer) for answer in answers]
    failed = [i for i, result in enumerate(results) if result.error is not None]
    if failed and len(failed) < len(results):
        first = results[failed[0]]
        raise ReplicaFailed(f"ranks {failed} of {len(results)} failed alone: {first.error}", first)
    return results[0]


def agreed_call(method: str, answers: Sequence[Answer]) -> None:
    """Raise what the ranks raised: ConfigError if all refused, ReplicaFailed for another error or different answers."""
    failed = [answer for answer in answers if answer.error is not None]
    if failed and len(failed) == len(answers) and all(answer.refused for answer in failed):
        raise ConfigError(str(failed[0].error))
    if failed:
        raise ReplicaFailed(f"{method} failed in {len(failed)} of {len(answers)} ranks: {failed[0].error}")


def agreed_info(infos: Sequence[ModelInfo]) -> ModelInfo:
    """Return the info of rank 0.

    Raises:
        ReplicaFailed: ranks that hold one model describe it differently.
    """
    different = differences(infos[0], infos[1:])
    if different:
        raise ReplicaFailed(f"the ranks disagree about the model: {different}")
    return infos[0]


def differences(first: ModelInfo, others: Sequence[ModelInfo]) -> str:
    """Return how infos differ in what callers rely on, as text; empty if they do not."""
    names = ("layout", "fused", "num_values", "dtype", "quantization", "batch_invariance", "revision")
    found: Mapping[str, set[str]] = {
        name: {repr(getattr(each, name)) for each in (first, *others)} - {repr(getattr(first, name))} for name in names
    }
    return "; ".join(
        f"{name} is {getattr(first, name)!r} and {', '.join(sorted(other))}" for name, other in found.items() if other
    )
