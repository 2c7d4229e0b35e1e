import gzip
import json

import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmark_results import mean_of_present, read_benchmark
from gym_rm.evaluation.benchmarks import BENCHMARKS, evaluate_benchmark

ROWS = [{"subset": "hep-go", "scores_chosen": 1.0, "scores_rejected": 0.0, "note": float("nan")}]


def test_a_benchmark_is_found_by_its_name():
    assert evaluate_benchmark("rewardbench", None, ROWS, model="m").model == "m"
    assert {evaluate_benchmark("rewardbench", None, ROWS).benchmark} <= BENCHMARKS.keys()


def test_an_unknown_benchmark_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'rm-bench'"):
        evaluate_benchmark("rm_bench", None, ROWS)


def test_all_values_can_be_written_as_json():
    values = evaluate_benchmark("rewardbench", None, ROWS).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_the_table_has_the_total_first_and_then_sections_and_subsets():
    table = evaluate_benchmark("rewardbench", None, ROWS).table_rows()
    assert table[0] == ("overall", 1.0, None)
    assert ("Chat", None, 0) in table
    assert table[-1] == ("  hep-go", 1.0, 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz"])
def test_rows_are_read_from_files(tmp_path, name):
    text = json.dumps(ROWS) if ".json." in name or name.endswith(".json") else "\n".join(map(json.dumps, ROWS))
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write(text)
    assert evaluate_benchmark("rewardbench", None, tmp_path / name).subsets == {"hep-go": 1.0}


def test_columns_are_read_with_the_model_beside_them():
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]} | {"model": "m", "model_type": "x"}
    result = evaluate_benchmark("rewardbench", None, columns)
    assert result.subsets == {"hep-go": 1.0}
    assert result.model == "m"


def test_several_files_are_one_benchmark(tmp_path):
    paths = [tmp_path / "chat_filtered.json", tmp_path / "code_filtered.json"]
    for path in paths:
        path.write_text(json.dumps([{"score_chosen": [1.0] * 3, "score_rejected": [0.0] * 3}]))
    assert evaluate_benchmark("rm-bench", None, list(map(str, paths))).counts == {"chat": 1, "code": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"subset": ["a", "b"], "scores_chosen": [1]}', r"columns of one length; got columns of \{'subset': 2,"),
        ('{"subset": "a"}', "expected a list of rows, or columns of one length"),
        ("[", "not valid JSON"),
        ("3", "must be a .jsonl"),
        ("[]", "the benchmark has no rows"),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, message):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("rewardbench", None, path)


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"the file 'nowhere\.json' does not exist"):
        read_benchmark("nowhere.json", pytest.fail)


def test_the_mean_leaves_out_values_that_are_missing():
    assert mean_of_present([1.0, None, 0.0], [1.0, 5.0, 3.0]) == 0.25
    assert mean_of_present([None]) is None
