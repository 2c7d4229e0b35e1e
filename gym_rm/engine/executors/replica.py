"""A replica: a group of ranks that hold one copy of a model, and what the answers of the ranks mean for the group."""

from __future__ import annotations

import abc
import math
import pickle
from collections.abc import Sequence
from time import monotonic
from typing import Any

from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo
from gym_rm.engine.executors.worker import Answer
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, brief

GRACE = 10.0  # seconds that ranks have to answer after another one has reported an error


class ReplicaFailed(Exception):
    """A rank died, does not answer, or disagrees with the others: the group must be started again.

    Attributes:
        reason: what happened.
        result: result of the batch that ran, if a rank reported an error before the group failed; otherwise None.
    """

    def __init__(self, reason: str, result: BatchResult | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.result = result


class Replica(abc.ABC):
    """One group of ranks that hold one model. One thread calls it; `kill` may come from any.

    Subclasses are the transport: they start the ranks, carry a request to all of them, and bring the answers back.
    """

    _size = 1  # number of ranks

    def start(self, spec: LoadSpec, seconds: float = math.inf) -> ModelInfo:
        """Start the ranks and load the model; after `kill`, start again.

        Raises:
            ConfigError: the ranks refuse the model or an option, with their message.
            ReplicaFailed: a rank died, did not answer within `seconds`, or the ranks disagree.
        """
        request = request_bytes("load", spec)
        self._size = spec.num_ranks
        try:
            self._start_ranks(spec)
            infos: list[ModelInfo] = _values("load", self._ask(request, seconds))
            different = differences(infos[0], infos[1:])
            if different:
                raise ReplicaFailed(f"the ranks disagree about the model: {different}")
        except BaseException:
            self.kill()
            raise
        return infos[0]

    def run(self, batch: Batch, seconds: float) -> BatchResult:
        """Run a batch and wait for its result. An error that every rank reports is the error of the batch.

        Raises:
            ReplicaFailed: a rank died, did not answer within `seconds`, or failed alone.
        """
        answers = self._ask(request_bytes("run", batch), seconds)
        failed = [i for i, answer in enumerate(answers) if answer.failed]
        if failed and len(failed) < len(answers):
            first = _result_of(answers[failed[0]])
            raise ReplicaFailed(f"ranks {failed} of {len(answers)} failed alone: {first.error}", first)
        return _result_of(answers[0])

    def call(self, method: str, *arguments: Any, seconds: float) -> None:
        """Call a method of the executor in every rank, such as `"update_weights"`.

        Raises:
            ConfigError: every rank refused the arguments, and nothing has changed.
            ReplicaFailed: a rank died, did not answer within `seconds`, or disagrees with the others.
        """
        _values(method, self._ask(request_bytes(method, *arguments), seconds))

    @property
    @abc.abstractmethod
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order; empty after `kill`."""

    @abc.abstractmethod
    def alive(self) -> bool:
        """Return False if a rank is known to be dead."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End all ranks and remove everything that was made for them; a running call raises `ReplicaFailed`."""

    @abc.abstractmethod
    def _start_ranks(self, spec: LoadSpec) -> None:
        """Start the processes of `spec.num_ranks` ranks, which wait for requests."""

    @abc.abstractmethod
    def _send(self, request: bytes) -> None:
        """Send a request to all ranks."""

    @abc.abstractmethod
    def _receive(self, ends: float) -> dict[int, Answer]:
        """Wait for answers to the last request until a time of `monotonic`; return those that came, by rank.

        Raises:
            ReplicaFailed: a rank died, or no answer came until then.
        """

    def _ask(self, request: bytes, seconds: float) -> list[Answer]:
        """Send a request to all ranks and return their answers, in order."""
        ends = monotonic() + seconds
        self._send(request)
        answers: dict[int, Answer] = {}
        while len(answers) < self._size:
            failed = next((answer for answer in answers.values() if answer.failed), None)
            if failed is not None:  # the others may wait for that rank
                ends = min(ends, monotonic() + GRACE)
            try:
                answers |= self._receive(ends)
            except BaseException as error:
                self.kill()  # a late answer must not be taken for an answer to the next request
                if failed is None or not isinstance(error, ReplicaFailed):
                    raise
                result = _result_of(failed)
                raise ReplicaFailed(f"{error.reason}, after another rank failed: {result.error}", result) from None
        return [answers[i] for i in range(self._size)]


def request_bytes(method: str, *arguments: Any) -> bytes:
    """Return a request as bytes; raise ConfigError if the arguments cannot be pickled."""
    try:
        return pickle.dumps((method, *arguments), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(
            f"the arguments of {method} cannot be sent to other processes: {brief(error)}. Pass paths and plain values."
        ) from error


def differences(first: ModelInfo, others: Sequence[ModelInfo]) -> str:
    """Return how infos differ in what callers rely on, as text; empty if they do not."""
    names = ("layout", "fused", "kernels", "num_values", "dtype", "quantization", "batch_invariance", "rows",
             "sampled_revision")  # fmt: skip
    return "; ".join(
        f"{name} is {getattr(first, name)!r} and {getattr(other, name)!r}"
        for name in names
        for other in others
        if getattr(other, name) != getattr(first, name)
    )


def _result_of(answer: Answer) -> BatchResult:
    """Return the result of a batch; an exception of the rank is the batch's error."""
    return answer.value if isinstance(answer.value, BatchResult) else BatchResult(error=answer.error)


def _values(method: str, answers: Sequence[Answer]) -> list[Any]:
    """Return what the ranks returned; raise ConfigError if all refused, and ReplicaFailed for any other error."""
    errors = [f"rank {i}: {answer.error}" for i, answer in enumerate(answers) if answer.error is not None]
    if all(answer.refused for answer in answers):
        raise ConfigError(str(answers[0].error))
    if errors:
        raise ReplicaFailed(f"{method} failed in {len(errors)} of {len(answers)} ranks: {'; '.join(errors)}")
    return [answer.value for answer in answers]
