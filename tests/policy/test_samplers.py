"""The sampler of a run is in this process by default, and says where a server would suit better."""

import pytest
import torch

from gym_rm.errors import warn_once
from gym_rm.policy.learner import Learner
from gym_rm.policy.samplers import make_sampler
from tests.policy.policy_runs import settings_of


@pytest.mark.parametrize(
    ("device", "options", "hint"),
    [
        ("cuda", ["env.num_prompts=31"], "a GPU samples 248 completions at a time, and fewer than 256"),
        ("cuda", ["env.num_prompts=64", "sampling.max_num_seqs=16"], "samples 16 completions at a time"),
        ("cuda", ["env.num_prompts=32"], None),
        ("cpu", ["env.num_prompts=2"], None),
    ],
)
def test_few_completions_on_a_gpu_have_a_hint_at_the_start(tmp_path, caplog, device, options, hint):
    settings = settings_of(tmp_path, "env.group_size=8", *options)
    learner = Learner(settings)
    learner.device = torch.device(device)
    warn_once.cache_clear()
    make_sampler(settings, learner)
    messages = [each for each in caplog.messages if "sampling.server" in each]
    assert len(messages) == (hint is not None)
    assert hint is None or hint in messages[0]
