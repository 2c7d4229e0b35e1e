import json

import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.inspection import inspect_comparisons
from tests import real_data

PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}


@pytest.mark.data
def test_real_conversations_have_the_counts_of_their_file():
    found = inspect_comparisons(load_comparisons(real_data.FOLDER / "hh_harmless.jsonl.gz"))
    assert (found.rows, found.pairs, found.ties, found.shapes) == (1150, 1147, 0, {"ranks": 1147})
    assert [(each.text, each.count) for each in found.dropped] == [("reply 1 of 2 is empty", 3)]
    assert found.lengths["messages of a prompt"].maximum == 35
    assert {each.text: each.count for each in found.remarks}[
        "a text contains 'Human:' like a turn of a transcript"
    ] == 19


@pytest.mark.data
def test_real_graded_solutions_have_their_ties_and_a_rating():
    found = inspect_comparisons(load_comparisons(real_data.FOLDER / "gsm8k_graded.jsonl.gz"))
    assert (found.replies, found.pairs, found.ties) == ({4: 658}, 1187, 303)
    assert found.objectives["correct"].count == 4 * 658


def test_shapes_ties_margins_and_sources_are_counted():
    rows = [
        {**PAIR, "margin": 1, "source": "sums"},
        {**PAIR, "margin": 3, "source": "sums"},
        {"context": "a", "response1": "b", "response2": "c", "overall_preference": 0},
        {"prompt": "a", "response": "b", "helpfulness": 3},
        {"prompt": "a", "completions": ["b", "c"], "labels": [1, 0]},
    ]
    found = inspect_comparisons(load_comparisons(rows))
    assert found.shapes == {"binary": 2, "signed": 1, "rated": 1, "steps": 1}
    assert (found.replies, found.pairs, found.ties, found.unranked) == ({1: 2, 2: 3}, 2, 1, 2)
    assert (found.margins.minimum, found.margins.maximum) == (0, 3)
    assert found.objectives["helpfulness"].mean == 3
    assert (found.steps.count, found.steps.mean) == (2, 0.5)
    assert found.sources == {"": 3, "sums": 2}


def test_length_bias_counts_pairs_and_gives_the_accuracy_of_length_alone():
    rows = [{**PAIR, "prompt": f"{k}?", "chosen": "x" * k} for k in (1, 4, 9, 9)]
    bias = inspect_comparisons(load_comparisons(rows)).length_bias
    assert (bias.longer, bias.shorter, bias.equal) == (2, 1, 1)
    assert bias.accuracy == 2.5 / 4
    rated = load_comparisons([{"prompt": "a", "response": "b", "helpfulness": 3}])
    assert inspect_comparisons(rated).length_bias.accuracy is None


def test_reasons_that_differ_only_in_a_value_are_one():
    rows = [PAIR, {**PAIR, "margin": "high"}, {**PAIR, "margin": "low"}, {**PAIR, "chosen": ""}]
    found = inspect_comparisons(load_comparisons(rows, on_error="drop"))
    assert [(each.count, each.examples) for each in found.dropped] == [
        (2, ("comparisons[1]", "comparisons[2]")),
        (1, ("comparisons[3]",)),
    ]


def test_an_inspection_is_plain_json():
    found = inspect_comparisons(load_comparisons([{**PAIR, "margin": 1}]))
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["shapes"] == {"binary": 1}
    assert plain["length_bias"] == {"longer": 0, "shorter": 1, "equal": 0, "accuracy": 0.0}
