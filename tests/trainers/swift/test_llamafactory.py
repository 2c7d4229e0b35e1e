"""LLaMA-Factory's PPO trainer asks our server for rewards."""

import importlib.machinery
import importlib.resources
import sys
import types

import pytest
from recording import RecordingScorer

torch = pytest.importorskip("torch")
pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed")
# It imports torchaudio, which has no build for processors of this torch, and needs it for sounds alone.
sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

from llamafactory.data import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from llamafactory.train.ppo.trainer import CustomPPOTrainer
from transformers import AutoTokenizer

from gym_rm import load_scorer
from gym_rm.server.options import ServerOptions
from gym_rm.server.serve import RewardServer

POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")


def dialogue(reply):
    asked = "What is the highest of 33, 71 and 12?"
    texts = [("user", "Hello"), ("assistant", "Hi."), ("user", asked), ("assistant", reply)]
    return [{"role": role, "content": text} for role, text in texts]


@pytest.fixture
def get_rewards(monkeypatch):
    """Function of a scorer and replies: the rewards that the trainer gets for its tokens from a server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    template = get_template_and_fix_tokenizer(tokenizer, DataArguments(template="chatml"))

    def get(scorer, replies):
        encoded = [template.encode_oneturn(tokenizer, dialogue(reply)) for reply in replies]
        queries, responses = ([torch.tensor(ids) for ids in each] for each in zip(*encoded, strict=True))
        with RewardServer(scorer, ServerOptions(policy_tokenizer=POLICY), port=0) as server:
            trainer = types.SimpleNamespace(
                finetuning_args=types.SimpleNamespace(reward_model_type="api"),
                reward_model=f"{server.url}/llamafactory",
                tokenizer=tokenizer,
            )
            return CustomPPOTrainer.get_rewards(trainer, queries, responses)

    return get


def test_the_rewards_are_those_of_the_messages(get_rewards):
    replies = ["It is 12.", "It is 71.", "", "71\n"]
    expected = load_scorer().score([dialogue(reply) for reply in replies]).rewards
    assert get_rewards(load_scorer(), replies).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_reply_without_a_score_stops_training(get_rewards):
    with pytest.raises(KeyError, match="scores"):
        get_rewards(RecordingScorer(), ["It is 71.", "FAIL"])
