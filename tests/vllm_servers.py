"""Servers of a real vLLM for CPUs, which a test can kill and start again at the same address."""

import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

SECONDS = 300  # until a server answers; 20 seconds of processor time
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = ("--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "2048", "--disable-uvicorn-access-log")


class Server:
    """A server of a model folder; `start` returns at once, `wait` when it answers."""

    def __init__(self, environment, folder, log, *options, dtype="float32"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.folder, self.log = f"http://127.0.0.1:{self.port}", folder, log
        command = [environment / "bin" / "vllm", "serve", folder, "--port", self.port, "--dtype", dtype]
        self._command = [str(each) for each in (*command, *OPTIONS, *options)]
        self._process, self._lock = None, threading.RLock()

    def start(self):
        """Start it, after an end if it runs; threads may do so at the same time."""
        with self._lock:
            self.kill()
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, env=os.environ | SETTINGS, start_new_session=True
                )
        return self

    def wait(self):
        deadline = time.monotonic() + SECONDS
        while not self.answers():
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.2)
        return self

    def answers(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def kill(self):
        """End all its processes at once."""
        with self._lock:
            if self._process is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                self._process = None
