import gymnasium as gym
import pytest
from recording import NO_FALLBACK_REWARDS, RecordingScorer, chat

from gym_rm import ConfigError, ScoringError

pytest.importorskip("torchrl", reason="TorchRL is not installed")

from tensordict import NonTensorStack, TensorDict
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.libs.gym import GymWrapper
from torchrl.envs.llm import ChatEnv
from transformers import AutoTokenizer

from gym_rm.adapters.torchrl import RewardModelTransform


@pytest.fixture
def make(recorder):
    """Function that makes a vector environment, or a single environment if `num_envs` is None."""

    def make(env_id="RewardModel-v0", num_envs=3, **settings):
        if num_envs is None:
            return gym.make(env_id, reward_model=recorder, **settings)
        return gym.make_vec(
            env_id, num_envs=num_envs, reward_model=recorder, **{"autoreset_mode": "Disabled", **settings}
        )

    return make


# --- GymWrapper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("env_id", ["RewardModelCandidates-v0", "RewardModelTokens-v0"])
def test_check_env_specs_passes(make, env_id, num_envs):
    check_env_specs(GymWrapper(make(env_id, num_envs)))


# --- ChatEnv -------------------------------------------------------------------------------------------------------


def histories(*replies, prompt="How much is 90 - 50?"):
    return History.from_chats([chat(prompt, reply) for reply in replies])


def chat_env(transform, batch_size):
    env = TransformedEnv(ChatEnv(batch_size=batch_size, input_mode="history"), transform)
    query = NonTensorStack(*["How much is 90 - 50?"] * batch_size[0])
    return env, env.reset(TensorDict({"query": query}, batch_size=batch_size))


def test_a_reply_gets_a_reward_and_ends_the_episode(recorder):
    env, start = chat_env(RewardModelTransform(recorder), (3,))
    start["history"].full = histories("four", "", "it is four")
    step = env.step(start)
    assert step["next", "reward"].tolist() == [[1.0], [0.0], [2.5]]
    assert step["next", "done"].all()
    assert recorder.calls == [[chat("How much is 90 - 50?", reply) for reply in ("four", "", "it is four")]]
    assert env.reward_spec.shape == (3, 1)


def test_end_tokens_of_the_policy_are_no_part_of_the_replies(recorder, policy_path):
    env, start = chat_env(RewardModelTransform(recorder, tokenizer=AutoTokenizer.from_pretrained(policy_path)), (1,))
    start["history"].full = History.from_chats([chat("q", "five<|im_end|>", "sure?", "four<|im_end|>")])
    assert env.step(start)["next", "reward"].tolist() == [[1.0]]
    assert recorder.calls == [[chat("q", "five", "sure?", "four")]]


def test_ends_episode_false_continues_the_dialogue(recorder):
    env, start = chat_env(RewardModelTransform(recorder, ends_episode=False), (2,))
    start["history"].full = histories("four", "five")
    step = env.step(start)
    assert not step["next", "done"].any()
    following = step["next"]
    following["history"].full = History.from_chats([chat("q", "four", "sure?", reply) for reply in ("yes!", "no")])
    assert env.step(following)["next", "reward"].tolist() == [[1.0], [0.5]]
    assert recorder.calls[1][0] == chat("q", "four", "sure?", "yes!")


def test_a_conversation_without_a_score_is_an_error_or_gets_the_fallback_reward():
    env, start = chat_env(RewardModelTransform(RecordingScorer()), (2,))
    start["history"].full = histories("FAIL", "four")
    with pytest.raises(ScoringError):
        env.step(start)
    env, start = chat_env(RewardModelTransform(RecordingScorer(), fallback_reward=-2.0), (2,))
    start["history"].full = histories("FAIL", "four")
    assert env.step(start)["next", "reward"].flatten().tolist() == [-2.0, 1.0]


@pytest.mark.parametrize("value", NO_FALLBACK_REWARDS)
def test_an_invalid_fallback_reward_is_an_error_of_the_constructor(recorder, value):
    with pytest.raises(ConfigError, match="fallback_reward must be"):
        RewardModelTransform(recorder, fallback_reward=value)


def test_a_conversation_with_tool_calls_has_no_score(embedded_scorer):
    env, start = chat_env(RewardModelTransform(embedded_scorer, fallback_reward=-2.0), (1,))
    start["history"].full = History.from_chats(
        [[*chat("q"), {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}]]
    )
    assert env.step(start)["next", "reward"].flatten().tolist() == [-2.0]


def test_a_verifier_gets_the_columns_of_the_tensordict(verifier):
    env, start = chat_env(RewardModelTransform(verifier, columns=("answer", "topic")), (2,))
    start["answer"], start["topic"] = NonTensorStack("40", "40"), NonTensorStack("sums", "sums")
    start["history"].full = histories("40", "41")
    assert env.step(start)["next", "reward"].flatten().tolist() == [1.0, 0.0]
    assert [(prompt.answer, prompt.metadata) for prompt in verifier.prompts] == [("40", {"topic": "sums"})] * 2
    assert verifier.prompts[0].messages == tuple(chat("How much is 90 - 50?"))
