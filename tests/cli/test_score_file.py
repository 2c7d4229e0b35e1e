import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gym_rm
from gym_rm.evaluation.stored_scores.file import _number
from tests.cli.command import FIVE, FOUR, ROWS, USER, LengthScorer, read, run, write

# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "score"),
    [
        ({"messages": [USER, FOUR]}, 0.1),
        ({"prompt": "2 + 2?", "response": "five"}, 0.4),
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}, {"chosen": 0.1, "rejected": 0.4}),
        ({"question": "2 + 2?", "answer": "4", "solutions": [{"text": "five"}, {"text": "4"}]}, [0.4, 0.1]),
    ],
)
def test_every_format_of_row_is_scored(tmp_path, scorer, row, score):
    run(write(tmp_path / "in.jsonl", [row]), "-o", tmp_path / "out.jsonl")
    assert read(tmp_path / "out.jsonl") == [{**row, "score": score}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, got list [1]"),
        ({"prompt": "a"}, "nothing to score; expected 'messages'"),
        ({"messages": [USER, FOUR], "score": 1}, "the field 'score' already exists; choose another name with --key"),
        ({"prompt": "a", "response": "bad"}, "it is bad"),
        ({"prompt": "a", "responses": ["fine", "bad"]}, "1: it is bad"),
    ],
)
def test_the_error_for_an_invalid_line_names_it(tmp_path, scorer, line, message):
    source = write(tmp_path / "in.jsonl", [ROWS[0], line, ROWS[1]])
    result = run(source, "-o", tmp_path / "out.jsonl", code=1)
    assert f"error: {source} line 2: {message}" in result.stderr
    assert stored_scores(tmp_path / "out.jsonl") == [0.0]


def test_skip_writes_the_error_and_continues(tmp_path, scorer):
    lines = [ROWS[0], "{", {"prompt": "a", "response": "bad"}, {"prompt": "a", "responses": ["bad", "four"]}, ROWS[1]]
    source = write(tmp_path / "in.jsonl", lines)
    result = run(source, "-o", tmp_path / "out.jsonl", "--on-error", "skip", code=3)
    assert "3 of 5 lines have no score" in result.stderr
    out = read(tmp_path / "out.jsonl")
    assert [row["score"] for row in out] == [0.0, None, None, [None, 0.4], 0.1]
    assert out[1]["line"] == "{"
    assert "line 2: not valid JSON" in out[1]["score_error"]
    assert (out[2]["score_error"], out[3]["score_error"]) == ("it is bad", "0: it is bad")
    assert "score_error" not in out[4]


@settings(max_examples=8)
@given(
    st.lists(
        st.dictionaries(
            st.text(),
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_infinity=False)
            | st.text()
            | st.lists(st.text()),
        )
    ),
    st.integers(1, 5),
)
def test_output_lines_start_with_the_input_lines(tmp_path_factory, rows, batch_size):
    folder = tmp_path_factory.mktemp("lines")
    lines = [json.dumps({"prompt": "a", "response": "b", **row}, ensure_ascii=False) for row in rows]
    lines = [line.encode("utf-8", "surrogatepass") for line in lines]
    (folder / "in.jsonl").write_bytes(b"\n".join(lines))
    arguments = ["-o", folder / "out.jsonl", "--batch-size", batch_size, "--on-error", "skip", "--key", "test key"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym_rm, "load_scorer", lambda model, **options: LengthScorer())
        run(folder / "in.jsonl", *arguments, code=(0, 3))
    out = (folder / "out.jsonl").read_bytes().splitlines()
    assert len(out) == len(lines)
    assert all(new.startswith(old[:-1]) for new, old in zip(out, lines, strict=True))


# --- fields ------------------------------------------------------------------------------------------------------


def test_all_turns_are_written(tmp_path, scorer):
    source = write(tmp_path / "in.jsonl", [{"messages": [USER, FIVE, USER, FOUR]}])
    run(source, "-o", tmp_path / "out.jsonl", "--turns", "all")
    assert read(tmp_path / "out.jsonl")[0]["score_turns"] == [4.0, 1.0]


def test_steps_are_written(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "responses": ["One.\n\nTwo two.", "One."]}])
    run(source, "-o", tmp_path / "out.jsonl", "--reward-model", "recording:rating_steps")
    row = read(tmp_path / "out.jsonl")[0]
    assert (row["score"], row["score_steps"], row["score_step_ends"]) == (
        [0.4, 0.4],
        [[0.4, 0.8], [0.4]],
        [[4, 14], [4]],
    )


def test_all_turns_require_a_scorer_that_scores_every_turn(tmp_path):
    source = write(tmp_path / "in.jsonl", ROWS)
    model = '{"kind": "ensemble", "scorers": [null]}'
    result = run(source, "--reward-model", model, "--turns", "all", code=1)
    assert "error: turns='all' needs a scorer that scores every turn" in result.stderr
    assert "EnsembleScorer scores only whole conversations" in result.stderr


# --- files -------------------------------------------------------------------------------------------------------


def test_standard_input_is_written_to_standard_output(scorer):
    result = run("-", stdin='\n{"prompt": "a", "response": "b"}\r\n\n')
    assert result.stdout == '{"prompt": "a", "response": "b", "score": 0.1}\n'


def test_batch_size_counts_conversations(tmp_path, scorer):
    rows = [{"prompt": "a", "responses": ["b"] * 4}] * 5
    run(write(tmp_path / "in.jsonl", rows), "-o", tmp_path / "out.jsonl", "--batch-size", 8)
    assert scorer.calls == [8, 8, 4]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.jsonl"], 1, "cannot read 'none.jsonl': No such file"),
        (["."], 1, "cannot read '.': Is a directory"),
        (["in.jsonl", "-o", "in.jsonl"], 1, "output must not be the input 'in.jsonl'"),
        (["in.jsonl", "-o", "out.parquet.gz"], 2, "output must end in .jsonl, .csv or .parquet"),
        (["in.jsonl", "-o", "."], 2, "output must be a file, or - for standard output, got '.'"),
        (["in.jsonl", "-o", "out.json"], 2, "output must end in .jsonl, .csv or .parquet"),
        (["in.jsonl", "-o", "none/out.jsonl"], 1, "cannot write 'none/out.jsonl': No such file"),
        (["in.jsonl.gz"], 1, "cannot read 'in.jsonl.gz'"),
    ],
)
def test_the_error_for_an_invalid_file_names_it(tmp_path, monkeypatch, scorer, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", ROWS)
    assert message in run(*arguments, code=code).stderr


# --- continued runs ----------------------------------------------------------------------------------------------


def stored_scores(out: Path) -> list:
    """Return the scores that are stored for an output that is not finished."""
    _, *entries = read(out.with_name(f"{out.name}.scores"))
    return [entry["score"] for entry in entries]


@settings(max_examples=6)
@given(cut=st.integers(0, 640))
def test_an_incomplete_last_line_is_scored_again(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    source, out = write(folder / "in.jsonl", ROWS), folder / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym_rm, "load_scorer", lambda model, **options: LengthScorer())
        run(source, "-o", out)
        whole, store = out.read_bytes(), folder / "out.jsonl.scores"
        out.unlink()
        store.write_bytes(store.read_bytes()[:cut])
        run(source, "-o", out)
    assert out.read_bytes() == whole


def test_an_existing_file_without_settings_is_not_changed(tmp_path, scorer):
    out = write(tmp_path / "out.jsonl", ["precious"])
    result = run(write(tmp_path / "in.jsonl", ROWS), "-o", out, code=1)
    assert "out.jsonl exists, but the file with its scores, out.jsonl.scores, does not" in result.stderr
    assert out.read_text() == "precious\n"


@pytest.mark.parametrize("header", ["[]", "{}", '{"settings": 3, "provenance": null}', '{"settings": {}', "\udcff"])
def test_a_file_of_scores_without_settings_is_an_error(tmp_path, scorer, header):
    source = write(tmp_path / "in.jsonl", ROWS)
    (tmp_path / "out.jsonl.scores").write_bytes(f"{header}\n".encode(errors="surrogateescape"))
    result = run(source, "-o", tmp_path / "out.jsonl", code=1)
    assert "out.jsonl.scores' line 1 is not" in result.stderr or "its first line has no settings" in result.stderr


# --- real data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "written"),
    [(np.float32(0.1), 0.1), (0.1, 0.1), (16777217.0, 16777217.0), (1e300, 1e300), (np.nan, None), (-np.inf, None)],
)
def test_numbers_are_written_exactly_and_those_of_a_reward_model_in_short(value, written):
    assert _number(np.float64(value)) == written
