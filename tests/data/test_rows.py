import csv
import datetime
import gzip
import json
import math
import os
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from gym_rm.data.rows import format_of, present, rows_of
from gym_rm.errors import ConfigError

USER = {"role": "user", "content": "2 + 2?"}
ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 3?", "answer": "6"}]


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix.lower() == ".gz" else text.encode())
    return path


def json_lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def values(source):
    return [row for _, row in rows_of(source, "prompts")]


def locations(source):
    return [where for where, _ in rows_of(source, "prompts")]


# --- files


NAMES = ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz", "p.csv", "p.csv.gz", "p.JSONL", "p.ndjson", "p.Csv.GZ"]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_file(tmp_path, name):
    texts = {"jsonl": "\n" + json_lines(ROWS), "json": json.dumps(ROWS), "csv": "prompt,answer\n2 + 2?,4\n3 + 3?,6\n"}
    path = write(tmp_path / name, texts[format_of(Path(name))[0]])
    assert values(path) == values(str(path)) == ROWS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt\na,b\n", "line 2: the row has more cells than the header, which has 1"),
        ("prompt,answer\na,b\nc\n", "line 3: the row has fewer cells than the header, which has 2"),
        ("prompt,answer,prompt\na,b,c\n", "line 1: the header has the column 'prompt' twice"),
        (f"prompt\n{'a' * 200_000}\n", "line 2: .* field larger than field limit .* to a .jsonl file"),
        ('messages\n"[{""role"": ""user""}]"\n', "line 2, column 'messages': the cells of a .csv file are texts"),
        ("prompt\n\"[{'role': 'user'}]\"\n", "line 2, column 'prompt': the cells of a .csv file are texts"),
    ],
)
def test_an_invalid_csv_file_is_an_error_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"p.csv {message}"):
        values(write(tmp_path / "p.csv", text))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('prompt\na\n"b\nc\nd\n', 3),
        ('prompt,answer\na,b\n"c,d\ne,f\ng,"h"\n', 3),
        ('prompt\n"a"b\n', 2),
        ('"prompt\na\n', 1),
    ],
)
def test_an_unclosed_quote_in_a_csv_file_is_an_error_with_the_line_of_the_row(tmp_path, text, line):
    with pytest.raises(ConfigError, match=rf"p.csv line {line}: the row that begins here is not valid CSV"):
        values(write(tmp_path / "p.csv", text))


def test_empty_cells_of_a_csv_file_are_left_out(tmp_path):
    assert values(write(tmp_path / "p.csv", "prompt,answer\na,\n,b\n")) == [{"prompt": "a"}, {"answer": "b"}]


def test_an_empty_cell_of_a_reply_is_an_empty_text(tmp_path):
    path = write(tmp_path / "p.csv", "prompt,chosen,rejected\nq,a,\n")
    assert values(path) == [{"prompt": "q", "chosen": "a", "rejected": ""}]


@pytest.mark.parametrize("text", ["[1]", '[{"a": 1}]', "[citation needed] foo", "{x", "[" * 9999])
def test_a_csv_cell_that_begins_like_json_is_a_text(tmp_path, text):
    with (tmp_path / "p.csv").open("w") as file:
        csv.writer(file).writerows([["prompt"], [text]])
    assert values(tmp_path / "p.csv") == [{"prompt": text}]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [USER], "user_turns": ["and 3 + 3?"], "answer": "4"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert values(tmp_path / "p.parquet") == rows


def test_cells_of_parquet_become_values_of_json(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.datetime(2024, 7, 26, 12)
    row = {"prompt": "é".encode(), "price": Decimal("0.10"), "when": day, "nested": [{"text": b"a", "none": None}]}
    table = pyarrow.Table.from_pylist([row]).append_column("kind", pyarrow.array([b"x"]).dictionary_encode())
    parquet.write_table(table, tmp_path / "p.parquet")
    nested = [{"text": "a"}]
    expected = {"prompt": "é", "price": "0.10", "when": "2024-07-26T12:00:00", "nested": nested, "kind": "x"}
    assert values(tmp_path / "p.parquet") == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "é".encode("latin-1")}, r"row 0, 'prompt': expected a text, got bytes b'\\xe9', which is not"),
        ({"prompt": [{"role": "user", "content": b"\xff"}]}, "row 0, 'prompt', 'content': expected a text, got bytes"),
        ({"prompt": "a", "margin": math.inf}, "row 0, 'margin': expected a finite number, got inf"),
    ],
)
def test_a_cell_of_parquet_that_json_does_not_have_is_refused_by_name(tmp_path, row, message):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=message):
        values(tmp_path / "p.parquet")


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv"])
def test_a_file_in_another_encoding_is_refused(tmp_path, name):
    text = {"jsonl": json_lines(ROWS), "json": json.dumps(ROWS), "csv": "prompt,answer\n2 + 2?,4\n"}
    (tmp_path / name).write_bytes(text[format_of(Path(name))[0]].encode("utf-16"))
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        next(rows_of(tmp_path / name, "prompts"))


def test_files_with_byte_order_marks_that_were_joined_are_read(tmp_path):
    assert values(write(tmp_path / "p.jsonl", "".join("\ufeff" + json_lines([row]) for row in ROWS))) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.jsonl", '"a"\n\n"b"\n', ["p.jsonl line 1", "p.jsonl line 3"]),
        ("p.json", '["a", "b"]', ["p.json row 0", "p.json row 1"]),
        ("p.csv", 'prompt\n"a\nb"\nc\n', ["p.csv line 3", "p.csv line 4"]),
    ],
)
def test_every_row_has_its_location(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.chdir(tmp_path)
    write(Path(name), text)
    assert locations(name) == expected


def test_a_named_pipe_is_read_as_json_lines(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write, args=(tmp_path / "pipe", json_lines(ROWS)), daemon=True)
    writer.start()
    assert values(tmp_path / "pipe") == ROWS
    writer.join()


# --- other sources


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_is_refused_because_it_has_no_order(kind):
    with pytest.raises(ConfigError, match=rf"prompts must have an order, but a {kind.__name__} has none.*Pass a list"):
        values(kind(["a", "b"]))


@pytest.mark.parametrize("missing", [float("nan"), np.float32("nan"), np.datetime64("NaT"), None])
def test_missing_values_become_none_at_any_depth(missing):
    assert values([{"a": missing, "b": [{"c": missing}]}]) == [{"a": None, "b": [{"c": None}]}]


def test_missing_values_of_pandas_become_none():
    pandas = pytest.importorskip("pandas")
    assert present({"a": pandas.NA, "b": pandas.NaT}) == {"a": None, "b": None}


def test_a_data_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    assert values(pandas.DataFrame(ROWS)) == ROWS


def test_a_data_set_by_name_and_split(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", json_lines(ROWS))
    write(folder / "test.jsonl", json_lines(ROWS[1:]))
    assert values("org/name") == ROWS
    assert values("org/name:test") == ROWS[1:]
    with pytest.raises(ConfigError, match="the data set 'org/name:nosuch' cannot be loaded"):
        values("org/name:nosuch")


@pytest.mark.parametrize(("source", "module"), [("org/name", "datasets"), ("p.parquet", "pyarrow.parquet")])
def test_the_error_of_a_missing_package_has_the_install_command(tmp_path, monkeypatch, source, module):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.parquet", "")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'gym-rm\[data\]'"):
        values(source)


def test_none_is_the_embedded_set():
    assert len(values(None)) > 100
    assert locations(None)[0] == "embedded prompts line 1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nosuch.jsonl", r"prompts: the file 'nosuch.jsonl' does not exist"),
        ("What is 2 + 2?", r"prompts='What is 2 \+ 2\?' is neither a file nor a data set name"),
        ({"prompt": "hi"}, r"prompts must be .* got dict"),
        (3, r"prompts must be .* got int 3"),
        (np.array("a"), r"prompts must be .* got ndarray"),
    ],
)
def test_an_invalid_source_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        values(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', r"p.jsonl line 3: not valid JSON: .* at column 12"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"p.jsonl line 2: not valid UTF-8: byte 0xff"),
        ("p.jsonl", b'{"a": ' + b"9" * 5000 + b"}", r"p.jsonl line 1: cannot be parsed as JSON"),
        ("p.jsonl", b"[" * 100_000, r"p.jsonl line 1: cannot be parsed as JSON: lists and mappings"),
        ("p.jsonl", b"[" * 700 + b"]" * 700, r"p.jsonl line 1: cannot be parsed as JSON: lists and mappings"),
        ("p.jsonl", b'{"a": 1e400}', r"p.jsonl line 1: cannot be parsed as JSON: the number 1e400 is too large"),
        ("p.jsonl.gz", b"not gzipped", r"p.jsonl.gz: cannot be read after line 0"),
        ("p.jsonl.gz", gzip.compress(b'"a"\n' * 9999, mtime=0)[:-20], r"p.jsonl.gz: cannot be read after line"),
        ("p.json.gz", gzip.compress(b"[1]", mtime=0)[:-4], r"p.json.gz: cannot be read"),
        ("p.json", b'{"prompt": "a"}', r"p.json: a .json file must contain a list of rows, got dict"),
        ("p.csv", b"prompt\n\xff\n", r"p.csv: not readable as CSV after line 0: not valid UTF-8"),
        ("p.txt", b"hello", r"prompts: cannot read '.*p.txt'; expected one of .jsonl"),
        ("p.parquet", b"no parquet", r"not readable as parquet|needs the package pyarrow"),
        ("p.parquet.gz", b"", r"prompts: cannot read '.*p.parquet.gz'"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        values(tmp_path / name)


def test_rows_of_a_file_are_read_one_by_one(tmp_path):
    """Files may be larger than memory, so an invalid line is an error only when it is reached."""
    rows = rows_of(write(tmp_path / "p.jsonl", json_lines(ROWS) + "{"), "prompts")
    assert [next(rows)[1], next(rows)[1]] == ROWS
    with pytest.raises(ConfigError, match="line 3: not valid JSON"):
        next(rows)


# --- single values


def test_import_loads_no_pandas():
    code = "import sys, gym_rm.data; assert not {'pandas', 'pyarrow', 'datasets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
