"""Servers of a real vLLM for the tests of this folder: `make test-vllm`, or pytest --vllm with its environment."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_servers import Server

import gym_rm

ASSETS = Path(gym_rm.__file__).parent / "assets"
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"


@pytest.fixture(scope="session")
def vllm(request):
    """Return the folder of vLLM's environment."""
    folder = request.config.getoption("--vllm")
    if folder is None:
        pytest.skip("needs vLLM for CPUs: make test-vllm")
    return folder


@pytest.fixture(scope="session")
def servers(vllm, tmp_path_factory):
    """Start a chat server and a pooling server of the embedded models; end them afterwards."""
    folder = tmp_path_factory.mktemp("vllm")
    for name in ("policy", "reward_model"):
        shutil.copytree(ASSETS / name, folder / name)
    template = folder / "reward_model" / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    started = {
        "policy": Server(vllm, folder / "policy", folder / "policy.log", "--logprobs-mode", "processed_logprobs"),
        "reward_model": Server(vllm, folder / "reward_model", folder / "reward.log", "--runner", "pooling"),
    }
    try:
        for server in started.values():
            server.start()
        yield {name: server.wait() for name, server in started.items()}
    finally:
        for server in started.values():
            server.kill()


@pytest.fixture
def chat_server(servers):
    return servers["policy"]


@pytest.fixture
def pooling_server(servers):
    return servers["reward_model"]


@pytest.fixture(scope="session")
def untied_server(vllm, servers, tmp_path_factory):
    """Return a server of the embedded policy with an output layer of its own, which tests may kill."""
    folder = tmp_path_factory.mktemp("untied")
    source = servers["policy"].folder
    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "policy")
    server = Server(vllm, folder / "policy", folder / "log", "--logprobs-mode", "processed_logprobs")
    try:
        yield server.start().wait()
    finally:
        server.kill()
