"""benchmarks/overlap.py with the embedded models, on a few made-up rows."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")]


def test_every_case_has_its_seconds_and_the_rewards_of_the_other_loop(tmp_path):
    rows = {
        "humaneval": [
            {
                "prompt": f"def plus(x):\n    return x + {n}\n",
                "entry_point": "plus",
                "canonical_solution": " ",
                "test": f"def check(candidate):\n    assert candidate(1) == {n + n % 2}\n",
            }
            for n in range(4)
        ],
        "hh_harmless": [
            {
                "context": [{"role": "user", "content": f"How old is a dog of {n} years?"}],
                "completions": [
                    {"completion": [{"role": "assistant", "content": f"It is {n} years old." + " Yes." * n}]}
                ],
            }
            for n in range(4)
        ],
    }
    for name, of_name in rows.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in of_name)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--tiny", "--data", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    values = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert len(values["cases"]["elsewhere"]) == 5
    for case in values["cases"]["elsewhere"].values():
        assert 0 < case["generation"] < case["one after the other"]
        assert case["overlapped"] > 0
        assert (case["equal replies"], case["other rewards"]) == (1, 0)
    assert values["GRPO"]["1"]["update"] > 0
