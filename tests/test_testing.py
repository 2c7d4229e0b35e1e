import contextlib
import dataclasses
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import gym_rm
from gym_rm import Scores, ScoringError
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.generation.chat import ChatReply
from gym_rm.generation.completions import Completion, sample_all
from gym_rm.testing import check_chat_model, check_sampler, check_scorer, check_vector_env
from gym_rm.types import Prompt

PROMPTS = ["one?", {"prompt": "two?", "user_turns": ["sure?"]}, "three?"]


def count_characters(conversations):
    return [sum(len(message["content"]) for message in conversation) for conversation in conversations]


class Broken:
    """Valid scorer whose scores are changed by `change_scores`."""

    def __init__(self, change_scores):
        self.change_scores = change_scores

    def score(self, conversations, prompts=None):
        scores = Scores.from_rewards(count_characters(conversations))
        return self.change_scores(scores, conversations) or scores


class BrokenVerifier:
    """Valid verifier whose scores or prompts are changed by `change_scores`."""

    def __init__(self, change_scores=lambda scores, prompts: None):
        self.change_scores = change_scores

    def score(self, conversations, prompts=None):
        prompts = [None] * len(conversations) if prompts is None else prompts
        right = [
            float(prompt is not None and prompt.answer in conversation[-1]["content"])
            for conversation, prompt in zip(conversations, prompts, strict=True)
        ]
        scores = Scores.from_rewards(right)
        return self.change_scores(scores, prompts) or scores


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


def raise_for_invalid_text(scores, conversations):
    str(conversations).encode()
    "".join(message["content"] for conversation in conversations for message in conversation).encode()


def fail_all_for_invalid_text(scores, conversations):
    if any("\ud800" in message["content"] for conversation in conversations for message in conversation):
        raise ScoringError(Scores.from_rewards([np.nan] * len(conversations)))


def change_rows_next_to_invalid_text(scores, conversations):
    if any("\ud800" in message["content"] for conversation in conversations for message in conversation):
        scores.rewards[:] += 1.0


@pytest.mark.parametrize(
    ("change_scores", "message"),
    [
        (shift_by_batch_size, "rewards scored with one call per conversation differ by"),
        (shift_by_position, "rewards scored in reverse order differ by"),
        (shift_second_copy, "equal conversations in one call got different rewards"),
        (edit, "score must not change its conversations and prompts"),
        (hide_nan, "row 0 has the reward nan and the error None"),
        (raise_for_invalid_text, "a conversation with a lone surrogate raised UnicodeEncodeError"),
        (fail_all_for_invalid_text, r"an invalid conversation in row 1 gave errors in rows \(0, 1, 2\)"),
        (change_rows_next_to_invalid_text, "rewards scored together with an invalid conversation differ by"),
        (lambda scores, _: [0.0] * len(scores), "returned a list, expected gym_rm.Scores"),
        (lambda scores, _: scores[1:], "returned 4 scores for 5 conversations"),
        (lambda scores, _: replaced(scores, num_tokens=scores.num_tokens - 1), "num_tokens must not be negative"),
        (lambda scores, _: replaced(scores, errors=("bad", *scores.errors[1:])), "and the error 'bad'"),
    ],
)
def test_a_broken_scorer_raises_assertion_error(change_scores, message):
    with pytest.raises(AssertionError, match=message):
        check_scorer(Broken(change_scores))


def edit_the_prompts(scores, prompts):
    prompts[0].metadata["seen"] = True


def shift_by_the_first_prompt(scores, prompts):
    scores.rewards[:] += len(prompts[0].prompt_id if prompts and prompts[0] is not None else "")


def fail_for_a_prompt_alone(scores, prompts):
    if len(prompts) == 1:
        raise ScoringError(Scores.from_rewards([np.nan]))


@pytest.mark.parametrize(
    ("change_scores", "error", "message"),
    [
        (edit_the_prompts, AssertionError, "score must not change its conversations and prompts"),
        (shift_by_the_first_prompt, AssertionError, "rewards scored .* differ by"),
        (fail_for_a_prompt_alone, ScoringError, "1 of 1 conversations could not be scored"),
    ],
)
def test_a_broken_verifier_raises(change_scores, error, message):
    conversations = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}] for text in "457"]
    prompts = [Prompt(({"role": "user", "content": "2 + 2?"},), "p" * size, answer="4") for size in (1, 2, 3)]
    check_scorer(BrokenVerifier(), conversations, prompts)
    with pytest.raises(error, match=message):
        check_scorer(BrokenVerifier(change_scores), conversations, prompts)


def test_valid_scorers_pass():
    check_scorer(gym_rm.load_scorer(count_characters))
    check_scorer(Broken(lambda scores, conversations: None))
    check_scorer(BrokenVerifier())


def test_a_scorer_may_have_no_score_for_an_invalid_conversation():
    def refuse(scores, conversations):
        bad = ["\ud800" in conversation[-1]["content"] for conversation in conversations]
        if any(bad):
            reasons = ["a lone surrogate" if each else None for each in bad]
            raise ScoringError(Scores.from_rewards(np.where(bad, np.nan, scores.rewards), errors=reasons))

    check_scorer(Broken(refuse))


def test_an_object_without_a_score_method_raises_assertion_error():
    with pytest.raises(AssertionError, match="must have a method score"):
        check_scorer(count_characters)


def test_a_scorer_without_a_prompts_parameter_raises_assertion_error():
    class WithoutPrompts:
        def score(self, conversations):
            return Scores.from_rewards(count_characters(conversations))

    with pytest.raises(AssertionError, match="prompts"):
        check_scorer(WithoutPrompts())


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_of_gymnasium_pass(mode):
    check_vector_env(gym.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode}))


def make(kind, **options):
    return kind(2, reward_model=count_characters, prompts=PROMPTS, **options)


class IgnoredSeed(RewardVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None, options=options)


class ChangedStep(RewardVectorEnv):
    """Environment that changes the return values of a valid step."""

    def next_recv(self, state, flights):
        state, step = super().next_recv(state, flights)
        return state, self.change(*step)


class SinglePrecision(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards.astype(np.float32), terminations, truncations, infos


class NotANumber(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards * np.nan, terminations, truncations, infos


class ScalarInfo(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards, terminations, truncations, {**infos, "mean": 3.0}


class NoFinalObservation(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        infos = {name: value for name, value in infos.items() if name != "final_obs"}
        return observations, rewards, terminations, truncations, infos


class RewardForReset(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards + 1.0, terminations, truncations, infos


class DoubleReward(ChangedStep):
    def change(self, observations, rewards, terminations, truncations, infos):
        return observations, rewards * 2, terminations, truncations, infos


class UncheckedReplies(RewardVectorEnv):
    def _check_replies(self, rows, actions):
        return super()._check_replies(rows, [str(action) for action in actions])


class LateReward(RewardVectorEnv):
    """Environment whose rewards depend on what is received together."""

    def recv(self, min_rows=1, timeout=None):
        observations, rewards, *rest = super().recv(min_rows, timeout)
        return observations, rewards * rest[-1]["rows"].mean(), *rest


class NoCancel(RewardVectorEnv):
    def cancel(self):
        pass


class IgnoredMask(RewardVectorEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("kind", "mode", "message"),
    [
        (IgnoredSeed, "SameStep", "the same seed and actions must return the same data"),
        (SinglePrecision, "SameStep", "rewards has the dtype float32, expected float64"),
        (NotANumber, "SameStep", "rewards must be finite"),
        (ScalarInfo, "SameStep", r"infos\['mean'\] is a float, not an array"),
        (NoFinalObservation, "SameStep", "infos have no 'final_obs'"),
        (RewardForReset, "NextStep", "NEXT_STEP: resetting rows must have reward 0"),
        (UncheckedReplies, "SameStep", "the reply None was accepted"),
        (IgnoredMask, "SameStep", "a partial reset"),
        (LateReward, "SameStep", "step . of row . differs when it is sent and received"),
        (NoCancel, "Disabled", r"cancel\(\) must take back"),
    ],
)
def test_a_broken_vector_environment_raises_assertion_error(kind, mode, message):
    with pytest.raises(AssertionError, match=message):
        check_vector_env(make(kind, autoreset_mode=mode))


def test_a_vector_environment_that_differs_from_its_single_environment_raises(monkeypatch):
    gym.register("Test/DoubleReward-v0", entry_point="gym_rm.envs.single:RewardEnv", vector_entry_point=DoubleReward)
    try:
        with pytest.raises(AssertionError, match="differs from SyncVectorEnv"):
            check_vector_env("Test/DoubleReward-v0", num_envs=2, reward_model=count_characters, prompts=PROMPTS)
    finally:
        gym.registry.pop("Test/DoubleReward-v0")


def test_a_single_environment_raises_assertion_error():
    with pytest.raises(AssertionError, match=r"expected a gymnasium\.vector\.VectorEnv, got OrderEnforcing"):
        check_vector_env(gym.make("RewardModel-v0", reward_model=count_characters, prompts=PROMPTS))


class Instant:
    """A chat model that answers at once, whatever the deadline is, by a function of the conversation."""

    def __init__(self, answer):
        self.answer = answer

    def reply(self, conversations, *, seeds, deadline=None):
        return self.answer([ChatReply(text=f"{len(each)}", finished=True) for each in conversations])


def test_a_chat_model_that_needs_no_time_is_right():
    check_chat_model(Instant(lambda replies: replies))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda replies: None, "check_chat_model: an exception that nothing expects, TypeError"),
        (lambda replies: replies[1:], "2 replies to 3 conversations"),
        (lambda replies: [replace(each, text=None) for each in replies], "the text of reply 0 is None"),
    ],
    ids=["None", "lost", "no text"],
)
def test_a_broken_chat_model_is_an_assertion_error(answer, message):
    with pytest.raises(AssertionError, match=message):
        check_chat_model(Instant(answer))


class Stream:
    """Completions of a `Sampler`, one in each call."""

    def __init__(self, number):
        self.number, self.opened = number, {}

    num_open = property(lambda self: len(self.opened))

    def add(self, keys, prompts, *, seeds):
        self.opened |= zip(keys, zip(prompts, seeds, strict=True), strict=True)

    def take(self, timeout=None):
        if not self.opened:
            return {}
        key, (prompt, seed) = self.opened.popitem()
        ids = np.array([self.number(sum(prompt), seed) % 5, 6, 9], dtype=np.int32)
        return {key: Completion(ids, np.array([-ids[0] - 1, -1, -1], dtype=np.float32), True, "")}

    def close(self):
        self.opened.clear()


class Sampler:
    """Completions of three tokens, from a seed and a prompt by a function."""

    def __init__(self, number):
        self.number = number

    def sample(self, prompts, *, seeds):
        return sample_all(self.stream(), prompts, seeds=seeds)

    def stream(self, *, calibrate=True):
        return Stream(self.number)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (lambda prompt, seed: prompt + seed, None),
        (lambda prompt, seed: prompt, "the seeds are not used"),
        (lambda prompt, seed: seed, "completions of different prompts with one seed are equal"),
    ],
    ids=["right", "no seeds", "no prompt"],
)
def test_a_sampler_uses_prompts_and_seeds(number, message):
    refused = contextlib.nullcontext() if message is None else pytest.raises(AssertionError, match=message)
    with refused:
        check_sampler(Sampler(number), [[1, 2], [3, 4, 5]], max_new_tokens=3, end_tokens=[9])
