import contextlib
import http.client
import json
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import gym_rm
from gym_rm.cli.main import app

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

POLICY = str(Path(gym_rm.__file__).parent / "assets" / "policy")
PROMPT = "<|im_start|>user\nHow much is 90 - 50?<|im_end|>\n<|im_start|>assistant\n"
REPLIES = ["It is 40.", "It is 37."]
REQUEST = {"query": [f"{PROMPT}{reply}<|im_end|>" for reply in REPLIES], "prompts": [PROMPT] * 2, "labels": ["40"] * 2}


@contextlib.contextmanager
def serving(*options, folder=None):
    """Run the command on a free port; yield the process and its URL, and kill the process afterwards.

    With a folder, the scorer is a function in it, which starts faster than a model.
    """
    model = ["--policy-tokenizer", POLICY] if folder is None else ["lengths:score"]
    if folder is not None:
        (folder / "lengths.py").write_text("def score(conversations):\n    return [1.0 for _ in conversations]\n")
    command = [sys.executable, "-m", "gym_rm", "serve", *model, "--port", "0", *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            if not line.startswith("listening at http://127.0.0.1:"):
                process.kill()  # otherwise reading stderr waits forever
                pytest.fail(line + process.stderr.read())
            yield process, line.split()[-1] + "/get_reward"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("secret")
    with serving("--key-file", str(file)) as (_, url):
        yield url


def post(url, key=None):
    """Request the rewards of two samples with this key; return status and response."""
    address = urllib.parse.urlsplit(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    with contextlib.closing(connection):
        headers["Content-Type"] = "application/json"
        connection.request("POST", address.path, json.dumps(REQUEST), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_request_returns_the_rewards_of_the_embedded_model(url):
    question = {"role": "user", "content": "How much is 90 - 50?"}
    conversations = [[question, {"role": "assistant", "content": reply}] for reply in REPLIES]
    status, reply = post(url, "secret")
    assert status == 200
    assert np.float32(reply["rewards"]).tolist() == gym_rm.load_scorer().score(conversations).rewards.tolist()


def error_of(*options):
    """Return the error output of a command that exits with code 2."""
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "key is missing, but host='0.0.0.0' can be reached from other machines"),
        (["nowhere/to/be/found"], "nowhere/to/be/found"),
        (["--policy-tokenizer", "nowhere/to/be/found"], "nowhere/to/be/found"),
        (["--option", "overlon=error"], "unknown option 'overlon'"),
        (["--allow-weight-updates"], "allow_weight_updates needs a key"),
    ],
)
def test_a_mistake_prints_one_line_of_error(options, message):
    stderr = error_of("--port", "0", *options)
    assert stderr.startswith("error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_a_port_in_use_prints_one_line_of_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        stderr = error_of("--port", str(other.getsockname()[1]))
    assert "Address already in use" in stderr
    assert stderr.count("\n") == 1


def test_the_curl_line_that_is_printed_works_with_the_key_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GYM_RM_KEY", "a secret")
    with serving(folder=tmp_path) as (process, url):
        assert post(url)[0] == 401
        command = process.stdout.readline().removeprefix("try: ")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert len(json.loads(done.stdout)["rewards"]) == 1, done.stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_key_file_is_an_error(tmp_path, text):
    (tmp_path / "key").write_text(text)
    assert "is empty" in error_of("--key-file", str(tmp_path / "key"))
    assert "No such file" in error_of("--key-file", str(tmp_path / "nowhere"))


def test_a_missing_library_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "gym_rm.server.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'gym-rm[server]'" in error_of()
