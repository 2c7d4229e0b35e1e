"""Which executor the options of `load_scorer` choose, and which options contradict each other."""

import importlib
import sys

import pytest

import gym_rm
from gym_rm.engine.executors.choice import choose_executor
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.replica import ParallelOptions
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.errors import ConfigError
from tests.engine.executors.batches import HEAD


@pytest.fixture
def choose(saved_model):
    def call(executor=None, device="cpu", **options):
        parallel = ParallelOptions(**options)
        checkpoint = open_checkpoint(LoadOptions(path=saved_model("qwen3"), device=device))
        sizes = {name: getattr(parallel, name) for name in ("tensor_parallel_size", "fsdp_size")}
        return choose_executor(executor, parallel, LoadSpec(checkpoint, HEAD, **sizes))

    return call


@pytest.mark.parametrize(
    ("executor", "options", "expected"),
    [
        (None, {}, LocalExecutor),
        ("local", {}, LocalExecutor),
        (None, {"num_replicas": 2}, ReplicatedExecutor),
        (None, {"fsdp_size": 2}, ReplicatedExecutor),
        (None, {"replicas": "processes"}, ReplicatedExecutor),
        ("processes", {}, ReplicatedExecutor),
        ("processes", {"replicas": "processes", "num_replicas": 3}, ReplicatedExecutor),
    ],
)
def test_the_executor_follows_from_the_options(executor, options, expected, choose, monkeypatch):
    monkeypatch.setattr("gym_rm.engine.executors.choice.connected_to_ray", lambda: False)
    assert type(choose(executor, **options)) is expected


@pytest.mark.parametrize(
    ("executor", "options", "reason"),
    [
        ("proceses", {}, r"executor must be one of .* Did you mean 'processes'\?"),
        ("local", {"num_replicas": 2}, "executor='local' runs the model in this process; leave out num_replicas=2"),
        ("ray", {"replicas": "processes"}, "executor='ray' and replicas='processes' contradict each other"),
        ("processes", {"name": "rm"}, "name='rm' names replicas in Ray"),
        (None, {"lease_seconds": 3}, "lease_seconds=3.0 needs num_replicas, replicas or executor"),
        (LocalExecutor(), {"num_replicas": 2}, "is an object, so num_replicas=2 cannot be applied"),
        (LocalExecutor, {}, "executor must be an Executor, such as LocalExecutor"),
    ],
)
def test_options_that_contradict_each_other_are_refused(executor, options, reason, choose):
    with pytest.raises(ConfigError, match=reason):
        choose(executor, **options)


@pytest.mark.parametrize(
    "options",
    [{"num_replicas": 0}, {"num_replicas": True}, {"replicas": "threads"}, {"lease_seconds": 0}, {"max_restarts": -1}],
)
def test_invalid_values_are_refused(options, choose):
    with pytest.raises(ConfigError, match=next(iter(options))):
        gym_rm.load_scorer(**options)


def test_replicas_in_a_torch_distributed_world_do_not_join_it(choose, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert isinstance(choose(num_replicas=2, replicas="processes"), ReplicatedExecutor)


def test_a_model_that_was_passed_in_is_refused(model, scorer_of):
    tokenizer = scorer_of("qwen3").renderer.tokenizer
    with pytest.raises(ConfigError, match="a model that is passed in cannot be sent to other processes"):
        gym_rm.RewardModelScorer(model, tokenizer, num_replicas=2)


def test_a_missing_ray_is_named_with_how_to_install_it(choose, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "gym_rm.engine.executors.ray", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'gym-rm\[ray\]', or pass executor='processes'"):
        choose("ray")
    with pytest.raises(ConfigError):
        importlib.import_module("gym_rm.engine.executors.ray")
