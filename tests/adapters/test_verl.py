import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recording import RecordingScorer, chat
from transformers import AutoTokenizer

from gym_rm import ConfigError, ScoringError
from gym_rm.adapters.verl import RewardModelManager, compute_score, compute_scores

QUESTION = "How much is 90 - 50?"
REPLIES = ["It is 40.", "no", "It is thirty-seven."]


@pytest.fixture(scope="module")
def tokenizer(policy_path):
    return AutoTokenizer.from_pretrained(policy_path)


class Batch:
    """The part of verl's DataProto that managers read, as its documentation describes it."""

    def __init__(self, batch, non_tensor_batch):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, {}

    def __len__(self):
        return len(self.batch["responses"])

    def __getitem__(self, index):
        tensors = {name: value[index] for name, value in self.batch.items()}
        arrays = {name: value[index] for name, value in self.non_tensor_batch.items()}
        return (
            Batch(tensors, arrays)
            if isinstance(index, slice)
            else SimpleNamespace(batch=tensors, non_tensor_batch=arrays)
        )


def make_batch(tokenizer, replies, *, make=Batch):
    """Prompts padded on the left, replies on the right, as verl's rollouts are."""
    prompt = tokenizer.apply_chat_template(chat(QUESTION), add_generation_prompt=True, return_dict=False)
    ids = [tokenizer(f"{reply}<|im_end|>")["input_ids"] for reply in replies]
    length = max(map(len, ids)) + 2
    responses = torch.tensor([each + [tokenizer.pad_token_id] * (length - len(each)) for each in ids])
    prompts = torch.tensor([[tokenizer.pad_token_id] * 3 + list(prompt)] * len(replies))
    mask = torch.cat([(prompts != tokenizer.pad_token_id), torch.zeros_like(responses, dtype=torch.bool)], dim=1).long()
    for row, each in enumerate(ids):
        mask[row, prompts.shape[1] : prompts.shape[1] + len(each)] = 1
    objects = {
        "raw_prompt": [chat(QUESTION) for _ in replies],
        "data_source": ["sums"] * len(replies),
        "reward_model": [{"ground_truth": "40"} for _ in replies],
        "extra_info": [{"question": QUESTION} for _ in replies],
    }
    arrays = {}
    for name, values in objects.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return make({"prompts": prompts, "responses": responses, "attention_mask": mask}, arrays)


def last_tokens(batch):
    return batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :].sum(1) - 1


# --- functions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [{"question": QUESTION}, {"prompt": QUESTION}, {"prompt": chat(QUESTION), "index": 3}])
def test_the_function_scores_the_prompt_with_the_reply(recorder, info):
    result = asyncio.run(compute_score("sums", "four", "40", info, reward_model=recorder))
    assert result == {"score": 1.0, "num_tokens": 24.0, "truncated_tokens": 0.0, "head_length": 4.0}
    assert recorder.calls == [[chat(QUESTION, "four")]]


def test_concurrent_calls_are_scored_together():
    scorer = RecordingScorer(seconds=0.05)

    async def rollouts():
        return await asyncio.gather(
            *(compute_score("s", "x" * n, None, {"question": QUESTION}, reward_model=scorer) for n in range(64))
        )

    assert [result["score"] for result in asyncio.run(rollouts())] == [n / 4 for n in range(64)]
    assert len(scorer.calls) <= 3


def test_the_batched_function_makes_one_call(recorder):
    results = compute_scores(["s"] * 3, REPLIES, ["40"] * 3, [{"question": QUESTION}] * 3, reward_model=recorder)
    assert [result["score"] for result in results] == [len(reply) / 4 for reply in REPLIES]
    assert len(recorder.calls) == 1


def test_without_a_prompt_nothing_is_scored(recorder):
    with pytest.raises(ConfigError, match="extra_info as 'prompt'"):
        asyncio.run(compute_score("s", "four", "40", {"index": 1}, reward_model=recorder))
    with pytest.raises(ConfigError, match="extra_info as 'prompt'"):
        compute_scores(["s"], ["four"], ["40"], [None], reward_model=recorder)


def test_a_failure_is_an_error_and_never_a_number(recorder):
    with pytest.raises(ScoringError):
        asyncio.run(compute_score("s", "FAIL", "40", {"question": QUESTION}, reward_model=recorder))
    with pytest.raises(ScoringError):
        compute_scores(["s"] * 2, ["ok", "FAIL"], ["40"] * 2, [{"question": QUESTION}] * 2, reward_model=recorder)


def test_the_embedded_model_is_loaded_once_and_gives_the_environments_reward(embedded_scorer):
    scores = compute_scores(["s"] * 3, REPLIES, [None] * 3, [{"question": QUESTION}] * 3)
    expected = embedded_scorer.score([chat(QUESTION, reply) for reply in REPLIES]).rewards
    assert [score["score"] for score in scores] == pytest.approx(expected.tolist(), abs=1e-5)
    again = asyncio.run(compute_score("s", REPLIES[0], None, {"question": QUESTION}))
    assert again["score"] == pytest.approx(expected[0], abs=1e-5)


# --- the manager ---------------------------------------------------------------------------------------------------


def check_manager(manager, batch, recorder, recorded):
    result = manager(batch, return_dict=True)
    rewards = result["reward_tensor"]
    assert rewards.shape == batch.batch["responses"].shape
    assert rewards[torch.arange(3), last_tokens(batch)].tolist() == [len(reply) / 4 for reply in REPLIES]
    assert rewards.count_nonzero() == 3
    assert result["reward_extra_info"]["head_length"] == [len(reply) for reply in REPLIES]
    assert recorder.calls == recorded
    torch.testing.assert_close(manager(batch), rewards)


async def run_singles(manager, batch):
    return await asyncio.gather(*(manager.run_single(batch[row : row + 1]) for row in range(len(batch))))


def test_the_manager_puts_rewards_on_the_last_tokens(tokenizer, recorder):
    manager = RewardModelManager(tokenizer=tokenizer, num_examine=0, reward_fn_key="data_source", reward_model=recorder)
    recorded = [[chat(QUESTION, reply) for reply in REPLIES]]
    check_manager(manager, make_batch(tokenizer, REPLIES), recorder, recorded)


def test_single_samples_are_scored_together(tokenizer):
    scorer = RecordingScorer(seconds=0.05)
    replies = ["x" * (n + 1) for n in range(24)]
    manager = RewardModelManager(tokenizer=tokenizer, reward_model=scorer)
    results = asyncio.run(run_singles(manager, make_batch(tokenizer, replies)))
    assert [result["reward_score"] for result in results] == [len(reply) / 4 for reply in replies]
    assert results[0]["reward_extra_info"].keys() == {"score", "num_tokens", "truncated_tokens", "head_length"}
    assert len(scorer.calls) <= 4


def test_the_configuration_can_name_the_reward_model(tokenizer, recorder):
    config = SimpleNamespace(reward={"reward_kwargs": {"reward_model": recorder}})
    manager = RewardModelManager(config=config, tokenizer=tokenizer, compute_score=None)
    assert asyncio.run(run_singles(manager, make_batch(tokenizer, ["four"])))[0]["reward_score"] == 1.0


def test_a_batch_without_messages_is_an_error(tokenizer, recorder):
    batch = make_batch(tokenizer, REPLIES)
    del batch.non_tensor_batch["raw_prompt"]
    with pytest.raises(ConfigError, match=r"data\.return_raw_chat=True"):
        RewardModelManager(tokenizer=tokenizer, reward_model=recorder)(batch)


# --- verl's own classes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl", reason="verl is not installed")


@pytest.fixture
def real_batch(verl, tokenizer):
    return make_batch(
        tokenizer, REPLIES, make=lambda tensors, arrays: verl.DataProto.from_dict(tensors=tensors, non_tensors=arrays)
    )


def test_the_manager_with_verls_dataproto(real_batch, tokenizer, recorder):
    manager = RewardModelManager(tokenizer=tokenizer, reward_model=recorder)
    check_manager(manager, real_batch, recorder, [[chat(QUESTION, reply) for reply in REPLIES]])
    results = asyncio.run(run_singles(manager, real_batch))
    assert [result["reward_score"] for result in results] == [len(reply) / 4 for reply in REPLIES]


def test_verls_batch_manager_with_our_function(real_batch, tokenizer, recorder):
    from verl.workers.reward_manager.batch import BatchRewardManager

    manager = BatchRewardManager(tokenizer, 0, compute_scores, reward_model=recorder)
    result = manager(real_batch, return_dict=True)
    rewards = result["reward_tensor"][torch.arange(3), last_tokens(real_batch)]
    assert rewards.tolist() == [len(reply) / 4 for reply in REPLIES]
    assert len(recorder.calls) == 1


def verl_config(**reward):
    from omegaconf import OmegaConf

    defaults = {
        "custom_reward_function": {"path": None, "name": None, "reward_kwargs": {}},
        "reward_manager": {"source": "register", "name": "naive", "module": {"path": None}},
        "sandbox_fusion": None,
        "reward_kwargs": {},
    }
    return OmegaConf.create({"reward": {**defaults, **reward}})


def rewards_of_loaded_manager(config, tokenizer, batch):
    from verl.trainer.ppo.reward import load_reward_manager

    async def run():
        return await run_singles(load_reward_manager(config, tokenizer), batch)

    return [result["reward_score"] for result in asyncio.run(run())]


def test_verl_loads_our_function_and_our_manager_from_its_configuration(real_batch, tokenizer, embedded_scorer):
    pytest.importorskip("verl.experimental.reward_loop.reward_manager.base")
    expected = embedded_scorer.score([chat(QUESTION, reply) for reply in REPLIES]).rewards.tolist()
    function = {"path": "pkg://gym_rm.adapters.verl", "name": "compute_score", "reward_kwargs": {"dtype": "float32"}}
    config = verl_config(custom_reward_function=function)
    assert rewards_of_loaded_manager(config, tokenizer, real_batch) == pytest.approx(expected, abs=1e-5)
    manager = {
        "source": "importlib",
        "name": "RewardModelManager",
        "module": {"path": "pkg://gym_rm.adapters.verl"},
    }
    config = verl_config(reward_manager=manager, reward_kwargs={"dtype": "float32"})
    assert rewards_of_loaded_manager(config, tokenizer, real_batch) == pytest.approx(expected, abs=1e-5)
