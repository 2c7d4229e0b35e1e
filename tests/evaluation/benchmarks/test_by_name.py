import gzip
import json

import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS, evaluate_benchmark
from gym_rm.evaluation.benchmarks.rows import mean_of_present, read_benchmark
from tests import tiny_models
from tests.evaluation.benchmarks.stored import LengthOfReply

ROWS = [{"subset": "hep-go", "prompt": "p", "chosen": "four", "rejected": "5", "note": float("nan")}]


def evaluate(rows, name="rewardbench", **options):
    return evaluate_benchmark(name, LengthOfReply(), rows, **options)


def test_a_benchmark_is_found_by_its_name():
    assert evaluate(ROWS, model="m").model == "m"
    assert evaluate(ROWS).model == "LengthOfReply"
    assert {evaluate(ROWS).benchmark} <= BENCHMARKS.keys()


def test_models_that_answer_a_question_are_evaluated(tmp_path):
    folder = tiny_models.save_policy(tmp_path, "llama", initializer_range=0.3)
    options = {"question": "Is it right?", "answers": ("A", "B")}
    scorer = gym_rm.load_scorer(str(folder), kind="generative", **options)
    row = {"source": "mmlu-pro", "question": "12 + 30?", "response_A": "42", "response_B": "No.", "label": "A>B"}
    swapped = {**row, "response_A": "No.", "response_B": "42"}
    result = evaluate_benchmark("judge-bench", scorer, [row, swapped])
    assert (result.overall, result.details, result.failed) == (0.5, {"ties": 0}, {})


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'rm-bench'"):
        evaluate(ROWS, "rm_bench")


def test_all_values_can_be_written_as_json():
    values = evaluate(ROWS).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_the_table_has_the_total_first_and_then_sections_and_subsets():
    table = evaluate(ROWS).table_rows()
    assert table[0] == ("overall", 1.0, None)
    assert ("Chat", None, 0) in table
    assert table[-1] == ("  hep-go", 1.0, 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json.gz"])
def test_rows_are_read_from_files(tmp_path, name):
    text = json.dumps(ROWS) if ".json." in name else "\n".join(map(json.dumps, ROWS))
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write(text)
    assert evaluate(tmp_path / name).subsets == {"hep-go": 1.0}


def test_several_files_are_one_benchmark(tmp_path):
    paths = [tmp_path / "chat_filtered.json", tmp_path / "code_filtered.json"]
    for path in paths:
        path.write_text(json.dumps([{"prompt": "p", "chosen": ["aa"] * 3, "rejected": ["a"] * 3}]))
    assert evaluate(list(map(str, paths)), "rm-bench").counts == {"chat": 1, "code": 1}


def test_a_source_without_rows_is_refused():
    with pytest.raises(ConfigError, match="the benchmark has no rows"):
        evaluate([])


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"the file 'nowhere\.json' does not exist"):
        read_benchmark("nowhere.json", pytest.fail)


def test_the_mean_leaves_out_values_that_are_missing():
    assert mean_of_present([1.0, None, 0.0], [1.0, 5.0, 3.0]) == 0.25
    assert mean_of_present([None]) is None
