import asyncio
import importlib.util
import textwrap
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from openrlhf_client import PROMPT, REPLIES, prompt_text, query
from recording import NO_ANSWERS, NO_FALLBACK_REWARDS, chat
from transformers import AutoTokenizer

import gym_rm
from gym_rm import ConfigError, ConversationError, ScoringError
from gym_rm.adapters.openrlhf import RewardFunction


def expected_rewards(scorer):
    return scorer.score([chat("How much is 90 - 50?", reply) for reply in REPLIES]).rewards.tolist()


@pytest.fixture
def reward_function(recorder, policy_path):
    return RewardFunction(recorder, policy_tokenizer=policy_path)


# --- the reward function -------------------------------------------------------------------------------------------


def test_the_function_returns_the_fields_that_openrlhf_expects(reward_function, recorder):
    result = reward_function([query("four"), query("4")], [PROMPT] * 2, ["4", "4"])
    assert recorder.calls == [[chat("How much is 90 - 50?", "four"), chat("How much is 90 - 50?", "4")]]
    assert result.keys() == {"rewards", "scores", "extra_logs"}
    torch.testing.assert_close(result["rewards"], torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(result["scores"], torch.sigmoid(torch.tensor([1.0, 0.25])))
    assert result["extra_logs"].keys() == {"score_ok", "num_tokens", "truncated_tokens", "component_length"}
    assert all(values.shape == (2,) for values in result["extra_logs"].values())


def test_a_sample_without_a_score_is_an_error_or_gets_the_fallback_reward(recorder, policy_path):
    queries, prompts = [query("FAIL"), query("four")], [PROMPT] * 2
    with pytest.raises(ScoringError):
        RewardFunction(recorder, policy_tokenizer=policy_path)(queries, prompts, ["", ""])
    result = RewardFunction(recorder, policy_tokenizer=policy_path, fallback_reward=-3.0)(queries, prompts, ["", ""])
    assert result["rewards"].tolist() == [-3.0, 1.0]
    assert result["extra_logs"]["score_ok"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("value", NO_FALLBACK_REWARDS)
def test_an_invalid_fallback_reward_is_an_error_of_the_constructor(recorder, policy_path, value):
    with pytest.raises(ConfigError, match="fallback_reward must be"):
        RewardFunction(recorder, policy_tokenizer=policy_path, fallback_reward=value)


def test_the_error_names_the_row_of_a_query_without_its_prompt(reward_function):
    with pytest.raises(ConversationError, match="query 1: the text does not begin with its prompt"):
        reward_function([query("four"), "cut"], [PROMPT] * 2, ["", ""])


def test_the_python_file_loads_the_way_openrlhf_loads_it(tmp_path, policy_path, embedded_scorer):
    file = tmp_path / "reward_func.py"
    file.write_text(
        textwrap.dedent(f"""
            from gym_rm.adapters.openrlhf import RewardFunction

            reward_func = RewardFunction(policy_tokenizer={policy_path!r})
        """)
    )
    spec = importlib.util.spec_from_file_location("reward_func", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = module.reward_func([query(reply) for reply in REPLIES], [PROMPT] * 2, ["", ""])["rewards"]
    assert rewards.tolist() == expected_rewards(embedded_scorer)


def test_the_reward_equals_that_of_the_environment(policy_path, embedded_scorer):
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    envs = gym.make_vec("RewardModel-v0", num_envs=4, reward_model=embedded_scorer)
    observations, _ = envs.reset(seed=0)
    replies = ["It is 40.", "The answer is 12.", "", "<|im_end|> or not"]
    prompts = [
        tokenizer.apply_chat_template(observation, tokenize=False, add_generation_prompt=True)
        for observation in observations
    ]
    queries = [prompt + reply + "<|im_end|>" for prompt, reply in zip(prompts, replies, strict=True)]
    reward_function = RewardFunction(embedded_scorer, policy_tokenizer=policy_path)
    rewards = reward_function(queries, prompts, [""] * 4)["rewards"]
    assert rewards.tolist() == envs.step(replies)[1].tolist()


# --- prompts for verifiers -----------------------------------------------------------------------------------------


@pytest.fixture
def verifying(verifier, policy_path):
    return RewardFunction(verifier, policy_tokenizer=policy_path)


def test_each_label_reaches_a_verifier_as_the_answer_of_its_query(verifying, verifier):
    prompts = [PROMPT, prompt_text("How much is 2 + 2?")]
    queries = [query("It is 40."), query("It is 40.", prompts[1])]
    assert verifying(queries, prompts, ["40", "4 "])["rewards"].tolist() == [1.0, 0.0]
    assert [prompt.answer for prompt in verifier.prompts] == ["40", "4 "]  # labels are not stripped
    assert verifier.prompts[1].messages == tuple(chat("How much is 2 + 2?"))


@pytest.mark.parametrize("label", ["", *NO_ANSWERS])  # OpenRLHF passes an empty text if the label is missing
def test_a_missing_or_unusable_label_is_an_error_for_a_verifier(verifying, verifier, label):
    with pytest.raises(ScoringError, match="row 1: the reward function returned None"):
        verifying([query("40")] * 2, [PROMPT] * 2, ["40", label])
    assert [prompt.answer for prompt in verifier.prompts] == ["40", None]


def test_a_wrong_number_of_labels_is_refused(verifying):
    with pytest.raises(ConversationError, match="one label for each query, got 2 queries, 2 prompts and 1 labels"):
        verifying([query("40")] * 2, [PROMPT] * 2, ["40"])


# --- OpenRLHF's client ---------------------------------------------------------------------------------------------


class OneReply:
    """Inference engine with the method that OpenRLHF's executor calls; it always returns the same tokens."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        output = SimpleNamespace(token_ids=self.token_ids, finish_reason="stop", logprobs=None, text="")
        return SimpleNamespace(outputs=[output])


def run_executors(executor, tokenizer, replies, labels=None):
    labels = labels or ["4"] * len(replies)
    params = SimpleNamespace(max_tokens=32, logprobs=None)

    async def rollouts():
        return await asyncio.gather(
            *(
                executor.execute(PROMPT, label, params, 512, tokenizer, OneReply(tokenizer(reply)["input_ids"]))
                for reply, label in zip(replies, labels, strict=True)
            )
        )

    return asyncio.run(rollouts())


def reward_server(scorer, **options):
    pytest.importorskip("fastapi", reason="the server's libraries are not installed")
    from gym_rm.server.options import ServerOptions
    from gym_rm.server.serve import RewardServer

    return RewardServer(scorer, ServerOptions(**options), port=0)


def test_openrlhfs_executor_gets_rewards_over_http(policy_path, recorder):
    agent = pytest.importorskip("openrlhf.utils.agent", reason="OpenRLHF is not installed")
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    options = {"policy_tokenizer": policy_path, "max_batch_size": 32, "max_wait": 3600}
    with reward_server(recorder, key="secret", **options) as server:
        recorder.calls.clear()  # of the known conversations
        url = server.url.replace("http://", "http://any:secret@") + "/get_reward"
        executor = agent.SingleTurnAgentExecutor(url)
        results = run_executors(executor, tokenizer, [f"{'x' * n}<|im_end|>" for n in range(32)])
    assert [result["reward"] for result in results] == [[n / 4] for n in range(32)]
    assert len(recorder.calls) == 1


def test_openrlhfs_executor_gets_rewards_from_the_python_file(tmp_path, policy_path, embedded_scorer):
    agent = pytest.importorskip("openrlhf.utils.agent", reason="OpenRLHF is not installed")
    file = tmp_path / "reward_func.py"
    file.write_text(
        "from gym_rm.adapters.openrlhf import RewardFunction\n"
        f"reward_func = RewardFunction(policy_tokenizer={policy_path!r})\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    results = run_executors(
        agent.SingleTurnAgentExecutor(str(file)), tokenizer, [f"{reply}<|im_end|>" for reply in REPLIES]
    )
    assert [result["reward"].shape for result in results] == [(1,), (1,)]
    assert [result["reward"].item() for result in results] == expected_rewards(embedded_scorer)


def test_the_labels_of_openrlhfs_executor_reach_a_verifier(verifier, policy_path):
    agent = pytest.importorskip("openrlhf.utils.agent", reason="OpenRLHF is not installed")
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    with reward_server(gym_rm.load_scorer(verifier), policy_tokenizer=policy_path) as server:
        executor = agent.SingleTurnAgentExecutor(server.url + "/get_reward")
        results = run_executors(executor, tokenizer, ["It is 40.<|im_end|>"] * 3, ["40", "41", "0"])
    assert [result["reward"] for result in results] == [[1.0], [0.0], [1.0]]
