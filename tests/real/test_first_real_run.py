"""`gym-rm demo --real` with SmolLM2, at its smallest."""

import subprocess
import sys

import pytest

from gym_rm.reports.runs import read_run
from tests import real_data


@pytest.mark.data
def test_the_first_real_run_ends_with_its_pages(smollm2, tmp_path):
    sizes = ("steps=1", "num_prompts=1", "num_pairs=2", "num_held_out_pairs=2", "audited_rows=2")
    command = (
        "demo",
        "--real",
        f"model={smollm2}",
        f"pairs={real_data.FOLDER}/hh_harmless.jsonl.gz",
        f"output={tmp_path}",
        *sizes,
    )
    done = subprocess.run([sys.executable, "-m", "gym_rm", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("$ gym-rm ") == 4
    first, last = read_run(tmp_path / "policy").before_and_after()[0]
    assert first["messages"][:-1] == last["messages"][:-1]
    assert (tmp_path / "policy" / "report.html").exists()
    assert (tmp_path / "evaluation" / "report.html").exists()
