"""All parts of benchmarks/gpu_day.py, tiny, in an empty folder, on conversations that this test writes."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_day.py"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="benchmarks read /proc")]


def run(folder, *options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)], cwd=folder, capture_output=True, text=True, timeout=600,
        env=environment | {"XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folder with a few problems and dialogues, in the format of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    problems = [
        {
            "question": f"Anna has {n} apples and buys {n + 2} more. How many has she?",
            "solutions": [
                {
                    "text": f"She has {n} + {n + 2} = {2 * n + 2} apples. #### {2 * n + 2}" + " Yes." * k,
                    "correct": k > 0,
                }
                for k in range(4)
            ],
        }
        for n in range(30)
    ]
    dialogues = [
        {
            "context": [{"role": "user", "content": f"Tell me about the number {n}, please."}],
            "completions": [
                {"rank": rank, "completion": [{"role": "assistant", "content": f"{n} is {word} than {n - 1}."}]}
                for rank, word in enumerate(("larger", "smaller"))
            ],
        }
        for n in range(30)
    ]
    for name, rows in (("gsm8k_graded", problems), ("hh_harmless", dialogues)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def rows_of(output, part):
    return [json.loads(line) for line in (output / f"part_{part}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def output(tmp_path_factory, data):
    """Folder with the results of all parts."""
    empty = tmp_path_factory.mktemp("empty")
    done = run(empty, "--part", *"ABCDE", "--tiny", "--data", data, "--output", empty / "out")
    assert done.returncode == 0, done.stderr[-3000:]
    return empty / "out"


@pytest.mark.parametrize("part", "ABCDE")
def test_every_row_has_a_result(output, part):
    rows = rows_of(output, part)
    assert len(rows) >= 4
    missing = [row for row in rows if not row.get("result") and "is not" not in row.get("skipped", "")]
    assert not missing


def test_scores_of_products_in_chunks_have_the_same_bits_in_every_batch(output):
    rungs = {row["parameters"]["rung"]: row["result"] for row in rows_of(output, "B") if "rung" in row["parameters"]}
    assert rungs["chunks of 256"]["other_bits"] == 0


def test_rows_that_do_not_fit_into_the_minutes_are_skipped(tmp_path, data):
    done = run(tmp_path, "--part", "C", "--tiny", "--data", data, "--output", tmp_path, "--minutes", "0.3")
    assert done.returncode == 0, done.stderr
    assert all("s are left" in row["skipped"] for row in rows_of(tmp_path, "C") if row["name"] != "vLLM")


def test_without_conversations_one_line_says_what_to_pass(tmp_path):
    done = run(tmp_path, "--part", "A", "--tiny", "--data", tmp_path, "--output", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("pass the folder with the real conversations.")
