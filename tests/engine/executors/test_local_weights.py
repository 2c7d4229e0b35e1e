import copy
import pickle

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.kinds.readouts import TokenLogProbabilities
from gym_rm.errors import ConfigError
from tests.engine.executors.batches import executor_of, needs_gpu, trees, values_of


@pytest.mark.parametrize("options", [{}, {"tree": False}, {"prefix_cache_tokens": 640}])
def test_updated_weights_are_used_at_once(options, trained):
    executor = executor_of(tiny_models.reward_model("qwen3"), **options)
    before = values_of(executor, trees())
    executor.update_weights(trained.state_dict())
    expected = values_of(executor_of(trained, **options), trees())
    assert np.array_equal(values_of(executor, trees()), expected)
    assert np.abs(expected - before).max() > 1e-2


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
        r"shape \['model.norm.weight \(31,\) instead of \(32,\)'\]"
    )
    with pytest.raises(ConfigError, match=reason):
        executor.update_weights(weights)


def test_clear_cache_removes_everything_from_the_old_weights(trained):
    options = {"prefix_cache_tokens": 640}
    model = tiny_models.reward_model("qwen3")
    executor = executor_of(model, **options)
    values_of(executor, trees())
    model.load_state_dict(trained.state_dict())
    executor.clear_cache()
    assert np.array_equal(values_of(executor, trees()), values_of(executor_of(trained, **options), trees()))


def test_a_closed_executor_raises(model):
    executor = executor_of(model)
    executor.close()
    executor.close()
    for use in (lambda: executor.run(trees()), executor.sleep, lambda: executor.update_weights(model.state_dict())):
        with pytest.raises(ConfigError, match=r"because it is closed or was not loaded"):
            use()
    executor.wake()
    executor.clear_cache()


@pytest.mark.parametrize("options", [{}, {"prefix_cache_tokens": 640}])
@pytest.mark.parametrize("copied", [lambda executor: pickle.loads(pickle.dumps(executor)), copy.deepcopy])
def test_a_copy_gives_the_same_values(copied, options, model):
    executor = executor_of(model, **options)
    expected = values_of(executor, trees())
    again = copied(executor)
    assert again.models[0] is not executor.models[0]
    assert np.array_equal(values_of(again, trees()), expected)


# --- sleep and wake


@needs_gpu
def test_sleep_gives_the_memory_back_and_wake_takes_it():
    model = tiny_models.reward_model("qwen3", hidden_size=256).cuda()
    executor = executor_of(model)
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
