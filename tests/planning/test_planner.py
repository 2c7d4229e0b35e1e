import json
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.plan_file import planned_scorer
from gym_rm.planning.plan import Basis, Phase, Role, load_plan
from gym_rm.planning.planner import plan
from gym_rm.planning.refusals import Infeasible

SCORING = {"cluster": {"gpu": "h100_sxm", "gpus_per_node": 8}, "reward_models": {"rm": {"model": "Qwen/Qwen3-8B"}}}
GRPO = {**SCORING, "policy": {"model": "Qwen/Qwen3-8B"}, "reference": True}
ONE_GPU = {**GRPO, "cluster": {"gpus_per_node": 1}, "reference": False}


def test_a_reward_model_alone_is_scored_on_replicas():
    found = plan(SCORING)
    component = found.component("rm")
    assert (component.tensor_parallel_size, component.num_replicas) == (1, found.used_gpus)
    assert component.role is Role.REWARD_MODEL
    assert found.pool_of("rm").peak < found.pool_of("rm").gpu_memory


def test_numbers_have_sources_and_add_up():
    found = plan(GRPO)
    memories = [memory for pool in found.pools for memory in pool.memory]
    numbers = [item for memory in memories for item in memory.persistent]
    numbers += [item for memory in memories for instant in memory.instants for item in instant.items]
    numbers += [part for time in found.times for part in time.parts]
    assert all(number.source and number.basis in Basis for number in numbers)
    assert sum(seconds for _, seconds in found.phase_seconds) == pytest.approx(found.step_seconds)
    for pool in found.pools:
        assert pool.busy_seconds == pytest.approx(sum(time.seconds for time in found.times if time.pool == pool.name))
        assert pool.peak <= pool.gpu_memory
    for time in found.times:
        assert time.seconds == pytest.approx(sum(part.seconds for part in time.parts))


def test_a_model_that_sleeps_has_no_bytes_while_others_work():
    found = plan(GRPO, overrides=("reward_models.rm.sleeps=true", "pools=together"))
    (pool,) = found.pools
    for memory in pool.memory:
        held = {item.component for item in memory.persistent}
        assert ("rm" in held) == (memory.component == "rm")
    assert any(time.phase is Phase.WAKE and time.component == "rm" for time in found.times)


def test_no_rank_of_training_is_without_a_conversation():
    found = plan(GRPO, overrides=("workload.num_prompts=1", "workload.group_size=3"))
    policy = found.component("policy")
    assert policy.fsdp_size * policy.num_replicas <= 3


def test_sleeping_frees_nothing_on_a_cpu():
    laptop = {"cluster": {"gpu": "cpu"}, "generation": {"engine": "transformers"}}
    models = {name: {"model": "Qwen/Qwen3-0.6B", "dtype": "float32"} for name in ("policy", "rm")}
    request = {**laptop, "policy": {**models["policy"], "lora": {"rank": 8}}, "reward_models": {"rm": models["rm"]}}
    request["workload"] = {"num_prompts": 2, "prompt_tokens": 128, "reply_tokens": 128}
    (pool,) = plan(request).pools
    assert not any(each.sleeps for each in pool.components)
    assert all({"policy", "rm"} <= {item.component for item in memory.persistent} for memory in pool.memory)
    with pytest.raises(Infeasible, match=r"reward_models.rm.sleeps=true frees nothing on a CPU"):
        plan(request, overrides=("reward_models.rm.sleeps=true",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.optimizer=adamw_8bit", "needs a GPU"),
        ("cluster.gpus_per_node=4", "share its memory; write cluster.nodes"),
    ],
)
def test_savings_of_gpus_are_refused_on_a_cpu(change, message):
    with pytest.raises(ConfigError, match=message):
        plan({**GRPO, "cluster": {"gpu": "cpu"}}, overrides=(change,))


def test_an_engine_that_is_awake_keeps_its_cache_while_others_work():
    for sleeps in ("true", "false"):
        found = plan(GRPO, overrides=("pools=together", f"generation.sleeps={sleeps}"))
        for memory in found.pools[0].memory:
            cached = any(item.name == "kv_cache" for item in memory.persistent)
            assert cached == (memory.component == "generation" or sleeps == "false")


def test_fixed_numbers_are_kept():
    found = plan(GRPO, overrides=("policy.num_gpus=4", "reward_models.rm.num_gpus=2", "generation.num_gpus=2",
                                  "reference={num_gpus: 4}", "generation.tensor_parallel_size=2"))  # fmt: skip
    assert found.component("policy").num_gpus == 4
    assert found.component("rm").num_gpus == 2
    assert found.component("generation").tensor_parallel_size == 2


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_plan_survives_its_file(tmp_path, suffix):
    found = plan(GRPO)
    assert load_plan(found.save(tmp_path / f"plan{suffix}")) == found
    assert load_plan(json.loads(json.dumps(found.to_dict()))) == found


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(GRPO))
    with pytest.raises(ConfigError, match="is not a plan; make one"):
        load_plan(file)
    values = plan(SCORING).to_dict()
    with pytest.raises(ConfigError, match="another format"):
        load_plan({**values, "format": 99})
    values["pools"][0]["components"][0]["num_replicas"] = 0
    with pytest.raises(ConfigError, match=r"pools.0.components.0"):
        load_plan(values)


def test_all_wrong_settings_are_named_at_once():
    changes = ("cluster.gpus_per_nod=3", "policy.tensor_parallel_size=0", "reference=maybe", "policy.sleeps=yes",
               "pools=foo", "policy.lora.rank=-1", "workload.turns=0", "step_seconds=0")  # fmt: skip
    with pytest.raises(ConfigError) as error:
        plan(GRPO, overrides=changes)
    for name in ("Did you mean 'gpus_per_node'", "policy.tensor_parallel_size must be", "reference must be",
                 "policy.sleeps must be", "pools must be", "policy.lora.rank", "turns", "step_seconds"):  # fmt: skip
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        ({}, "nothing to plan"),
        ({"critic": {"model": "Qwen/Qwen3-8B"}, **SCORING}, "belong to a policy"),
        ({"reward_models": {"policy": {"model": "Qwen/Qwen3-8B"}}}, "this name is taken"),
    ],
)
def test_a_request_that_misses_something_says_what(request_of, message):
    with pytest.raises(ConfigError, match=message):
        plan(request_of)


def violations(*changes: str) -> str:
    with pytest.raises(Infeasible) as error:
        plan(GRPO, overrides=changes)
    for fix in error.value.fixes[:1]:
        plan(GRPO, overrides=(*changes, *fix))
    return str(error.value)


def test_a_refusal_lists_single_changes_then_pairs_then_hardware():
    with pytest.raises(
        Infeasible, match=r"it needs (\d+\.\d) GiB of each GPU of 80\.0 GiB: 6\d\.\d GiB are missing"
    ) as error:
        plan(ONE_GPU)
    assert error.value.fixes == (
        ("policy.master_weights=false",),
        ("policy.lora.rank=16",),
        ("cluster.gpu=b200_sxm",),
        ("cluster.gpus_per_node=2",),
    )
    assert "\n  policy.master_weights=false\n" in str(error.value)


def test_a_model_that_is_much_too_large_says_how_much_is_missing():
    with pytest.raises(
        Infeasible, match=r"needs (\d+\.\d) GiB of each GPU of 80\.0 GiB: (\d+\.\d) GiB are missing"
    ) as error:
        plan({"policy": {"model": "meta-llama/Llama-3.1-405B"}, "reward_models": {"rm": {"model": "Qwen/Qwen3-0.6B"}}})
    needed, missing = map(float, re.search(r"needs (\S+) GiB .* 80\.0 GiB: (\S+) GiB", str(error.value)).groups())
    assert missing == pytest.approx(needed - 80, abs=0.11)
    assert missing > 6000


# From verl's examples/tuning and its table of the hardware that is needed: model, GPUs of 80 GB, rank of LoRA.
MINIMUM_RUNS = [
    ("Qwen/Qwen2.5-0.5B", 1, 32),
    ("Qwen/Qwen2.5-1.5B", 1, None),
    ("Qwen/Qwen2.5-1.5B", 1, 32),
    ("Qwen/Qwen2.5-3B", 1, 32),
    ("Qwen/Qwen2.5-7B", 2, None),
    ("Qwen/Qwen2.5-7B", 1, 32),
    ("Qwen/Qwen2.5-14B", 4, None),
    ("Qwen/Qwen2.5-14B", 2, 32),
    ("Qwen/Qwen2.5-32B", 4, 32),
    ("Qwen/Qwen2.5-72B", 8, 32),
]


@pytest.mark.parametrize(("model", "gpus", "rank"), MINIMUM_RUNS)
def test_what_others_ran_on_few_gpus_fits(model, gpus, rank):
    policy = {"model": model, "lora": None if rank is None else {"rank": rank}, "gradient_checkpointing": True}
    lengths = {"prompt_tokens": 1024, "reply_tokens": 1024, "num_prompts": 128, "group_size": 5}
    found = plan({"cluster": {"gpus_per_node": gpus}, "policy": policy, "reference": True, "workload": lengths})
    assert found.used_gpus == gpus


REQUESTS = st.fixed_dictionaries(
    {
        "cluster": st.fixed_dictionaries({"gpu": st.sampled_from(["l4", "h100_sxm", "cpu"])}),
        "policy": st.fixed_dictionaries(
            {"model": st.sampled_from(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"])},
            optional={"dtype": st.just("float32"), "fsdp_size": st.sampled_from([1, 8]), "sleeps": st.booleans(),
                      "tensor_parallel_size": st.sampled_from([1, 3]), "max_num_batched_tokens": st.just(600)},
        ),
        "reward_models": st.just({"rm": {"model": "Qwen/Qwen3-8B"}}),
    },
    optional={
        "generation": st.sampled_from([{"engine": "transformers"}, {"gpu_memory_utilization": 0.1}]),
        "reference": st.booleans(),
        "pools": st.sampled_from(["apart", "together"]),
        "step_seconds": st.just(1),
        "workload": st.sampled_from([{"group_size": 1}, {"reply_tokens": {"p50": 300, "max": 50000}}]),
    },
)  # fmt: skip


@pytest.mark.slow
@given(REQUESTS)
@settings(max_examples=30, deadline=None)
def test_every_offered_fix_fits(request):
    try:
        plan(request)
    except Infeasible as error:
        for fix in error.fixes:
            plan(request, overrides=fix)
    except ConfigError:
        pass


@pytest.mark.slow
def test_a_broken_rule_and_a_step_time_out_of_reach_are_mended_together():
    request = {**GRPO, "step_seconds": 0.1, "workload": {"group_size": 1}}
    with pytest.raises(Infeasible) as error:
        plan(request)
    assert error.value.fixes[0] == ("workload.group_size=2", "step_seconds=null")
    plan(request, overrides=error.value.fixes[0])


@pytest.mark.slow
def test_savings_and_hardware_are_combined_where_nothing_less_is_enough():
    request = {**GRPO, "cluster": {}, "policy": {"model": "Qwen/Qwen3-235B-A22B"}, "reference": False}
    with pytest.raises(Infeasible) as error:
        plan(request)
    assert ("policy.lora.rank=16", "cluster.gpus_per_node=8") in error.value.fixes
    for fix in error.value.fixes:
        plan(request, overrides=fix)


def test_all_broken_rules_are_named_at_once_each_with_a_change():
    text = violations("policy.tensor_parallel_size=3", "workload.group_size=1", "workload.updates_per_step=1000")
    for part in ("32 attention heads", "8 key and value heads", "tokens of the vocabulary", "group_size=1",
                 "updates_per_step=1000",
                 "possible: 1, 2, 4, 8",
                 "policy.tensor_parallel_size=2 workload.group_size=2 workload.updates_per_step=64"):  # fmt: skip
        assert part in text


def test_tensor_parallel_groups_larger_than_a_node_are_refused():
    text = violations("cluster.gpus_per_node=2", "cluster.nodes=4", "reward_models.rm.tensor_parallel_size=4")
    assert "does not stay in a node of 2 GPUs" in text
    assert "reward_models.rm.tensor_parallel_size=2" in text


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (("reward_models.rm.num_gpus=6", "reward_models.rm.tensor_parallel_size=4"), "tensor_parallel_size=4"),
        (("policy.num_gpus=8", "policy.fsdp_size=8", "workload.num_prompts=1", "workload.group_size=4"),
         "fsdp_size=8 cannot be kept with 8 GPUs and 4 conversations of a step"),
    ],
)  # fmt: skip
def test_fixed_numbers_that_contradict_the_others_are_refused(changes, numbers):
    text = violations(*changes)
    assert numbers in text
    assert "=auto" in text


def test_texts_longer_than_the_model_reads_are_refused():
    text = violations("workload.reply_tokens=50000")
    assert "reads 40,960" in text
    assert "workload.reply_tokens=40448" in text


def test_an_engine_with_too_small_a_share_says_so():
    request = {"cluster": {"gpus_per_node": 2}, "policy": {"model": "Qwen/Qwen3-4B", "lora": {}}, "pools": "apart"}
    with pytest.raises(Infeasible, match=r"more than generation.gpu_memory_utilization=0.07 of it") as error:
        plan({**request, "generation": {"gpu_memory_utilization": 0.07, "tensor_parallel_size": 1}})
    assert ("generation.gpu_memory_utilization=0.9",) in error.value.fixes


def test_a_step_time_out_of_reach_names_the_fastest():
    with pytest.raises(Infeasible, match="the fastest plan on 1 x 1 h100_sxm takes") as error:
        plan({**SCORING, "cluster": {}}, overrides=("step_seconds=0.5",))
    assert error.value.fixes[0][0].startswith("step_seconds=")
    plan({**SCORING, "cluster": {}}, overrides=error.value.fixes[0])


def test_a_request_that_is_too_large_for_its_step_time_gives_it_up():
    with pytest.raises(Infeasible, match="does not fit") as error:
        plan(ONE_GPU, overrides=("step_seconds=0.5",))
    assert ("step_seconds=null", "policy.lora.rank=16") in error.value.fixes


@pytest.mark.parametrize(
    "option", [(), ("reward_models.rm.fsdp_size=8",), ("reward_models.rm.tensor_parallel_size=1",)]
)
def test_a_reward_model_with_few_heads_is_divided_by_fsdp_in_a_node(option):
    request = {"cluster": {"nodes": 2, "gpus_per_node": 8}, "reward_models": {"rm": {"model": "Qwen/Qwen3-235B-A22B"}}}
    found = plan(request, overrides=option)
    assert found.times[0].seconds == pytest.approx(found.step_seconds)
    size, gpus = found.component("rm").fsdp_size, found.pools[0].gpus
    assert size > 4
    assert len(gpus) == 2 * size
    assert all(len({address.node for address in group}) == 1 for group in (gpus[:size], gpus[size:]))
    _, options = planned_scorer(found, None, {}, conversations=1)
    assert (options["fsdp_size"], options["num_replicas"]) == (size, 2)
    assert "tensor_parallel_size" not in options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("reward_models.rm.quantization=int8",),
            "rm.quantization=int8 does not run on h100_sxm.*\n.*\n.*quantization=fp8",
        ),
        (("reward_models.rm.quantization=fp8", "reward_models.rm.fsdp_size=2"), "fsdp_size=2, quantization=fp8 cannot"),
    ],
)
def test_what_cannot_be_loaded_is_not_planned(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(GRPO, overrides=changes)


def test_quantized_matrices_are_a_byte_each_after_they_were_read_whole():
    rm = {"model": "nvidia/Llama-3.3-Nemotron-70B-Reward", "tensor_parallel_size": 2, "quantization": "fp8"}
    found = plan({"cluster": {"gpus_per_node": 2}, "reward_models": {"rm": rm}})
    (memory,) = found.pools[0].memory
    (weights,) = (item for item in memory.persistent if item.name == "weights")
    assert 34 < weights.bytes / 1e9 < 37
    assert max(instant.bytes for instant in memory.instants if instant.name == "load") > 34e9
    _, options = planned_scorer(found, None, {}, conversations=1)
    assert (options["quantization"], options["dtype"]) == ("fp8", "bfloat16")


def test_pools_must_list_each_component_once():
    with pytest.raises(ConfigError) as error:
        plan(GRPO, overrides=("pools=[[policy, generation], [rm, rm], [judge]]",))
    for part in ("'judge' is no component", "'rm' is in more than one pool", "'reference' is in no pool"):
        assert part in str(error.value)


@pytest.mark.parametrize("change", ["policy.tensor_parallel_size=2", "policy.fsdp_size=4"])
def test_a_policy_that_generates_with_its_own_weights_is_whole_on_each_gpu(change):
    with pytest.raises(ConfigError, match=f"{change}: generation by transformers needs the policy's whole weights"):
        plan(GRPO, overrides=(change, "generation.engine=transformers"))


@pytest.mark.parametrize("change", ["cluster.nodes=1000000000000", "cluster.gpus_per_node=1000000000000"])
def test_a_cluster_of_absurd_size_is_refused(change):
    with pytest.raises(ConfigError, match=change.replace("=", ".*")):
        plan(SCORING, overrides=(change,))


def test_more_components_than_can_be_tried_ask_for_their_pools():
    models = {f"rm{index}": {"model": "Qwen/Qwen3-0.6B"} for index in range(9)}
    request = {"cluster": {}, "reward_models": models}
    with pytest.raises(Infeasible, match=r"9 components can share GPUs in too many ways.*(?s:.)*pools=together"):
        plan(request)
    assert len(plan({**request, "pools": "together"}).pools) == 1
