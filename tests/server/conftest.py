import importlib.util
from pathlib import Path

import pytest

INSTALLED = all(importlib.util.find_spec(module) for module in ("fastapi", "uvicorn", "prometheus_client", "httpx"))
collect_ignore = [] if INSTALLED else [path.name for path in Path(__file__).parent.glob("test_*.py")]

if INSTALLED:
    import contextlib
    import time

    import httpx
    from recording import RecordingScorer

    import gym_rm
    from gym_rm.server.options import ServerLimits, ServerOptions
    from gym_rm.server.serve import RewardServer

    @contextlib.contextmanager
    def serving(scorer, *, limits=None, **options):
        """Serve a scorer on a free port; yield the server and a client of it."""
        settings = ServerOptions(limits=ServerLimits(**(limits or {})), **options)
        with RewardServer(scorer, settings, port=0) as server:
            pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            with httpx.Client(base_url=server.url, timeout=600, limits=pool, trust_env=False) as client:
                yield server, client

    def wait_until(condition, seconds=60):
        """Wait until a condition holds; it fails after some seconds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true in time"
            time.sleep(0.01)

    @pytest.fixture(name="wait_until", scope="session")
    def wait_until_fixture():
        """`wait_until(condition)`."""
        return wait_until

    @pytest.fixture(name="serving", scope="session")
    def serving_fixture():
        """`serving(scorer, limits={...}, **options)`, as a context manager."""
        return serving

    @pytest.fixture(scope="session")
    def recording_server():
        """A server whose scorer records its calls, the scorer, and a client."""
        recorder = RecordingScorer()
        with serving(recorder) as (server, client):
            yield recorder, server, client

    @pytest.fixture
    def recorder(recording_server):
        recording_server[0].calls.clear()
        return recording_server[0]

    @pytest.fixture
    def client(recording_server):
        return recording_server[2]

    @pytest.fixture(scope="session")
    def embedded():
        return gym_rm.load_scorer()

    @pytest.fixture(scope="session")
    def model_client(embedded):
        """Client of a server of the embedded reward model."""
        with serving(embedded) as (_, client):
            yield client
