"""Record what a real vLLM replies, for the stand-in servers of the tests.

    python scripts/record_vllm_replies.py CHAT_URL POOLING_URL tests/vllm_replies.json

The servers are those of `tests/real_vllm/conftest.py`: the embedded policy, and the embedded reward model with
`--runner pooling`. A request that cannot be served may stop vLLM 0.32, so it is the last one.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
NO_PROMPT = {"add_generation_prompt": False, "add_special_tokens": False}
SAMPLING = {"max_tokens": 4, "seed": 1, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}

# name: server, path, body (None to GET); MODEL is the name of the served model
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "version": ("chat", "/version", None),
    "models": ("pooling", "/v1/models", None),
    "weight_info": ("chat", "/weight_info", None),
    "server_info": ("chat", "/server_info", None),
    "reset_prefix_cache": ("chat", "/reset_prefix_cache", {}),
    "update_weight_version": ("chat", "/update_weight_version", {"new_version": "default"}),
    "completion": ("chat", "/v1/completions", {"model": "MODEL", "prompt": [5, 6, 7], **SAMPLING}),
    "unknown_model": ("chat", "/v1/completions", {"model": "another", "prompt": [5, 6, 7]}),
    "too_long": ("chat", "/v1/completions", {"model": "MODEL", "prompt": [5] * 3000}),
    "no_route": ("chat", "/classify", {"model": "MODEL", "input": [[5, 6]]}),
    "tokenize": ("pooling", "/tokenize", {"model": "MODEL", "messages": MESSAGES, **NO_PROMPT}),
    "classify_ids": ("pooling", "/classify", {"model": "MODEL", "input": [[5, 6], [7]], "use_activation": False}),
    "classify_messages": ("pooling", "/classify", {"model": "MODEL", "messages": MESSAGES, "use_activation": False}),
    "classify_unknown_model": ("pooling", "/classify", {"model": "another", "input": [[5, 6]]}),
    "classify_too_long": ("pooling", "/classify", {"model": "MODEL", "input": [[5] * 3000]}),
    "chat_at_pooling": ("pooling", "/v1/chat/completions", {"model": "MODEL", "messages": MESSAGES[:1]}),
    "reload_failed": ("chat", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}),
}


def ask(url: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Return status and JSON of a reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return {"status": reply.status, "body": json.loads(reply.read() or b"null")}
    except urllib.error.HTTPError as refusal:
        return {"status": refusal.code, "body": json.loads(refusal.read() or b"null")}


def record(urls: dict[str, str], *, stop: bool = True) -> dict[str, dict[str, Any]]:
    """Return the reply to each request by its name; without the one that may stop the server, unless `stop`."""
    models = {each: ask(url, "/v1/models", None)["body"]["data"][0]["id"] for each, url in urls.items()}
    replies = {}
    for name, (server, path, body) in REQUESTS.items():
        if name == "reload_failed" and not stop:
            continue
        named = body and {key: models[server] if value == "MODEL" else value for key, value in body.items()}
        text = json.dumps(ask(urls[server], path, named))
        for served in sorted(models.values(), key=len, reverse=True):
            text = text.replace(served, "/models/" + Path(served).name)
        replies[name] = json.loads(text)
    if "vllm_config" in replies["server_info"]["body"]:  # thousands of characters, of which the type is read
        config = replies["server_info"]["body"]["vllm_config"]
        replies["server_info"]["body"] = {"vllm_config": config[config.index("dtype=") :].partition(",")[0]}
    return replies


if __name__ == "__main__":
    found = record({"chat": sys.argv[1].rstrip("/"), "pooling": sys.argv[2].rstrip("/")})
    Path(sys.argv[3]).write_text(json.dumps(found, indent=1) + "\n")
