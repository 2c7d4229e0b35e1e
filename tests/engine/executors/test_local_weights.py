import copy

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.kinds.readouts import TokenLogProbabilities
from gym_rm.errors import ConfigError
from tests.engine.executors.batches import executor_of, needs_gpu, trees, values_of


def test_update_weights_does_not_change_the_reference(language_models):
    policy, reference = (copy.deepcopy(model) for model in language_models)
    executor = executor_of(policy, TokenLogProbabilities(), reference=reference)
    before = values_of(executor, trees())
    executor.update_weights(dict(reference.named_parameters()))
    after = values_of(executor, trees())
    assert np.array_equal(after[:, 1], before[:, 1])
    np.testing.assert_allclose(after[:, 0], after[:, 1], atol=1e-6)


def test_the_error_lists_weights_that_do_not_fit(trained):
    executor = executor_of(tiny_models.reward_model("qwen3"))
    weights = trained.state_dict()
    weights["head.weight"] = weights.pop("score.weight")
    weights["model.norm.weight"] = torch.ones(31)
    reason = (
        r"do not fit Qwen3ForSequenceClassification: missing \['score.weight'\], unknown \['head.weight'\], wrong "
        r"type or shape \['model.norm.weight \(torch.float32, \(31,\)\) instead of \(torch.float32, \(32,\)\)'\]"
    )
    with pytest.raises(ConfigError, match=reason):
        executor.update_weights(weights)


# --- sleep and wake


@needs_gpu
def test_sleep_gives_the_memory_back_and_wake_takes_it():
    model = tiny_models.reward_model("qwen3", hidden_size=256).cuda()
    executor = executor_of(model)
    assert executor._model.info.layout == "tree"
    expected = values_of(executor, trees())
    before = torch.cuda.memory_allocated()
    executor.sleep()
    assert torch.cuda.memory_allocated() < before / 2
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert np.array_equal(values_of(executor, trees()), expected)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}


@needs_gpu
def test_weights_that_changed_between_two_sleeps_are_kept():
    model = tiny_models.reward_model("qwen3").cuda()
    executor = executor_of(model)
    executor.sleep()
    executor.wake()
    with torch.no_grad():
        model.score.weight.mul_(2)
    weights = model.score.weight.clone()
    executor.sleep()
    executor.wake()
    assert torch.equal(model.score.weight, weights)


@needs_gpu
def test_closing_a_sleeping_executor_moves_a_model_that_was_passed_in_back():
    model = tiny_models.reward_model("qwen3").cuda()
    executor = executor_of(model)
    executor.sleep()
    executor.close()
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
