"""The site of docs: it is built without a warning, has every public name and every environment, and can be searched."""

import importlib.util
import os
import subprocess
import sys
import zlib
from pathlib import Path

import gymnasium as gym
import pytest

import gym_rm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_parser", "sphinx_copybutton")),
        reason="needs the extra docs",
    ),
]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ROOT / "docs", folder]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder


def names_in(site):
    """Return the names of Python objects in the inventory of the site."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)
    rows = (row.split() for row in zlib.decompress(lines[4]).decode().splitlines())
    return {row[0] for row in rows if row[1].startswith("py:")}


def test_the_reference_has_every_public_name(site):
    names = names_in(site)
    assert {f"gym_rm.{name}" for name in dir(gym_rm)} <= names
    assert {"gym_rm.testing.check_scorer", "gym_rm.policy.losses.policy_loss", "gym_rm.planning.planner.plan"} <= names


def test_every_environment_has_a_page(site):
    ids = {name for name, spec in gym.registry.items() if "gym_rm" in str(spec.entry_point) and "/" not in name}
    titles = {
        page.read_text().partition("<h1>")[2].partition("<")[0] for page in (site / "environments").glob("*.html")
    }
    assert titles == ids


def test_the_reference_has_every_setting_and_command(site):
    settings = (site / "reference" / "settings.html").read_text()
    for name in ("env.group_size", "optimizer.learning_rate", "tensor_parallel_size", "max_queue", "rubric"):
        assert f">{name}<" in settings, name
    commands = (site / "reference" / "commands.html").read_text()
    assert [
        name for name in ("score", "serve", "train", "plan", "data inspect") if f"gym-rm {name}" not in commands
    ] == []


def test_the_search_finds_a_setting(site, browser):
    context = browser.new_context(viewport={"width": 400, "height": 900})
    page = context.new_page()
    page.goto(f"{site.as_uri()}/search.html?q=group_size")
    found = page.locator("#search-results ul.search li a").first
    found.wait_for()
    assert "setting" in found.get_attribute("href")
    found.click()
    assert page.locator("tr:target").inner_text().lstrip().split()[0] in ("group_size", "env.group_size")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    context.close()
