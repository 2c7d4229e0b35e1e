import threading
import time

import numpy as np
import pytest
import tiny_models
import torch
import transformers

from gym_rm.engine.backbones.invariant_products import LADDER
from gym_rm.engine.backbones.llama import MODEL_TYPES
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.model_info import CPU_BATCHED_TOKENS
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits, TokenLogProbabilities
from gym_rm.errors import ConfigError
from tests.engine.executors.batches import (
    HEAD,
    MARK,
    batches_with_a_mark,
    executor_of,
    needs_gpu,
    sequences,
    trees,
    values_of,
)
from tests.engine.watching import raising


@pytest.fixture
def fails_at_the_mark(monkeypatch):
    """A function that makes the forward of a model raise an error for batches with the mark."""

    def make(model, error):
        embedding = model.get_input_embeddings()

        def forward(ids):
            if (ids == MARK).any():
                raise error
            return type(embedding).forward(embedding, ids)

        monkeypatch.setattr(embedding, "forward", forward)

    return make


# --- load


def test_load_returns_the_properties_of_the_model(model):
    assert LocalExecutor().load(LoadSpec(model, HEAD)) == ModelInfo(
        layout="tree",
        fused=True,
        num_values=1,
        dtype="float32",
        device="cpu",
        max_num_batched_tokens=CPU_BATCHED_TOKENS,
        max_positions=model.config.max_position_embeddings,
        num_embeddings=400,
        max_batchable_length=None,
        quantization=None,
        torch=torch.__version__,
        transformers=transformers.__version__,
        attention="sdpa",
        tried_length=113,
        batch_invariance="bit-equal",
        rows=str(LADDER["cpu"][0]),
    )


@pytest.mark.parametrize(
    ("architecture", "config", "spec", "expected"),
    [
        ("qwen3", {}, {"tree": False}, {"layout": "padded", "fused": False}),
        ("gemma2", {}, {}, {"layout": "tree", "fused": False}),
        ("bloom", {}, {}, {"layout": "padded", "fused": False}),
        ("roberta", {}, {"readout": ClassifierLogits()}, {"max_positions": 4096, "num_positions": 4096}),  # 3 not used
        ("opt", {}, {}, {"max_positions": 4096, "num_positions": 4096}),  # a table of 4098 rows
        ("xlnet", {}, {"readout": ClassifierLogits()}, {"layout": "one_by_one", "max_positions": None}),
        ("qwen3", {"num_labels": 3}, {}, {"num_values": 3}),
        ("qwen3", {"vocab_size": 350}, {}, {"num_embeddings": 350}),
    ],
)
def test_the_info_depends_on_the_model_and_the_spec(architecture, config, spec, expected):
    model = tiny_models.reward_model(architecture, **config)
    info = LocalExecutor().load(LoadSpec(model, **{"readout": HEAD, **spec}))
    assert {name: getattr(info, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"readout": ModuleHead("value")}, "has no head 'value'; pass one of .*'score'"),
        ({"readout": TokenLogits((3,))}, "has no output layer over a vocabulary"),
        ({"quantization": "int8"}, "needs a model of its own: save yours with save_pretrained"),
        ({"tree": False, "prefix_cache_tokens": 64}, "prefix_cache_tokens needs"),
    ],
)
def test_a_spec_that_does_not_fit_the_model_is_refused(spec, reason, model):
    with pytest.raises(ConfigError, match=reason):
        LocalExecutor().load(LoadSpec(model, **{"readout": HEAD, **spec}))


def test_a_prefix_cache_for_two_models_is_refused(language_models):
    policy, reference = language_models
    spec = LoadSpec(policy, TokenLogProbabilities(), reference, prefix_cache_tokens=64)
    with pytest.raises(ConfigError, match="prefix_cache_tokens needs one decoder"):
        LocalExecutor().load(spec)


def test_too_little_memory_for_the_trial_is_a_config_error(model):
    refused = pytest.raises(ConfigError, match=r"its forward does not: CUDA out of memory.* pass a smaller dtype")
    with raising(model, torch.OutOfMemoryError("CUDA out of memory")), refused:
        LocalExecutor().load(LoadSpec(model, HEAD))


def test_an_executor_loads_another_model_only_after_close(model, trained):
    executor = executor_of(model)
    expected = values_of(executor, trees())
    with pytest.raises(ConfigError, match="already has a model; make another executor"):
        executor.load(LoadSpec(trained, HEAD))
    assert np.array_equal(values_of(executor, trees()), expected)
    executor.close()
    executor.load(LoadSpec(trained, HEAD))
    assert np.array_equal(values_of(executor, trees()), values_of(executor_of(trained), trees()))


# --- run


@pytest.mark.parametrize(
    ("layout", "error", "out_of_memory"),
    [
        ("tree", torch.OutOfMemoryError("CUDA out of memory"), True),
        ("tree", MemoryError(), True),
        ("padded", RuntimeError("[enforce fail] can't allocate memory: 99 bytes"), True),
        ("padded", ValueError("a broken batch"), False),
    ],
)
def test_an_error_is_the_result_of_its_batch_only(layout, error, out_of_memory, model, fails_at_the_mark):
    executor = executor_of(model)
    batches = batches_with_a_mark(layout)
    expected = [values_of(executor, [batch]) for batch in batches]
    fails_at_the_mark(model, error)
    first, second, third = executor.run(batches)
    assert np.array_equal(first.values, expected[0])
    assert np.array_equal(third.values, expected[2])
    assert second.out_of_memory == out_of_memory
    assert second.values is None
    assert type(error).__name__ in second.error


def test_interrupts_are_raised(model):
    executor = executor_of(model)
    with raising(model, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        executor.run(trees())
    assert values_of(executor, trees()).shape == (6, 1)


def test_a_failed_batch_does_not_corrupt_the_prefix_cache(model, fails_at_the_mark, monkeypatch):
    executor = executor_of(model, prefix_cache_tokens=640)
    batches = batches_with_a_mark()
    expected = values_of(executor_of(model), batches)
    fails_at_the_mark(model, torch.OutOfMemoryError("out of memory"))
    failed = executor.run(batches)
    monkeypatch.undo()
    assert [result.out_of_memory for result in failed] == [False, True, False]
    assert np.array_equal(values_of(executor, batches), expected)


def test_results_have_the_number_of_reused_tokens(model):
    executor = executor_of(model, prefix_cache_tokens=640)
    batches = [plan_trees([each], max_num_batched_tokens=500).batches[0] for each in sequences(3)]
    assert [result.reused_tokens for result in executor.run(batches)] == [0, 16, 16], (
        "one block of 16 tokens from the prompt of 20"
    )
    executor.clear_cache()
    assert [result.reused_tokens for result in executor.run(batches)] == [0, 16, 16]


def test_executors_of_one_model_never_run_at_the_same_time(monkeypatch):
    model = tiny_models.reward_model("qwen3")
    executors = [executor_of(model) for _ in range(4)]
    running, most = [], []
    embedding = model.get_input_embeddings()

    def slow(ids):
        running.append(ids)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return type(embedding).forward(embedding, ids)

    monkeypatch.setattr(embedding, "forward", slow)
    threads = [threading.Thread(target=executor.run, args=(trees(),)) for executor in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_the_weights_do_not_move_during_a_forward(method, monkeypatch):
    model = tiny_models.reward_model("qwen3")
    running, mover = executor_of(model), executor_of(model)
    if method == "wake":
        mover.sleep()
    started, may_end = threading.Event(), threading.Event()
    embedding = model.get_input_embeddings()

    def waiting(ids):
        started.set()
        may_end.wait(10)
        return type(embedding).forward(embedding, ids)

    monkeypatch.setattr(embedding, "forward", waiting)
    forward = threading.Thread(target=running.run, args=(trees(),))
    move = threading.Thread(target=getattr(mover, method))
    forward.start()
    assert started.wait(10)
    move.start()
    move.join(0.2)
    assert move.is_alive()
    may_end.set()
    forward.join()
    move.join()


@needs_gpu
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma2", "gpt_oss", "bert"])
def test_scores_on_a_gpu_equal_those_on_the_cpu(architecture, saved_model, real_conversations):
    import gym_rm

    expected = tiny_models.plain_rewards(saved_model(architecture), real_conversations)
    scorer = gym_rm.load_scorer(saved_model(architecture), dtype="float32", device="cuda")
    assert scorer.layout in tiny_models.layouts(architecture)
    assert scorer.info.fused == (architecture in MODEL_TYPES)
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=1e-3)
