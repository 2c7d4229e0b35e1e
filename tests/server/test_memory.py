"""Memory of a real `gym-rm serve` under requests within every limit."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

BYTES, MEBIBYTE = 14_000_000, 2**20
CONVERSATION = b'[{"role":"user","content":"%b"},{"role":"assistant","content":"x"}]'
LONG = CONVERSATION % (b"abc def 12. " * (BYTES // 12))
MANY = b",".join([CONVERSATION % (b"abc def 12. " * (BYTES // 12_100))] * 1000)
BODIES = {
    "one long text": ("/classify", b'{"input":"%b"}' % (b"!a" * (BYTES // 2))),
    "one text to tokenize": ("/tokenize", b'{"prompt":"%b"}' % (b"!a" * (BYTES // 2))),
    "one message to tokenize": ("/tokenize", b'{"messages":%b}' % LONG),
    "one long conversation": ("/v1/rewards", b'{"conversations":[%b]}' % LONG),
    "many conversations": ("/v1/rewards", b'{"conversations":[%b]}' % MANY),
    "many messages": ("/classify", b'{"messages":%b}' % (b"[" + b'{"role":"user","content":"a"},' * 450_000 + b"1]")),
    "token ids": ("/classify", b'{"input":[%b1]}' % (b"1," * (BYTES // 2))),
    "invalid ids": ("/classify", b'{"input":[%b1]}' % (b"1.5," * (BYTES // 4))),
    "invalid prompts": ("/v1/rewards", b'{"conversations":[],"prompts":[%b1]}' % (b"{}," * (BYTES // 3))),
    "pairs": ("/score", b'{"queries":"a","documents":[%b"a"]}' % (b'"a",' * (BYTES // 4))),
}


@pytest.fixture(scope="module")
def process():
    """A server in a process of its own that may have 6 GB, and its address."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the memory of a process from /proc")
    start = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 * 10**9,) * 2); "
    run = start + "import sys; from gym_rm.cli.main import main; sys.argv = ['gym-rm', 'serve', '--port', '0']; main()"
    serving = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    try:
        yield serving, re.search(r"http://\S+", serving.stdout.readline())[0]
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()


SLOW = pytest.param("many conversations", marks=pytest.mark.slow)  # these are scored


@pytest.mark.parametrize("name", [name if name != "many conversations" else SLOW for name in BODIES])
def test_eight_large_bodies_at_once_take_less_than_max_memory_bytes(process, name):
    serving, url = process
    path, body = BODIES[name]
    before = memory(serving, "VmRSS")
    Path(f"/proc/{serving.pid}/clear_refs").write_text("5")  # the peak is counted anew
    with ThreadPoolExecutor(8) as pool:
        headers = {"content-type": "application/json"}
        sent = [
            pool.submit(httpx.post, url + path, content=body, headers=headers, timeout=120, trust_env=False)
            for _ in range(8)
        ]
        statuses = {each.result().status_code for each in sent}
    assert statuses <= {200, 400, 413, 503}
    assert memory(serving, "VmHWM") - before < 512 * MEBIBYTE
    assert httpx.get(url + "/ready", trust_env=False).status_code == 200


def memory(process, name):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024
