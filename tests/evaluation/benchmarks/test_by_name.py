import json

import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rows import mean_of_present
from tests.evaluation.benchmarks.stored import LengthOfReply, evaluate_benchmark

ROWS = [{"subset": "hep-go", "prompt": "p", "chosen": "four", "rejected": "5", "note": float("nan")}]


def evaluate(rows, name="rewardbench"):
    return evaluate_benchmark(name, LengthOfReply(), rows)


def test_all_values_can_be_written_as_json():
    values = evaluate(ROWS).as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values


def test_several_files_are_one_benchmark(tmp_path):
    paths = [tmp_path / "chat_filtered.json", tmp_path / "code_filtered.json"]
    for path in paths:
        path.write_text(json.dumps([{"prompt": "p", "chosen": ["aa"] * 3, "rejected": ["a"] * 3}]))
    assert evaluate(list(map(str, paths)), "rm-bench").counts == {"chat": 1, "code": 1}


def test_a_source_without_rows_is_refused():
    with pytest.raises(ConfigError, match="the benchmark has no rows"):
        evaluate([])


def test_the_mean_leaves_out_values_that_are_missing():
    assert mean_of_present([1.0, None, 0.0], [1.0, 5.0, 3.0]) == 0.25
    assert mean_of_present([None]) is None
