"""Models that several ranks hold together give the scores of the whole model, and no rank has all of its weights."""

import dataclasses
import functools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tiny_models

import gym_rm
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.ranks import check_shards
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.errors import ConfigError
from tests.engine.executors.sharded_cases import Case, run_in_ranks, whole

TOLERANCE = 1e-5  # of float32 scores
TENSOR_PARALLEL, FULLY_SHARDED = {"tensor_parallel_size": 2}, {"fsdp_size": 2}
WITH_PLAN = ("qwen3", "mixtral", "llama", "gemma2", "gemma3", "gpt_neox", "phi3", "deepseek_v3")
ANY = ("qwen3", "gpt2", "deberta_v2", "mixtral", "xlnet")
OPTIONS = ("tensors", "prefix cache", "turns", "folder", "experts", "experts folder", "generative", "implicit")
OFTEN = (  # cases that every run of the tests has
    "tensor parallel qwen3", "fully sharded qwen3", "wrong sums",
)  # fmt: skip
FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
QUESTION = {"question": "Is the sum correct? Answer The or No.", "answers": ("The", "N")}


@pytest.fixture(scope="module")
def dialogues(gsm8k_groups, hh_pairs, real_conversations):
    """Real conversations: groups of replies to one question, and dialogues of several turns."""
    return [each for group in [*gsm8k_groups[1:4], real_conversations] for each in group]


@pytest.fixture(scope="module")
def cases(saved_model, tmp_path_factory):
    """All cases with two ranks, by name."""
    pytest.importorskip("transformers.distributed.tensor_parallel", reason="needs transformers 5.17")
    made = {f"tensor parallel {each}": Case(saved_model(each), TENSOR_PARALLEL) for each in (*WITH_PLAN, "doge")}
    policy, reference = (
        str(tiny_models.save_policy(tmp_path_factory.mktemp("policy"), seed=seed, initializer_range=0.3))
        for seed in (1, 2)
    )
    qwen, other = saved_model("qwen3"), saved_model("qwen3", seed=1)
    experts, other_experts = saved_model("mixtral"), saved_model("mixtral", seed=1)
    cached = {"prefix_cache_tokens": 4096}
    made |= {f"fully sharded {each}": Case(saved_model(each), FULLY_SHARDED) for each in ANY}
    made["fully sharded tensors"] = Case(qwen, FULLY_SHARDED, act="score_after_update", argument=[other])
    made["fully sharded folder"] = Case(qwen, FULLY_SHARDED, act="score_after_update", argument=other)
    made |= {
        "tensor parallel turns": Case(qwen, TENSOR_PARALLEL, act="score_turns"),
        "tensor parallel prefix cache": Case(qwen, TENSOR_PARALLEL, options=cached, act="score_turn_by_turn"),
        "tensor parallel folder": Case(qwen, TENSOR_PARALLEL, act="score_after_update", argument=other),
        "tensor parallel tensors": Case(qwen, TENSOR_PARALLEL, act="score_after_update", argument=[other]),
        "tensor parallel experts": Case(experts, TENSOR_PARALLEL, act="score_after_update", argument=[other_experts]),
        "tensor parallel experts folder": Case(
            experts, TENSOR_PARALLEL, act="score_after_update", argument=other_experts
        ),
        "tensor parallel generative": Case(policy, TENSOR_PARALLEL, {"kind": "generative"}, QUESTION),
        "tensor parallel implicit": Case(policy, TENSOR_PARALLEL, {"kind": "implicit"}, {"reference": reference}),
        "tensor parallel bfloat16": Case(saved_model("qwen3", head_dim=8), TENSOR_PARALLEL, {"dtype": "bfloat16"}),
    }
    made["wrong sums"] = Case(qwen, TENSOR_PARALLEL, wrong_sums=True)
    made["tensor parallel int8"] = Case(qwen, TENSOR_PARALLEL, options={"quantization": "int8", "check": False})
    return made


def names(*cases):
    """Return parameters of a test; cases that not every run has are slow."""
    return [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in cases]


@pytest.fixture(scope="module")
def results(cases, dialogues, tmp_path_factory):
    """Results of both ranks, by the name of the case; two processes run many cases."""

    class Results(dict):
        def __missing__(self, name):
            together = {each: case for each, case in cases.items() if (each in OFTEN) == (name in OFTEN)}
            self.update(run_in_ranks(together, dialogues, 2, tmp_path_factory.mktemp("ranks")))
            return self[name]

    return Results()


@pytest.fixture(scope="module")
def expected(cases, dialogues):
    """Function that returns the result of the whole model in this process."""
    return functools.cache(lambda name: whole(cases[name], dialogues))


def assert_equal_in_all_ranks(of_ranks):
    first, *others = of_ranks
    assert "error" not in first, first
    for other in others:
        np.testing.assert_array_equal(other["rewards"], first["rewards"])


@pytest.mark.parametrize("name", names(*(f"tensor parallel {each}" for each in (*WITH_PLAN, *OPTIONS))))
def test_tensor_parallel_scores_are_those_of_the_whole_model(name, results, expected):
    assert_equal_in_all_ranks(results[name])
    got, want = results[name][0], expected(name)
    np.testing.assert_allclose(got["rewards"], want["rewards"], atol=TOLERANCE * max(1, np.abs(want["rewards"]).max()))
    apart = np.abs(want["rewards"][:, None] - want["rewards"]) > 2 * TOLERANCE
    order = np.sign(got["rewards"][:, None] - got["rewards"])
    assert (order[apart] == np.sign(want["rewards"][:, None] - want["rewards"])[apart]).all()
    assert want["rewards"].std() > 100 * TOLERANCE, "the test needs scores that differ clearly"
    assert (got["layout"], got["fused"]) == (want["layout"], want["fused"])


@pytest.mark.parametrize("name", names(*(f"fully sharded {each}" for each in (*ANY, "tensors", "folder"))))
def test_fully_sharded_scores_have_the_bits_of_the_whole_model(name, results, expected):
    assert_equal_in_all_ranks(results[name])
    want = expected(name)
    np.testing.assert_array_equal(results[name][0]["rewards"], want["rewards"])
    assert want["rewards"].std() > 100 * TOLERANCE, "the test needs scores that differ clearly"
    assert results[name][0]["layout"] == want["layout"]


@pytest.mark.parametrize("name", names(*(f"tensor parallel {each}" for each in (*WITH_PLAN, "bfloat16", "int8"))))
def test_the_same_conversation_has_the_same_bits_in_every_batch(name, results):
    result = results[name][0]
    np.testing.assert_array_equal(result["again"], result["rewards"])
    np.testing.assert_array_equal(result["backwards"], result["rewards"])
    assert result["same row twice"][0] == result["same row twice"][1]
    assert result["batch_invariance"] == "bit-equal"


@pytest.mark.slow
def test_four_ranks(saved_model, dialogues, tmp_path):
    case = Case(saved_model("qwen3", **FOUR_HEADS), {"tensor_parallel_size": 4})
    of_ranks = run_in_ranks({"four": case}, dialogues, 4, tmp_path)["four"]
    assert_equal_in_all_ranks(of_ranks)
    want = whole(case, dialogues)
    np.testing.assert_allclose(of_ranks[0]["rewards"], want["rewards"], atol=TOLERANCE)
    assert (
        of_ranks[0]["shapes"]["model.layers.0.self_attn.k_proj.weight"][0] * 4
        == want["shapes"]["model.layers.0.self_attn.k_proj.weight"][0]
    )


@pytest.mark.parametrize("name", ["tensor parallel qwen3", "fully sharded qwen3"])
def test_a_rank_holds_half_of_the_elements(name, results, expected):
    elements = expected(name)["elements"]
    assert all(each["elements"] < 0.55 * elements for each in results[name])


@pytest.mark.slow
def test_partial_sums_in_bfloat16_are_kept_in_float32(results, expected, cases, dialogues):
    in_float32 = whole(dataclasses.replace(cases["tensor parallel bfloat16"], load={}), dialogues)["rewards"]
    one_process = np.abs(expected("tensor parallel bfloat16")["rewards"] - in_float32)
    two_ranks = np.abs(results["tensor parallel bfloat16"][0]["rewards"] - in_float32)
    # Two partial sums that were rounded to bfloat16 would add to the error of one process.
    assert two_ranks.mean() < 1.1 * one_process.mean()


def test_a_plan_that_computes_other_values_is_refused(results):
    for result in results["wrong sums"]:
        assert "computes other values than the whole model" in result["error"]


# --- refused before a process starts -----------------------------------------------------------------------------


def spec_of(folder, **fields):
    return LoadSpec(open_checkpoint(LoadOptions(path=str(folder))), ModuleHead("score"), **fields)


@pytest.mark.parametrize(
    ("architecture", "size", "message"),
    [
        ("qwen3", 3, r"num_attention_heads=4, num_key_value_heads=2.*sizes that can: \[1, 2\]"),
        ("qwen3", 4, r"num_key_value_heads=2.*sizes that can: \[1, 2\].*fsdp_size=4"),
        ("bert", 2, r"no tensor-parallel plan.*'bert'.*pass fsdp_size=2"),
    ],
)
def test_sizes_that_do_not_divide_the_heads_are_refused(architecture, size, message, saved_model):
    with pytest.raises(ConfigError, match=message):
        check_shards(spec_of(saved_model(architecture), tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 2, "fsdp_size": 2}, "cannot be combined"),
        ({"fsdp_size": 2, "quantization": "int8"}, "quantization='int8' does not work with fsdp_size=2"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(fields, message, saved_model):
    with pytest.raises(ConfigError, match=message):
        check_shards(spec_of(saved_model("qwen3"), **fields))


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reading_takes_a_rank_less_than_two_thirds_of_the_memory_of_the_whole_model(tmp_path):
    from tests.engine.executors.sharded_cases import peaks

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}
    model = tiny_models.reward_model("qwen3", num_attention_heads=8, num_key_value_heads=4, **sizes).bfloat16()
    model.save_pretrained(tmp_path / "model")
    tiny_models.tokenizer("qwen").save_pretrained(tmp_path / "model")
    (alone,) = peaks(str(tmp_path / "model"), {}, tmp_path)
    for rank in peaks(str(tmp_path / "model"), TENSOR_PARALLEL, tmp_path):
        assert rank < 0.65 * alone


# --- through the front door --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_whose_rank_is_killed_starts_again_with_the_new_weights(saved_model, dialogues):
    other = saved_model("qwen3", seed=1)
    scorer = gym_rm.load_scorer(saved_model("qwen3"), **TENSOR_PARALLEL)
    try:
        scorer.update_weights(other)
        before = scorer.score(dialogues).rewards
        np.testing.assert_allclose(before, gym_rm.load_scorer(other).score(dialogues).rewards, atol=TOLERANCE)
        (replica,) = scorer.executor.replicas
        old = replica.process_ids
        os.kill(old[1], signal.SIGKILL)
        np.testing.assert_array_equal(scorer.score(dialogues).rewards, before)
        new = replica.process_ids
        assert not set(new) & set(old)
    finally:
        scorer.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in (*old, *new))
