"""The same data from JSON lines and from column formats, which fill keys of other rows with None."""

import json

import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from tests.cli.command import write

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")


def tool(name, properties, **others):
    parameters = {"type": "object", "properties": properties, **others}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def turn(identity, **arguments):
    call = {"type": "function", "id": identity, "function": {"name": "b", "arguments": arguments}}
    return [
        {"role": "user", "content": "Which one?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": identity},
    ]


ROWS = [
    {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("a", {"x": {"type": "string"}}, required=["x"])]},
    {
        "messages": turn("c1", city="Rome"),
        "tools": [tool("b", {"y": {"type": "string", "enum": ["p", "q"]}}), tool("n", {})],
    },
    {"messages": turn("c2", deep={"l": [{"u": "1"}, {"v": "2"}]}), "tools": []},
    {"messages": turn("c3", names=["a", "b"], options={"unit": "C"}), "tools": [], "extra": [{"k": "1"}, {"m": "2"}]},
]


ROWS = [{"extra": None, **row} for row in ROWS]  # pyarrow reads only the columns of the first row


@pytest.fixture(params=["parquet", "datasets", "iterable", "table", "batch", "pandas", "pandas of parquet"])
def source(request, tmp_path):
    """The rows in a column format."""
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet")
    of_datasets = datasets.Dataset(table)
    return {
        "parquet": lambda: tmp_path / "rows.parquet",
        "datasets": lambda: of_datasets,
        "iterable": of_datasets.to_iterable_dataset,
        "table": lambda: table,
        "batch": lambda: table.to_batches()[0],
        "pandas": lambda: pandas.DataFrame(ROWS),
        "pandas of parquet": lambda: pandas.read_parquet(tmp_path / "rows.parquet"),
    }[request.param]()


def test_a_column_format_has_the_prompts_of_json_lines(source, tmp_path):
    def shown(prompts):
        plain = [[prompt.messages, prompt.tools, prompt.metadata.get("extra")] for prompt in prompts]
        return json.dumps(plain, sort_keys=True)  # a column format has one order of keys for all rows

    assert shown(load_prompts(source)) == shown(load_prompts(write(tmp_path / "rows.jsonl", ROWS)))


def test_none_of_json_lines_is_kept(tmp_path):
    (prompt,) = load_prompts(write(tmp_path / "rows.jsonl", [{"messages": turn("c1", city=None)}]))
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


def test_none_in_a_list_is_a_value(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "hi", "extra": ["a", None]}]), tmp_path / "rows.parquet")
    assert load_prompts(tmp_path / "rows.parquet")[0].metadata == {"extra": ["a", None]}


@pytest.mark.parametrize("column", [pandas.Series(["a", "b"], index=[1, 0]), pyarrow.array(["a", "b"])])
def test_a_column_of_texts_is_read_by_position(column):
    assert [prompt.messages[0]["content"] for prompt in load_prompts(column)] == ["a", "b"]


@pytest.mark.parametrize("load", [load_prompts, load_comparisons])
def test_a_table_with_two_equal_columns_is_refused(load):
    twice = {"pandas": pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])}
    twice["pyarrow"] = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    for table in twice.values():
        with pytest.raises(ConfigError, match="has the column 'prompt' twice"):
            load(table)


@pytest.mark.parametrize("folder", [".", "", "/", "sub"])
def test_a_folder_without_rows_is_not_searched(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    write(tmp_path / "sub" / "deep" / "rows.jsonl", [{"prompt": "hi"}])
    with pytest.raises(ConfigError, match="is a folder and no data set; name a file in it"):
        load_prompts(folder)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".jsonl", "a\0b", "~nobody-of-this-name/x.jsonl"])
def test_an_impossible_name_of_a_file_is_a_clear_error(name):
    with pytest.raises(ConfigError, match=r"does not exist|is neither a file nor"):
        load_prompts(name)
