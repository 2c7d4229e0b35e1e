import dataclasses
import threading
import time

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from transformers import AutoModelForCausalLM

from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.executors.local import CPU_BATCHED_TOKENS, LocalExecutor
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead, TokenLogits, TokenLogProbabilities
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.engine.token_tree import plan_padded, plan_trees
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
        longest_shared=None,
        revision=None,
        quantization=None,
        torch=torch.__version__,
        transformers=transformers.__version__,
        attention="sdpa",
        batch_invariance="bit-equal",
    )


def test_a_checkpoint_gives_the_same_info_and_values_as_its_model(saved_model):
    folder = saved_model("qwen3")
    loaded, handed_over = LocalExecutor(), LocalExecutor()
    info = loaded.load(LoadSpec(open_checkpoint(LoadOptions(path=folder)), HEAD))
    model = type(loaded.models[0]).from_pretrained(folder)
    assert handed_over.load(LoadSpec(model, HEAD)) == dataclasses.replace(info, revision=None)
    assert handed_over.models == (model,)
    assert np.array_equal(values_of(loaded, trees()), values_of(handed_over, trees()))


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("architecture", "config", "spec", "expected"),
    [
        ("qwen3", {}, {"tree": False}, {"layout": "padded", "fused": False}),
        ("gemma2", {}, {}, {"layout": "tree", "fused": False}),
        ("bloom", {}, {}, {"layout": "padded", "fused": False}),
        ("bert", {}, {"readout": ClassifierLogits()}, {"layout": "padded", "fused": False, "max_positions": 4096}),
        ("roberta", {}, {"readout": ClassifierLogits()}, {"max_positions": 4096}),  # three of 4099 are not used
        ("roberta", {}, {"readout": ClassifierLogits()}, {"num_positions": 4096}),
        ("opt", {}, {}, {"max_positions": 4096, "num_positions": 4096}),  # a table of 4098 rows
        ("xlnet", {}, {"readout": ClassifierLogits()}, {"layout": "one_by_one", "max_positions": None}),
        ("qwen3", {"num_labels": 3}, {}, {"num_values": 3}),
        ("qwen3", {"vocab_size": 350}, {}, {"num_embeddings": 350}),
        ("llama", DYNAMIC, {}, {"longest_shared": 64, "max_positions": 64}),
        ("qwen3", {}, {"quantization": "int8"}, {"quantization": "int8", "layout": "tree", "fused": True}),
    ],
)
def test_the_info_depends_on_the_model_and_the_spec(architecture, config, spec, expected):
    model = tiny_models.reward_model(architecture, **config)
    info = LocalExecutor().load(LoadSpec(model, **{"readout": HEAD, **spec}))
    assert {name: getattr(info, name) for name in expected} == expected


def test_the_info_has_the_precision_and_the_revision():
    model = tiny_models.reward_model("qwen3").bfloat16()
    model.config._commit_hash = "abc123"
    info = LocalExecutor().load(LoadSpec(model, HEAD))
    assert (info.dtype, info.revision) == ("bfloat16", "abc123")


def test_two_models_have_two_values_and_the_smaller_limit_of_positions(language_models):
    policy, reference = language_models
    executor = LocalExecutor()
    info = executor.load(LoadSpec(policy, TokenLogProbabilities(), reference))
    assert (info.num_values, info.max_positions) == (2, 512)
    assert executor.models == (policy, reference)


def test_token_logits_have_one_value_per_token(language_models):
    assert LocalExecutor().load(LoadSpec(language_models[0], TokenLogits((3, 5, 8)))).num_values == 3


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"readout": ModuleHead("value")}, "has no head 'value'; pass one of .*'score'"),
        ({"readout": TokenLogits((3,))}, "has no output layer over a vocabulary"),
        ({"quantization": "fp8"}, "needs an Ada, Hopper or newer GPU, but the model is on cpu"),
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


def test_an_executor_can_load_after_a_failed_load(model):
    executor = LocalExecutor()
    with pytest.raises(ConfigError):
        executor.load(LoadSpec(model, HEAD, tree=False, prefix_cache_tokens=64))
    assert executor.load(LoadSpec(model, HEAD)).layout == "tree"


def test_a_language_model_in_training_mode_loads(tmp_path):
    folder = tiny_models.save_policy(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    assert LocalExecutor().load(LoadSpec(model, TokenLogits((3, 5)))).num_values == 2
    assert model.training


# --- run


@pytest.mark.parametrize(
    "plan",
    [plan_trees(sequences(), max_num_batched_tokens=40), plan_padded(sequences(), max_num_batched_tokens=60)],
    ids=["tree", "padded"],
)
def test_one_result_per_batch_in_order(plan, model):
    executor = executor_of(model)
    assert len(plan.batches) > 1
    results = executor.run(plan.batches)
    assert [result.values.shape for result in results] == [(batch.num_reads, 1) for batch in plan.batches]
    assert {result.values.dtype for result in results} == {np.dtype(np.float32)}
    assert {(result.error, result.out_of_memory, result.reused_tokens) for result in results} == {(None, False, 0)}
    for result, batch in zip(results, plan.batches, strict=True):
        assert np.array_equal(result.values, values_of(executor, [batch]))


def test_no_batches_have_no_results(model):
    assert executor_of(model).run([]) == []


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_a_failed_batch_does_not_affect_the_others(layout, model, fails_at_the_mark):
    executor = executor_of(model)
    batches = batches_with_a_mark(layout)
    expected = [values_of(executor, [batch]) for batch in batches]
    fails_at_the_mark(model, ValueError("a broken batch"))
    first, second, third = executor.run(batches)
    assert np.array_equal(first.values, expected[0])
    assert np.array_equal(third.values, expected[2])
    assert (second.values, second.error, second.out_of_memory) == (None, "ValueError: a broken batch", False)


def test_a_token_without_an_embedding_fails_its_batch(model):
    executor = executor_of(model)
    batches = batches_with_a_mark()
    batches[1].input_ids[-1] = 1_000_000
    results = executor.run(batches)
    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].error.startswith("IndexError: ")


def test_all_batches_can_fail(model):
    executor = executor_of(model)
    with raising(model, RuntimeError("broken")):
        results = executor.run(batches_with_a_mark())
    assert [(result.values, result.error) for result in results] == [(None, "RuntimeError: broken")] * 3


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] can't allocate memory: 99 bytes"),
    ],
)
def test_out_of_memory_is_the_result_of_its_batch_only(error, model, fails_at_the_mark):
    executor = executor_of(model)
    batches = batches_with_a_mark()
    expected = [values_of(executor, [batch]) for batch in batches]
    fails_at_the_mark(model, error)
    first, second, third = executor.run(batches)
    assert np.array_equal(first.values, expected[0])
    assert np.array_equal(third.values, expected[2])
    assert second.out_of_memory
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


def test_run_computes_no_gradients(model):
    values_of(executor_of(model), trees())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_is_off_and_the_training_mode_is_restored():
    model = tiny_models.reward_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = values_of(executor_of(model), trees())
    model.train()
    frozen = model.base_model.h[0].eval()
    assert np.array_equal(values_of(executor_of(model), trees()), expected)
    assert model.training
    assert not frozen.training


def test_the_training_mode_is_restored_after_a_failure():
    model = tiny_models.reward_model("qwen3").train()
    (result,) = executor_of(model).run([broken_batch()])
    assert result.error.startswith("IndexError")
    assert model.training


def broken_batch():
    (tree,) = trees()
    tree.input_ids[0] = 1_000_000  # beyond the vocabulary
    return tree


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
        may_end.wait()
        return type(embedding).forward(embedding, ids)

    monkeypatch.setattr(embedding, "forward", waiting)
    forward = threading.Thread(target=running.run, args=(trees(),))
    move = threading.Thread(target=getattr(mover, method))
    forward.start()
    started.wait()
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
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=1e-3)
