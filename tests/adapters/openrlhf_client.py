"""Requests as OpenRLHF sends them: prompts rendered by the policy's chat template, and queries with a reply."""

import json
import urllib.error
import urllib.request

PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"
REPLIES = ["It is 40.", "It is 37."]


def prompt_text(question):
    return PROMPT.replace("How much is 90 - 50?", question)


def query(reply, prompt=PROMPT):
    return prompt + reply + "<|im_end|>"


def post(url, body, headers=None):
    """Post a body (bytes, or an object that is sent as JSON) and return the status and the JSON response."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=3600) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
