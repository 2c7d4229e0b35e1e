"""The wheel alone: built from the sdist, installed into an environment of its own, and used in an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 9.5e6  # bytes of the wheel; the embedded models and the audit take most of it
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="needs the package build")
    pytest.importorskip("hatchling", reason="needs the package hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the package hatch-fancy-pypi-readme")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Folder of an environment with the wheel; its other packages are those of the running interpreter."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (own,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]  # whose own .pth files are not read
    (own / "borrowed.pth").write_text("\n".join(borrowed))
    return folder


@pytest.fixture(scope="module")
def environment():
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(installed, environment, tmp_path):
    """Return a function that runs a program of the environment in an empty folder, and returns what it prints."""

    def run_program(*command):
        program = installed / "bin" / command[0]
        done = subprocess.run([program, *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_program


def test_the_sdist_and_the_wheel_have_what_they_need_and_no_more(wheel):
    (sdist,) = wheel.parent.glob("*.tar.gz")
    print(f"\nwheel {wheel.stat().st_size / 1e6:.1f} MB, sdist {sdist.stat().st_size / 1e6:.1f} MB")
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"gym_rm", "gym_rm-0.1.0.dist-info"}
    metadata = zipfile.ZipFile(wheel).read("gym_rm-0.1.0.dist-info/METADATA").decode()
    assert re.findall(r"\]\((?!https?:).*?\)|<!--", metadata) == []  # PyPI has no files of the repository
    for folder in ("agents", "configs"):
        files = {str(file.relative_to(ROOT)) for file in (ROOT / folder).rglob("*.*") if "__pycache__" not in str(file)}
        assert {f"gym_rm/{file}" for file in files} <= set(names)
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "tests/test_wheel.py"} <= packed


def test_the_first_example_of_the_readme_runs(run, installed, tmp_path):
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[1]
    (tmp_path / "first.py").write_text(f"{first}\nimport gym_rm\nprint(gym_rm.__file__)\n")
    *_, where = run("python", "first.py").splitlines()
    assert Path(where).is_relative_to(installed)


def test_a_policy_is_trained_by_the_commands_of_the_wheel(run, tmp_path):
    assert "demo" in run("gym-rm", "--help")
    run("gym-rm", "demo", "steps=2", "eval.num_prompts=8", "output=demo")
    assert (tmp_path / "demo" / "report.html").exists()
    run("gym-rm", "grpo", "--config", "math", "steps=1", "eval.num_prompts=0", "output=math")
    assert (tmp_path / "math" / "final" / "model.safetensors").exists()


def test_replies_are_scored_and_hardware_is_planned(run, tmp_path):
    row = {"prompt": "Which is the smallest, 91, 31 or 49?", "response": "It is 31."}
    (tmp_path / "replies.jsonl").write_text(json.dumps(row))
    run("gym-rm", "score", "replies.jsonl", "-o", "scored.jsonl")
    assert json.loads((tmp_path / "scored.jsonl").read_text())["score"] > 0
    assert "fits on 1 x 8" in run("gym-rm", "plan", "h100_1x8")


def test_the_server_and_its_page_answer(installed, environment, tmp_path):
    pytest.importorskip("fastapi")
    command = [installed / "bin" / "gym-rm", "serve", "--port", "0"]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            page = answer_of(server, tmp_path / "log")
        finally:
            server.terminate()
    assert "<html" in page


def answer_of(server, log):
    """Return the page of a server, which writes its address when it is ready."""
    deadline = time.monotonic() + 60
    while not (found := re.search(r"listening at (\S+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    with urllib.request.urlopen(f"{found[1]}/", timeout=60) as reply:
        return reply.read().decode()


def test_the_workflows_are_valid():
    check = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if check is None:
        pytest.skip("needs the package check-jsonschema")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {file.stem for file in files} == {"test", "wheel", "site", "release"}
    done = subprocess.run(
        [check, "--builtin-schema", "vendor.github-workflows", *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
