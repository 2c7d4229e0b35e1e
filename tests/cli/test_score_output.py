"""Outputs are locked, resumed, retried and replaced without losing a score or mixing two runs."""

import shutil
import sys

import pytest
import tiny_models
from safetensors.torch import load_file, save_file

import gym_rm
from tests.cli.command import ROWS, LengthScorer, read, run, write

NAMES = ["out.jsonl", "out.parquet"]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.jsonl", ROWS)


def needs(name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    return name


def rows_of(path):
    """Return `(id, score, score_error)` of every row of an output in any format."""
    from gym_rm.data.rows import rows_of

    rows = [row for _, row in rows_of(path, "output")]
    numbers = [(row["id"], row.get("score"), row.get("score_error")) for row in rows]
    return [(int(i), None if s in (None, "null") else float(s), e) for i, s, e in numbers]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


class BadTwice(LengthScorer):
    """Scorer without a score for replies of three and five characters."""

    def score(self, conversations, prompts=None, turns="last"):
        odd = [[*c[:-1], {**c[-1], "content": "bad"}] if len(c[-1]["content"]) in (3, 5) else c for c in conversations]
        return super().score(odd, prompts, turns)


# --- locks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_second_run_on_one_output_is_refused_and_the_first_is_not_disturbed(
    tmp_path, monkeypatch, source, name, options
):
    out, errors = tmp_path / name, []

    class RunsAgain(LengthScorer):
        def score(self, conversations, prompts=None, turns="last"):
            errors.append(run(source, "-o", out, *options, code=1).stderr)
            return super().score(conversations, prompts, turns)

    scorer = RunsAgain()
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args, **kwargs: scorer)
    run(source, "-o", out, "--batch-size", 4)
    assert len(errors) == 3
    assert all(f"another process is writing '{out}.scores'; wait until it has finished" in error for error in errors)
    assert [score for _, score, _ in rows_of(out)] == [index / 10 for index in range(10)]


# --- continued runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at_call", [1, 3])
def test_an_interrupted_run_is_continued_in_every_format(tmp_path, monkeypatch, source, name, at_call):
    out = tmp_path / needs(name)
    stopped = LengthScorer(raises=KeyboardInterrupt(), at_call=at_call)
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: stopped)
    run(source, "-o", out, "--batch-size", 2, code=130)
    again = LengthScorer()
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: again)
    run(source, "-o", out)
    assert again.calls == [10 - 2 * (at_call - 1)]
    run(source, "-o", tmp_path / f"whole.{name}")
    assert out.read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
    assert not any(file.endswith(".new") for file in files(tmp_path))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_changed_input_keeps_the_scores_of_the_rows_that_stayed(tmp_path, scorer, source, name):
    out = tmp_path / name
    run(source, "-o", out)
    changed = {**ROWS[9], "response": "changed"}
    run(write(source, [changed, *ROWS[4:8][::-1]]), "-o", out)
    assert scorer.calls == [10, 1]
    assert rows_of(out) == [(9, 0.7, None), *((index, index / 10, None) for index in (7, 6, 5, 4))]


@pytest.mark.parametrize(
    ("name", "dtype", "change"),
    [
        ("other.jsonl", "float32", "input: earlier 'in.jsonl', now 'other.jsonl'"),
        ("in.jsonl", "bfloat16", "dtype: earlier 'float32', now 'bfloat16'"),
    ],
)
def test_an_output_of_other_settings_is_an_error_and_is_not_changed(tmp_path, scorer, source, name, dtype, change):
    out = tmp_path / "out.jsonl"
    run(source, "-o", out, "--option", "dtype=float32")
    before = out.read_bytes()
    command = (write(tmp_path / name, ROWS), "-o", out, "--option", f"dtype={dtype}")
    assert f"was written with other settings or another model ({change})" in run(*command, code=1).stderr
    assert out.read_bytes() == before
    run(*command, "--overwrite")


def cut(out, size):
    """Leave only the first lines of the scores of an output, as after a run that was killed."""
    store = out.with_name(f"{out.name}.scores")
    store.write_bytes(b"".join(store.read_bytes().splitlines(keepends=True)[:size]))


@pytest.mark.parametrize("stored", [4, 11])
def test_a_run_over_changed_weights_is_refused(tmp_path, source, stored):
    """The folder has the same name and size; with 11 lines, nothing is left to score."""
    folder, out = tiny_models.save_reward_model(tmp_path / "model"), tmp_path / "out.jsonl"
    command = (source, "--reward-model", folder, "-o", out)
    run(*command)
    cut(out, stored)
    shutil.copytree(folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] *= 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert (
        "was written with other settings or another model (revision: earlier 'sha256:" in run(*command, code=1).stderr
    )
    shutil.rmtree(folder)
    assert "does not exist" in run(*command, code=1).stderr
    (tmp_path / "copy").rename(folder)
    run(*command)
    assert [row["id"] for row in read(out)] == list(range(10))


@pytest.mark.parametrize("changed", [{"model": "other"}, {"with_provenance": False}])
def test_scores_after_an_invalid_first_batch_are_of_one_model(tmp_path, monkeypatch, changed):
    source, out = write(tmp_path / "in.jsonl", ["{", *ROWS]), tmp_path / "out.jsonl"
    command = (source, "-o", out, "--batch-size", 1, "--on-error", "skip")
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: LengthScorer())
    run(*command, code=3)
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: LengthScorer(**changed))
    assert "was written with other settings or another model" in run(*command, code=1).stderr


# --- replaced outputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_overwrite_keeps_the_old_output_until_the_first_line_is_scored(tmp_path, monkeypatch, scorer, source, name):
    out = tmp_path / needs(name)
    run(source, "-o", out)
    before = out.read_bytes()
    write(tmp_path / "bad.jsonl", ["{"])
    run(tmp_path / "bad.jsonl", "-o", out, "--overwrite", code=1)
    assert out.read_bytes() == before
    run(source, "-o", out)
    assert scorer.calls == [10]


# --- retried lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_lines_without_a_score_are_scored_again(tmp_path, monkeypatch, source, name):
    out = tmp_path / needs(name)
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: BadTwice())
    run(source, "-o", out, "--on-error", "skip", code=3)
    assert [error for _, _, error in rows_of(out)] == [None] * 3 + ["it is bad"] + [None] + ["it is bad"] + [None] * 4
    stopped = LengthScorer(raises=KeyboardInterrupt(), at_call=2)
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: stopped)
    run(source, "-o", out, "--batch-size", 1, code=130)
    again = LengthScorer()
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: again)
    run(source, "-o", out)
    assert again.calls == [1]
    assert rows_of(out) == [(index, index / 10, None) for index in range(10)]
    run(source, "-o", tmp_path / f"whole.{name}")
    assert out.read_bytes() == (tmp_path / f"whole.{name}").read_bytes()


# --- files -------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_reported_before_anything_is_scored(tmp_path, monkeypatch, scorer, source):
    name = "out.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    result = run(source, "-o", tmp_path / name, code=2)
    assert f"writing {tmp_path / name} needs the package pyarrow; run pip install 'gym-rm[data]'" in result.stderr
    assert scorer.calls == []
