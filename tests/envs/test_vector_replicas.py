"""`RewardModel-v0` with several replicas of its reward model."""

import json
import os

import gymnasium as gym
import numpy as np
import pytest

from gym_rm.errors import ConfigError
from tests.engine.executors.batches import gone


@pytest.mark.slow
def test_an_environment_with_replicas_gives_the_same_rewards_and_ends_them(saved_model):
    options = json.loads(json.dumps({"reward_model": saved_model("qwen3"), "num_envs": 4, "group_size": 2}))
    one = gym.make_vec("RewardModel-v0", **options)
    two = gym.make_vec("RewardModel-v0", **options, num_replicas=2, reward_model_kwargs={"executor": "processes"})
    one.reset(seed=0)
    two.reset(seed=0)
    for step in range(3):
        replies = [f"{step} and {k}" for k in range(4)]
        assert np.array_equal(two.step(replies)[1], one.step(replies)[1])
    executor = two.unwrapped.scorer.executor
    ids = [each for replica in executor.replicas for each in replica.process_ids]
    assert len([each for each in ids if os.path.exists(f"/proc/{each}")]) == 2
    two.close()
    assert all(gone(each) for each in ids)


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match="num_replicas is given twice, also in reward_model_kwargs"):
        gym.make_vec("RewardModel-v0", 2, num_replicas=2, reward_model_kwargs={"num_replicas": 2})
