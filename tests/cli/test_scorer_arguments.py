import pytest
import tiny_models
import torch

import gym_rm
from gym_rm.cli import scorer_arguments
from gym_rm.cli.scorer_arguments import ScorerArguments


@pytest.fixture
def threads():
    """Function that returns the number of torch's threads after a scorer is loaded, starting from three."""
    before = torch.get_num_threads()

    def chosen(model, number=None):
        torch.set_num_threads(3)
        ScorerArguments(model=model, threads=number).load()
        return torch.get_num_threads()

    yield chosen
    torch.set_num_threads(before)


def test_a_small_model_runs_on_one_thread(threads, scorer_of):
    small = scorer_of("qwen3")
    assert threads(small) == 1
    assert threads(gym_rm.load_scorer(kind="ensemble", scorers=[small, small])) == 1


def test_a_larger_model_and_a_function_keep_the_threads_of_torch(threads):
    large = tiny_models.reward_model("qwen3", hidden_size=scorer_arguments.HIDDEN_SIZE_FOR_THREADS)
    tokenizer = tiny_models.tokenizer("qwen")
    assert threads(gym_rm.RewardModelScorer(large, tokenizer)) == 3
    assert threads(gym_rm.load_scorer(lambda conversations: [0.0] * len(conversations))) == 3


def test_a_given_number_of_threads_is_used(threads, scorer_of):
    assert threads(scorer_of("qwen3"), 2) == 2


def test_loading_a_scorer_leaves_the_threads_of_the_process(threads, saved_model):
    torch.set_num_threads(3)
    gym_rm.load_scorer(saved_model("qwen3"))
    assert torch.get_num_threads() == 3
