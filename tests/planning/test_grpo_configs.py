"""The runs in configs/grpo fit on their GPUs, as planned, and the saved result has the memory of the plans."""

import pytest

from benchmarks.grpo_plans import CLUSTERS, CONFIGS, memory
from gym_rm.config import load_config
from gym_rm.policy.grpo_settings import GRPOSettings
from scripts.write_figures import result


def test_every_config_with_a_model_of_its_own_is_planned():
    own = (
        file
        for file in CONFIGS.glob("*.yaml")
        if not (load_config(GRPOSettings, file).policy.model or "embedded:").startswith(("embedded:", "outputs/"))
    )
    assert {file.stem for file in own} == {*CLUSTERS, "smollm2"}  # which runs on a CPU


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_run_fits_on_its_gpus_and_the_result_has_the_memory_of_its_plan(name):
    """If the estimates change, `python benchmarks/grpo_plans.py --save grpo_plans` writes the result again."""
    found = memory(name)
    assert found["peak"] <= found["memory"]
    assert result("grpo_plans")["values"][name] == pytest.approx(found, abs=0.06)
