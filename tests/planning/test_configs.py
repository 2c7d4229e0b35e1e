"""The requests in configs/plan: each has a plan, whose numbers are those in docs/planning.md."""

import functools
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from gym_rm.errors import ConfigError
from gym_rm.planning.exports import flags
from gym_rm.planning.plan import Phase
from gym_rm.planning.planner import plan
from gym_rm.reports.plan_pictures import plan_picture
from gym_rm.reports.plan_tables import plan_report

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "plan").glob("*.yaml"))
PAGE = ROOT / "docs" / "planning.md"

planned = functools.cache(plan)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_request_has_a_plan_that_fits(file):
    found = planned(file)
    gpus = [address for pool in found.pools for address in pool.gpus]
    assert len(gpus) == len(set(gpus))
    assert all(pool.peak <= pool.gpu_memory for pool in found.pools)
    assert {Phase.GENERATE, Phase.SCORE, Phase.UPDATE} <= {phase for phase, _ in found.phase_seconds}


def test_pictures_and_tables_of_a_cpu_say_cpu():
    found = planned(ROOT / "configs" / "plan" / "laptop.yaml")
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_report(found))
    shown = plan_picture(found) + console.file.getvalue()
    assert "Memory of one CPU" in shown
    assert "GPU" not in shown
    with pytest.raises(ConfigError, match="trains on GPUs, and the plan is for CPUs; print it --for gym-rm"):
        flags(found, "verl")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_has_the_numbers_of_the_plan(file):
    """If the estimates change, `python scripts/make_plan_docs.py` writes the page's table and pictures again."""
    row = re.search(rf"^\| \[`{file.stem}`\]\(.*?\) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    found = planned(file)
    numbers = [
        float(number) for number in re.findall(r"([\d.]+) s\b|([\d.]+) conv", row[1]) for number in number if number
    ]
    assert numbers == pytest.approx([found.step_seconds, found.conversations_per_second], rel=0.02)
