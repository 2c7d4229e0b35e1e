import threading
import time

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.executors import LocalExecutor
from gym_rm.engine.kinds import DecoderRewardModel
from gym_rm.engine.token_tree import TokenSequence, plan_padded, plan_trees

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def sequences(count=6, seed=0):
    random = np.random.default_rng(seed)
    prompt = random.integers(5, 300, 20)
    replies = [np.r_[prompt, random.integers(5, 300, 3 + k)].astype(np.int32) for k in range(count)]
    return [TokenSequence(ids, np.array([len(ids) - 1])) for ids in replies]


@pytest.fixture(scope="module")
def model():
    return DecoderRewardModel(tiny_models.reward_model("qwen3"))


def test_values_of_all_batches_in_order(model):
    executor = LocalExecutor(model)
    for plan in (
        plan_trees(sequences(), max_num_batched_tokens=40),
        plan_padded(sequences(), max_num_batched_tokens=60),
    ):
        assert len(plan.batches) > 1
        values = executor.run(plan.batches)
        assert values.shape == (sum(len(batch.reads) for batch in plan.batches), 1)
        assert values.dtype == np.float32
        one_by_one = np.concatenate([executor.run([batch]) for batch in plan.batches])
        assert np.array_equal(values, one_by_one)


def test_nothing_to_run(model):
    assert LocalExecutor(model).run([]).shape == (0, 1)


def test_no_gradients_are_kept(model):
    LocalExecutor(model).run(plan_trees(sequences(), max_num_batched_tokens=500).batches)
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_dropout_is_off_and_the_mode_is_left_as_it_was():
    model = DecoderRewardModel(tiny_models.reward_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
    batches = plan_trees(sequences(), max_num_batched_tokens=500).batches
    expected = LocalExecutor(model).run(batches)
    model.model.train()
    frozen = model.model.base_model.h[0].eval()
    assert np.array_equal(LocalExecutor(model).run(batches), expected)
    assert model.model.training
    assert not frozen.training


def test_the_mode_is_left_as_it_was_after_a_failure(model):
    model.model.train()
    tree = plan_trees(sequences(), max_num_batched_tokens=500).batches[0]
    tree.input_ids[0] = 1_000_000  # beyond the vocabulary
    with pytest.raises(IndexError):
        LocalExecutor(model).run([tree])
    assert model.model.training
    model.model.eval()


def test_executors_of_one_model_take_turns(model):
    running, most = [], []

    class Slow(DecoderRewardModel):
        def forward(self, batch):
            running.append(batch)
            most.append(len(running))
            time.sleep(0.01)
            running.pop()
            return super().forward(batch)

    batches = plan_trees(sequences(), max_num_batched_tokens=500).batches
    executors = [LocalExecutor(Slow(model.model)) for _ in range(4)]
    threads = [threading.Thread(target=executor.run, args=(batches,)) for executor in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_sleep_and_wake_on_a_cpu_move_nothing(model):
    executor = LocalExecutor(model)
    batches = plan_trees(sequences(), max_num_batched_tokens=500).batches
    expected = executor.run(batches)
    places = [parameter.data_ptr() for parameter in model.model.parameters()]
    executor.sleep()
    assert [parameter.data_ptr() for parameter in model.model.parameters()] == places
    assert np.array_equal(executor.run(batches), expected)


@needs_gpu
def test_sleep_gives_the_memory_back_and_wake_takes_it():
    model = DecoderRewardModel(tiny_models.reward_model("qwen3", hidden_size=256).cuda())
    executor = LocalExecutor(model)
    batches = plan_trees(sequences(), max_num_batched_tokens=500).batches
    expected = executor.run(batches)
    before = torch.cuda.memory_allocated()
    executor.sleep()
    assert torch.cuda.memory_allocated() < before / 2
    assert {parameter.device.type for parameter in model.model.parameters()} == {"cpu"}
    assert np.array_equal(executor.run(batches), expected)
    assert {parameter.device.type for parameter in model.model.parameters()} == {"cuda"}


@needs_gpu
def test_weights_that_changed_between_two_sleeps_are_kept():
    model = DecoderRewardModel(tiny_models.reward_model("qwen3").cuda())
    executor = LocalExecutor(model)
    executor.sleep()
    executor.wake()
    with torch.no_grad():
        model.model.score.weight.mul_(2)
    weights = model.model.score.weight.clone()
    executor.sleep()
    executor.wake()
    assert torch.equal(model.model.score.weight, weights)


@needs_gpu
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gemma2", "gpt_oss", "bert"])
def test_a_gpu_gives_the_numbers_of_the_cpu(architecture, saved_model, real_conversations):
    import gym_rm

    expected = tiny_models.plain_rewards(saved_model(architecture), real_conversations)
    scorer = gym_rm.load_scorer(saved_model(architecture), dtype="float32", device="cuda")
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=1e-3)
