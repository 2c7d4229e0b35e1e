"""OpenRLHF: its executor of single turns against our server, and what it does with the samples."""

import asyncio
import importlib.util
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recording import RecordingScorer, Verifier
from transformers import AutoTokenizer

import gym_rm

pytest.importorskip("openrlhf")

from openrlhf.trainer.ppo_utils.experience import Experience, split_experience_batch
from openrlhf.utils import agent

from gym_rm.server.options import ServerOptions
from gym_rm.server.serve import RewardServer

ROOT = Path(__file__).parents[3]
POLICY = str(ROOT / "gym_rm" / "assets" / "policy")
PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"


@contextmanager
def served(scorer, user="", **options):
    """Serve a scorer; yield the URL for OpenRLHF."""
    with RewardServer(scorer, ServerOptions(policy_tokenizer=POLICY, **options), port=0) as server:
        yield server.url.replace("http://", f"http://{user}") + "/get_reward"


class Replies:
    """Inference engine with the method that OpenRLHF's executors call; it returns one reply after the other."""

    def __init__(self, tokenizer, replies):
        self.tokenizer, self.replies = tokenizer, iter(replies)

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        ids = self.tokenizer(next(self.replies) + "<|im_end|>")["input_ids"]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=None, text="")])


def samples(executor, replies, labels):
    """Return the samples of one prompt for each label, as OpenRLHF's rollout actor makes them."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    engine, params = Replies(tokenizer, replies), SimpleNamespace(max_tokens=32, logprobs=None)

    async def rollouts():
        return await asyncio.gather(
            *(executor.execute(PROMPT, label, params, 512, tokenizer, engine) for label in labels)
        )

    return asyncio.run(rollouts())


def experience(sample):
    """Return what `_process_response_into_experience`, which needs vLLM, makes of the reward and the logs."""
    reward = None if sample["reward"] is None else torch.tensor([sample["reward"]])
    info = {name: torch.tensor([value]) for name, value in sample["extra_logs"].items()}
    return Experience(sequences=torch.ones(1, 4), rewards=reward, info=info)


@pytest.fixture
def quick(monkeypatch):
    """Let OpenRLHF not wait between two tries."""
    sleep = asyncio.sleep
    monkeypatch.setattr(agent.asyncio, "sleep", lambda seconds: sleep(0))


def test_the_samples_of_a_rollout_are_scored_in_one_batch(recorder):
    with served(recorder, "any:secret@", key="secret", max_batch_size=32, max_wait=3600) as url:
        recorder.calls.clear()  # of the known conversations
        found = samples(agent.SingleTurnAgentExecutor(url), ["x" * n for n in range(32)], ["4"] * 32)
    assert [sample["reward"] for sample in found] == [[n / 4] for n in range(32)]
    assert len(recorder.calls) == 1


def test_labels_reach_a_verifier():
    with served(gym_rm.load_scorer(Verifier())) as url:
        found = samples(agent.SingleTurnAgentExecutor(url), ["It is 40."] * 3, ["40", "41", "0"])
    assert [sample["reward"] for sample in found] == [[1.0], [0.0], [1.0]]


def rules(conversations, prompts):
    """Reward function with a component that only rows with an answer have."""
    right = [np.nan if prompt.answer is None else 1.0 for prompt in prompts]
    return gym_rm.Scores.from_rewards([0.5] * len(prompts), components={"right": right})


def test_samples_with_and_without_a_component_are_one_batch():
    with served(gym_rm.load_scorer(rules)) as url:
        found = samples(agent.SingleTurnAgentExecutor(url), ["40", "no"], ["40", None])
    logged = split_experience_batch(Experience.concat_experiences([*map(experience, found)], 0))
    assert [(one.info["component_right"].item(), one.info["has_right"].item()) for one in logged] == [(1, 1), (0, 0)]


def test_a_sample_without_a_score_ends_the_run(recorder, quick):
    with served(recorder) as url:
        found = samples(agent.SingleTurnAgentExecutor(url), ["four", "FAIL"], ["4"] * 2)
    assert [sample["reward"] for sample in found] == [[1.0], None]
    with pytest.raises(AttributeError, match="'NoneType'"):
        Experience.concat_experiences([*map(experience, found)], 0)


@pytest.fixture
def page_executor(tmp_path):
    """Function from a URL to the executor on our page."""
    page = (ROOT / "docs" / "adapters" / "openrlhf.md").read_text("utf-8")
    (code,) = re.findall(r"```py\n(# agent\.py\n.*?)```", page, re.DOTALL)

    def make(url):
        file = tmp_path / "agent.py"
        file.write_text(code.replace("http://127.0.0.1:5000/get_reward", url))
        spec = importlib.util.spec_from_file_location("agent_module", file)  # as OpenRLHF loads it
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.AgentExecutor()

    return make


def test_the_executor_of_the_page_takes_another_reply_for_one_without_a_score(recorder, page_executor):
    with served(recorder) as url:
        (sample,) = samples(page_executor(url), ["FAIL", "four"], ["4"])
    assert sample["reward"] == [1.0]


def test_the_executor_of_the_page_ends_with_the_reason(recorder, page_executor):
    with served(recorder) as url, pytest.raises(RuntimeError, match="the reply contains FAIL"):
        samples(page_executor(url), ["FAIL"] * 3, ["4"])


def test_a_fallback_reward_counts_and_is_logged():
    with served(RecordingScorer(), fallback_reward=-1.0) as url:
        found = samples(agent.SingleTurnAgentExecutor(url), ["four", "FAIL"], ["4"] * 2)
    assert [sample["reward"] for sample in found] == [[1.0], [-1.0]]
    assert [sample["extra_logs"]["score_ok"] for sample in found] == [[1.0], [0.0]]
