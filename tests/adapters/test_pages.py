"""The Python code of every page in `docs/adapters` runs, in one process per page, and shows a reward that rises."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snippets import expected_text, same_text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "adapters"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.stem not in ("README", "others"))
LIBRARIES = {
    "trl": "trl",
    "sb3": "stable_baselines3",
    "torchrl": "torchrl",
    "rllib": "tree",  # which RLlib needs; its own code is part of every installation of Ray
    "cleanrl": "torch",
    "skrl": "skrl",
    "verl": "torch",
    "openrlhf": "fastapi",
    "skyrl": "skyrl_gym",
    "nemo_rl": "torch",
    "verifiers": "verifiers.v1",
    "openenv": "openenv.core.env_server",
    "gem": "gem",
    "nemo_gym": "fastapi",
    "slime": "torch",
    "areal": "math_verify",
    "ms_swift": "swift.rewards",
    "tinker": "tinker_cookbook",
    "atropos": "torch",
    "art": "art",
    "minari": "minari",
}
NUMBER = r"(-?\d+\.\d+)"
RISE = rf"(?:before|of a wrong reply): {NUMBER}, (?:after|of the right reply): {NUMBER}"
"""What every page prints: two numbers, of which the second must be higher."""


TEXTS = {page.stem: page.read_text() for page in PAGES}
for section in (DOCS / "others.md").read_text().split("\n## ")[1:]:  # every library has a section
    title = section.partition("\n")[0]
    TEXTS[title.removesuffix(" cookbook").removesuffix("-gym").lower().replace("-", "_")] = section


def blocks(name, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[name], re.DOTALL | re.MULTILINE)


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_the_code_of_a_page_runs_and_shows_a_higher_reward(name, tmp_path):
    library = LIBRARIES[name]
    if not is_installed(library):
        pytest.skip(f"{library} is not installed")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(name)))
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    run = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    shown = re.findall(RISE, run.stdout)
    assert shown, run.stdout
    assert all(float(low) < float(high) for low, high in shown), shown
    lines = script.read_text().splitlines()
    for number in (number for number, line in enumerate(lines, 1) if line.startswith("print(")):
        if expected := expected_text(lines, number):
            assert any(same_text(expected, line) for line in run.stdout.splitlines()), (expected, run.stdout)


def test_every_library_has_python_code_and_every_page_is_in_the_table():
    assert TEXTS.keys() == LIBRARIES.keys()
    assert all(map(blocks, TEXTS))
    table = (DOCS / "README.md").read_text()
    assert [page.name for page in PAGES if f"({page.name})" not in table] == []


def test_every_adapter_has_a_page():
    adapters = {path.stem for path in (ROOT / "gym_rm" / "adapters").glob("*.py")} - {"__init__"}
    assert adapters <= {page.stem for page in PAGES}


def test_the_settings_on_the_page_of_verl_name_existing_objects():
    for block in blocks("verl", "bash"):
        settings = dict(line.lstrip("+").split("=", 1) for line in block.split())
        path = next(value for name, value in settings.items() if name.endswith(".path"))
        name = next(value for key, value in settings.items() if key.endswith(".name"))
        module = importlib.import_module(path.removeprefix("pkg://"))
        assert hasattr(module, name)
