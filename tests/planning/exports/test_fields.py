"""Every field of a plan is in the text of an export, or the export is refused with the field's name."""

import dataclasses

import pytest

from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.planning.exports import LIBRARIES, flags
from gym_rm.planning.plan import ComponentPlan
from gym_rm.planning.plan_request import Component, StepWorkload
from tests.planning.plans import component, gpus, plan_of, pool, reward

IMPLIED = {
    "name": "what users call it",
    "role": "what it is",
    "parameters": "those of the model",
    "num_replicas": "the GPUs of its pool that the other sizes leave",
}
OF_TRAINING = ("gradient_checkpointing", "optimizer", "lora", "master_weights", "shared_prompts")
# Fields that a role does not have, or that follow from the policy's.
NOT_OF = {
    "policy": ("max_num_seqs", "quantization"),
    "critic": ("max_num_seqs", "quantization"),
    "generation": (*OF_TRAINING, "quantization", "fsdp_size", "model", "max_num_batched_tokens"),
    "reference": (*OF_TRAINING, "max_num_seqs", "quantization"),
    "reward_model": (*OF_TRAINING, "max_num_seqs"),
}
OF_ENGINE = ("dtype", "tensor_parallel_size", "sleeps")  # gym-rm generates with the policy's weights, without one
OTHERS = {
    "model": ("another",),
    "dtype": ("float32", "bfloat16", "float16"),
    "tensor_parallel_size": (2,),
    "fsdp_size": (1, 2, 4),
    "max_num_batched_tokens": (4096, 65536),
    "max_num_seqs": (17,),
    "gradient_checkpointing": (True, False),
    "sleeps": (True, False),
    "quantization": ("int8", "fp8"),
    "optimizer": ("adamw_8bit", "sgd"),
    "master_weights": (True, False),
    "shared_prompts": (True, False),
    "lora": (None, LoRASettings(rank=4), LoRASettings(alpha=8), LoRASettings(alpha=0.5), LoRASettings(dropout=0.1),
             LoRASettings(target_modules=("q_proj", "v_proj")), LoRASettings(target_modules=".*_proj")),
}  # fmt: skip
OF_WORK = {
    "num_prompts": {"num_prompts": 128, "conversations": 1024},
    "group_size": {"group_size": 16, "conversations": 1024},
    "turns": {"turns": 3},
    "prompts": {"prompt_tokens": 2048},
    "replies": {"reply_tokens": 2048},
    "updates_per_step": {"updates_per_step": 4},
    "epochs": {"epochs": 2},
    "asynchronous": {"asynchronous": True},
    "turn_tokens": {"turn_tokens": 99, "turns": 3},
}


def base(library, *, lora=False):
    """Return a plan that a library can follow, with as many components as it can have."""
    sleeps, size = library not in ("trl", "gym-rm"), 8
    dtype = "float32" if library == "nemo-rl" and lora else "bfloat16"
    sizes = {"fsdp_size": size} if library != "gym-rm" else {"num_replicas": size}
    trained = {"sleeps": sleeps, "dtype": dtype, "lora": LoRASettings() if lora else None, **sizes}
    parts = [component("policy", "policy", **trained), component("reference", "reference", dtype=dtype, sleeps=sleeps, **sizes),
             component("generation", "generation", num_replicas=size, sleeps=library != "gym-rm")]  # fmt: skip
    if library in ("verl", "openrlhf"):
        parts.append(component("critic", "critic", **{**trained, "lora": trained["lora"] if library == "openrlhf" else None}))
    apart = library == "nemo-rl"
    scorer = reward(8, sleeps=sleeps and not apart)
    pools = [pool(parts, gpus(0, 0, 8)), pool((scorer,), gpus(1, 0, 8))] if apart else [pool((*parts, scorer), gpus(0, 0, 8))]
    if library == "gym-rm":  # it has no weights of its own for generation
        bars = tuple(dataclasses.replace(bar, persistent=()) if bar.component == "generation" else bar for bar in pools[0].memory)
        pools[0] = dataclasses.replace(pools[0], memory=bars)
    return plan_of([8] * len(pools), *pools)


def changed(plan, role, **values):
    """Return the plan with other values of a component; its sizes stay a division of its GPUs."""

    def change(part):
        if part.role != role:
            return part
        tp, fsdp = (values.get(name, getattr(part, name)) for name in ("tensor_parallel_size", "fsdp_size"))
        gpus, fsdp = part.num_gpus, min(fsdp, part.num_gpus // tp)
        sizes = {"tensor_parallel_size": tp, "fsdp_size": fsdp, "num_replicas": gpus // tp // fsdp}
        return dataclasses.replace(part, **{**values, **sizes})

    pools = [dataclasses.replace(each, components=tuple(map(change, each.components))) for each in plan.pools]
    return dataclasses.replace(plan, pools=tuple(pools))


CASES = [
    (library, lora, role, field.name)
    for library in ("gym-rm", *LIBRARIES)
    for lora in (False, True)
    for role in {part.role.value: None for each in base(library).pools for part in each.components}
    for field in dataclasses.fields(ComponentPlan)
    if field.name not in (*IMPLIED, *NOT_OF[role])
    and not (library == "gym-rm" and role == "generation" and field.name in OF_ENGINE)
]


@pytest.mark.parametrize(("library", "lora", "role", "field"), CASES)
def test_a_field_of_a_component_is_written_or_refused_by_name(library, lora, role, field):
    plan = base(library, lora=lora)
    text = flags(plan, library).text
    part = next(each for pool in plan.pools for each in pool.components if each.role == role)
    path = "reward_models.rm" if role == "reward_model" else role
    for value in OTHERS[field]:
        if value == getattr(part, field):
            continue
        try:
            other = flags(changed(plan, role, **{field: value}), library).text
        except ConfigError as error:
            assert f"{path}.{field}" in str(error)
        else:
            assert other != text, f"{field}={value} is dropped"


@pytest.mark.parametrize("library", ["gym-rm", *LIBRARIES])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(StepWorkload)])
def test_a_field_of_the_work_is_written_or_refused_by_name(library, field):
    plan = base(library)
    try:
        other = flags(dataclasses.replace(plan, **OF_WORK[field]), library).text
    except ConfigError as error:
        assert f"workload.{field}" in str(error) or (field == "turn_tokens" and "workload.turns" in str(error))
    else:
        assert other != flags(plan, library).text


def test_a_plan_has_what_a_request_says_of_a_component():
    not_in_plan = {"shape", "engine", "num_gpus", "gpu_memory_utilization"}  # model, pool and memory of the plan
    assert {field.name for field in dataclasses.fields(Component)} - not_in_plan <= {field.name for field in dataclasses.fields(ComponentPlan)}
