"""The runs in configs/grpo fit on their GPUs, as planned, and docs/grpo.md has the memory of the plans."""

import re

import pytest

from gym_rm.config import load_config
from gym_rm.planning.quantities import GIB
from gym_rm.policy.grpo_settings import GRPOSettings
from scripts.make_grpo_docs import CLUSTERS, CONFIGS, PAGE, planned, section


def test_every_config_with_a_model_of_its_own_is_planned():
    own = (
        file
        for file in CONFIGS.glob("*.yaml")
        if not (load_config(GRPOSettings, file).policy.model or "outputs/").startswith("outputs/")
    )
    assert {file.stem for file in own} == {*CLUSTERS}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_run_fits_on_its_gpus_and_the_page_has_the_memory_of_its_plan(name):
    """If the estimates change, `python scripts/make_grpo_docs.py` writes the page's table again."""
    found = planned(name)
    (pool,) = found.pools
    assert pool.peak <= pool.gpu_memory
    table = section(PAGE.read_text(encoding="utf-8"), "memory")[1]
    row = re.search(rf"^\| \[`{name}`\]\(.*?\) \| (\d) \|(.*)\|$", table, re.MULTILINE)
    assert row is not None
    assert int(row[1]) == len(pool.gpus)
    numbers = [float(each) for each in re.findall(r"([\d.]+) GiB", row[2])]
    assert numbers == pytest.approx([pool.peak / GIB, pool.gpu_memory / GIB], abs=0.06)
