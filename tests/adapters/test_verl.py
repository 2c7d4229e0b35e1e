import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recording import chat, merged
from transformers import AutoTokenizer

from gym_rm import ConfigError, ScoringError
from gym_rm.adapters.verl import RewardModelManager

QUESTION = "How much is 90 - 50?"
REPLIES = ["It is 40.", "no", "It is thirty-seven."]


@pytest.fixture(scope="module")
def tokenizer(policy_path):
    return AutoTokenizer.from_pretrained(policy_path)


class Batch:
    """Stand-in of verl's DataProto with the attributes that reward managers read."""

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


def make_batch(tokenizer, replies, *, answers=None, info=None, make=Batch):
    """Return a batch in the layout of verl's rollouts: prompts padded on the left, replies on the right."""
    answers = ["40"] * len(replies) if answers is None else answers
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
        "reward_model": [{"style": "rule", "ground_truth": answer} for answer in answers],
        "extra_info": [{"index": row, **(info or {})} for row in range(len(replies))],
    }
    arrays = {}
    for name, values in objects.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return make({"prompts": prompts, "responses": responses, "attention_mask": mask}, arrays)


# --- prompts for verifiers -----------------------------------------------------------------------------------------


def score_one(tokenizer, reply, ground_truth, reward_model, info=None):
    batch = make_batch(tokenizer, [reply], answers=[ground_truth], info=info)
    manager = RewardModelManager(tokenizer=tokenizer, reward_model=reward_model)
    return asyncio.run(manager.run_single(batch))["reward_score"]


def test_a_reply_without_a_score_is_an_error(tokenizer, recorder):
    with pytest.raises(ScoringError):
        score_one(tokenizer, "FAIL", "40", recorder)


def test_the_ground_truth_and_the_extra_info_reach_a_verifier(tokenizer, verifier):
    info = {"id": "sum-3", "level": "easy"}
    assert score_one(tokenizer, "It is 40.", "40", verifier, info) == 1.0
    assert score_one(tokenizer, "It is 41.", "40", verifier, info) == 0.0
    prompt = verifier.prompts[0]
    assert (prompt.messages, prompt.answer, prompt.prompt_id) == (tuple(chat(QUESTION)), "40", "sum-3")
    assert (prompt.metadata["data_source"], prompt.metadata["level"]) == ("sums", "easy")


@pytest.mark.parametrize("ground_truth", [None, ["40"]])
def test_an_answer_in_the_extra_info_does_not_replace_the_ground_truth(tokenizer, verifier, ground_truth):
    # In verl's GSM8K data set, extra_info['answer'] is the whole solution.
    with pytest.raises(ScoringError):
        score_one(tokenizer, "It is 40.", ground_truth, verifier, {"answer": "90 - 50 = 40. #### 40"})
    assert verifier.prompts[0].answer is None


# --- the manager ---------------------------------------------------------------------------------------------------


async def run_singles(manager, batch):
    return await asyncio.gather(*(manager.run_single(batch[row : row + 1]) for row in range(len(batch))))


def test_concurrent_samples_are_scored_in_one_batch(tokenizer, recorder):
    replies = ["x" * (n + 1) for n in range(24)]
    manager = RewardModelManager(tokenizer=tokenizer, reward_model=merged(recorder, 24))
    results = asyncio.run(run_singles(manager, make_batch(tokenizer, replies)))
    assert [result["reward_score"] for result in results] == [len(reply) / 4 for reply in replies]
    numbers = {"score", "num_tokens", "truncated_tokens", "component_length"}
    assert results[0]["reward_extra_info"].keys() == numbers
    assert len(recorder.calls) == 1


def test_a_batch_without_raw_prompt_is_an_error(tokenizer, recorder):
    batch = make_batch(tokenizer, REPLIES)
    del batch.non_tensor_batch["raw_prompt"]
    with pytest.raises(ConfigError, match=r"data\.return_raw_chat=True"):
        asyncio.run(run_singles(RewardModelManager(tokenizer=tokenizer, reward_model=recorder), batch))


def test_each_reward_is_at_the_last_token_of_its_reply(tokenizer):
    batch = make_batch(tokenizer, REPLIES)
    rewards = RewardModelManager.assemble_rm_scores(batch, [1.0, 2.0, 3.0])
    assert rewards.shape == batch.batch["responses"].shape
    last = batch.batch["attention_mask"][:, batch.batch["prompts"].shape[1] :].sum(1) - 1
    assert rewards[torch.arange(3), last].tolist() == [1.0, 2.0, 3.0]
    assert rewards.count_nonzero() == 3


# --- verl's classes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl", reason="verl is not installed")


@pytest.fixture
def make_real_batch(verl, tokenizer):
    def make(tensors, arrays):
        return verl.DataProto.from_dict(tensors=tensors, non_tensors=arrays)

    return lambda answers: make_batch(tokenizer, REPLIES, answers=answers, make=make)


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


def test_verl_loads_the_manager_from_its_configuration(make_real_batch, tokenizer, embedded_scorer):
    pytest.importorskip("verl.experimental.reward_loop.reward_manager.base")
    real_batch = make_real_batch(None)
    expected = embedded_scorer.score([chat(QUESTION, reply) for reply in REPLIES]).rewards.tolist()
    manager = {
        "source": "importlib",
        "name": "RewardModelManager",
        "module": {"path": "pkg://gym_rm.adapters.verl"},
    }
    config = verl_config(reward_manager=manager, reward_kwargs={"dtype": "float32"})
    assert rewards_of_loaded_manager(config, tokenizer, real_batch) == expected
