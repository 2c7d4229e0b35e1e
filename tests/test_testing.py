import dataclasses

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import gym_rm
from gym_rm import Scores, ScoringError
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.testing import check_scorer, check_vector_env
from gym_rm.types import Prompt

PROMPTS = ["one?", {"prompt": "two?", "user_turns": ["sure?"]}, "three?"]


def count_characters(conversations):
    return [sum(len(message["content"]) for message in conversation) for conversation in conversations]


class Broken:
    """A good scorer, but for what `spoil` does to its scores."""

    def __init__(self, spoil):
        self.spoil = spoil

    def score(self, conversations, prompts=None):
        scores = Scores.from_rewards(count_characters(conversations))
        return self.spoil(scores, conversations) or scores


class BrokenVerifier:
    """A good verifier, but for what `spoil` does with its scores and prompts."""

    def __init__(self, spoil=lambda scores, prompts: None):
        self.spoil = spoil

    def score(self, conversations, prompts=None):
        prompts = [None] * len(conversations) if prompts is None else prompts
        right = [
            float(prompt is not None and prompt.answer in conversation[-1]["content"])
            for conversation, prompt in zip(conversations, prompts, strict=True)
        ]
        scores = Scores.from_rewards(right)
        return self.spoil(scores, prompts) or scores


def replaced(scores, **columns):
    return dataclasses.replace(scores, **columns)


def shift_by_batch_size(scores, conversations):
    scores.rewards[:] += len(conversations)


def shift_by_position(scores, conversations):
    scores.rewards[:] += np.arange(len(conversations))


def shift_second_copy(scores, conversations):
    seen = [conversation in conversations[:row] for row, conversation in enumerate(conversations)]
    scores.rewards[seen] += 1e-6 * np.abs(scores.rewards[seen]) + 1e-6


def edit(scores, conversations):
    conversations[0][-1]["content"] += "!"


def hide_nan(scores, conversations):
    scores.rewards[:1] = np.nan


def raise_for_bad_text(scores, conversations):
    str(conversations).encode()
    "".join(message["content"] for conversation in conversations for message in conversation).encode()


def fail_all_for_bad_text(scores, conversations):
    if any("\ud800" in message["content"] for conversation in conversations for message in conversation):
        raise ScoringError(Scores.from_rewards([np.nan] * len(conversations)))


def fail_next_to_bad_text(scores, conversations):
    if any("\ud800" in message["content"] for conversation in conversations for message in conversation):
        scores.rewards[:] += 1.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shift_by_batch_size, "scored one call each, rewards move by"),
        (shift_by_position, "scored in the reverse order, rewards move by"),
        (shift_second_copy, "equal conversations in one call got different rewards"),
        (edit, "score changed the conversations"),
        (hide_nan, "row 0 has the reward nan and the error None"),
        (raise_for_bad_text, "a conversation with a lone surrogate raised UnicodeEncodeError"),
        (fail_all_for_bad_text, r"a bad conversation in row 1 made rows \(0, 1, 2\) fail"),
        (fail_next_to_bad_text, "scored next to a bad conversation, rewards move by"),
        (lambda scores, _: [0.0] * len(scores), "returned a list, expected gym_rm.Scores"),
        (
            lambda scores, _: replaced(scores, rewards=scores.rewards[1:]),
            r"rewards has the shape \(4,\), expected \(5,\)",
        ),
        (lambda scores, _: replaced(scores, rewards=scores.rewards.astype(float)), "rewards has the dtype float64"),
        (lambda scores, _: replaced(scores, num_tokens=[0]), "num_tokens is a list"),
        (lambda scores, _: replaced(scores, num_tokens=scores.num_tokens - 1), "negative num_tokens"),
        (
            lambda scores, _: replaced(scores, components={"a": scores.num_tokens}),
            r"components\['a'\] has the dtype int64",
        ),
        (lambda scores, _: replaced(scores, errors=("bad", *scores.errors[1:])), "and the error 'bad'"),
        (
            lambda scores, _: replaced(scores, terminations=np.zeros(3, dtype=bool)),
            r"terminations have the shape \(3,\)",
        ),
        (lambda scores, _: replaced(scores, terminations=np.zeros(len(scores))), "terminations must be bool"),
        (
            lambda scores, _: replaced(scores, infos={"verdict": np.zeros(3)}),
            r"infos\['verdict'\] has 3 entries for 5 conversations",
        ),
    ],
)
def test_a_broken_scorer_is_found_out(spoil, message):
    with pytest.raises(AssertionError, match=message):
        check_scorer(Broken(spoil))


def edit_the_prompts(scores, prompts):
    prompts[0].metadata["seen"] = True


def shift_by_the_first_prompt(scores, prompts):
    scores.rewards[:] += len(prompts[0].prompt_id if prompts and prompts[0] is not None else "")


def fail_for_a_prompt_alone(scores, prompts):
    if len(prompts) == 1:
        raise ScoringError(Scores.from_rewards([np.nan]))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (edit_the_prompts, AssertionError, "score changed the conversations or prompts"),
        (shift_by_the_first_prompt, AssertionError, "rewards move by"),
        (fail_for_a_prompt_alone, ScoringError, "1 of 1 conversations could not be scored"),
    ],
)
def test_a_broken_verifier_is_found_out(spoil, error, message):
    conversations = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}] for text in "457"]
    prompts = [Prompt(({"role": "user", "content": "2 + 2?"},), "p" * size, answer="4") for size in (1, 2, 3)]
    check_scorer(BrokenVerifier(), conversations, prompts)
    with pytest.raises(error, match=message):
        check_scorer(BrokenVerifier(spoil), conversations, prompts)


def test_a_scorer_is_given_a_prompt_for_every_conversation():
    asked = []
    check_scorer(BrokenVerifier(lambda scores, prompts: asked.append(len([p for p in prompts if p is not None]))))
    assert max(asked) == 10
    assert 1 in asked


def test_prompts_must_be_as_many_as_conversations():
    conversations = [[{"role": "user", "content": text}] for text in "ab"]
    with pytest.raises(AssertionError, match="got 1 prompts for 2 conversations"):
        check_scorer(BrokenVerifier(), conversations, [Prompt((), "0", answer="a")])


def test_one_conversation_proves_too_little():
    with pytest.raises(AssertionError, match="needs at least two conversations"):
        check_scorer(gym_rm.load_scorer(count_characters), [[{"role": "user", "content": "a"}]])


def test_good_scorers_pass():
    check_scorer(gym_rm.load_scorer(count_characters))
    check_scorer(Broken(lambda scores, conversations: None))
    check_scorer(BrokenVerifier())


def test_a_scorer_may_refuse_one_bad_conversation():
    def refuse(scores, conversations):
        bad = ["\ud800" in conversation[-1]["content"] for conversation in conversations]
        if any(bad):
            reasons = ["a lone surrogate" if each else None for each in bad]
            raise ScoringError(Scores.from_rewards(np.where(bad, np.nan, scores.rewards), errors=reasons))

    check_scorer(Broken(refuse))


def test_an_object_without_a_score_method_is_refused():
    with pytest.raises(AssertionError, match="has no method score"):
        check_scorer(count_characters)


def test_a_scorer_without_a_parameter_for_prompts_is_found_out():
    class WithoutPrompts:
        def score(self, conversations):
            return Scores.from_rewards(count_characters(conversations))

    with pytest.raises(AssertionError, match="prompts"):
        check_scorer(WithoutPrompts())


def test_own_conversations_are_checked():
    with pytest.raises(AssertionError, match="reverse order"):
        check_scorer(
            Broken(shift_by_position), [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
        )


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_gymnasiums_own_vector_environments_pass(mode):
    check_vector_env(gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode}))


def make(kind, **options):
    return kind(2, reward_model=count_characters, prompts=PROMPTS, **options)


class KeepsObservations(RewardVectorEnv):
    """Hands out the conversations that it goes on working with."""

    def _observe(self):
        return tuple(episode.messages for episode in self._episodes)


class ForgetsTheSeed(RewardVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None, options=options)


class Returns(RewardVectorEnv):
    """Changes what a good step returned."""

    def step(self, actions):
        return self.change(*super().step(actions))


class SinglePrecision(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards.astype(np.float32), terminations, truncations, infos


class NotANumber(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards * np.nan, terminations, truncations, infos


class ScalarInfo(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards, terminations, truncations, {**infos, "mean": 3.0}


class InfoWithoutMask(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards, terminations, truncations, {**infos, "extra": np.zeros(2)}


class NoFinalObservation(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        infos = {name: value for name, value in infos.items() if name != "final_obs"}
        return observations, rewards, terminations, truncations, infos


class PaysForResets(Returns):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards + 1.0, terminations, truncations, infos


class TakesAnything(RewardVectorEnv):
    def _check_replies(self, rows, actions):
        return [str(actions[row]) for row in rows]


class ResetsEverything(RewardVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class TextMode(RewardVectorEnv):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metadata["autoreset_mode"] = "SameStep"


@pytest.mark.parametrize(
    ("kind", "mode", "message"),
    [
        (KeepsObservations, "SameStep", "returned the same objects"),
        (ForgetsTheSeed, "SameStep", "the same seed and actions gave different data"),
        (SinglePrecision, "SameStep", "rewards has the dtype float32, expected float64"),
        (NotANumber, "SameStep", "rewards must be finite"),
        (ScalarInfo, "SameStep", r"infos\['mean'\] is a float, not an array"),
        (InfoWithoutMask, "SameStep", r"infos\['extra'\] has no mask"),
        (NoFinalObservation, "SameStep", "infos have no 'final_obs'"),
        (PaysForResets, "NextStep", "NEXT_STEP: resetting rows must have reward 0"),
        (TakesAnything, "SameStep", "the reply None"),
        (ResetsEverything, "SameStep", "a partial reset"),
        (TextMode, "SameStep", "must be an AutoresetMode, got 'SameStep'"),
    ],
)
def test_a_broken_vector_environment_is_found_out(kind, mode, message):
    with pytest.raises(AssertionError, match=message):
        check_vector_env(make(kind, autoreset_mode=mode))


def test_a_vector_environment_that_differs_from_its_single_one_is_found_out(monkeypatch):
    gym.register("Test/Pays-v0", entry_point="gym_rm.envs.single:RewardEnv", vector_entry_point=PaysForResets)
    try:
        with pytest.raises(AssertionError, match="differs from SyncVectorEnv"):
            check_vector_env("Test/Pays-v0", num_envs=2, reward_model=count_characters, prompts=PROMPTS)
    finally:
        gym.registry.pop("Test/Pays-v0")


def test_an_object_that_is_not_a_vector_environment_is_refused():
    with pytest.raises(AssertionError, match=r"expected a gymnasium\.vector\.VectorEnv, got OrderEnforcing"):
        check_vector_env(gym.make("RewardModel-v0", reward_model=count_characters, prompts=PROMPTS))


def test_options_can_only_go_with_an_id():
    with pytest.raises(AssertionError, match="go with an id only"):
        check_vector_env(make(RewardVectorEnv), max_turns=3)
