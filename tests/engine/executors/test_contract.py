"""The contract of executors, held by those of this package and missed by broken ones."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_models
from safetensors.torch import load_file

from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.testing import check_executor
from tests.engine.executors.batches import spec_of, tree_with, trees

NO_SUCH_TOKEN = 1_000_000


@pytest.fixture(scope="module")
def checked(saved_model, tmp_path_factory):
    """Function that checks an executor with one model."""
    spec, other = spec_of(saved_model("qwen3")), tiny_models.save_reward_model(tmp_path_factory.mktemp("b"), seed=1)

    def check(make, *, spec=spec, **options):
        check_executor(make, spec, trees(40), **{"broken": tree_with(NO_SUCH_TOKEN), "weights": str(other)} | options)

    return check


def replicas(count):
    return lambda: ReplicatedExecutor(
        ParallelOptions(num_replicas=count), lambda index: ProcessReplica(index, threads=1)
    )


def test_the_executor_of_this_process(checked, saved_model):
    checked(LocalExecutor)
    checked(LocalExecutor, weights=load_file(f"{saved_model('qwen3', seed=1)}/model.safetensors"))


@pytest.mark.slow
def test_the_executor_of_processes(checked):
    checked(replicas(2))


@pytest.mark.slow
def test_the_ranks_of_a_divided_model(checked, saved_model):
    # A CPU refuses a wrong id in every rank alone; on GPUs it would end them.
    checked(replicas(1), spec=spec_of(saved_model("qwen3"), tensor_parallel_size=2), exact=False, broken=None)


class Wrong(LocalExecutor):
    """Breaks one promise: a function changes the results of `run`."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def run(self, batches):
        return self.change(super().run(batches))


def moved(results):
    return [
        each if each.values is None else replace(each, values=np.nextafter(each.values, np.inf)) for each in results
    ]


def all_fail(results):
    failed = any(each.error for each in results)
    return [replace(each, values=None, error="a neighbour failed") for each in results] if failed else results


def hidden(results):
    return [
        each if each.error is None else replace(each, error=None, values=np.zeros((1, 1), np.float32))
        for each in results
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: results[1:], r"run returned \d results for \d batches"),
        (lambda results: results[::-1], "the values of batch 0"),
        (moved, "differ from those of one process"),
        (all_fail, "fails because of the broken one"),
        (hidden, "the broken batch must have an error"),
    ],
    ids=["lost", "order", "one bit", "all fail", "hidden error"],
)
def test_results_of_a_broken_executor_are_noticed(change, message, checked):
    with pytest.raises(AssertionError, match=message):
        checked(lambda: Wrong(change))


class KeepsWeights(LocalExecutor):
    def update_weights(self, weights):
        if isinstance(weights, dict):
            super().update_weights(weights)


class TakesAnything(LocalExecutor):
    def update_weights(self, weights):
        pass


class RunsAfterClose(LocalExecutor):
    def run(self, batches):
        return [] if self._model is None else super().run(batches)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (KeepsWeights, "after update_weights, the values of batch 0"),
        (TakesAnything, "must raise ConfigError for weights that do not fit"),
        (RunsAfterClose, "run after close must raise ConfigError"),
    ],
)
def test_methods_of_a_broken_executor_are_noticed(executor, message, checked):
    with pytest.raises(AssertionError, match=message):
        checked(executor)
