"""NeMo RL configs: what is read, and what is refused."""

import copy

import pytest
import yaml

from gym_rm.errors import ConfigError
from gym_rm.planning.nemo_rl.config import read_nemo_config
from gym_rm.planning.nemo_rl.placement import NemoRequest, nemo_placement

# the parts of examples/configs/grpo_rm_1B.yaml that a placement depends on
RECIPE = """
defaults: grpo_math_1B.yaml
data:
  default: {env_name: reward_model}
env:
  reward_model:
    model_name: Skywork/Skywork-Reward-V2-Qwen3-0.6B
    batch_size: ${policy.train_micro_batch_size}
    resources: {gpus_per_node: 1, num_nodes: 1}
    dtensor_cfg: {_v2: true, enabled: true, tensor_parallel_size: 1, context_parallel_size: 1}
cluster: {gpus_per_node: 2, num_nodes: 1, segment_size: null}
"""


def recipe(**changes):
    """Return the recipe with other values, by dotted keys with `__`."""
    config = yaml.safe_load(RECIPE)
    for key, value in changes.items():
        *parts, last = key.split("__")
        place = config
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return config


def test_the_default_recipe_is_read_and_placed():
    request = read_nemo_config(recipe())
    assert request == NemoRequest(1, 2, reward_model_nodes=1, reward_model_gpus_per_node=1)
    assert nemo_placement(request).text == "1 GPUs for policy and generation, 1 for the reward model, 0 idle"


def test_values_of_the_base_and_references_are_followed():
    base = {
        "policy": {"train_micro_batch_size": 4, "generation": {"colocated": {"enabled": False, "resources": {}}}},
        "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
    }
    before = copy.deepcopy(base)
    config = recipe(policy__generation__colocated__resources__gpus_per_node=1, defaults="other.yaml")
    request = read_nemo_config(config, base=base)
    assert (request.reward_model_batch_size, request.colocated, request.generation_gpus_per_node) == (4, False, 1)
    assert (request.num_prompts, request.group_size) == (32, 16)
    assert base == before


def test_resources_count_only_if_a_dataset_uses_the_reward_model():
    assert not read_nemo_config(recipe(data__default__env_name="math")).has_reward_model
    train = [{"env_name": "math"}, {"env_name": "reward_model"}]
    assert read_nemo_config(recipe(data={"train": train})).has_reward_model


def test_megatron_has_its_own_parallel_sizes():
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 4,
        "pipeline_model_parallel_size": 8,
    }
    request = read_nemo_config(recipe(policy__megatron_cfg=megatron))
    assert request.parallel_sizes["training"] == (2, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__num_nodes": "one"}, "cluster.num_nodes must be an integer, got 'one'"),
        ({"cluster__gpus_per_node": 1.5}, "cluster.gpus_per_node must be an integer, got 1.5"),
        ({"cluster__num_nodes": True}, "cluster.num_nodes must be an integer, got True"),
        ({"cluster": {"num_nodes": 1}}, "cluster.gpus_per_node is missing"),
        ({"cluster__num_gpus": 8}, "unknown setting cluster.num_gpus"),
        ({"cluster__gpu_per_node": 8}, "Did you mean 'gpus_per_node'"),
        ({"cluster": 8}, "cluster must be a mapping, got 8"),
        ({"policy__generation__colocated__enabled": "yes"}, "colocated.enabled must be true or false, got 'yes'"),
        ({"policy__generation__colocated__resource": {}}, "Did you mean 'resources'"),
        ({"env__reward_model__resources": {"num_nodes": 1}}, "env.reward_model.resources.gpus_per_node is missing"),
        ({"data__default__env_name": "reward_modell"}, "is not the environment 'reward_model'"),
        ({"data__default__env_name": 3}, "data.default.env_name must be text, got 3"),
        ({"defaults": "grpo_math_8B.yaml"}, "inherits from 'grpo_math_8B.yaml'; pass its values as base="),
        ({"cluster__segment_size": 8}, "segments of NVLink domains is not reproduced"),
        ({"env__reward_model__batch_size": "${env.reward_model.batch_size}"}, "refers to itself"),
    ],
)
def test_unknown_and_mistyped_values_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_nemo_config(recipe(**changes))


def test_all_problems_of_a_config_are_listed():
    with pytest.raises(ConfigError, match="3 problems"):
        read_nemo_config(recipe(cluster__num_nodes="1", cluster__gpus=3, cluster__gpus_per_node=None))
    with pytest.raises(ConfigError, match="must be a mapping, got list"):
        read_nemo_config([])
