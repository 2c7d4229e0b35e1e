"""A real process: SIGTERM, accepted requests, and the log."""

import json
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from recording import RecordingScorer

SLOW_SCORER = """
import time

def score(conversations):
    time.sleep(float(conversations[0][-1]["content"]) if conversations[0][-1]["content"][0].isdigit() else 0)
    return [1.0] * len(conversations)
"""


@pytest.fixture
def start(tmp_path):
    """Function that starts `gym-rm serve` with a slow scorer, and returns the process and its URL."""
    (tmp_path / "slow.py").write_text(SLOW_SCORER)
    processes = []

    def run(*options):
        command = [sys.executable, "-m", "gym_rm", "serve", "slow:score", "--port", "0", *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
        processes.append(process)
        line = process.stdout.readline()
        if not line.startswith("listening at http://127.0.0.1:"):
            process.kill()  # otherwise reading stderr waits forever
            pytest.fail(line + process.stderr.read())
        return process, line.split()[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def body(seconds):
    messages = [{"role": "user", "content": "wait"}, {"role": "assistant", "content": str(seconds)}]
    return {"conversations": [messages]}


@pytest.fixture
def client():
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client


def test_sigterm_answers_accepted_requests_refuses_new_ones_and_exits_0(start, client, wait_until):
    process, url = start()
    client.get(url + "/health")  # a kept connection
    with ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(httpx.post, url + "/v1/rewards", json=body(1.5), timeout=60) for _ in range(4)]
        wait_until(lambda: queue_of(client, url) == 4)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get(url + "/ready").status_code == 503)
        refused = client.post(url + "/v1/rewards", json=body(0))
        assert [each.result().status_code for each in accepted] == [200] * 4
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 0
    assert "Traceback" not in stderr


def queue_of(client, url):
    lines = client.get(url + "/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("gym_rm_queue_conversations"))


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads the limits of a process in /proc")
def test_more_clients_may_stay_connected_than_the_usual_limit_of_open_files(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        process, _ = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (line,) = [each for each in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if "open files" in each]
    assert int(line.split()[3]) == min(9216, hard)


def test_a_request_that_takes_too_long_does_not_stop_the_shutdown(start, client, wait_until):
    process, url = start("--option", "drain_timeout=0.5")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, url + "/v1/rewards", json=body(60), timeout=60)
        wait_until(lambda: queue_of(client, url) == 1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)  # half of the time that the request takes
        assert process.returncode == 1
        assert waiting.result().json()["error"]["code"] == "draining"


def test_a_second_signal_stops_at_once(start, client, wait_until):
    process, url = start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, url + "/v1/rewards", json=body(60), timeout=60)
        wait_until(lambda: queue_of(client, url) == 1)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.get(url + "/ready").status_code == 503)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)  # half of the time that the request takes
        assert process.returncode == 1
        with pytest.raises(httpx.HTTPError):
            waiting.result().raise_for_status()


def test_a_request_whose_body_is_still_arriving_when_the_server_closes_is_answered(serving, wait_until):
    with serving(RecordingScorer()) as (server, _), ThreadPoolExecutor(2) as pool:

        def slowly():
            content = json.dumps(body(0)).encode()
            yield content[:10]
            wait_until(lambda: server.service.state == "draining")
            yield content[10:]

        headers = {"content-type": "application/json"}
        url = server.url + "/v1/rewards"
        arriving = pool.submit(httpx.post, url, content=slowly(), headers=headers, timeout=60, trust_env=False)
        wait_until(lambda: server.service.in_flight == 1)
        pool.submit(server.close)
        assert arriving.result().status_code == 200
