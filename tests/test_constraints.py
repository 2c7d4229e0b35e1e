"""The files of constraints: the oldest supported versions are those that pyproject.toml declares."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = {"ruff", "mypy"}  # they do not run with the oldest versions


def release(version):
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", version).split("."))


def test_the_oldest_constraints_are_the_declared_minimums():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], extras["lora"], extras["server"], extras["dev"]]
    flat = [each for item in required for each in ([item] if isinstance(item, str) else item)]
    minimums = dict(match.groups() for each in flat if (match := re.match(r"([\w.-]+)>=([\d.]+)", each)))
    text = (ROOT / "constraints-oldest.txt").read_text().lower()
    pins = dict(re.findall(r"^(\S+)==(\S+)$", text.replace("_", "-"), re.MULTILINE))
    assert {"torch", "transformers", "gymnasium", "numpy"} <= minimums.keys()
    wrong = {name: pins.get(name) for name in minimums.keys() - TOOLS if release(pins[name]) != release(minimums[name])}
    assert not wrong
