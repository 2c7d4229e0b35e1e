"""SmolLM2 with adapters: gradients and sampled log-probabilities are those of the plain forward of peft."""

import pytest
import torch

from gym_rm.generation.decoding import LeanDecoder
from gym_rm.generation.sampling import LocalSampler
from gym_rm.lora_settings import LoRASettings
from gym_rm.policy.trained_policy import TrainedPolicy, open_policy
from gym_rm.policy.turn_batches import policy_batches
from gym_rm.training.layouts import choose_layout
from tests.policy.turns import batched_loss, difference, gradients, gsm8k_turns, plain_loss, turn
from tests.policy.turns import plain as plain_log_probs


@pytest.fixture(scope="module")
def start(smollm2):
    pytest.importorskip("peft")
    made = open_policy(str(smollm2), lora=LoRASettings(rank=16), seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.005)
    return made


def test_gradients_of_adapters_are_those_of_peft(start):
    policy = TrainedPolicy(start)
    layout = choose_layout(policy, start.model, tree=True, fuse=True)
    assert (layout.layout, layout.fuse) == ("tree", True)
    turns, groups = gsm8k_turns(start.tokenizer, problems=1, length=24)
    batches = policy_batches(turns, groups, layout="tree", max_num_batched_tokens=2000)
    expected = gradients(plain_loss(start.model, turns), start.model)
    assert difference(gradients(batched_loss(policy, batches, turns), start.model), expected) < 1e-4


def test_sampled_log_probs_are_those_of_peft(start):
    sampler = LocalSampler(start.trained, start.tokenizer, max_new_tokens=12)
    (given, *_), _ = gsm8k_turns(start.tokenizer, problems=1, length=4)
    for each in sampler.sample([given.prompt] * 4, seeds=range(4)):
        with torch.no_grad():
            expected = plain_log_probs(start.model, turn(given.prompt, each.token_ids))[0]
        torch.testing.assert_close(torch.from_numpy(each.log_probs), expected, rtol=1e-4, atol=1e-4)
    assert type(sampler._decoder) is LeanDecoder
