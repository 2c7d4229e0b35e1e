import copy
import logging
import pickle

import numpy as np
import pytest
import torch

import gym_rm
from gym_rm.engine.text.renderer import Renderer
from gym_rm.scores import ScoringError
from tests import tiny_models
from tests.engine.watching import dialogue, size_of, watched_scorer


def poisoned(parts, token):
    """Return a copy of the model in which the embedding of one token is NaN."""
    model, tokenizer = parts
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.base_model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(token)] = float("nan")
    return model, tokenizer


@pytest.mark.parametrize("options", [{}, {"tree": False}])
def test_a_weight_of_nan_costs_only_the_rows_that_read_it(parts, options):
    good, bad = dialogue("Tell me", "yes"), dialogue("Tell me", "no ~")
    scorer = watched_scorer(poisoned(parts, "~"), **options)
    expected = watched_scorer(parts, **options).score([good]).rewards[0]
    reason = "1 of 3 conversations could not be scored: row 1: the reward model returned nan"
    with pytest.raises(ScoringError, match=reason) as caught:
        scorer.score([good, bad, good])
    scores = caught.value.scores
    assert np.isnan(scores.rewards[1])
    assert scores.rewards[[0, 2]].tolist() == [expected, expected]
    assert scores.errors[0] is scores.errors[2] is None
    assert pickle.loads(pickle.dumps(caught.value)).rows == (1,)


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("architecture", "options", "layer"),
    [
        ("qwen3", {"kind": "process", "step_token": "~"}, "score"),
        ("gemma2", {"kind": "generative", "answers": ("1", "2")}, "lm_head"),  # with a soft cap
        ("roberta", {}, "classifier.dense"),
        ("bert", {}, "bert.pooler.dense"),
    ],
)
def test_an_infinite_value_is_no_reward_after_it_was_squashed(architecture, options, layer, number):
    make = tiny_models.policy if layer == "lm_head" else tiny_models.reward_model
    model = make(architecture)
    tokenizer = tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
    scorer = gym_rm.RewardModelScorer(model, tokenizer, **options)
    model.get_submodule(layer).register_forward_hook(lambda layer, inputs, output: torch.full_like(output, number))
    with pytest.raises(ScoringError) as caught:
        scorer.score([dialogue("Tell me", "yes"), dialogue("Tell me", "no")])
    assert caught.value.rows == (0, 1)


def test_a_nan_in_a_later_turn_does_not_reach_the_score_of_an_earlier_turn(parts):
    start = dialogue("Tell me", "yes")
    longer = [*start, *dialogue("why?", "no ~")]
    expected = watched_scorer(parts).score([start]).rewards[0]
    with pytest.raises(ScoringError) as caught:
        watched_scorer(poisoned(parts, "~")).score([start, longer])
    assert caught.value.rows == (1,)
    assert caught.value.scores.rewards[0] == expected


def test_a_row_that_always_fails_does_not_affect_its_batch(parts, gsm8k_groups, logged):
    conversations = [conversation for group in gsm8k_groups[:6] for conversation in group]
    expected = watched_scorer(parts, max_num_batched_tokens=1200).score(conversations)
    conversations[7] = [*conversations[7][:-1], {"role": "assistant", "content": "~"}]
    token = parts[1].convert_tokens_to_ids("~")
    broken = RuntimeError("the device was lost")
    scorer = watched_scorer(
        parts,
        fails=lambda batch, call: broken if (batch.input_ids == token).any() else None,
        max_num_batched_tokens=1200,
    )
    with pytest.raises(ScoringError) as caught:
        scorer.score(conversations)
    scores = caught.value.scores
    assert caught.value.rows == (7,)
    assert scores.errors[7] == "its batch failed: RuntimeError: the device was lost"
    others = np.delete(np.arange(len(conversations)), 7)
    assert scores.rewards[others].tolist() == expected.rewards[others].tolist()
    assert "sequences failed (RuntimeError: the device was lost); running each alone" in logged.text
    assert scorer.score(conversations[:4]).failed_rows == (), "the scorer can be used after a failure"


def out_of_memory_above(limit):
    return lambda batch, call: torch.OutOfMemoryError("CUDA out of memory") if size_of(batch) > limit else None


@pytest.mark.parametrize("tree", [True, False])
def test_out_of_memory_halves_the_budget_and_remembers_it(tree, parts, gsm8k_groups, logged):
    conversations = [conversation for group in gsm8k_groups[:6] for conversation in group]
    expected = watched_scorer(parts, tree=tree).score(conversations).rewards
    limit = max(len(one.input_ids) for one in Renderer(parts[1]).encode(conversations)) + 100
    scorer = watched_scorer(parts, tree=tree, fails=out_of_memory_above(limit), max_num_batched_tokens=100_000)
    rewards = scorer.score(conversations).rewards
    assert rewards.tolist() == expected.tolist()
    assert scorer.max_num_batched_tokens <= limit
    warned = [record.message for record in logged.records if record.levelno == logging.WARNING]
    assert len([message for message in warned if "out of memory" in message]) == 1
    assert f"continuing with {scorer.max_num_batched_tokens}" in warned[0]

    scorer.executor.batches.clear()
    again = scorer.score(conversations).rewards
    assert again.tolist() == rewards.tolist()
    assert max(map(size_of, scorer.executor.batches)) <= limit, "batch sizes that failed before are not tried again"
    assert len(logged.records) == len([r for r in logged.records if "out of memory" not in r.message]) + 1


def test_the_scorer_can_be_used_after_an_interrupt(parts, real_conversations):
    scorer = watched_scorer(parts, fails=lambda batch, call: KeyboardInterrupt() if call == 1 else None)
    with pytest.raises(KeyboardInterrupt):
        scorer.score(real_conversations)
    assert scorer.score(real_conversations).failed_rows == ()


def test_conversations_over_max_length_fail_only_their_rows(scorer_of):
    scorer = scorer_of("qwen3")
    huge, endless = dialogue("q", "So it is. " * 100_000), dialogue(*["turn"] * 10_000)
    with pytest.raises(ScoringError, match="more than max_length=32768") as caught:
        scorer.score([huge, dialogue("q", "a"), endless])
    assert caught.value.rows == (0, 2)
    assert caught.value.scores.rewards[1] == scorer.score([dialogue("q", "a")]).rewards[0]


def test_cut_tokens_are_counted_and_warned_of_once(saved_model, logged):
    scorer = gym_rm.load_scorer(saved_model("qwen3"), max_length=200, overlong="drop_turns")
    endless = dialogue(*["What is 12 + 30?", "It is 42."] * 500)
    scores = scorer.score([endless, dialogue("q", "a"), endless])
    whole = len(Renderer(scorer.renderer.tokenizer).encode([endless])[0].input_ids)
    assert scores.num_tokens[0] <= 200
    assert scores.truncated_tokens.tolist() == [whole - scores.num_tokens[0], 0, whole - scores.num_tokens[0]]
    assert scores.provenance.settings["overlong"] == "drop_turns"
    scorer.score([endless])
    assert len([record for record in logged.records if "are cut" in record.message]) == 1
