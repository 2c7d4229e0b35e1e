import json

import numpy as np
import pytest

from gym_rm.data.prompts import answer_text, load_prompts, prompt_of_columns
from gym_rm.errors import ConfigError
from gym_rm.types import Prompt
from tests import real_data

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 3?", "answer": "6"}]


# --- rows


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


def test_fields_of_a_row():
    (prompt,) = load_prompts(
        [{"prompt_id": 7, "id": 8, "question": "2 + 2?", "answer": 4, "user_turns": ["Sure?"], "level": "easy"}]
    )
    assert (prompt.prompt_id, prompt.answer, prompt.user_turns) == ("7", "4", ("Sure?",))
    assert prompt.metadata == {"level": "easy"}


def test_the_last_assistant_turn_is_the_reference_reply():
    (prompt,) = load_prompts([{"messages": [USER, FIVE, USER, FOUR]}])
    assert prompt.messages == (USER, FIVE, USER)
    assert prompt.metadata == {"reference_reply": "4"}


def test_messages_are_preferred_and_a_prompt_that_they_repeat_goes_to_metadata():
    (prompt,) = load_prompts([{"prompt": "2 + 2?", "messages": [USER]}])
    assert prompt.messages == (USER,)
    assert prompt.metadata == {"prompt": "2 + 2?"}


@pytest.mark.parametrize(
    ("row", "first", "dropped"),
    [
        ({"context": [USER], "question": "Why?"}, "context", "question"),
        ({"context": "A text.", "question": "Why?"}, "context", "question"),
        ({"messages": [USER], "prompt": "Why?"}, "messages", "prompt"),
        ({"messages": [USER], "prompt": [{"role": "system", "content": "Be brief."}, USER]}, "messages", "prompt"),
        ({"context": "He asked: who? Then he left.", "question": "who?"}, "context", "question"),
    ],
)
def test_a_second_prompt_field_with_its_own_text_is_refused(row, first, dropped):
    with pytest.raises(ConfigError, match=rf"prompts\[0\]: '{first}' and '{dropped}' are different.*Join them"):
        load_prompts([row])


@pytest.mark.parametrize("explicit", [{"prompt": "2 + 2?"}, {"messages": [USER]}])
@pytest.mark.parametrize("column", [{"context": "A text."}, {"question": [USER, FOUR]}, {"context": {"title": "A"}}])
def test_context_and_question_are_metadata_beside_a_prompt(explicit, column):
    (prompt,) = load_prompts([{**explicit, **column}])
    assert (prompt.messages, prompt.metadata) == ((USER,), column)


@pytest.mark.parametrize("context", ["", [], {"title": ["A"], "sentences": [["A text."]]}, 3, ["A text."]])
def test_a_context_that_is_no_prompt_is_metadata_beside_a_question(context):
    (prompt,) = load_prompts([{"context": context, "question": "2 + 2?"}])
    assert (prompt.messages, prompt.metadata) == ((USER,), {"context": context})


@pytest.mark.parametrize(
    ("context", "question"),
    [("2 +\r\n2?", "2 +\n2?"), ("A text.\n\n2 + 2?", "2 + 2?"), ([FIVE, USER], "2 + 2?"), ("2 + 2?", [USER, FOUR])],
)
def test_a_question_that_repeats_the_context_or_its_end_is_accepted(context, question):
    (prompt,) = load_prompts([{"context": context, "question": question}])
    assert prompt.metadata == {"question": question}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a" * 11}, r"'messages\[0\].content' has 11 characters, more than max_text_length=10"),
        (
            {"prompt": "a", "user_turns": ["b", "c" * 12]},
            r"'user_turns\[1\]' has 12 characters, more than max_text_length=10",
        ),
        ({"prompt": "ab\ud800"}, r"'messages\[0\].content' contains a lone surrogate, '\\ud800' at character 2"),
        (Prompt(({"role": "user", "content": "a" * 11},), "p"), r"'messages\[0\].content' has 11 characters"),
    ],
)
def test_the_error_of_an_unusable_text_names_its_row_and_field(row, message):
    with pytest.raises(ConfigError, match=rf"^prompts\[1\]: {message}"):
        load_prompts(["good", row], max_text_length=10)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "text": "hi"}, r"prompts\[1\]: expected one of the fields .* got the fields \['text'\]"),
        (USER, r"prompts\[1\]: .* pass its conversation as a list of messages"),
        (3, r"prompts\[1\]: 'messages' must be a text or a list of messages, got int 3"),
        ({"messages": []}, r"'messages' must be a text or a list of messages, got list \[\]"),
        ({"messages": ["hi"]}, r"'messages\[0\]' must be a message .* got str 'hi'"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\].content' must be a text, got only the keys \['role'\]"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, r"'messages\[1\].content' must be a text, got int 3"),
        ({"messages": [FOUR]}, r"'messages' must have a message to answer before its last assistant turn"),
        ({"prompt": "hi", "user_turns": "more"}, r"'user_turns' must be a list of texts, got str 'more'"),
    ],
)
def test_an_invalid_row_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        load_prompts(["good", row])


# --- sources


def test_the_error_of_an_invalid_row_has_its_file_and_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"p.jsonl line 2: expected one of the fields"):
        load_prompts(path)


def test_limit():
    assert load_prompts(ROWS, limit=1) == load_prompts(ROWS[:1])
    assert load_prompts(ROWS, limit=9) == load_prompts(ROWS)
    with pytest.raises(ConfigError, match="limit must be an integer of at least 1, got 0"):
        load_prompts(ROWS, limit=0)


@pytest.mark.data
def test_real_prompts():
    assert len(load_prompts(real_data.FOLDER / "gsm8k_train.jsonl.gz")) == 7473
    graded = load_prompts(real_data.FOLDER / "gsm8k_graded.jsonl.gz")
    assert len(graded) == 658
    assert all(len(prompt.metadata["solutions"]) == 4 for prompt in graded)
    (first,) = load_prompts(real_data.FOLDER / "humaneval.jsonl.gz", limit=1)
    assert first.metadata["entry_point"] == "has_close_elements"


# --- rows of a trainer


def test_the_default_name_of_a_prompt_is_its_index():
    assert prompt_of_columns([USER], {}, 3) == Prompt((USER,), "3")
    assert prompt_of_columns([USER], {"prompt_id": None, "id": "b"}, 3).prompt_id == "b"
    assert prompt_of_columns([USER], {"prompt_id": "a", "id": "b"}, 3).prompt_id == "a"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4", "4"),
        (4, "4"),
        (4.5, "4.5"),
        (0, "0"),
        (4.0, "4"),  # pandas converts integers to floats in a column with missing values
        (np.int64(4), "4"),
        (np.float32(0.1), "0.1"),
        (10**20 + 1, "100000000000000000001"),
        ("", None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (True, None),
        (["4"], None),
    ],
)
def test_an_answer_as_text(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize("dtype", ["object", "string"])
def test_a_missing_text_in_a_table_is_not_the_text_nan(dtype):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    rows = [{"prompt": "2 + 2?", "answer": "4", "id": "a"}, {"prompt": "Hello."}, {"question": "3 + 3?"}]
    prompts = load_prompts(pandas.DataFrame(rows).astype(dtype))
    assert [prompt.prompt_id for prompt in prompts] == ["a", "1", "2"]
    assert [prompt.answer for prompt in prompts] == ["4", None, None]
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["2 + 2?", "Hello.", "3 + 3?"]


def test_the_answer_may_be_in_another_column():
    prompt = prompt_of_columns(
        [USER], {"ground_truth": 4, "answer": "a long solution"}, 0, answer_column="ground_truth"
    )
    assert prompt == Prompt((USER,), "0", answer="4", metadata={"answer": "a long solution"})


def test_tools_of_a_row_are_schemas_in_every_form():
    flat = {"type": "function", "name": "now", "description": "The time.", "parameters": {"type": "object"}}
    nested = {"type": "function", "function": {key: value for key, value in flat.items() if key != "type"}}
    for tools in ([flat], [nested], json.dumps([flat]), (nested,)):
        (row,) = load_prompts([{"prompt": "What time is it?", "tools": tools}])
        assert row.tools == (nested,)
        assert row.metadata == {}
    assert all(load_prompts([{"prompt": "Hi", "tools": tools}])[0].tools == () for tools in (None, [], "", "[]"))
