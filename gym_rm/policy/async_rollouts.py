"""Make the rollouts of the next steps while the policy is updated, with bounded staleness of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from gym_rm.policy.rollouts import Rollout

Weights = Mapping[str, Tensor] | None


class AsyncRollouts:
    """Rollouts of a run, in the order of steps, each made with weights of a known step.

    Step t is made with the weights after step t - 1 - `max_staleness` (or the first ones), whatever the timing, so that
    a run repeats itself exactly if it is not interrupted. With 0, a step is made when it is asked for.

    Args:
        make: returns the rollouts of a step, given the new weights, if there are any, and their step.
        weights: returns a copy of the current weights.
        max_staleness: number of steps to be ahead.
        num_steps: number of steps of the run.
        step: number of steps that are done.

    Example:
        >>> rollouts = AsyncRollouts(lambda *about: [], lambda: None, max_staleness=1, num_steps=2, step=0)
        >>> rollouts.take(1), rollouts.take(2)
        ([], [])
        >>> rollouts.close()
    """

    def __init__(
        self,
        make: Callable[[int, Weights, int], Sequence[Rollout]],
        weights: Callable[[], Weights],
        *,
        max_staleness: int,
        num_steps: int,
        step: int,
    ) -> None:
        self._make, self._weights, self._num_steps, self._ahead = make, weights, num_steps, max_staleness
        self._thread = ThreadPoolExecutor(1, "rollouts") if max_staleness else None
        self._waiting: dict[int, Future[Sequence[Rollout]]] = {}
        current = weights() if self._thread else None
        for next_step in range(step + 1, step + 1 + max_staleness):
            self._start(next_step, current, step)

    def take(self, step: int) -> Sequence[Rollout]:
        """Return the rollouts of a step, and start the one that its weights may be used for.

        Raises:
            Exception: what `make` raised.
        """
        if self._thread is None:
            return self._make(step, self._weights(), step - 1)
        self._start(step + self._ahead, self._weights(), step - 1)
        return self._waiting.pop(step).result()

    def close(self) -> None:
        """Wait for the rollout in progress, and drop those that were not started."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self, step: int, weights: Weights, version: int) -> None:
        if self._thread is not None and step <= self._num_steps:
            self._waiting[step] = self._thread.submit(self._make, step, weights, version)
