"""The recorded replies that the stand-in servers repeat are those of this vLLM."""

import json
from pathlib import Path

import vllm_servers

from scripts.record_vllm_replies import record

RECORDED = Path(vllm_servers.__file__).with_name("vllm_replies.json")


def shape(value, name=""):
    """Return the names and types in a reply; of lists, and of tokens by name, those that occur."""
    if isinstance(value, dict) and name != "top_logprobs":
        return {key: shape(each, key) for key, each in value.items()}
    if isinstance(value, list | dict):
        shapes = [shape(each, name) for each in (value.values() if isinstance(value, dict) else value)]
        return [each for place, each in enumerate(shapes) if each not in shapes[:place]]
    return type(value).__name__


def test_this_vllm_replies_in_the_recorded_shapes(chat_server, pooling_server):
    recorded = json.loads(RECORDED.read_text())
    del recorded["reload_failed"]  # it may stop a server
    replies = record({"chat": chat_server.url, "pooling": pooling_server.url}, stop=False)
    assert replies["version"] == recorded["version"]
    assert {name: each["status"] for name, each in replies.items()} == {
        n: each["status"] for n, each in recorded.items()
    }
    assert {name: shape(each) for name, each in replies.items()} == {n: shape(each) for n, each in recorded.items()}
