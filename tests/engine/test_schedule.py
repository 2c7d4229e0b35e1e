import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.engine.schedule import CPU_BATCHED_TOKENS, BudgetedRunner
from gym_rm.errors import ConfigError
from gym_rm.engine.executors import LocalExecutor
from gym_rm.engine.kinds import DecoderRewardModel
from gym_rm.engine.token_tree import TokenSequence


@pytest.fixture(scope="module")
def model():
    return DecoderRewardModel(tiny_models.reward_model("qwen3", max_position_embeddings=20_000))


class Watched:
    """Runs batches, remembers their sizes, and has memory for so many tokens."""

    def __init__(self, model, memory=10**9):
        self.inner, self.memory, self.sizes = LocalExecutor(model), memory, []

    def run(self, batches):
        for batch in batches:
            if batch.input_ids.size > self.memory:
                raise torch.OutOfMemoryError(f"{batch.input_ids.size} tokens")
        self.sizes += [batch.input_ids.size for batch in batches]
        return self.inner.run(batches)


def random_ids(length, seed):
    return np.random.default_rng(seed).integers(5, 300, length).astype(np.int32)


def ending(ids):
    return TokenSequence(ids, np.array([len(ids) - 1]))


@pytest.fixture
def short_and_long():
    return [ending(random_ids(235, seed)) for seed in range(30)] + [ending(random_ids(5034, 99))]


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("budget", ["auto", 20_000, 6000])
def test_a_long_conversation_that_does_not_fit_costs_only_itself(budget, layout, model, short_and_long):
    runner = BudgetedRunner(model, layout=layout, budget=budget)
    expected = runner.run(short_and_long, LocalExecutor(model)).values
    result = runner.run(short_and_long, Watched(model, memory=1500))
    assert list(result.failures) == [30]
    assert "OutOfMemoryError: 5034 tokens" in result.failures[30]
    np.testing.assert_allclose(result.values[:30], expected[:30], atol=1e-5)
    assert 256 < runner.budget <= 1500


def test_what_was_learnt_is_not_tried_again(model, short_and_long):
    runner = BudgetedRunner(model, layout="tree", budget=20_000)
    runner.run(short_and_long, Watched(model, memory=1500))
    again = Watched(model)
    assert not runner.run(short_and_long, again).failures
    assert sorted(again.sizes)[-1] == 5034
    assert sorted(again.sizes)[-2] <= 1500


def test_nothing_is_learnt_where_nothing_fits(model):
    runner = BudgetedRunner(model, layout="tree", budget=1000)
    sequences = [ending(random_ids(50, seed)) for seed in range(4)]
    assert len(runner.run(sequences, Watched(model, memory=0)).failures) == 4
    assert runner.budget == 1000


def test_a_prompt_longer_than_the_automatic_budget_is_still_shared(model):
    prompt = random_ids(CPU_BATCHED_TOKENS + 500, 0)
    group = [ending(np.concatenate([prompt, random_ids(40, 1 + reply)])) for reply in range(8)]
    result = BudgetedRunner(model, layout="tree").run(group, LocalExecutor(model))
    assert not result.failures
    assert result.workload["unique_tokens"] <= len(prompt) + 8 * 40


@pytest.mark.parametrize(
    "change",
    [lambda values: values[:-1], lambda values: np.vstack([values, values[:1]]), lambda values: values[:, 0], list],
)
def test_an_executor_that_gives_the_wrong_values_fails_its_rows(change, model):
    class Wrong(Watched):
        def run(self, batches):
            return change(super().run(batches))

    result = BudgetedRunner(model, layout="tree").run(
        [ending(random_ids(9, 0)), ending(random_ids(7, 1))], Wrong(model)
    )
    assert list(result.failures) == [0, 1]
    assert "Wrong.run must give values of shape (2, 1); got" in result.failures[0]
    assert np.isnan(result.values).all()


def test_an_executor_is_not_asked_for_nothing(model):
    executor = Watched(model)
    executor.run = None
    assert BudgetedRunner(model, layout="tree").run([], executor).values.shape == (0, 1)


@pytest.mark.parametrize("budget", [0, -5, 1.5, True, "lots"])
def test_a_budget_is_a_positive_integer(budget, model):
    runner = BudgetedRunner(model, layout="tree")
    with pytest.raises(ConfigError, match="must be 'auto' or a positive integer"):
        runner.budget = budget
    with pytest.raises(ConfigError, match="must be 'auto' or a positive integer"):
        BudgetedRunner(model, layout="tree", budget=budget)
