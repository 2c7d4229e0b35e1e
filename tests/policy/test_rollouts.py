"""Rollouts of a step: turns, templates that rewrite history, failed scorers, replaced groups, and what is learned."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gym_rm
from agents import grpo
from gym_rm.errors import ConfigError
from gym_rm.policy.advantages import zero_variance_groups
from gym_rm.policy.learner import Learner
from gym_rm.policy.rollout_schedule import RolloutSchedule
from gym_rm.policy.rollouts import Rollout, RolloutTable, position_consistent, rollout_metrics
from gym_rm.policy.samplers import make_sampler
from gym_rm.reports.runs import read_run
from gym_rm.scorers.load import load_scorer
from gym_rm.types import Prompt
from tests import chain_models, tiny_models
from tests.chain_models import END
from tests.policy import policy_runs
from tests.policy.policy_runs import settings_of, train

FORGETFUL = (  # strips what the assistant said before, as templates strip earlier thinking
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}<|assistant|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = [
    Prompt([{"role": "user", "content": f"What is {n} + {n}?"}], prompt_id=str(n), user_turns=("And now?",))
    for n in range(7)
]


class Run:
    """The parts of a run of the embedded policy."""

    def __init__(self, folder, *options, scorer=policy_runs.lengths_and_vowels, prompts=PROMPTS, template=None):
        self.settings = settings_of(folder, *options)
        self.learner, self.scorer, self.prompts = Learner(self.settings), load_scorer(scorer), prompts
        if template is not None:
            self.learner.start.tokenizer.chat_template = template
        self.schedule = RolloutSchedule(
            self.settings, self.learner, num_prompts=len(prompts), num_held_out=len(prompts)
        )
        self.sampler, _ = make_sampler(self.settings, self.learner)

    def play(self, batch, group_size=4):
        envs = grpo.make_envs(self.settings, self.prompts, self.scorer, len(batch.playing), group_size)
        rollouts = grpo.play(envs, self.sampler, batch, grpo.PhaseTimer()).rollouts
        envs.close()
        return rollouts

    def step(self, number=1):
        return self.play(self.schedule.training(number))

    def learn(self, rollouts):
        parts = (self.learner, self.scorer, self.settings, grpo.PhaseTimer())
        return grpo.train_step(1, lambda step: RolloutTable(rollouts), *parts)[1:]


def plain_log_probs(model, prompt, token_ids):
    ids = torch.from_numpy(np.concatenate([prompt, token_ids])).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["whole history", "forgetful"])
def test_every_turn_learns_exactly_what_was_sampled(template, tmp_path):
    run = Run(tmp_path, "env.max_turns=2", template=template)
    rollouts = run.step()
    samples = RolloutTable(rollouts)
    assert len(samples.turns) == 2 * len(rollouts) == 32
    for turn in samples.turns[:8]:
        expected = plain_log_probs(run.learner.start.model, turn.prompt, turn.completion.token_ids)
        np.testing.assert_allclose(turn.completion.log_probs, expected, atol=1e-5)
    learnt = samples.scatter(run.learner.log_probs(run.learner.batches(samples.turns, samples.groups)))
    np.testing.assert_allclose(learnt, samples.log_probs, atol=1e-5)
    assert not rollout_metrics(rollouts).keys() & {"thinking_tokens", "answer_tokens"}
    second = run.learner.start.tokenizer.decode(rollouts[0].turns[1].prompt)
    assert (rollouts[0].turns[0].completion.text in second) == (template is None)
    assert "And now?" in second
    advantages, metrics = run.learn(rollouts)
    assert metrics["importance_capped"] == 0
    assert metrics["importance_mean"] == pytest.approx(1, abs=1e-4)
    assert len(advantages) == 16


def test_an_environment_gets_the_tag_that_the_template_opened(tmp_path):
    chain = {"\n": [" 3?"], " 3?": [" 4?", "</think>"], " 4?": [" 3?"], "</think>": [" It is 4."], " It is 4.": [END]}
    template = tiny_models.CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    policy = chain_models.save_chain(tmp_path / "policy", chain, chat_template=template)
    prompts = [replace(prompt, answer="4") for prompt in PROMPTS]
    options = ("sampling.max_new_tokens=6", "env.max_turns=2", f"policy.model={policy}")
    run = Run(tmp_path, *options, scorer={"kind": "math"}, prompts=prompts)
    rollouts = run.step()
    tokenizer = run.learner.start.tokenizer
    for rollout in rollouts:
        said = [message["content"] for message in rollout.conversation if message["role"] == "assistant"]
        assert said == [turn.reply for turn in rollout.turns]
        for turn in rollout.turns:
            sampled = tokenizer.decode(turn.completion.token_ids).removesuffix(END)
            assert turn.reply == "<think>\n" + sampled
            of_answer = 2 if turn.completion.finished else 0  # with the end token
            assert turn.thinking_tokens == len(turn.completion.token_ids) - of_answer
            assert turn.reward == turn.completion.finished
        assert rollout.right == rollout.turns[-1].completion.finished
    assert 0 < sum(rollout.finished for rollout in rollouts) < len(rollouts)
    metrics = rollout_metrics(rollouts)
    assert metrics["thinking_tokens"] + metrics["answer_tokens"] == metrics["completion_tokens"]
    assert metrics["accuracy"] == np.mean([rollout.right for rollout in rollouts])
    assert run.learn(rollouts)[1]["importance_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("reward_on", ["turn", "improvement", "end"])
def test_rewards_of_turns(reward_on, tmp_path):
    options = ("env.max_turns=2", f"env.reward_on={reward_on}", "advantage.per_turn=true")
    run = Run(tmp_path, *options)
    rollouts = run.step()
    for rollout in rollouts:
        scores = policy_runs.lengths_and_vowels([[{"content": turn.completion.text}] for turn in rollout.turns])
        expected = {"turn": scores, "improvement": [scores[0], scores[1] - scores[0]], "end": [0.0, scores[1]]}
        assert [turn.reward for turn in rollout.turns] == pytest.approx(expected[reward_on])
        assert rollout.reward == pytest.approx(sum(scores) if reward_on == "turn" else scores[1])
    assert run.learn(rollouts)[1]["grad_norm"] > 0


def test_only_zero_variance_groups_are_replaced_and_only_so_often(tmp_path):
    def flat_for_even_numbers(conversations):
        names = [messages[0]["content"].split()[2] for messages in conversations]
        return [0.0 if int(n) % 2 == 0 else len(m[-1]["content"]) for n, m in zip(names, conversations, strict=True)]

    run = Run(tmp_path, "sampling.temperature=2", scorer=flat_for_even_numbers)
    rollouts = run.step()
    flat = grpo.zero_variance_groups(RolloutTable(rollouts), run.settings)
    rewards, groups = RolloutTable(rollouts).column("reward"), RolloutTable(rollouts).column("group")
    assert 0 < len(flat) < 4
    assert flat.tolist() == zero_variance_groups(rewards, groups).tolist()
    others = run.play(run.schedule.replacing(flat, step=1, attempt=1))
    assert {rollout.group for rollout in others} == set(flat.tolist())  # whole groups
    for ours, theirs in zip(
        RolloutTable.joined([RolloutTable(rollouts), RolloutTable(others)]).rollouts, rollouts, strict=True
    ):
        assert ours.row == theirs.row
        assert (ours.attempt == 1) == (ours.group in flat)


def test_every_held_out_prompt_is_answered_once_in_order_and_always_in_the_same_way(tmp_path):
    run = Run(tmp_path)
    first, second = (run.play(run.schedule.held_out(), group_size=1) for _ in range(2))
    assert [rollout.prompt_id for rollout in first] == [prompt.prompt_id for prompt in PROMPTS]
    assert repr(first) == repr(second)


def test_a_step_has_the_same_rollouts_on_any_number_of_ranks(tmp_path):
    run = Run(tmp_path)
    ranks = [SimpleNamespace(rank=rank, world=2, start=run.learner.start) for rank in range(2)]
    schedules = [RolloutSchedule(run.settings, rank, num_prompts=7, num_held_out=7) for rank in ranks]
    parts = [rollout for schedule in schedules for rollout in run.play(schedule.training(3))]
    for ours, theirs in zip(parts, run.step(3), strict=True):
        assert (ours.row, ours.prompt_id, ours.conversation) == (theirs.row, theirs.prompt_id, theirs.conversation)
    three = SimpleNamespace(rank=0, world=3, start=run.learner.start)
    with pytest.raises(ConfigError, match=r"env\.num_prompts=4 must be a multiple of the 3 processes"):
        RolloutSchedule(run.settings, three, num_prompts=7, num_held_out=7)


def test_rows_that_failed_count_nowhere_and_the_run_continues(tmp_path):
    scorer = "env.reward_model=tests.policy.policy_runs:failing_now_and_then"
    assert train(tmp_path / "run", scorer, "env.fallback_reward=0", "eval.every=1", "steps=3") is None
    run = read_run(tmp_path / "run")
    rows = [row for row in run.conversations if row["phase"] == "train"]
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(failed) < len(rows) == 3 * 16
    assert all(row["advantage"] == 0 for row in failed)
    assert any(row["advantage"] != 0 for row in rows)
    assert sum(row["failed"] for row in run.training) == pytest.approx(len(failed) / 16)


def test_a_failed_turn_makes_its_rollout_fail(tmp_path):
    def second_fails(conversations):
        return [
            math.nan if len(messages) > 2 and messages[0]["content"][8] == "3" else 1.0 for messages in conversations
        ]

    options = ("env.max_turns=2", "env.fallback_reward=0", "advantage.per_turn=true")
    run = Run(tmp_path, *options, scorer=second_fails)
    rollouts = run.step(1) + run.step(2)
    assert {rollout.prompt_id for rollout in rollouts if math.isnan(rollout.reward)} == {"3"}
    advantages, metrics = run.learn(rollouts[:16])
    assert (advantages == 0).all()
    assert json.dumps(metrics, allow_nan=False)


def test_verdicts_are_those_of_the_rows_and_components_only_those_that_a_row_has(tmp_path):
    def graded(conversations):
        count = len(conversations)
        return gym_rm.Scores.from_rewards(
            [1.0] * count,
            components={"math": [1.0] * count, "chat": [math.nan] * count},
            infos={"math/verdict": [f"verdict on {each[-1]['content']}" for each in conversations]},
        )

    rollouts = Run(tmp_path, scorer=graded).step()
    for rollout in rollouts:
        assert rollout.verdicts == {"math/verdict": f"verdict on {rollout.conversation[-1]['content']}"}
    assert all(rollout.components == {"math": 1.0} for rollout in rollouts)


def judged(**verdicts):
    """Return a rollout for each verdict, by the place of the better reply in the first, second, ... pair."""
    return [
        Rollout(0, 0, f"{name[-1]}/{name[:-1]}", None, [], (), {}, verdicts={"verdict": verdict})
        for name, verdict in verdicts.items()
    ]


def test_pairs_whose_verdict_is_the_same_in_both_orders_are_counted():
    rollouts = judged(first0="right", second0="right", first1="wrong", second1="right", second2="wrong", first2="wrong")
    assert position_consistent(rollouts) == pytest.approx(2 / 3)
    assert position_consistent(judged(first0="right", second0="unreadable", first1="tie")) is None
    assert position_consistent([replace(each, verdicts={}) for each in rollouts]) is None


def first_varies(conversations):
    """The first reply has 0.1 for each character, the last one 0.7, which no sum of floats of the two makes exactly."""
    values = np.array([0.7 if len(c) > 2 else 0.1 * len(c[-1]["content"]) for c in conversations])
    return gym_rm.Scores.from_rewards(values, components={"half": values / 2})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gdpo"])
def test_improvements_telescope_to_the_last_score_and_its_components(estimator, tmp_path):
    options = ("env.max_turns=2", "env.reward_on=improvement", f"advantage.estimator={estimator}")
    run = Run(tmp_path, *options, scorer=first_varies)
    table = RolloutTable(run.step())
    firsts = {turn.score for turn in table.turns[::2]}
    assert len(firsts) > 2
    assert any(math.fsum(turn.reward for turn in each.turns) != 0.7 for each in table.rollouts)  # but for the last bit
    assert [rollout.reward for rollout in table.rollouts] == [0.7] * 16
    assert [rollout.components for rollout in table.rollouts] == [{"half": 0.35}] * 16
    assert len(grpo.zero_variance_groups(table, run.settings)) == 4  # as for whole episodes nothing is to be learned
    assert not grpo.estimate(table, run.settings)[0].any()


def test_improvements_from_a_turn_on_are_compared_with_those_of_the_same_turn(tmp_path):
    options = ("env.max_turns=2", "env.reward_on=improvement", "advantage.per_turn=true", "advantage.estimator=rloo")
    run = Run(tmp_path, *options, scorer=first_varies)
    table = RolloutTable(run.step())
    advantages, counted = grpo.estimate(table, run.settings)
    of_turns = advantages[np.cumsum(table.lengths) - table.lengths].reshape(4, 4, 2)
    firsts = np.array([turn.score for turn in table.turns]).reshape(4, 4, 2)[..., 0]
    np.testing.assert_allclose(of_turns[..., 0], 0, atol=1e-12)  # every episode ends with one score
    left = 0.7 - firsts  # for the second turn
    np.testing.assert_allclose(of_turns[..., 1], (left - left.mean(1, keepdims=True)) * 4 / 3, atol=1e-12)
    assert counted.all()
    assert of_turns[..., 1].any()


def test_an_episode_with_a_turn_without_an_improvement_is_left_out(tmp_path):
    def fails(conversations):
        return [math.nan if len(c) == 2 and "4" in c[0]["content"] else float(len(c)) for c in conversations]

    run = Run(tmp_path, "env.max_turns=2", "env.reward_on=improvement", "env.fallback_reward=5", scorer=fails)
    table = RolloutTable(run.step())
    _, counted = grpo.estimate(table, run.settings)
    failed = np.array(["4" in each.conversation[0]["content"] for each in table.rollouts])
    assert 0 < failed.sum() < 16
    assert np.isnan(table.column("reward")).tolist() == failed.tolist() == (~counted[::2]).tolist()
    for rollout in np.array(table.rollouts, dtype=object)[failed]:
        assert [turn.score for turn in rollout.turns] == [None, 4.0]
        assert np.isnan([turn.reward for turn in rollout.turns]).all()
