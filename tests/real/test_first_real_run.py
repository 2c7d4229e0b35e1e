"""`gym-rm demo --real` with SmolLM2, at its smallest."""

import json
import subprocess
import sys

import pytest
from conftest import rows

from gym_rm.reports.runs import read_run


@pytest.mark.data
def test_the_first_real_run_ends_with_its_pages(smollm2, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    short = sorted(map(json.dumps, rows("hh_harmless")), key=len)[:8]  # an audit scores hundreds of changes of a reply
    pairs.write_text("\n".join(short))
    sizes = ("steps=1", "num_prompts=1", "num_pairs=2", "num_held_out_pairs=2", "audited_rows=2")
    command = (
        "demo",
        "--real",
        f"model={smollm2}",
        f"pairs={pairs}",
        f"output={tmp_path / 'run'}",
        *sizes,
    )
    done = subprocess.run([sys.executable, "-m", "gym_rm", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("$ gym-rm ") == 4
    first, last = read_run(tmp_path / "run" / "policy").before_and_after()[0]
    assert first["messages"][:-1] == last["messages"][:-1]
    assert (tmp_path / "run" / "policy" / "report.html").exists()
    assert (tmp_path / "run" / "evaluation" / "report.html").exists()
