"""Rollouts that are made ahead of the updates: with which weights, and in which order."""

import threading

import numpy as np
import pytest

from gym_rm.generation.completions import Completion
from gym_rm.policy.async_rollouts import AsyncRollouts
from gym_rm.policy.rollouts import Rollout, RolloutTurn


def rollout(step):
    completion = Completion(np.array([step, 7], np.int32), np.array([-0.1, -1 / 3], np.float32), True, "It is é.")
    turn = RolloutTurn(np.array([1, 2], np.int32), completion, float("nan") if step % 2 else 1 / 3)
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is é."}]
    return Rollout(step, 0, "a", None, conversation, (turn,), {"style": 0.1}, attempt=2)


class Run:
    """A run whose weights are the number of steps that are done."""

    def __init__(self, max_staleness, *, steps=6, step=0):
        self.used, self.step, self.steps = {}, step, steps
        self.ahead = AsyncRollouts(
            self.make, lambda: {"done": self.step}, max_staleness=max_staleness, num_steps=steps, step=step
        )

    def make(self, step, weights, version):
        assert weights == {"done": version}
        self.used[step] = version
        return [rollout(step)]

    def until(self, last):
        while self.step < last:
            (found,) = self.ahead.take(self.step + 1)
            assert found.row == self.step + 1
            self.step += 1
        return self


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 9])
def test_each_step_has_the_weights_of_its_staleness_exactly(max_staleness):
    run = Run(max_staleness).until(6)
    run.ahead.close()
    assert run.used == {step: max(0, step - 1 - max_staleness) for step in range(1, 7)}


def test_a_resumed_run_begins_with_the_weights_of_its_checkpoint():
    run = Run(2, step=3).until(6)
    run.ahead.close()
    assert run.used == {4: 3, 5: 3, 6: 3}


def test_the_next_step_is_made_while_the_policy_is_updated():
    made = threading.Event()

    def make(step, weights, version):
        if step == 2:
            made.set()
        return []

    ahead = AsyncRollouts(make, lambda: None, max_staleness=1, num_steps=3, step=0)
    ahead.take(1)
    assert made.wait(10)  # though nothing asked for step 2
    ahead.close()


def test_an_error_of_the_other_thread_reaches_the_one_that_learns():
    def make(step, weights, version):
        if step == 2:
            raise RuntimeError("no server")
        return [rollout(step)]

    ahead = AsyncRollouts(make, lambda: None, max_staleness=2, num_steps=4, step=0)
    ahead.take(1)
    with pytest.raises(RuntimeError, match="no server"):
        ahead.take(2)
    ahead.close()
