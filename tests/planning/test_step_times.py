"""Times of the planner against what others predict or have published for the same work."""

from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies

from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.hardware.devices import KINDS
from gym_rm.planning.lengths import Lengths, constant
from gym_rm.planning.model.known_models import load_shape
from gym_rm.planning.plan import Phase, Role
from gym_rm.planning.plan_request import Choice, Component, StepWorkload
from gym_rm.planning.quantities import Basis, Quantity
from gym_rm.planning.step_times import LAUNCH, NETWORK, Site, component_times, sync_times, wake_times

BETWEEN = Quantity(50e9, Basis.TABLE, "NVIDIA AIConfigurator 0.12")


def model(name: str, role: Role, engine: str, **numbers) -> Component:
    labels = 1 if role is Role.REWARD_MODEL else None
    return Component(
        role.value, role, load_shape(name, None, num_labels=labels, name=name), "bfloat16", engine, **numbers
    )


def site(kind: str = "h100_sxm", **numbers) -> Site:
    return Site(KINDS[kind], BETWEEN, **{"num_gpus": 8, "per_node": 8, **numbers})


@pytest.mark.parametrize(
    ("name", "kind", "tp", "milliseconds"),
    [
        ("Qwen/Qwen3-0.6B", "h200_sxm", 1, 33.6),
        ("Qwen/Qwen3-8B", "h200_sxm", 1, 349),
        ("Qwen/Qwen3-8B", "h100_sxm", 1, 345),
        ("meta-llama/Llama-3.1-8B", "a100_sxm", 1, 951),
        ("meta-llama/Llama-3.1-70B", "h200_sxm", 2, 1856),
        ("meta-llama/Llama-3.1-70B", "h200_sxm", 8, 648),
        ("meta-llama/Llama-3.1-70B", "h100_sxm", 4, 1016),
    ],
)
def test_scoring_is_within_a_tenth_of_what_aiconfigurator_predicts_for_a_prefill(name, kind, tp, milliseconds):
    work = StepWorkload(16, 1, 1, 0, constant(1024), constant(0.001))
    choice = Choice(tensor_parallel_size=tp, max_num_batched_tokens=16384)
    clock = component_times(model(name, Role.REWARD_MODEL, "gym_rm"), choice, work, site(kind))[Phase.SCORE]
    assert clock.total * 1000 == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(
    ("name", "tp", "fsdp", "length", "batch", "published"),
    [
        ("Qwen/Qwen2.5-32B", 2, 4, 4096, 32, 2250.31),
        ("meta-llama/Llama-3.1-70B", 2, 4, 4096, 32, 1091.85),
        ("Qwen/Qwen3-30B-A3B", 1, 8, 4096, 512, 12040),
    ],
)
def test_training_is_within_a_tenth_of_published_tokens_per_second(name, tp, fsdp, length, batch, published):
    """NVIDIA NeMo AutoModel, performance summary, DGX H100."""
    component = model(name, Role.POLICY, "training", lora=None if "A3B" in name else LoRASettings())
    choice = Choice(
        tensor_parallel_size=tp, fsdp_size=fsdp, max_num_batched_tokens=2 * length, gradient_checkpointing=True
    )
    work = StepWorkload(batch, 1, 1, 0, constant(1), constant(length - 1))
    seconds = component_times(component, choice, work, site(), old_log_probs=False)[Phase.UPDATE].total
    assert batch * length / seconds / (tp * fsdp) == pytest.approx(published, rel=0.1)


LENGTHS = Lengths(tuple(float(value) for value in range(20, 820, 20)), Basis.FORMULA, "test")
WORK = StepWorkload(64, 8, 1, 0, constant(300), LENGTHS)


@hypothesis.given(replicas=strategies.integers(1, 64), seats=strategies.sampled_from([8, 64, 256]))
@hypothesis.settings(max_examples=30, deadline=None)
def test_more_engines_never_generate_slower(replicas, seats):
    generation = model("Qwen/Qwen3-8B", Role.GENERATION, "vllm")
    few, many = (
        component_times(generation, Choice(num_replicas=count, max_num_seqs=seats), WORK, site())[Phase.GENERATE].total
        for count in (replicas, replicas + 1)
    )
    assert many <= few * (1 + 1e-9)


def test_shared_prompts_are_scored_once():
    rm = model("Qwen/Qwen3-8B", Role.REWARD_MODEL, "gym_rm")
    grouped = component_times(rm, Choice(), WORK, site())[Phase.SCORE].total
    single = component_times(rm, Choice(), replace(WORK, num_prompts=512, group_size=1), site())[Phase.SCORE].total
    expected = WORK.unique_tokens / WORK.tokens
    assert grouped / single == pytest.approx(expected, rel=0.1)


def test_the_longest_replies_decide_how_long_generation_takes():
    generation = model("Qwen/Qwen3-8B", Role.GENERATION, "vllm")
    choice = Choice(num_replicas=8, max_num_seqs=64)
    even = replace(WORK, replies=constant(LENGTHS.mean))
    uneven = component_times(generation, choice, WORK, site())[Phase.GENERATE].total
    assert uneven > 1.5 * component_times(generation, choice, even, site())[Phase.GENERATE].total


def test_a_network_between_nodes_slows_fsdp():
    policy = model("Qwen/Qwen3-8B", Role.POLICY, "training")
    choice = Choice(fsdp_size=16, max_num_batched_tokens=1024)
    slow = Site(KINDS["h100_sxm"], Quantity(1e9, Basis.FORMULA, "given"), 16, 8)
    inside = component_times(policy, choice, WORK, site())[Phase.UPDATE].total
    assert component_times(policy, choice, WORK, slow)[Phase.UPDATE].total > 2 * inside


@pytest.mark.parametrize(("fsdp", "per_node", "shared"), [(8, 8, 1), (4, 8, 2), (16, 8, 1), (2, 8, 4), (8, 4, 1)])
def test_groups_between_nodes_share_the_network(fsdp, per_node, shared):
    """Of every group, a node has `shared` GPUs; 8 replicas of 8 GPUs leave the network of one GPU to each group."""
    policy = model("Qwen/Qwen3-8B", Role.POLICY, "training")
    place = site(num_gpus=64, per_node=per_node)
    assert place.collective(64 // fsdp, stride=fsdp).value == pytest.approx(shared * BETWEEN.value)
    choice = Choice(fsdp_size=fsdp, num_replicas=64 // fsdp)
    parts = component_times(policy, choice, WORK, place)[Phase.UPDATE].parts()
    moved = 8 * policy.shape.parameters / fsdp * (1 - fsdp / 64)
    assert sum(part.seconds for part in parts if part.name == NETWORK) >= moved / shared / BETWEEN.value


def test_lora_and_kept_activations_are_faster():
    policy = model("Qwen/Qwen3-8B", Role.POLICY, "training")
    again = Choice(gradient_checkpointing=True)
    full = component_times(policy, again, WORK, site())[Phase.UPDATE].total
    assert component_times(policy, Choice(), WORK, site())[Phase.UPDATE].total < full
    assert component_times(replace(policy, lora=LoRASettings()), again, WORK, site())[Phase.UPDATE].total < full


def test_a_small_model_waits_for_kernel_launches():
    rm = model("Qwen/Qwen3-0.6B", Role.REWARD_MODEL, "gym_rm")
    tiny = StepWorkload(2, 1, 1, 0, constant(16), constant(1))
    parts = component_times(rm, Choice(), tiny, site())[Phase.SCORE].parts()
    assert max(parts, key=lambda part: part.seconds).name == LAUNCH


def test_models_that_do_not_change_come_back_without_being_copied_away():
    size = 16e9
    trained = wake_times(model("Qwen/Qwen3-8B", Role.POLICY, "training"), size, KINDS["h100_sxm"]).total
    frozen = wake_times(model("Qwen/Qwen3-8B", Role.REWARD_MODEL, "gym_rm"), size, KINDS["h100_sxm"]).total
    assert trained - frozen == pytest.approx(size / 64e9)


def test_weights_go_to_other_nodes_over_the_network():
    policy = model("Qwen/Qwen3-8B", Role.POLICY, "training")
    (part,) = sync_times(policy, Choice(fsdp_size=8), site(), together=False, crosses=True).parts()
    assert part.name == NETWORK
    assert part.seconds == pytest.approx(policy.shape.parameters * 2 / 50e9)
