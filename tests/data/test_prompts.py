import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.data.prompts import load_pairs, load_prompts, read_rows
from gym_rm.errors import ConfigError
from gym_rm.types import PreferencePair, Prompt

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 3?", "answer": "6"}]


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def json_lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# --- prompts: rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        "2 + 2?",
        [USER],
        {"messages": [USER]},
        {"prompt": "2 + 2?"},
        {"prompt": [USER]},
        {"context": [USER]},
        {"context": "2 + 2?"},
        {"question": "2 + 2?"},
        Prompt((USER,), "0"),
    ],
)
def test_every_row_shape_gives_the_same_prompt(row):
    assert load_prompts([row]) == (Prompt((USER,), "0"),)


def test_fields_go_where_they_belong():
    (prompt,) = load_prompts(
        [{"prompt_id": 7, "id": 8, "question": "2 + 2?", "answer": 4, "user_turns": ["Sure?"], "level": "easy"}]
    )
    assert (prompt.prompt_id, prompt.answer, prompt.user_turns) == ("7", "4", ("Sure?",))
    assert prompt.metadata == {"level": "easy"}


def test_the_last_assistant_turn_is_the_reference_reply():
    (prompt,) = load_prompts([{"messages": [USER, FIVE, USER, FOUR]}])
    assert prompt.messages == (USER, FIVE, USER)
    assert prompt.metadata == {"reference_reply": "4"}


def test_messages_are_preferred_and_the_other_conversation_is_kept():
    (prompt,) = load_prompts([{"prompt": "other", "messages": [USER]}])
    assert prompt.messages == (USER,)
    assert prompt.metadata == {"prompt": "other"}


def test_keys_that_only_other_messages_have_are_dropped():
    (prompt,) = load_prompts([[{**USER, "name": None}]])
    assert prompt.messages == (USER,)


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_text_is_never_edited(texts):
    assert [prompt.messages[0]["content"] for prompt in load_prompts(texts)] == texts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, r"prompts\[1\]: expected one of the fields .* got \['text'\]"),
        (USER, r"prompts\[1\]: .* put it in a list of its own"),
        (3, r"prompts\[1\]: 'messages' must be a text or a list of messages, got int 3"),
        ({"messages": []}, r"'messages' must be a text or a list of messages, got list \[\]"),
        ({"messages": ["hi"]}, r"'messages\[0\]' must be a message .* got str 'hi'"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\].content' must be a text, got only the keys \['role'\]"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, r"'messages\[1\].content' must be a text, got int 3"),
        ({"messages": [FOUR]}, r"'messages' leaves nothing to answer"),
        ({"prompt": "hi", "answer": ["4"]}, r"'answer' must be a text or a number, got list \['4'\]"),
        ({"prompt": "hi", "user_turns": "more"}, r"'user_turns' must be a list of texts, got str 'more'"),
        ({"context": "a", "question": "b"}, r"'context' and 'question' are both texts; join them"),
    ],
)
def test_a_bad_row_is_named(row, message):
    with pytest.raises(ConfigError, match=message):
        load_prompts(["good", row])


# --- prompts: sources --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz", "p.csv", "p.csv.gz"])
def test_every_text_file(tmp_path, name):
    text = {
        "jsonl": "\n" + json_lines(ROWS),
        "json": json.dumps(ROWS),
        "csv": "prompt,answer\n2 + 2?,4\n3 + 3?,6\n",
    }[name.split(".")[1]]
    path = write(tmp_path / name, text)
    assert load_prompts(path) == load_prompts(str(path)) == load_prompts(ROWS)


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path):
    assert load_prompts(write(tmp_path / "p.jsonl", "\ufeff" + json_lines(ROWS))) == load_prompts(ROWS)


def test_csv_holds_lists_as_json(tmp_path):
    path = write(tmp_path / "p.csv", 'messages,user_turns\n"[{""role"": ""user"", ""content"": ""a\nb""}]",\n')
    with pytest.raises(ConfigError, match=r"p.csv line 3, column 'messages': not valid JSON"):
        load_prompts(path)
    path = write(tmp_path / "q.csv", 'messages,user_turns\n"[{""role"": ""user"", ""content"": ""a""}]","[""b""]"\n')
    assert load_prompts(path) == load_prompts([{"messages": [{"role": "user", "content": "a"}], "user_turns": ["b"]}])


def test_csv_with_too_many_cells(tmp_path):
    with pytest.raises(ConfigError, match=r"p.csv line 2: more cells than the 1 columns"):
        load_prompts(write(tmp_path / "p.csv", "prompt\na,b\n"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [USER], "user_turns": ["and 3 + 3?"], "answer": "4"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert load_prompts(tmp_path / "p.parquet") == load_prompts(rows)


def test_a_broken_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="not readable as parquet"):
        load_prompts(write(tmp_path / "p.parquet", "no parquet"))


def test_a_data_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    assert load_prompts(pandas.DataFrame(ROWS)) == load_prompts(ROWS)


def test_a_data_set_by_name_and_split(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", json_lines(ROWS))
    write(folder / "test.jsonl", json_lines(ROWS[1:]))
    assert load_prompts("org/name") == load_prompts(ROWS)
    assert load_prompts("org/name:test") == load_prompts(ROWS[1:])
    with pytest.raises(ConfigError, match="the data set 'org/name:nosuch' cannot be loaded"):
        load_prompts("org/name:nosuch")


@pytest.mark.parametrize(("source", "module"), [("org/name", "datasets"), ("p.parquet", "pyarrow.parquet")])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, source, module):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.parquet", "")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'gym-rm\[data\]'"):
        load_prompts(source)


def test_a_generator():
    assert load_prompts(row for row in ROWS) == load_prompts(ROWS)


def test_limit():
    assert load_prompts(ROWS, limit=1) == load_prompts(ROWS[:1])
    assert load_prompts(ROWS, limit=9) == load_prompts(ROWS)
    with pytest.raises(ConfigError, match="limit must be at least 1 or None for all prompts, got 0"):
        load_prompts(ROWS, limit=0)


def test_the_embedded_prompts():
    prompts = load_prompts(limit=50)
    assert len(prompts) == 50
    assert len({prompt.prompt_id for prompt in prompts}) == 50
    assert all(prompt.messages[-1]["role"] == "user" and prompt.answer for prompt in prompts)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"prompts: the given list holds no rows"),
        ("nosuch.jsonl", r"prompts: there is no file 'nosuch.jsonl'"),
        ("What is 2 + 2?", r"prompts='What is 2 \+ 2\?' is no file and no data set name"),
        ({"prompt": "hi"}, r"prompts must be .* got dict"),
        (3, r"prompts must be .* got int 3"),
    ],
)
def test_a_bad_source(source, message):
    with pytest.raises(ConfigError, match=message):
        load_prompts(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": }\n', r"p.jsonl line 3: not valid JSON: .* at column 12"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"p.jsonl line 2: not UTF-8: byte 0xff"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "a"}\n', r"p.jsonl line 2: expected one of the fields"),
        ("p.jsonl", b'{"a": ' + b"9" * 5000 + b"}", r"p.jsonl line 1: not a row"),
        ("p.jsonl", b"[" * 100_000, r"p.jsonl line 1: not a row"),
        ("p.jsonl.gz", b"not gzipped", r"p.jsonl.gz: cannot be read after line 0"),
        ("p.jsonl.gz", gzip.compress(b'"a"\n' * 9999)[:-20], r"p.jsonl.gz: cannot be read after line"),
        ("p.json.gz", gzip.compress(b"[1]")[:-4], r"p.json.gz: cannot be read"),
        ("p.json", b'{"prompt": "a"}', r"p.json: a .json file must hold a list of rows, got dict"),
        ("p.csv", b"prompt\n\xff\n", r"p.csv: not readable as CSV after line 0"),
        ("p.txt", b"hello", r"prompts: cannot read '.*p.txt'; expected one of .jsonl"),
        ("p.parquet.gz", b"", r"prompts: cannot read '.*p.parquet.gz'"),
    ],
)
def test_a_bad_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(tmp_path / name)


def test_read_rows_streams_with_line_numbers(tmp_path):
    path = write(tmp_path / "p.jsonl.gz", "\n" + json_lines(ROWS) + "[]\n")
    rows = read_rows(path)
    assert next(rows) == (2, ROWS[0])
    assert next(rows) == (3, ROWS[1])
    with pytest.raises(ConfigError, match=r"p.jsonl.gz line 4: expected a JSON object, got list"):
        next(rows)


def test_import_loads_no_pandas():
    code = "import sys, gym_rm.data.prompts; assert not {'pandas', 'pyarrow', 'datasets', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- pairs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"},
        {"context": [USER], "completions": [{"rank": 1, "completion": [FIVE]}, {"rank": 0, "completion": [FOUR]}]},
        {"context": "2 + 2?", "completions": [{"rank": 0, "completion": "4"}, {"rank": 1, "completion": "5"}]},
        PreferencePair((USER,), (FOUR,), (FIVE,)),
    ],
)
def test_every_pair_shape_gives_the_same_pair(row):
    assert load_pairs([row]) == (PreferencePair((USER,), (FOUR,), (FIVE,)),)


def test_margin_and_metadata():
    pair, scored = load_pairs(
        [
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "margin": 2, "subset": "sums"},
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "score_rejected": 8.5},
        ]
    )
    assert (pair.margin, pair.metadata) == (2.0, {"subset": "sums"})
    assert scored.margin == 0.5


def test_equal_conversations_keep_a_reply_each():
    (pair,) = load_pairs([{"chosen": [USER, FOUR], "rejected": [USER, FOUR]}])
    assert (pair.prompt, pair.chosen, pair.rejected) == ((USER,), (FOUR,), (FOUR,))


def test_more_than_two_ranks_give_every_pair_with_a_preference():
    completions = [{"rank": rank, "completion": text} for rank, text in [(2, "6"), (0, "4"), (1, "5"), (1, "5!")]]
    pairs = load_pairs([{"context": "2 + 2?", "completions": completions}])
    assert [(pair.chosen[0]["content"], pair.rejected[0]["content"]) for pair in pairs] == [
        ("4", "5"),
        ("4", "5!"),
        ("4", "6"),
        ("5", "6"),
        ("5!", "6"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", r"pairs\[0\]: expected a row with 'chosen' and 'rejected', got str 'text'"),
        ({"prompt": "a", "chosen": "b"}, r"the field 'rejected' is missing, got \['chosen', 'prompt'\]"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, r"'rejected\[0\]' must be a message"),
        ({"chosen": "b", "rejected": "c"}, r"add the field 'prompt' or give whole conversations"),
        ({"prompt": "a", "chosen": [USER, FOUR], "rejected": "5"}, r"'chosen' begins with a user turn that is not"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, r"'margin' must be a number, got str 'x'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": "x", "score_rejected": 1},
            r"'score_chosen' and 'score_rejected' must be numbers",
        ),
        ({"completions": []}, r"the field 'context' is missing"),
        ({"context": "a", "completions": []}, r"'completions' must be a list of at least two"),
        ({"context": "a", "completions": ["b", "c"]}, r"'completions\[0\]' must be .* got str 'b'"),
        ({"context": "a", "completions": [{"completion": "b"}] * 2}, r"'completions\[0\].rank' must be a number"),
        ({"context": "a", "completions": [{"rank": 0, "completion": "b"}] * 2}, r"all completions have the rank 0"),
    ],
)
def test_a_bad_pair_is_named(row, message):
    with pytest.raises(ConfigError, match=message):
        load_pairs([row])


# --- real rows ---------------------------------------------------------------------------------------------------


@needs_data
def test_real_pairs():
    pairs = load_pairs(DATA / "hh_harmless.jsonl.gz")
    assert len(pairs) == 1150
    assert max(len(pair.prompt) for pair in pairs) == 35
    assert all(pair.prompt[-1]["role"] == "user" for pair in pairs)
    assert len(load_pairs(DATA / "rewardbench_slice.jsonl.gz")) == 300


@needs_data
def test_real_prompts():
    assert len(load_prompts(DATA / "gsm8k_train.jsonl.gz")) == 7473
    graded = load_prompts(DATA / "gsm8k_graded.jsonl.gz")
    assert len(graded) == 658
    assert all(len(prompt.metadata["solutions"]) == 4 for prompt in graded)
    assert load_prompts(DATA / "humaneval.jsonl.gz", limit=1)[0].metadata["entry_point"] == "has_close_elements"
