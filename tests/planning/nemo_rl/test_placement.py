"""NeMo RL's placement: every worked example and error of its rules, and what holds for all requests."""

import dataclasses
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.nemo_rl.placement import NemoError, NemoPlacement, NemoRequest, NemoStage, nemo_placement, surpass
from gym_rm.planning.nemo_rl.problems import nemo_problems
from gym_rm.planning.nemo_rl.rules import RULES, nemo_answer, nemo_rule
from gym_rm.planning.plan import Address
from gym_rm.planning.planner import plan
from tests.planning.plans import component, plan_of, pool


def request(text, **changes):
    """Return the request of `"4x8 rm 1x8 gen 1x8"`: nodes x GPUs; without `gen`, generation is colocated."""
    words = text.split()

    def pair(word):
        return [None if each == "null" else int(each) for each in word.split("x")]

    values = dict(zip(("num_nodes", "gpus_per_node"), pair(words[0]), strict=True))
    if "rm" in words:
        nodes, gpus = pair(words[words.index("rm") + 1])
        values |= {"reward_model_nodes": nodes, "reward_model_gpus_per_node": gpus}
    if "gen" in words:
        nodes, gpus = pair(words[words.index("gen") + 1])
        values |= {"colocated": False, "generation_nodes": nodes, "generation_gpus_per_node": gpus}
    return NemoRequest(**values, **changes)


def counts(placement):
    generation = 0 if placement.request.colocated else len(placement.generation)
    return len(placement.train), generation, len(placement.reward_model), len(placement.idle)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1x8 rm 1x4", (4, 0, 4, 0)),
        ("1x8 rm 1x4 gen nullx2", (2, 2, 4, 0)),
        ("1x8 rm 1x4 gen 1x2", (2, 2, 4, 0)),
        ("1x2 rm 1x1", (1, 0, 1, 0)),
        ("2x8 rm 1x8", (8, 0, 8, 0)),
        ("2x8 rm 1x4", (8, 0, 4, 4)),
        ("2x8 rm 1x8 gen nullx4", (4, 4, 8, 0)),
        ("2x8 rm 1x8 gen 1x4", (4, 4, 8, 0)),
        ("2x8 rm 1x4 gen 1x4", (4, 4, 4, 4)),
        ("4x8 rm 1x8 gen 1x8", (16, 8, 8, 0)),
        ("4x8 rm 2x6", (16, 0, 12, 4)),
        ("1x8", (8, 0, 0, 0)),
        ("4x8", (32, 0, 0, 0)),
        ("4x8 gen 3x8", (8, 24, 0, 0)),
    ],
)
def test_worked_examples(text, expected):
    assert counts(nemo_placement(request(text))) == expected


SETUP, ACTOR, WAITING, WORKERS = NemoStage.SETUP, NemoStage.ACTOR, NemoStage.WAITING, NemoStage.WORKERS
REWARD = "reward_model_gpus_per_node"
TP4 = {"reward_model_tensor_parallel_size": 2, "reward_model_context_parallel_size": 2}


@pytest.mark.parametrize(
    ("text", "changes", "stage", "says", "problem", "fix"),
    [
        ("1x1 rm 1x1", {}, SETUP, r"resources.gpus_per_node must be > 0", "never lets share", {"gpus_per_node": 2}),
        ("1x8 rm 1x8", {}, SETUP, r"resources.gpus_per_node must be > 0", "none is left", {REWARD: 7}),
        ("1x8 rm 1x4 gen nullx4", {}, SETUP, "for training, 0", "0 are left", {"reward_model_gpus_per_node": 3}),
        ("1x8 rm 1x4 gen nullxnull", {}, SETUP, "got None", "needs at least 1 GPU", {"generation_gpus_per_node": 1}),
        ("1x8 rm 1x4 gen nullx0", {}, SETUP, "got 0", "needs at least 1 GPU", {"generation_gpus_per_node": 1}),
        ("1x8 rm 1x4 gen 2x2", {}, SETUP, "must be 1 or null .* got 2", "there is one node", {"generation_nodes": 1}),
        ("2x8 rm 2x1", {}, SETUP, "policy_nodes must be > 0", "2 of 2 whole nodes, though", {"reward_model_nodes": 1}),
        ("2x8 rm 2x8", {}, SETUP, "policy_nodes must be > 0", "2 of 2 whole nodes: none", {"reward_model_nodes": 1}),
        ("2x8 rm 3x8", {}, SETUP, "policy_nodes must be > 0, got -1", "3 of 2", {"reward_model_nodes": 1}),
        ("2x8 rm 1x8 gen 1x8", {}, SETUP, "for training, 0", "0 are left", {"generation_gpus_per_node": 7}),
        ("2x8 rm 1x8 gen 2x4", {}, SETUP, "must be 1 or null", "there is one node", {"generation_nodes": 1}),
        ("4x8 rm 1x8 gen 1x4", {}, SETUP, "must equal cluster", "it must be 8", {"generation_gpus_per_node": 8}),
        ("4x8 rm 1x8 gen 3x8", {}, SETUP, "got 0 and 3", "3 of the 3 nodes", {"generation_nodes": 2}),
        ("4x8 rm 1x8 gen 0x8", {}, SETUP, "must be > 0 with several", "at least 1 whole node", {"generation_nodes": 1}),
        ("4x8 rm 1x8 gen nullx8", {}, SETUP, "TypeError", "at least 1 whole node", {"generation_nodes": 1}),
        ("4x8 rm 1x8 gen nullx8", {"algorithm": "ppo"}, SETUP, "AssertionError", "whole node", {"generation_nodes": 1}),
        # not checked at setup
        ("1x8 rm 2x1", {}, WAITING, "timed out", "the cluster has 1 node", {"reward_model_nodes": 1}),
        ("2x8 rm 1x12", {}, WAITING, "timed out", "a node has 8 GPUs", {"reward_model_gpus_per_node": 8}),
        ("2x8 rm 1x17", {}, NemoStage.ATTEMPTS, "17 requested, 16", "a node has 8", {"reward_model_gpus_per_node": 8}),
        ("1x8 rm 1x0", {}, ACTOR, "world size 0", "at least 1", {"reward_model_gpus_per_node": 1}),
        ("1x8 rm 0x4", {}, ACTOR, "world size 0", "at least 1", {"reward_model_nodes": 1}),
        ("2x8 rm -1x-1", {}, ACTOR, "world size 0", "at least 1", {"reward_model_nodes": 1, REWARD: 1}),
        ("2x8 rm 1x6", TP4, ACTOR, "divisible .* 4", "2 x 2", {"reward_model_tensor_parallel_size": 1}),
        ("1x8 rm 1x2", TP4, ACTOR, "insufficient", "2 x 2", {"reward_model_tensor_parallel_size": 1}),
        ("2x8 rm 1x8", {"policy_tensor_parallel_size": 3}, WORKERS, "divisible", "training has 8", None),
        ("1x8 rm 1x5", {"generation_tensor_parallel_size": 2}, WORKERS, "divisible", "generation has 3", None),
        ("1x8 rm 1x3", {"num_prompts": 1, "group_size": 4}, NemoStage.STEP, "4 rows .* by the 3", "4 rows", None),
        ("2x8 rm 1x1", {"num_prompts": 6, "group_size": 8, "reward_model_batch_size": 32}, NemoStage.STEP,
         "48 rows .*batch_size = 32", "48 rows", {"reward_model_batch_size": 24}),
        ("1x8 rm 1x1", {"reward_model_parameters": 70_000_000_000, "gpu_memory": 80 * 2**30}, NemoStage.MEMORY,
         "out of memory", "260.8 GiB on each of its 1 GPU for", {"reward_model_gpus_per_node": 4}),
        ("1x8 rm 1x4", {"policy_parameters": 32_000_000_000, "gpu_memory": 80 * 2**30}, NemoStage.MEMORY,
         "out of memory", "the policy needs", {"reward_model_gpus_per_node": 2}),
    ],
)  # fmt: skip
def test_errors_are_known_before_the_start(text, changes, stage, says, problem, fix):
    asked = request(text, **changes)
    with pytest.raises(NemoError, match=problem) as caught:
        nemo_placement(asked)
    error = caught.value
    assert error.says.stage is stage
    assert re.search(says, str(error.says))
    assert fix is None or error.fix == fix
    nemo_placement(dataclasses.replace(asked, **error.fix))
    assert pickle.loads(pickle.dumps(error)).fix == error.fix


def test_all_problems_are_listed_at_once():
    asked = request("1x8 rm 2x9", reward_model_tensor_parallel_size=3)
    with pytest.raises(NemoError) as caught:
        nemo_placement(asked)
    for part in ("is 9, but a node has 8", "is 2, but the cluster has 1 node", "takes 8 of 8", "3 x 1"):
        assert sum(part in problem for problem in caught.value.problems) == 1
    nemo_placement(dataclasses.replace(asked, **caught.value.fix))


def test_every_rule_is_reached_by_an_example():
    texts = ("1x8 rm 1x4", "1x8 rm 1x4 gen 1x2", "2x8 rm 1x4", "2x8 rm 1x8 gen 1x4", "4x8 rm 1x8 gen 1x8")
    assert tuple(nemo_rule(request(text)) for text in texts) == RULES


def test_a_reward_model_takes_the_last_nodes_and_wastes_their_other_gpus():
    placement = nemo_placement(request("2x8 rm 1x4"))
    assert placement.reward_model == tuple(Address(1, i) for i in range(4))
    assert placement.idle == tuple(Address(1, i) for i in range(4, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": "2"}, "num_nodes must be an integer"),
        ({"gpus_per_node": 4.0}, "gpus_per_node must be an integer"),
        ({"colocated": 1}, "colocated must be true or false"),
        ({"algorithm": "gpro"}, "did you mean 'grpo'|Did you mean 'grpo'"),
        ({"reward_model_nodes": 1}, "go together"),
        ({"gpu_memory": 0}, "more than 0 bytes"),
    ],
)
def test_other_types_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        nemo_placement(NemoRequest(**{"num_nodes": 1, "gpus_per_node": 8, **changes}))


NUMBERS = st.integers(-1, 9)
SIZES = st.sampled_from([1, 2, 3, 4])
OPTIONAL = st.none() | NUMBERS


@st.composite
def requests(draw):
    reward = draw(st.booleans())
    return NemoRequest(
        num_nodes=draw(st.integers(-1, 5)),
        gpus_per_node=draw(NUMBERS),
        colocated=draw(st.booleans()),
        reward_model_nodes=draw(NUMBERS) if reward else None,
        reward_model_gpus_per_node=draw(NUMBERS) if reward else None,
        generation_nodes=draw(OPTIONAL),
        generation_gpus_per_node=draw(OPTIONAL),
        policy_tensor_parallel_size=draw(SIZES),
        generation_tensor_parallel_size=draw(SIZES),
        reward_model_tensor_parallel_size=draw(SIZES),
        reward_model_context_parallel_size=draw(SIZES),
        algorithm=draw(st.sampled_from(["grpo", "ppo"])),
    )


@settings(max_examples=500)
@given(asked=requests())
def test_our_problems_are_exactly_those_that_stop_nemo_rl(asked):
    assert bool(nemo_problems(asked)) == (nemo_answer(asked) is not None)


@settings(max_examples=300)
@given(asked=requests())
def test_no_gpu_is_in_two_places_and_the_rest_is_idle(asked):
    try:
        placement = nemo_placement(asked)
    except NemoError as error:
        if not error.fix:
            return
        placement = nemo_placement(dataclasses.replace(asked, **error.fix))
    done = placement.request
    generation = () if done.colocated else placement.generation
    placed = [*placement.train, *generation, *placement.reward_model, *placement.idle]
    every = [Address(node, gpu) for node in range(done.num_nodes) for gpu in range(done.gpus_per_node)]
    assert sorted(placed, key=str) == sorted(every, key=str)
    assert placement.train
    assert placement.generation
    assert len(placement.reward_model) == done.reward_model_gpus


# --- the comparison --------------------------------------------------------------------------------------------------


def test_one_gpu_with_sleep_where_theirs_asserts():
    with pytest.raises(NemoError) as caught:
        nemo_placement(request("1x1 rm 1x1"))
    parts = (component("policy", "policy"), component("generation", "generation"), component("rm", "reward_model"))
    found = surpass(plan_of([1], pool(parts, [(0, 0)])), caught.value)
    assert (found.runs, found.idle, found.plan_idle, found.shared_gpus) == (False, None, 0, 1)
    assert "does not run: AssertionError at setup" in found.lines[0]
    assert any("take turns on 1 GPU; policy, generation, rm sleep" in line for line in found.lines)


def test_the_planner_places_on_one_gpu_what_nemo_rl_refuses():
    sizes = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    reward = {**sizes, "architectures": ["Qwen3ForSequenceClassification"]}
    found = plan(
        {"cluster": {"gpu": "h100_sxm"}, "policy": {"config": sizes}, "reward_models": {"rm": {"config": reward}}}
    )
    with pytest.raises(NemoError) as caught:
        nemo_placement(request("1x1 rm 1x1"))
    difference = surpass(found, caught.value)
    assert (difference.runs, difference.plan_idle, difference.shared_gpus) == (False, 0, 1)
    assert found.pools[0].peak < found.pools[0].gpu_memory


def test_a_node_is_shared_where_theirs_is_wasted():
    theirs = nemo_placement(request("2x8 rm 1x4"))
    train = pool((component("policy", "policy", fsdp_size=12),), [(i // 8, i % 8) for i in range(12)])
    reward = pool((component("rm", "reward_model", num_replicas=4),), [(1, i) for i in range(4, 8)])
    found = surpass(plan_of([8, 8], train, reward), theirs)
    assert (found.runs, found.idle, found.plan_idle, found.shared_nodes) == (True, 4, 0, (1,))
    assert "Idle: 4 GPUs with NeMo RL, 0 with the plan." in found.lines


def test_whole_nodes_are_not_called_shared():
    train = pool((component("policy", "policy", fsdp_size=8),), [(0, i) for i in range(8)])
    reward = pool((component("rm", "reward_model", num_replicas=8),), [(1, i) for i in range(8)])
    found = surpass(plan_of([8, 8], train, reward), nemo_placement(request("2x8 rm 1x8")))
    assert (found.shared_nodes, found.shared_gpus, found.idle, found.plan_idle) == ((), 0, 0, 0)
    assert len(found.lines) == 2


def test_plans_for_other_hardware_are_not_compared():
    theirs = nemo_placement(request("1x2 rm 1x1"))
    assert isinstance(theirs, NemoPlacement)
    with pytest.raises(ConfigError, match=r"\[8\] GPUs, the NeMo RL request for 1 x 2"):
        surpass(plan_of([8], pool((component("rm", "reward_model"),), [(0, 0)])), theirs)
