import pytest
import torch
from recording import NO_FALLBACK_REWARDS, RecordingScorer, chat

from gym_rm import ConfigError, ScoringError
from gym_rm.adapters.nemo_rl import EnvironmentReturn, RewardModelEnvironment
from gym_rm.data.prompts import name_of


@pytest.fixture
def environment(recorder):
    return RewardModelEnvironment({"reward_model": recorder})


def log(*texts):
    """Return a message log in the form of NeMo RL's rollouts, with the tokens of each message."""
    return [{**message, "token_ids": torch.arange(3)} for message in chat(*texts)]


# --- the interface -------------------------------------------------------------------------------------------------


def test_step_returns_the_fields_that_nemo_rl_expects(environment, recorder):
    result = environment.step([log("q", "four"), log("q", "a", "sure?", "it is four")], [{"any": 1}, None])
    assert isinstance(result, EnvironmentReturn)
    assert result._fields == ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")
    assert result.rewards.dtype is torch.float32
    assert result.rewards.tolist() == [1.0, 2.5]
    assert result.terminateds.dtype is torch.bool
    assert result.terminateds.tolist() == [True, True]
    assert result.metadata == result.next_stop_strings == [None, None]
    assert result.observations == [{"role": "environment", "content": ""}] * 2
    assert result.answers == ["four", "it is four"]
    assert recorder.calls == [[chat("q", "four"), chat("q", "a", "sure?", "it is four")]]


def test_tool_calls_of_a_log_reach_the_scorer(environment, recorder):
    rollout = log("q", "a")
    rollout[1]["tool_calls"] = [{"function": {"name": "sum", "arguments": "{}"}}]
    environment.step([rollout], [None])
    (conversation,) = recorder.calls[-1]
    assert [sorted(message) for message in conversation] == [["content", "role"], ["content", "role", "tool_calls"]]


@pytest.mark.parametrize("value", NO_FALLBACK_REWARDS)
def test_an_invalid_fallback_reward_is_an_error_of_the_constructor(recorder, value):
    with pytest.raises(ConfigError, match="fallback_reward must be"):
        RewardModelEnvironment({"reward_model": recorder}, fallback_reward=value)


def test_a_log_without_a_score_is_an_error_or_gets_the_fallback_reward(environment):
    with pytest.raises(ScoringError):
        environment.step([log("q", "FAIL"), log("q", "four")], [None, None])
    environment = RewardModelEnvironment({"reward_model": RecordingScorer()}, fallback_reward=-2.0)
    assert environment.step([log("q", "FAIL"), log("q", "four")], [None, None]).rewards.tolist() == [-2.0, 1.0]


def test_rendered_prompts_need_the_policy_tokenizer(recorder, policy_path, environment):
    prompt = "<|im_start|>user\nHow much is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="policy_tokenizer="):
        environment.step([log(prompt, "four<|im_end|>")], [None])
    environment = RewardModelEnvironment({"reward_model": recorder}, policy_tokenizer=policy_path)
    environment.step([log(prompt, "four<|im_end|>")], [None])
    assert recorder.calls == [[chat("How much is 2 + 2?", "four")]]


def test_the_last_shutdown_closes_a_scorer_that_environments_share():
    environments = [RewardModelEnvironment({"reward_model": "recording:RecordingScorer"}) for _ in range(2)]
    scorer = environments[0].scorer
    assert environments[1].scorer is scorer
    environments[0].shutdown()
    environments[0].shutdown()
    assert not scorer.closed
    environments[1].shutdown()
    assert scorer.closed


# --- prompts for verifiers -----------------------------------------------------------------------------------------


@pytest.fixture
def verifying(verifier):
    return RewardModelEnvironment({"reward_model": verifier})


@pytest.mark.parametrize("key", ["ground_truth", "answer"])
def test_the_metadata_of_each_log_reaches_a_verifier(verifying, verifier, key):
    logs = [log("2 + 2?", "4"), log("3 + 3?", "5"), log("q", "a", "sure?", "yes")]
    metadata = [{key: "4", "level": "easy"}, {key: "6", "id": "b"}, {key: "a"}]
    assert verifying.step(logs, metadata).rewards.tolist() == [1.0, 0.0, 0.0]
    assert [prompt.answer for prompt in verifier.prompts] == ["4", "6", "a"]
    asked = [chat("2 + 2?"), chat("3 + 3?"), chat("q", "a", "sure?")]
    assert [prompt.messages for prompt in verifier.prompts] == [tuple(messages) for messages in asked]
    first, second, third = [prompt.prompt_id for prompt in verifier.prompts]
    assert second == "b"
    assert first == name_of(tuple(chat("2 + 2?"))) != third
    assert verifier.prompts[0].metadata["level"] == "easy"


@pytest.mark.parametrize("metadata", [None, [None], [{}], ["4"]])
def test_a_log_without_metadata_is_an_error_for_a_verifier(verifying, metadata):
    with pytest.raises(ScoringError, match="row 0"):
        verifying.step([log("q", "4")], metadata)


# --- the configuration ---------------------------------------------------------------------------------------------


def test_a_section_names_a_scorer_and_its_options():
    environment = RewardModelEnvironment({"enabled": True, "kind": "math"})
    assert environment.step([log("2 + 2?", "4")], [{"ground_truth": "4"}]).rewards.tolist() == [1.0]
    environment.shutdown()
    with pytest.raises(ConfigError, match="write reward_model: org/name"):
        RewardModelEnvironment({"model_name": "org/name", "precision": "bfloat16"})
    with pytest.raises(ConfigError, match="unknown option 'precision'"):
        RewardModelEnvironment({"precision": "bfloat16"})
