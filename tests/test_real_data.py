"""`pytest --data FOLDER` says where the real conversations are; a wrong folder is an error, and no reason to skip."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import rows

from tests import real_data

ROOT = Path(__file__).parents[1]


def run(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--data={folder}", __file__]
    done = subprocess.run([*command, "-k", "rows"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.data
def test_rows_are_those_of_the_folder(pytestconfig):
    given = pytestconfig.getoption("--data")
    assert given is None or given.resolve() == real_data.FOLDER
    assert rows("gsm8k_graded")[0]["solutions"]


@pytest.mark.slow
def test_the_folder_that_is_passed_is_read(tmp_path):
    with gzip.open(tmp_path / "gsm8k_graded.jsonl.gz", "wt") as file:
        file.write('{"solutions": [1]}\n')
    code, output = run(tmp_path)
    assert code == 0, output
    assert "1 passed" in output


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "reason"), [(".", "No such file"), ("missing", "missing is not a folder")])
def test_a_folder_without_the_file_is_an_error(folder, reason, tmp_path):
    code, output = run(tmp_path / folder)
    assert code != 0
    assert reason in output
