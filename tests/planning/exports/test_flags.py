"""A plan as settings of other libraries: their numbers are the plan's, and what they cannot do is refused."""

import dataclasses
import re
import shlex

import pytest

from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.exports import LIBRARIES, flags
from tests.planning.exports.test_fields import base, changed
from tests.planning.plans import apart, awake, component, gpus, plan_of, pool, reward, together, training


def values(found):
    """Return the settings as a mapping, from `a.b=c` or `--a.b c` lines."""
    pairs = [re.split(r"[= ]", " ".join(shlex.split(line)), maxsplit=1) for line in found.lines]
    return {pair[0].removeprefix("--").removeprefix("++"): pair[1] if len(pair) > 1 else "" for pair in pairs}


def expect(found, expected):
    assert {name: values(found).get(name) for name in expected} == expected


def test_verl_has_the_numbers_of_the_plan():
    expected = {
        "trainer.nnodes": "1",
        "trainer.n_gpus_per_node": "8",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": "8",
        "actor_rollout_ref.actor.fsdp_config.param_offload": "true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "true",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.25",
        "actor_rollout_ref.rollout.n": "8",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "32",
        "data.train_batch_size": "64",
        "data.max_prompt_length": "1024",
        "reward.reward_model.enable": "true",
        "reward.reward_model.enable_resource_pool": "true",
        "reward.reward_model.nnodes": "1",
        "reward.reward_model.n_gpus_per_node": "4",
        "reward.reward_model.rollout.tensor_model_parallel_size": "2",
    }
    expect(flags(apart(count=4, size=2), "verl"), expected)
    found = values(flags(together(), "verl"))
    assert found["reward.reward_model.enable_resource_pool"] == "false"
    assert "reward.reward_model.nnodes" not in found


def test_trl_has_the_numbers_of_the_plan():
    found = flags(awake(4), "trl")
    got = values(found)
    expect(
        found,
        {
            "vllm_mode": "colocate",
            "vllm_tensor_parallel_size": "1",
            "vllm_gpu_memory_utilization": "0.25",
            "vllm_enable_sleep_mode": "true",
            "num_generations": "8",
            "reward_funcs": "rewards.reward0",
            "max_completion_length": "1024",
        },
    )
    assert "--num_processes 4 --num_machines 1" in found.lines[0]
    rows, accumulated = int(got["per_device_train_batch_size"]), int(got["gradient_accumulation_steps"])
    assert rows * 4 * int(got["steps_per_generation"]) == 512
    assert rows * 4 * accumulated == 512 // 2
    assert rows * 2048 <= 16384


def test_trl_gets_a_server_for_generation_apart():
    plan = plan_of(
        [8],
        pool((component("policy", "policy", fsdp_size=4, sleeps=False),), gpus(0, 0, 4)),
        pool((component("generation", "generation", tensor_parallel_size=2, sleeps=False),), gpus(0, 4, 2)),
        pool((reward(2, sleeps=False),), gpus(0, 6, 2)),
    )
    found = flags(plan, "trl")
    assert found.lines[0].startswith("CUDA_VISIBLE_DEVICES=4,5 trl vllm-serve --model")
    assert "--tensor_parallel_size 2 --data_parallel_size 1" in found.lines[0]
    assert "--use_fsdp" in found.lines[1]
    assert values(found)["vllm_mode"] == "server"
    serve = "gym-rm serve org/model --port 5000 --option dtype=bfloat16"
    assert any(serve in note and "num_replicas=2" in note for note in found.notes)
    assert any("RewardModelReward('http://127.0.0.1:5000', name='rm')" in note for note in found.notes)


# What a library is told of the policy's model, the rank of its adapters and their factor, and the optimizer.
OF_POLICY = {
    "verl": ("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha",
             "actor_rollout_ref.actor.optim.optimizer", "AdamW"),
    "trl": ("model_name_or_path", "lora_r", "lora_alpha", "optim", "adamw_torch"),
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 8, 16, 128])
@pytest.mark.parametrize("library", list(LIBRARIES))
def test_a_library_trains_the_policy_that_was_planned(library, rank):
    lora = LoRASettings(rank=rank, alpha=3 * rank) if rank else None
    got = values(flags(changed(base(library, lora=rank > 0), "policy", lora=lora), library))
    model, *sizes, optimizer, name = OF_POLICY[library]
    assert (got[model], got[optimizer]) == ("org/model", name)
    assert [int(got.get(size, 0)) for size in sizes] == [rank, 3 * rank]


UNEVEN = [
    pool((component("policy", "policy", fsdp_size=12), component("generation", "generation", num_replicas=12)),
         [*gpus(0, 0, 8), *gpus(1, 0, 4)]),
    pool((reward(4),), gpus(1, 4, 4)),
]  # fmt: skip
CRITIC_ADAPTERS = (
    *training(lora=LoRASettings()), component("critic", "critic", fsdp_size=8, lora=LoRASettings(rank=8)), reward(8)
)  # fmt: skip
CRITIC = pool((*training(), component("critic", "critic", fsdp_size=8), reward(8)), gpus(0, 0, 8))
TWO = pool((*training(), reward(8), reward(8, name="second")), gpus(0, 0, 8))
TENSOR = pool(
    (component("policy", "policy", tensor_parallel_size=2, fsdp_size=4), training()[1], reward(8)), gpus(0, 0, 8)
)


@pytest.mark.parametrize(
    ("library", "plan", "message"),
    [
        ("verl", plan_of([8, 8], *UNEVEN, conversations=768), "8 of node 0, 4 of node 1"),
        ("verl", plan_of([8], TENSOR), "FSDP has no tensor parallelism; set policy.tensor_parallel_size=1"),
        ("verl", plan_of([8], TWO), "one reward model in a run"),
        ("verl", together(quantization="int8"), "reward_models.rm.quantization=int8, but only gym_rm's scorers"),
        ("verl", plan_of([8], pool(CRITIC_ADAPTERS, gpus(0, 0, 8))), "trains the whole critic; set critic.lora=null"),
        ("trl", together(), "policy.sleeps=true, but it stays on the GPU"),
        ("trl", plan_of([8], TENSOR), "policy.tensor_parallel_size=2, but GRPOTrainer has no"),
        ("trl", plan_of([8], CRITIC), "GRPO has no critic"),
    ],
)  # fmt: skip
def test_what_a_library_cannot_do_is_refused(library, plan, message):
    with pytest.raises(ConfigError, match=f"{library} cannot follow this plan") as caught:
        flags(plan, library)
    assert message in str(caught.value)


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_all_reasons_are_listed_at_once(library):
    plan = plan_of([8], pool((component("policy", "policy", tensor_parallel_size=2, fsdp_size=2), *TWO.components[1:],
                              component("pairs", "reward_training")), [*gpus(0, 0, 8)]))  # fmt: skip
    with pytest.raises(ConfigError, match=r"cannot follow this plan, \d reasons") as caught:
        flags(plan, library)
    assert "pairs trains a reward model" in str(caught.value)


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_a_policy_of_sizes_alone_asks_for_the_model(library):
    with pytest.raises(ConfigError, match=r"only sizes for policy; set policy\.model"):
        flags(changed(base(library), "policy", model="sizes of policy"), library)


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_a_folder_with_other_letters_is_one_word_of_the_shell(library):
    folder = "/models/of a $user"
    plan = base(library)
    for role in ("policy", "reference"):
        plan = changed(plan, role, model=folder)
    assert folder in values(flags(plan, library))[OF_POLICY[library][0]]


def test_another_library_or_work_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'verl'"):
        flags(apart(), "verll")
    with pytest.raises(ConfigError, match="the plan has no policy: rm"):
        flags(plan_of([8], pool((reward(8),), gpus(0, 0, 8))), "verl")
    with pytest.raises(ConfigError, match="3 updates do not divide 64 prompts"):
        flags(dataclasses.replace(apart(), updates_per_step=3), "verl")


@pytest.mark.parametrize("library", list(LIBRARIES))
def test_conversations_that_the_ranks_do_not_divide_are_refused(library):
    policy = component("policy", "policy", fsdp_size=3, sleeps=False)
    generation = component("generation", "generation", num_replicas=3)
    parts = pool((policy, generation), gpus(0, 0, 3)), pool((reward(1, sleeps=False, dtype="float32"),), gpus(0, 3, 1))
    with pytest.raises(ConfigError, match=r"not divisible by (the policy's )?3 (data-parallel ranks|processes)"):
        flags(plan_of([4], *parts), library)
