"""Episodes of a step: turns, templates that rewrite history, parts, scorers that fail, and replaced groups."""

import json
import math
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

import gym_rm
from agents.grpo import flat_groups, groups_to_replace, learn
from gym_rm.errors import GymRMError
from gym_rm.reports.runs import read_run
from gym_rm.scorer import load_scorer
from gym_rm.training import playing
from gym_rm.training.learner import Learner
from gym_rm.training.playing import Measurements, Rollouts
from gym_rm.types import Prompt
from tests import chain_models
from tests.training import policy_runs
from tests.training.policy_runs import settings_of, train

FORGETFUL = (  # strips what the assistant said before, as templates strip earlier thinking
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}<|assistant|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = [
    Prompt([{"role": "user", "content": f"What is {n} + {n}?"}], prompt_id=str(n), user_turns=("And now?",))
    for n in range(7)
]


def rollouts_of(folder, *options, scorer=policy_runs.lengths_and_vowels, prompts=PROMPTS, template=None):
    settings = settings_of(folder, *options)
    learner = Learner(settings)
    if template is not None:
        learner.start.tokenizer.chat_template = template
    return (
        Rollouts(settings, learner, prompts, load_scorer(scorer), without_signal=groups_to_replace),
        learner,
        settings,
    )


def plain_log_probs(model, prompt, token_ids):
    ids = torch.from_numpy(np.concatenate([prompt, token_ids])).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["whole history", "forgetful"])
def test_every_turn_learns_exactly_what_was_sampled(template, tmp_path):
    rollouts, learner, settings = rollouts_of(tmp_path, "env.max_turns=2", template=template)
    episodes = rollouts.make(1, None, 0)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert len(turns) == 2 * len(episodes) == 32
    for turn in turns[:8]:
        expected = plain_log_probs(learner.start.model, turn.prompt, turn.completion.token_ids)
        np.testing.assert_allclose(turn.completion.log_probs, expected, atol=1e-5)
    groups = np.repeat([episode.group for episode in episodes], 2)
    batches = learner.batches(turns, groups)
    for batch, values in zip(batches, learner.log_probs(batches), strict=True):
        sampled = np.concatenate([turns[k].completion.log_probs for k in batch.turns])
        np.testing.assert_allclose(values.numpy(), sampled, atol=1e-5)
    second = learner.start.tokenizer.decode(episodes[0].turns[1].prompt)
    said = episodes[0].turns[0].completion.text
    assert (said in second) == (template is None)
    assert "And now?" in second
    metrics, advantages = learn(learner, episodes, settings, step=1, noise=0.0)
    assert metrics["importance_capped"] == 0
    assert metrics["importance_mean"] == pytest.approx(1, abs=1e-4)
    assert len(advantages) == 16
    rollouts.close()


@pytest.mark.parametrize("reward_on", ["turn", "end"])
def test_rewards_of_turns(reward_on, tmp_path):
    options = ("env.max_turns=2", f"env.reward_on={reward_on}", "advantage.per_turn=true", "advantage.discount=0.5")
    rollouts, learner, settings = rollouts_of(tmp_path, *options)
    episodes = rollouts.make(1, None, 0)
    for episode in episodes:
        scores = policy_runs.lengths_and_vowels([[{"content": turn.completion.text}] for turn in episode.turns])
        expected = scores if reward_on == "turn" else [0.0, scores[1]]
        assert [turn.reward for turn in episode.turns] == pytest.approx(expected)
        assert episode.reward == pytest.approx(sum(expected))
    learn(learner, episodes, settings, step=1, noise=0.0)
    rollouts.close()


class Serial:
    """An executor that runs what it is given at once."""

    def __init__(self, *arguments):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **options):
        pass


def plain(episodes):
    return [repr(episode) for episode in episodes]


def test_parts_that_overlap_are_the_same_as_parts_one_after_the_other(tmp_path, monkeypatch):
    found = {}
    for name, parts in {"whole": 1, "overlap": 2, "serial": 2}.items():
        if name == "serial":
            monkeypatch.setattr(playing, "ThreadPoolExecutor", Serial)
        rollouts, _, _ = rollouts_of(tmp_path, f"rollout_parts={parts}")
        found[name] = rollouts.make(1, None, 0) + rollouts.make(2, None, 1)
        rollouts.close()
    assert plain(found["overlap"]) == plain(found["serial"])
    for ours, theirs in zip(found["overlap"], found["whole"], strict=True):
        assert (ours.row, ours.group, ours.prompt_id, ours.reward) == (
            theirs.row,
            theirs.group,
            theirs.prompt_id,
            theirs.reward,
        )
        assert ours.conversation == theirs.conversation


def test_only_flat_groups_are_replaced_and_only_so_often(tmp_path):
    calls = []

    def flat_for_even_numbers(conversations):
        calls.append(len(conversations))
        names = [messages[0]["content"].split()[2] for messages in conversations]
        return [0.0 if int(n) % 2 == 0 else len(m[-1]["content"]) for n, m in zip(names, conversations, strict=True)]

    options = ("advantage.dynamic_sampling=true", "advantage.max_extra_batches=2", "sampling.temperature=2")
    rollouts, _, _ = rollouts_of(tmp_path, *options, scorer=flat_for_even_numbers)
    plain_rollouts, _, _ = rollouts_of(tmp_path, "sampling.temperature=2", scorer=flat_for_even_numbers)
    for step in (1, 2):
        ours, theirs = rollouts.make(step, None, step - 1), plain_rollouts.make(step, None, step - 1)
        flat = flat_groups(np.array([each.reward for each in theirs]), np.array([each.group for each in theirs]))
        assert len(flat)
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine.attempt > 0) == (other.group in flat)
            assert (repr(mine) == repr(other)) == (other.group not in flat)
        assert max(each.attempt for each in ours) <= 2
    assert all(count % 4 == 0 for count in calls)  # whole groups
    rollouts.close()
    plain_rollouts.close()


def test_every_held_out_prompt_is_answered_once_in_order(tmp_path):
    rollouts, learner, settings = rollouts_of(tmp_path, "eval.batch_size=3")
    scored = []
    scorer = load_scorer(lambda conversations: scored.extend(conversations) or [0.0] * len(conversations))
    measurements = Measurements(settings, learner, PROMPTS, scorer, rollouts.source)
    first, second = measurements.make(), measurements.make()
    assert [each.prompt_id for each in first] == [prompt.prompt_id for prompt in PROMPTS]
    assert len(scored) == 2 * len(PROMPTS)
    assert plain(first) == plain(second)
    measurements.close()
    rollouts.close()


def test_rows_that_failed_count_nowhere_and_the_run_goes_on(tmp_path):
    scorer = "env.reward_model=tests.training.policy_runs:failing_now_and_then"
    assert train(tmp_path / "run", scorer, "env.fallback_reward=0", "eval.every=1", "steps=3") is None
    run = read_run(tmp_path / "run")
    rows = [row for row in run.conversations if row["phase"] == "train"]
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(failed) < len(rows) == 3 * 16
    assert all(row["advantage"] == 0 for row in failed)
    assert any(row["advantage"] != 0 for row in rows)
    assert sum(row["failed"] for row in run.training) == pytest.approx(len(failed) / 16)


def test_without_a_fallback_the_run_ends_with_a_checkpoint_and_goes_on(tmp_path, monkeypatch):
    options = ("env.reward_model=tests.training.policy_runs:lengths_and_vowels", "eval.every=4")
    train(tmp_path / "whole", *options)
    score, calls = policy_runs.lengths_and_vowels, []

    def failing(conversations):
        calls.append(1)
        if len(calls) == 4:  # one measurement, then the third step
            raise RuntimeError("no power")
        return score(conversations)

    with monkeypatch.context() as patch:
        patch.setattr(policy_runs, "lengths_and_vowels", failing)
        with pytest.raises(
            GymRMError, match=r"scoring failed at .*test_playing.py, line \d+: RuntimeError: no power"
        ) as e:
            train(tmp_path / "run", *options)
    assert "The checkpoint after step 2 is saved" in e.value.__notes__[-1]
    train(tmp_path / "run", *options)
    policy_runs.require_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_failed_turn_makes_its_episode_fail(tmp_path):
    def second_fails(conversations):
        return [
            math.nan if len(messages) > 2 and messages[0]["content"][8] == "3" else 1.0 for messages in conversations
        ]

    rollouts, learner, settings = rollouts_of(
        tmp_path, "env.max_turns=2", "env.fallback_reward=0", "advantage.per_turn=true", scorer=second_fails
    )
    episodes = [each for step in (1, 2) for each in rollouts.make(step, None, 0)]
    failed = [each for each in episodes if math.isnan(each.reward)]
    assert failed
    assert {each.prompt_id for each in failed} == {"3"}
    metrics, advantages = learn(learner, episodes[:16], settings, step=1, noise=0.0)
    assert (advantages == 0).all()
    assert json.dumps(metrics, allow_nan=False)
    rollouts.close()


def test_verdicts_are_those_of_the_rows_and_components_only_those_that_a_row_has(tmp_path):
    def graded(conversations):
        count = len(conversations)
        return gym_rm.Scores.from_rewards(
            [1.0] * count,
            components={"math": [1.0] * count, "chat": [math.nan] * count},
            infos={"math/verdict": [f"verdict {row}" for row in range(count)]},
        )

    rollouts, *_ = rollouts_of(tmp_path, scorer=graded)
    episodes = rollouts.make(1, None, 0)
    assert [episode.verdicts for episode in episodes] == [{"math/verdict": f"verdict {row}"} for row in range(16)]
    assert all(episode.components == {"math": 1.0} for episode in episodes)


def test_a_chat_model_plays_the_user(tmp_path):
    folder = tmp_path / "user"
    folder.mkdir()
    chain_models.save_chain(folder, {"\n": ["Why?"], "Why?": [chain_models.END]})
    options = ("env.max_turns=3", f"env.respond={{model: {folder}, max_turns: 1}}")
    rollouts, _, _ = rollouts_of(tmp_path / "run", *options, prompts=[replace(each, user_turns=()) for each in PROMPTS])
    episodes = rollouts.make(1, None, 0)
    assert {len(episode.turns) for episode in episodes} == {2}
    assert {episode.conversation[2]["content"] for episode in episodes} == {"Why?"}
    rollouts.close()
