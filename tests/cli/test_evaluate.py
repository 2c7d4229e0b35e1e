"""`gym-rm evaluate`: outputs, scores of earlier runs, failures, two models, benchmarks, and exit codes."""

import json

import pytest

import gym_rm
from gym_rm.errors import RemoteError
from gym_rm.types import Provenance
from tests.cli.command import LengthScorer, read, runner, write

PAIRS = [
    {"prompt": f"question {i}", "chosen": "x" * (i + 2), "rejected": "y" * (7 if i % 4 else 1), "subset": f"s{i % 2}"}
    for i in range(20)
]
RIGHT = sum(len(row["chosen"]) > len(row["rejected"]) for row in PAIRS)
evaluate = runner("evaluate")


def values(*arguments, code=0):
    return json.loads(evaluate(*arguments, "--json", code=code).stdout)


@pytest.fixture
def models(monkeypatch):
    """Scorers by name; each call of `load_scorer` is recorded."""
    scorers = {None: LengthScorer(), "short": LengthScorer(model="short")}
    score = scorers["short"].score
    scorers["short"].score = lambda conversations, prompts=None: score(
        [[*chat[:-1], {**chat[-1], "content": "z" * (20 - len(chat[-1]["content"]))}] for chat in conversations]
    )
    loaded = []

    def load(name, **options):
        loaded.append((name, options))
        return scorers[name]

    for name, scorer in scorers.items():
        scorer.provenance = Provenance("LengthScorer", name or "length", revision="1")
    monkeypatch.setattr(gym_rm, "load_scorer", load)
    scorers["loaded"] = loaded
    return scorers


@pytest.fixture
def pairs(tmp_path):
    return write(tmp_path / "pairs.jsonl", PAIRS)


def test_scores_of_an_earlier_evaluation_repeat_it_without_the_model(models, pairs, tmp_path):
    evaluate(pairs, "-o", tmp_path / "out")
    models["loaded"].clear()
    found = values(pairs, "--scores", tmp_path / "out" / "scores.jsonl")
    assert models["loaded"] == []
    first = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["sets"] == first["sets"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RemoteError("the server is gone"), 1, "the server is gone"),
        (KeyboardInterrupt(), 130, "repeat the same command"),
    ],
    ids=["error", "ctrl-c"],
)
def test_a_run_that_stops_leaves_the_finished_rows_and_continues(models, pairs, tmp_path, error, code, words):
    scorer = models[None]
    scorer.raises, scorer.at_call = error, 3
    result = evaluate(pairs, "-o", tmp_path / "out", "--batch-size", 8, code=code)
    assert words in result.stderr
    assert len(read(tmp_path / "out" / "scores.jsonl")) == 1 + 8
    scorer.raises = None
    scorer.calls.clear()
    evaluate(pairs, "-o", tmp_path / "out", "--batch-size", 8)
    assert sum(scorer.calls) == 2 * 12


def test_rows_without_a_score_are_counted_and_tried_again(models, pairs, tmp_path):
    write(pairs, [*PAIRS, {"prompt": "p", "chosen": "good", "rejected": "bad"}])
    result = evaluate(pairs, "-o", tmp_path / "out", code=3)
    assert "1 of 21 rows lack a reward" in result.stdout.replace("\n", " ")
    found = json.loads((tmp_path / "out" / "report.json").read_text())["sets"][0]["preferences"]
    assert (found["num_failed"], found["metrics"]["num_pairs"]) == (1, 20)
    assert found["accuracy"]["value"] == pytest.approx(RIGHT / 20)
    models[None].calls.clear()
    evaluate(pairs, "-o", tmp_path / "out", code=3)
    assert models[None].calls == [2]


def test_two_models_are_compared(models, pairs, tmp_path):
    found = values(pairs, "--against", "short", "-o", tmp_path / "out")["sets"][0]
    assert (found["model"], found["against"]) == ("embedded", "short")
    equal = sum(len(row["chosen"]) == len(row["rejected"]) for row in PAIRS)
    assert found["comparison"]["only_first"] == RIGHT
    assert found["comparison"]["only_second"] == 20 - RIGHT - equal
    assert (tmp_path / "out" / "against.jsonl").is_file()


def test_a_malformed_row_stops_or_is_counted(models, pairs):
    write(pairs, [*PAIRS, '{"prompt": "p", "chosen": 3}'])
    assert "line 21" in evaluate(pairs, code=1).stderr
    found = values(pairs, "--on-error", "skip")["sets"][0]
    assert found["num_dropped"] == 1
    assert found["preferences"]["num_comparisons"] == 20


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "has no rows"),
        ([{"prompt": "p", "chosen": "", "rejected": "a"}], "were dropped"),
        ([{"context": "p", "response1": "a", "response2": "b", "overall_preference": 0}], "has no preference"),
    ],
    ids=["empty", "empty-reply", "all-ties"],
)
def test_a_file_without_a_pair_is_an_error(models, tmp_path, rows, problem):
    assert problem in evaluate(write(tmp_path / "rows.jsonl", rows), code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--reward-model", "{"], "not valid JSON"),
        (["--benchmark", "rewardbench", "--best-of-n", "correct"], "--best-of-n cannot be used"),
        (["--benchmark", "agent-process-bench", "--rows", "5"], "--rows cannot be used"),
        (["--reward-model", "short", "--scores", "x.jsonl"], "exclude each other"),
        (["-o", "page.html"], "-o is a folder for all files, got 'page.html'"),
    ],
)
def test_options_that_make_no_sense_are_refused(pairs, arguments, problem):
    assert problem in evaluate(pairs, *arguments, code=2).stderr


def test_a_benchmark_of_two_models(models, tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{**row, "subset": "alpacaeval-easy"} for row in PAIRS])
    result = evaluate(rows, "--benchmark", "rewardbench", "--against", "short", "-o", tmp_path / "out")
    assert "alpacaeval-easy" in result.stdout
    found = json.loads((tmp_path / "out" / "report.json").read_text())["benchmarks"]
    assert [one["model"] for one in found] == ["embedded", "short"]
    assert found[0]["overall"] == pytest.approx(RIGHT / 20)
    assert "alpacaeval-easy" in (tmp_path / "out" / "report.html").read_text()


def test_published_results_are_counted_without_a_model_unless_one_is_named(models, tmp_path):
    row = {"source": "mmlu-pro-law", "question": "q", "response_A": "aa", "response_B": "a", "label": "A>B"}
    said = [{"decision": "A>B"}, {"decision": "A=B"}], [{"decision": "B>A"}, None]
    rows = write(tmp_path / "rows.jsonl", [{**row, "judgments": each} for each in said])
    (found,) = values(rows, "--benchmark", "judge-bench")["benchmarks"]
    assert (models["loaded"], found["model"], found["overall"], found["failed"]) == ([], "published", 0.5, {})
    (found,) = values(rows, "--benchmark", "judge-bench", "--reward-model", "short")["benchmarks"]
    assert (found["model"], found["overall"]) == ("short", 0.0)
    write(rows, [{**row, "judgments": said[0]}, row])
    mixed = evaluate(rows, "--benchmark", "judge-bench", code=1).stderr
    assert "line 2: no results, but other rows have some" in mixed.replace("\n", " ")


def test_a_table_without_replies_has_no_model(models, tmp_path):
    row = {"id": "math-0", "label": -1, "prediction": -1}
    rows = write(tmp_path / "rows.jsonl", [row, {**row, "label": 0, "prediction": 0}])
    assert values(rows, "--benchmark", "process-bench")["benchmarks"][0]["overall"] == 1.0
    refused = evaluate(rows, "--benchmark", "process-bench", "--reward-model", "short", code=1)
    assert "process-bench counts the results in the rows; name no model" in refused.stderr.replace("\n", " ")
