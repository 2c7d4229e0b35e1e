"""Inputs and outputs in every format have the same rows and scores."""

import csv
import datetime
import gzip
import io
import json

import pytest

from gym_rm.data.rows import rows_of
from gym_rm.evaluation.stored_scores.output import write_csv
from tests.cli.command import FIVE, FOUR, ROWS, USER, read, run

TEXTS = [{"id": str(row["id"]), "prompt": row["prompt"], "response": row["response"]} for row in ROWS[1:]]


def rows_in(path):
    return [row for _, row in rows_of(path, "output")]


def csv_text(rows):
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def save(path, rows):
    """Write rows in the format of the file's name."""
    name = path.name.lower()
    if name.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    content = csv_text(rows) if ".csv" in name else json.dumps(rows).encode() if ".json" in name else json_lines(rows)
    content = json_lines(rows) if ".jsonl" in name or ".ndjson" in name else content
    if name.endswith("gz"):
        content = gzip.compress(content)
    path.write_bytes(content)
    return path


INPUTS = [
    "in.jsonl",
    "in.JSONL",
    "in.ndjson",
    "in.json",
    "in.csv",
    "in.parquet",
    "in.CSV.GZ",
    "in.txt",
]


@pytest.mark.parametrize("name", INPUTS)
def test_every_format_of_input_gives_the_same_output(tmp_path, scorer, name):
    run(save(tmp_path / name, TEXTS), "-o", tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl") == [{**row, "score": len(row["response"]) / 10} for row in TEXTS]


@pytest.mark.parametrize("name", ["out.ndjson", "out.parquet", "out.csv"])
@pytest.mark.parametrize("given", ["in.jsonl", "in.csv", "in.parquet"])
def test_every_format_of_output_has_the_rows_and_scores(tmp_path, scorer, given, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    run(save(tmp_path / given, TEXTS), "-o", tmp_path / name)
    found = [{**row, "score": float(row["score"])} for row in rows_in(tmp_path / name)]
    assert found == [{**row, "score": len(row["response"]) / 10} for row in TEXTS]


def test_the_columns_of_a_parquet_file_keep_their_types(tmp_path, scorer):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.datetime(2024, 7, 26, 12)
    rows = [{"messages": [USER, reply], "when": day, "raw": b"\xff"} for reply in [FOUR, FIVE] * 900]
    table = pyarrow.Table.from_pylist(rows)
    table = table.append_column("size", pyarrow.array([1] * 1800, pyarrow.int8()))
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=700)
    run(tmp_path / "in.parquet", "-o", tmp_path / "out.parquet")
    written = parquet.read_table(tmp_path / "out.parquet")
    assert written.drop_columns(["score"]).schema.equals(table.schema)
    assert written.drop_columns(["score"]).equals(table)
    assert written["score"].to_pylist() == [0.1, 0.4] * 900


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("prompt,response\n", "prompt,response,score\n"),
        ("b,prompt,response\n,a,x\n", "b,prompt,response,score\n,a,x,0.1\n"),
    ],
)
def test_a_csv_file_keeps_columns_without_values(tmp_path, scorer, given, written):
    (tmp_path / "in.csv").write_text(given)
    result = run(tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().replace("\r", "") == written
    assert ("in.csv has no rows; nothing was scored" in result.stderr) == ("x" not in given)


def test_a_lone_carriage_return_in_a_csv_file_is_read_back():
    lines, file = [json.dumps({"a\r": "x", "b": "one\rtwo"}).encode() + b"\n"], io.BytesIO()
    write_csv(lines, file, None, [])
    assert list(csv.reader(io.StringIO(file.getvalue().decode(), newline=""))) == [["a\r", "b"], ["x", "one\rtwo"]]
