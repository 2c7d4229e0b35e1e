"""All parts of benchmarks/gpu_first.py and gpu_day.py, tiny, in an empty folder, on a few made-up conversations."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"gpu_first": "12345", "gpu_day": "ABCDE"}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="benchmarks read /proc")]


def run(folder, script, *options, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--tiny", *map(str, options)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600,
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
    """Folder with the results of all parts of both scripts."""
    empty = tmp_path_factory.mktemp("empty")
    (empty / "kernels" / "triton").mkdir(parents=True)
    (empty / "kernels" / "triton" / "one").write_text("a kernel")
    for script, parts in PARTS.items():
        done = run(
            empty, script, "--part", *parts, "--data", data, "--output", empty / "out", "--kernels", empty / "kernels"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (empty / "out" / f"{script}.txt").write_text(done.stdout)
    return empty / "out"


@pytest.mark.parametrize("part", "".join(PARTS.values()))
def test_every_row_has_a_result(output, part):
    rows = rows_of(output, part)
    assert sum("result" in row for row in rows) >= (1 if part in "234" else 3)
    missing = [row for row in rows if not row.get("result") and "is not" not in row.get("skipped", "")]
    assert not missing


def test_scores_of_products_in_chunks_have_the_same_bits_in_every_batch(output):
    rungs = {row["parameters"]["rung"]: row["result"] for row in rows_of(output, "B") if "rung" in row["parameters"]}
    assert rungs["chunks of 256"]["other_bits"] == 0


def test_the_first_numbers_say_how_the_model_ran(output):
    (line,) = [line for line in (output / "gpu_first.txt").read_text().splitlines() if line.startswith("tiny: ")]
    assert "of the measured rate of products" in line
    assert "layout tree, fused True" in line
    assert all(name in line for name in ("products", "attention", "bit-equal", "with texts"))


def test_every_number_of_rows_of_a_product_is_compared(output):
    (row,) = [row for row in rows_of(output, "3") if "result" in row]
    assert {each["row_counts"] for each in row["result"].values()} == {21}
    assert all("chunks of 256" in each["kept_by"] for each in row["result"].values())


@pytest.mark.parametrize("part", ["1", "4", "C"])
def test_a_model_that_does_not_run_as_a_tree_has_an_error_instead_of_a_number(tmp_path, data, part):
    script = "gpu_day" if part == "C" else "gpu_first"
    done = run(tmp_path, script, "--part", part, "--data", data, "--output", tmp_path, GYM_RM_DEBUG="layout=padded")
    assert done.returncode == 1
    rows = [row for row in rows_of(tmp_path, part) if row["name"] in ("load", "variant", "scoring", "padded")]
    assert {row.get("error", "")[:56] for row in rows if "skipped" not in row} == {
        "ArithmeticError: the model does not run as promised, {'l"
    }


def test_compiled_kernels_travel_back_and_are_read(output, tmp_path, data):
    archive, kernels = output / "kernels.tar.gz", output.parent / "kernels"
    (kernels / "triton" / "one").unlink()
    options = ("--part", "2", "--data", data, "--output", tmp_path, "--minutes", "0", "--read-kernels", archive)
    assert "nothing was measured" in run(tmp_path, "gpu_first", *options, "--kernels", kernels).stderr
    assert (kernels / "triton" / "one").read_text() == "a kernel"
    with tarfile.open(tmp_path / "kernels.tar.gz") as file:
        assert "./triton/one" in file.getnames()
    elsewhere = run(tmp_path, "gpu_first", *options, "--kernels", tmp_path / "elsewhere")
    assert elsewhere.returncode == 1
    assert f"pass --kernels {kernels}" in elsewhere.stderr


def test_rows_that_do_not_fit_into_the_minutes_are_skipped_and_a_day_without_numbers_is_an_error(tmp_path, data):
    done = run(tmp_path, "gpu_day", "--part", "C", "--data", data, "--output", tmp_path, "--minutes", "0.3")
    assert done.returncode == 1
    assert "nothing was measured" in done.stderr
    assert all("s are left" in row["skipped"] for row in rows_of(tmp_path, "C") if row["name"] != "vLLM")


def test_without_conversations_one_line_says_what_to_pass(tmp_path):
    done = run(tmp_path, "gpu_day", "--part", "A", "--data", tmp_path, "--output", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("pass the folder with the real conversations.")
