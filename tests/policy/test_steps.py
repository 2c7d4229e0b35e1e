"""Rewards of steps in a run: the tokens of each step, what they learn, and what a run refuses."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm import Scores
from gym_rm.checks import model_source
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError
from gym_rm.policy.rollout_batch import tokens_between
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.reports.runs import read_run
from tests import chain_models, tiny_models
from tests.chain_models import END
from tests.policy.policy_runs import settings_of, train
from tests.policy.test_rollouts import Run

TOKENIZER = load_tokenizer(model_source("path", "embedded:policy"))


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab 0.é😀界\u3000\n\ufffd", min_size=1, max_size=20), st.data())
def test_every_token_belongs_to_the_part_of_its_last_byte(text, data):
    whole, single = ids_of(text), [token for character in text for token in ids_of(character)]
    ids = data.draw(st.sampled_from([whole, single]))
    starts = sorted(data.draw(st.lists(st.integers(-2, len(text)), max_size=4)))
    owners = [k for k, character in enumerate(text) for _ in character.encode()]  # the character of each byte
    ends = np.cumsum([*map(len, TOKENIZER.convert_ids_to_tokens(ids))])
    parts = [sum(start <= owners[end - 1] for start in starts) for end in ends]
    lengths = tokens_between(starts, np.array(ids, dtype=np.int32), TOKENIZER.decode)
    assert lengths == tuple(np.bincount(parts, minlength=len(starts) + 1).tolist())


def rated(conversations):
    """Rate each step of the replies by its length; a reply without letters has no score."""
    replies = [messages[-1]["content"] for messages in conversations]
    spans = [[(m.start(), m.end()) for m in re.finditer(r"\S+", reply)] for reply in replies]
    steps = [[float(end - start) for start, end in each] for each in spans]
    scores = Scores.from_rewards([min(each, default=math.nan) for each in steps])
    return dataclasses.replace(scores, step_rewards=steps, step_ends=[[end for _, end in each] for each in spans])


def test_the_steps_of_a_reply_have_its_tokens_also_if_the_template_opens_the_thinking(tmp_path):
    chain = {"\n": [" 3?"], " 3?": [" 4?", "</think>"], " 4?": [" 3?"], "</think>": [" It is 4."], " It is 4.": [END]}
    template = tiny_models.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    policy = chain_models.save_chain(tmp_path / "policy", chain, chat_template=template)
    options = ("sampling.max_new_tokens=8", "env.max_turns=2", f"policy.model={policy}", "advantage.steps=sum")
    run = Run(tmp_path, *options, scorer=rated)
    rollouts = run.step()
    for turn in RolloutTable(rollouts).turns:
        ids, ends = turn.completion.token_ids, [0, *np.cumsum(turn.step_lengths)]
        said = ["".join(run.learner.start.tokenizer.decode(ids[a:b])) for a, b in itertools.pairwise(ends)]
        assert ends[-1] == len(ids)
        assert len(turn.step_rewards) == len(turn.step_ends) == len(turn.reply.split())
        assert turn.step_lengths[0] == 0  # of "<think>", which was not sampled
        assert "".join(said).removesuffix(END) == turn.completion.text
        if turn.completion.finished:  # ` It is 4.` is one token, of the step of its last word, as the end token
            assert turn.step_lengths[-3:] == (0, 0, 2)
    assert run.learn(rollouts)[1]["grad_norm"] > 0


@pytest.mark.parametrize("credit", ["min", "sum", "last"])
def test_tokens_learn_from_their_own_step_and_failed_rows_from_none(credit, tmp_path):
    options = ("env.max_turns=2", "env.fallback_reward=0", f"advantage.steps={credit}", "advantage.dynamic_sampling=1")
    run = Run(tmp_path, *options, scorer=rated)
    rollouts = run.step()
    rollouts[3] = dataclasses.replace(rollouts[3], turns=(dataclasses.replace(rollouts[3].turns[0], reward=math.nan),))
    samples = RolloutTable(rollouts)
    numbered = [np.arange(1.0, 1 + len(steps)) for steps in samples.steps]
    values = np.split(samples.spread_over_tokens(numbered), np.cumsum([each.num_tokens for each in rollouts])[:-1])
    assert (values[3] == 0).all()
    for rollout, of_rollout in zip(rollouts, values, strict=True):
        lengths = [length for turn in rollout.turns for length in turn.step_lengths]
        if rollout is not rollouts[3]:
            assert of_rollout.tolist() == np.repeat(np.arange(1.0, 1 + len(lengths)), lengths).tolist()
    advantages, metrics = run.learn(rollouts)
    assert advantages[3] == 0
    assert metrics["grad_norm"] > 0


def test_a_turn_that_was_not_scored_has_the_value_of_the_next_step(tmp_path):
    run = Run(tmp_path, "env.max_turns=2", "env.reward_on=end", scorer=rated)
    rollout = run.step()[0]
    first, last = (len(turn.completion.token_ids) for turn in rollout.turns)
    values = RolloutTable([rollout]).spread_over_tokens([np.arange(1.0, 1 + len(rollout.step_rewards))])
    assert rollout.turns[0].step_rewards == ()
    assert values[:first].tolist() == [1.0] * first
    assert len(values) == first + last


def test_a_run_keeps_the_steps_and_a_scorer_without_steps_is_refused(tmp_path):
    train(tmp_path / "run", "env.reward_model=tests.policy.test_steps:rated", "advantage.steps=min", "steps=1")
    run = read_run(tmp_path / "run")
    for row in run.conversations:
        content = row["messages"][-1]["content"]
        assert [[len(word) for word in content.split()]] == row["step_rewards"]
        assert content[: row["step_ends"][0][-1]] == content.rstrip()
    assert run.training[0]["steps_per_reply"] == pytest.approx(3, abs=2)
    with pytest.raises(ConfigError, match=r"advantage\.steps='min' needs a process reward model"):
        train(tmp_path / "other", "advantage.steps=min", "steps=1")


@pytest.mark.parametrize("other", ["estimator=gdpo", "per_turn=true", "overlong_buffer=4"])
def test_steps_are_not_compared_together_with_other_things(other, tmp_path):
    with pytest.raises(ConfigError, match="compares steps instead of the rewards of replies"):
        settings_of(tmp_path, "advantage.steps=last", f"advantage.{other}")


def test_the_advantage_of_the_reward_is_added_with_its_weight(tmp_path):
    options = ("advantage.steps=min", "env.fallback_reward=0")
    runs = [Run(tmp_path, *each, scorer=rated) for each in (options, (*options, "advantage.reward_weight=0.5"), ())]
    rollouts = runs[0].step()
    steps, both, reward = (run.learn(rollouts)[0] for run in runs)
    np.testing.assert_allclose(both, steps + 0.5 * reward, atol=1e-12)
    with pytest.raises(ConfigError, match=r"advantage\.reward_weight is for advantage\.steps"):
        settings_of(tmp_path, "advantage.reward_weight=1")
