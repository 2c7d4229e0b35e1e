"""Every field of a plan is in the text of an export, or the export is refused with the field's name."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    "turn_tokens": {"turns": 3, "turn_tokens": 99},
}


def base(library, *, lora=False):
    """Return a plan that a library can follow, with as many components as it can have, on 8 GPUs each."""
    asleep, own = library not in ("trl", "gym-rm"), library == "gym-rm"
    sizes = {"num_replicas": 8} if own else {"fsdp_size": 8}
    given = {"sleeps": asleep, "dtype": "bfloat16", **sizes}
    adapters = LoRASettings() if lora else None
    parts = [
        component("policy", "policy", lora=adapters, **given),
        component("generation", "generation", num_replicas=8, sleeps=not own),
        component("reference", "reference", **given),
    ]
    if library == "verl":
        parts.append(component("critic", "critic", **given))
    together = pool((*parts, reward(8, sleeps=asleep)), gpus(0, 0, 8))
    return plan_of([8], with_the_policys_weights(together) if own else together)


def with_the_policys_weights(pool):
    """Return a pool in which generation has no weights of its own."""
    bars = (dataclasses.replace(bar, persistent=()) if bar.component == "generation" else bar for bar in pool.memory)
    return dataclasses.replace(pool, memory=tuple(bars))


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


def exported(plan, library):
    """Return the text of an export, or why it is refused."""
    try:
        return flags(plan, library).text
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize(("library", "lora", "role", "field"), CASES)
def test_a_field_of_a_component_is_written_or_refused_by_name(library, lora, role, field):
    plan = base(library, lora=lora)
    path = "reward_models.rm" if role == "reward_model" else role
    for value in OTHERS[field]:
        if (other := changed(plan, role, **{field: value})) != plan:
            text = exported(other, library)
            assert text != exported(plan, library), value
            assert not text.startswith("refused") or f"{path}.{field}" in text


@settings(max_examples=25)
@given(st.data())
@pytest.mark.parametrize("library", ["gym-rm", *LIBRARIES])
def test_plans_of_the_same_text_are_the_same(library, data):
    changes = [(role, field, value) for name, _, role, field in CASES if name == library for value in OTHERS[field]]
    some = st.lists(st.sampled_from(changes), max_size=4)

    def drawn():
        plan = base(library)
        for role, field, value in data.draw(some):
            plan = changed(plan, role, **{field: value})
        return plan

    one, other = drawn(), drawn()
    text = exported(one, library)
    assert one == other or text.startswith("refused") or text != exported(other, library)


@pytest.mark.parametrize("library", ["gym-rm", *LIBRARIES])
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(StepWorkload)])
def test_a_field_of_the_work_is_written_or_refused_by_name(library, field):
    plan = base(library)
    text = exported(dataclasses.replace(plan, **OF_WORK[field]), library)
    assert text != exported(plan, library)
    name = "turns" if field == "turn_tokens" else field  # there are none between one turn
    assert not text.startswith("refused") or f"workload.{name}" in text


@pytest.mark.parametrize("library", ["gym-rm", *LIBRARIES])
@pytest.mark.parametrize("lora", [False, True])
def test_a_library_follows_the_plan_from_which_fields_are_changed(library, lora):
    assert not exported(base(library, lora=lora), library).startswith("refused")


def test_a_plan_has_every_setting_of_a_component():
    others = {"shape", "engine", "num_gpus", "gpu_memory_utilization"}  # in its model, its pool and its memory
    names = {field.name for field in dataclasses.fields(Component)} - others
    assert names <= {field.name for field in dataclasses.fields(ComponentPlan)}
