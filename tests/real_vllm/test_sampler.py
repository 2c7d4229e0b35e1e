"""A real vLLM as sampler: its log-probabilities are the trainer's, whatever happens to its weights."""

import json
import urllib.request

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from gym_rm.errors import ConfigError, RemoteError
from gym_rm.policy.learner import Learner
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.samplers import make_sampler
from tests.policy.policy_runs import settings_of

PROMPTS = ("What is the largest of 3, 71 and 9?", "Hello!", "Which is the lowest: 5 or 4?")


def post(server, path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read() or b"null")


class Trainer:
    """A learner, the sampler of its run at a server, and prompts."""

    def __init__(self, server, folder, *overrides):
        settings = settings_of(
            folder,
            f"policy.model={server.folder}",
            f"sampling.server={server.url}",
            "sampling.max_new_tokens=24",
            *overrides,
        )
        self.learner = Learner(settings)
        self.sampler, self.update = make_sampler(settings, self.learner)
        tokenizer = self.learner.start.tokenizer
        rows = [[{"role": "user", "content": text}] for text in PROMPTS]
        chat = {"add_generation_prompt": True, "return_dict": False}
        self.prompts = [np.array(tokenizer.apply_chat_template(row, **chat), dtype=np.int32) for row in rows] * 4
        self.seeds = [7 * row for row in range(len(self.prompts))]

    def learn(self, seed=0):
        """Change all weights by a lot."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.learner.start.trained.parameters():
                if parameter.requires_grad:
                    parameter += max(0.3 * parameter.std(), 0.05) * torch.randn_like(parameter)  # zeros of adapters too
        self.learner.version += 1

    def sample(self, rows=slice(None)):
        return self.sampler.sample(self.prompts[rows], seeds=self.seeds[rows])

    def largest_error(self, completions):
        expected = self.learner.log_probs_of(self.prompts, completions)
        return max(np.abs(own - each.log_probs).max() for own, each in zip(expected, completions, strict=True))


@pytest.fixture
def trainer(chat_server, tmp_path):
    made = []

    def make(*overrides, server=chat_server):
        made.append(Trainer(server, tmp_path / "run", *overrides))
        made[-1].update()
        return made[-1]

    yield make
    for each in made:
        each.sampler.close()


def of(completions):
    return [(each.token_ids.tolist(), each.log_probs.tolist(), each.finished, each.text) for each in completions]


@pytest.mark.parametrize("server", ["chat_server", "untied_server"])
def test_log_probabilities_are_the_trainers_before_and_after_a_large_update(trainer, server, request):
    run = trainer(server=request.getfixturevalue(server))
    before = run.sample()
    assert run.largest_error(before) < 1e-4
    for seed in (1, 2):
        run.learn(seed)
        run.update()
        after = run.sample()
        assert run.largest_error(after) < 1e-4
    assert of(after) != of(before)


def test_adapters_are_merged_into_the_weights_of_the_server(trainer):
    pytest.importorskip("peft")
    run = trainer("policy.lora.rank=4")
    before = run.sample()
    run.learn()
    run.update()
    after = run.sample()
    assert run.largest_error(after) < 1e-4
    assert of(after) != of(before)


def test_a_completion_depends_on_its_seed_and_not_on_the_others(trainer):
    run = trainer("sampling.temperature=0.7")
    whole = run.sample()
    assert of(run.sample(slice(3, 5))) == of(whole[3:5])
    assert len({each.text for each in whole[::3]}) > 1, "rows 0, 3, 6 and 9 have one prompt"
    assert run.largest_error(whole) < 1e-4


def test_a_stream_hands_the_same_completions_over_as_they_end(trainer):
    run = trainer()
    expected = run.sample()
    stream, completions = run.sampler.stream(), {}
    for row, (prompt, seed) in enumerate(zip(run.prompts, run.seeds, strict=True)):
        stream.add([row], [prompt], seeds=[seed])
        completions |= stream.take(timeout=0.0)
    while stream.num_open:
        completions |= stream.take()
    assert list(completions) != sorted(completions), "some end before others that were begun earlier"
    assert of([completions[row] for row in range(len(expected))]) == of(expected)


def test_ends_are_those_of_the_policy(trainer):
    run = trainer("sampling.max_new_tokens=5", "sampling.temperature=1.5")
    completions = run.sample()
    assert {each.finished for each in completions} == {True, False}
    for each in completions:
        assert len(each.token_ids) <= 5
        assert each.finished == (each.token_ids[-1] == run.learner.start.tokenizer.eos_token_id)
        assert each.finished or len(each.token_ids) == 5


def test_weights_that_something_else_loaded_are_noticed_and_replaced(trainer, chat_server):
    run = trainer()
    run.learn()
    run.update()
    expected = of(run.sample())
    post(
        chat_server,
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": str(chat_server.folder)}},
    )
    post(chat_server, "/reset_prefix_cache", {})
    with pytest.raises(RemoteError, match="has other log-probabilities than the trainer for weights of version 1"):
        run.sample()
    assert of(run.sample()) == expected


def test_log_probabilities_at_another_temperature_are_an_error(trainer):
    run = trainer()
    run.sampler.temperature = 1.7
    with pytest.raises(RemoteError, match="it has loaded them again"):
        run.sample()
    with pytest.raises(ConfigError, match=r"has other log-probabilities .* --logprobs-mode"):
        run.sample()


def test_weights_that_cannot_be_loaded_are_an_error_at_once(untied_server, tmp_path):
    """This stops vLLM 0.32: keep it the last test of its server."""
    sampler = RemoteSampler(
        untied_server.url,
        model=str(untied_server.folder),
        tokenizer=AutoTokenizer.from_pretrained(untied_server.folder),
        ends=[2],
        save=lambda folder, weights: (folder / "model.safetensors").write_bytes(b"no weights"),
        weights_folder=tmp_path,
        max_new_tokens=4,
    )
    with pytest.raises(ConfigError, match=r"did not load the weights in .*version-00000001"):
        sampler.update_weights({}, version=1)
