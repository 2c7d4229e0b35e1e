"""Every command of docs/server.md runs, in one shell, and so does the endpoint on the page of OpenRLHF."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def commands(page):
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture
def shell(tmp_path):
    """Function that runs commands with `gym-rm` and `python3` of this environment, on free ports."""
    (tmp_path / "bin").mkdir()
    for name, arguments in (("gym-rm", "-m gym_rm"), ("python3", "")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        script.chmod(0o755)

    def run(text):
        for port in ("5000", "5001"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                text = text.replace(port, str(free.getsockname()[1]))
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        script = f"set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{text}"
        return subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    return run


@pytest.mark.slow
@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="no bash")
def test_the_commands_of_the_page_run(shell, embedded):
    run = shell(commands("server.md"))
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ('"rewards":[', ",null]", '"probs":[', '"embedding":[', '"score":', '"LABEL_0"'):
        assert part in run.stdout, part
    assert '"calibration"' in run.stdout
    assert "gym_rm_weight_updates_total 1.0" in run.stdout


@pytest.mark.slow
def test_the_endpoint_of_openrlhf_runs(shell):
    run = shell(commands("adapters/openrlhf.md"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert '"rewards":[' in run.stdout


def test_the_page_has_every_route():
    from gym_rm.server.app import ROUTES

    text = (DOCS / "server.md").read_text()
    assert [path for _, path, _ in ROUTES if f"{path}`" not in text] == []
