"""Which executor the options of `load_scorer` choose, and which options contradict each other."""

import importlib
import sys

import pytest

import gym_rm
from gym_rm.engine.executors.choice import choose_executor
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.errors import ConfigError
from tests.engine.executors.batches import HEAD


@pytest.fixture
def choose(saved_model):
    def call(executor=None, device="cpu", **options):
        parallel = ParallelOptions(**options)
        checkpoint = open_checkpoint(LoadOptions(path=saved_model("qwen3"), device=device))
        spec = LoadSpec(checkpoint, HEAD, tensor_parallel_size=parallel.tensor_parallel_size)
        return choose_executor(executor, parallel, spec)

    return call


@pytest.mark.parametrize(
    ("executor", "options", "expected"),
    [
        (None, {}, LocalExecutor),
        ("local", {}, LocalExecutor),
        (None, {"num_replicas": 2}, ReplicatedExecutor),
        (None, {"tensor_parallel_size": 2}, ReplicatedExecutor),
        ("processes", {}, ReplicatedExecutor),
        ("processes", {"num_replicas": 3}, ReplicatedExecutor),
    ],
)
def test_the_executor_follows_from_the_options(executor, options, expected, choose):
    assert type(choose(executor, **options)) is expected


@pytest.mark.parametrize(
    ("executor", "options", "reason"),
    [
        ("proceses", {}, r"executor must be one of .* Did you mean 'processes'\?"),
        ("local", {"num_replicas": 2}, "executor='local' runs the model in this process; leave out num_replicas"),
        (LocalExecutor(), {"num_replicas": 2}, "is an object; leave out num_replicas"),
        (LocalExecutor, {}, "executor must be an Executor, such as LocalExecutor"),
    ],
)
def test_options_that_contradict_each_other_are_refused(executor, options, reason, choose):
    with pytest.raises(ConfigError, match=reason):
        choose(executor, **options)


@pytest.mark.parametrize(
    "options",
    [{"num_replicas": 0}, {"num_replicas": True}, {"batch_timeout": 0}],
)
def test_invalid_values_are_refused(options, choose):
    with pytest.raises(ConfigError, match=next(iter(options))):
        gym_rm.load_scorer(**options)


def test_replicas_in_a_torch_distributed_world_do_not_join_it(choose, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert isinstance(choose("processes", num_replicas=2), ReplicatedExecutor)


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


def test_a_model_that_names_its_device_is_refused(saved_model, choose, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="pass device='cuda', and choose the GPUs with CUDA_VISIBLE_DEVICES"):
        choose(device="cuda:1", num_replicas=2)
    with pytest.raises(ConfigError, match="device_map='auto' divides the model"):
        gym_rm.load_scorer(saved_model("qwen3"), device_map="auto", num_replicas=2)


def test_too_few_gpus_are_refused_before_a_process_starts(choose, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ConfigError, match="num_replicas=2 with 2 ranks each needs 4 GPUs, but this process sees 3"):
        choose(device="cuda", num_replicas=2, tensor_parallel_size=2)
