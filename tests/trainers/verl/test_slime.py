"""slime, from a tree of its sources (`--tree slime=PATH`): its rollout, remote rewards and filter of groups."""

import asyncio
import importlib.resources
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from recording import chat

import gym_rm

pytest.importorskip("verl")  # the environment has what slime's rollout imports

from gym_rm.server.options import ServerOptions
from gym_rm.server.serve import RewardServer

PAGE = Path(__file__).parents[3] / "docs" / "adapters" / "others.md"
POLICY = str(importlib.resources.files("gym_rm") / "assets" / "policy")
PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def rollout(tree, monkeypatch):
    """slime's module of rollouts."""
    monkeypatch.syspath_prepend(str(tree("slime")))
    from slime.rollout import sglang_rollout

    return sglang_rollout


@pytest.fixture
def my_rewards(tmp_path, monkeypatch, recorder):
    """The module of the page with a scorer that records, and a function that generates the replies of the prompts."""
    (section,) = re.findall(r"^## slime\n(.*?)^## ", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = re.findall(r"^```python\n(.*?)^prompt = ", section, re.DOTALL | re.MULTILINE)
    generate = (
        "async def generate(args, sample, params):\n    sample.response = sample.metadata['reply']\n    return sample"
    )
    (tmp_path / "my_rewards.py").write_text(f"{code}\n\n{generate}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards

    monkeypatch.setattr(my_rewards, "REWARD_MODEL", recorder)
    yield my_rewards
    del sys.modules["my_rewards"]


class Options(Namespace):
    """slime's arguments; those that are not given are None."""

    def __getattr__(self, name):
        return None


def generated(rollout, monkeypatch, groups, wanted):
    """Return the rewards of the groups that slime's rollout takes, which prompts are the groups of their replies."""

    async def no_abort(args, rollout_id):
        return []

    monkeypatch.setattr(rollout, "abort", no_abort)  # it asks the inference servers
    names = ("custom_generate_function_path", "custom_rm_path", "dynamic_sampling_filter_path")
    paths = dict(zip(names, ("my_rewards.generate", "my_rewards.reward", "my_rewards.has_rewards"), strict=True))
    sizes = {"rollout_batch_size": wanted, "over_sampling_batch_size": 1, "n_samples_per_prompt": len(groups[0])}
    engine = {"hf_checkpoint": POLICY, "rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "rollout_top_p": 1.0}
    options = Options(rollout_global_dataset=True, sglang_server_concurrency=4, **paths, **sizes, **engine)
    prompts = iter(groups)

    def source(count):
        group = next(prompts)
        return [
            [
                rollout.Sample(index=number, prompt=chat("2 + 2?"), label="4", metadata={"reply": reply})
                for number, reply in enumerate(group)
            ]
        ]

    output, _ = asyncio.run(rollout.generate_rollout_async(options, 0, source))
    return [[sample.reward for sample in group] for group in output.samples]


def test_a_group_with_a_reply_without_a_score_is_replaced(rollout, my_rewards, monkeypatch):
    groups = [["four", "FAIL"], ["x", "xx"], ["xxx", "xxxx"]]
    assert generated(rollout, monkeypatch, groups, 2) == [[0.25, 0.5], [0.75, 1.0]]


def ask(rollout, scorer, *samples):
    """Return the rewards that slime's `remote_rm` gets of our server."""

    async def rewards(url):
        from slime.rollout import rm_hub

        options = Options(rm_type="remote_rm", rm_url=url)
        try:
            return await rm_hub.batched_async_rm(options, [rollout.Sample(**sample) for sample in samples])
        finally:
            await rm_hub._get_shared_session().close()

    with RewardServer(scorer, ServerOptions(policy_tokenizer=POLICY), port=0) as server:
        return asyncio.run(rewards(server.url + "/slime"))


@pytest.mark.parametrize("prompt", [PROMPT, chat("How much is 90 - 50?")])
def test_the_server_gives_remote_rm_the_rewards_of_the_scorer(rollout, prompt):
    scorer, replies = gym_rm.load_scorer(), ["It is 40.", "no"]
    expected = [scorer.score([chat("How much is 90 - 50?", reply)]).rewards.item() for reply in replies]
    samples = [{"prompt": prompt, "response": f"{reply}<|im_end|>", "label": "40"} for reply in replies]
    assert ask(rollout, scorer, *samples) == expected


def test_remote_rm_raises_for_a_reply_without_a_score(rollout, recorder, monkeypatch):
    sleep, waits = asyncio.sleep, []
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0, waits.append(seconds)))
    with pytest.raises(Exception, match="422"):
        ask(rollout, recorder, {"prompt": chat("2 + 2?"), "response": "FAIL", "label": "4"})
    assert len([wait for wait in waits if wait >= 1]) == 9
