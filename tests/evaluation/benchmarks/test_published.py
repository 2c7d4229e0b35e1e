"""Tables from published results, with numbers that were counted by hand."""

import json

import pytest

from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.by_name import BENCHMARKS
from gym_rm.evaluation.benchmarks.published import REDUCTIONS
from gym_rm.evaluation.benchmarks.rows import read_benchmark


def table(name, rows):
    return BENCHMARKS[name].result(read_benchmark(rows, BENCHMARKS[name].read_row))


def test_process_bench_is_the_mean_over_sets_of_the_harmonic_mean_of_both_halves():
    said = {"gsm8k": [(2, 2), (0, 1), (3, -1), (-1, -1)], "math": [(1, 1), (-1, 0), (-1, -1), (-1, None), (-1, -1)]}
    rows = [
        {"id": f"{name}-{k}", "label": label, "prediction": prediction}
        for name, pairs in said.items()
        for k, (label, prediction) in enumerate(pairs)
    ]
    result = table("process-bench", rows)
    assert result.details["gsm8k"] == {"F1": 0.5, "error accuracy": 1 / 3, "correct accuracy": 1.0}
    assert result.details["math"] == {"F1": pytest.approx(2 / 3), "error accuracy": 1.0, "correct accuracy": 0.5}
    assert (result.overall, result.counts) == (pytest.approx((1 / 2 + 2 / 3) / 2), {"gsm8k": 4, "math": 5})


def test_the_first_step_that_is_not_above_one_half_is_predicted():
    rows = [
        {"id": "math-0", "label": 1, "score_steps": [0.9, 0.5, 0.1]},
        {"id": "math-1", "label": -1, "score_steps": [0.9, 0.6]},
        {"id": "math-2", "label": -1, "score_steps": [0.2]},
    ]
    assert table("process-bench", rows).details["math"] == {
        "F1": pytest.approx(2 / 3),
        "error accuracy": 1.0,
        "correct accuracy": 0.5,
    }


def test_a_solution_without_scores_has_no_prediction():
    for failed in ({"score_steps": [], "score_error": "too long"}, {"score_error": "too long"}, {"score_steps": []}):
        rows = [{"id": "math-0", "label": "0", "prediction": "0"}, {"id": "math-1", "label": -1, **failed}]
        found = table("process-bench", rows).details["math"]
        assert (found["error accuracy"], found["correct accuracy"]) == (1.0, 0.0)


def test_one_half_alone_has_no_harmonic_mean():
    result = table("process-bench", [{"id": "math-0", "label": 1, "prediction": 1}])
    assert (result.overall, result.subsets, result.details["math"]["error accuracy"]) == (None, {}, 1.0)
    assert result.missing == ("math",)


def solution(kind, errors, valid, **fields):
    return {"classification": kind, "error_steps": errors, "scores": {"step_level_validity_labels": valid}, **fields}


def test_prm_bench_is_the_mean_of_the_f1_of_good_steps_and_of_bad_ones():
    rows = [
        solution("circular", [2, 3], [True, False, True, True]),  # 2 hits, 1 right, 1 false; the first error is found
        solution("deception", [1], [True, True, False, True]),  # 2 hits, 1 false, 1 missed
        solution("deception", [3], [False, True], validity=True),  # 1 hit, 1 missed; it ends before the error
        solution("deception", [1], [], validity=False),
        solution("correct", [], [False] * 9),
    ]
    result = table("prm-bench", rows)
    f1, negative = 2 * 5 / (2 * 5 + 2 + 2), 2 * 1 / (2 * 1 + 2 + 2)
    assert result.sections == {
        "PRM score": pytest.approx(0.5 * f1 + 0.5 * negative),
        "F1": pytest.approx(f1),
        "negative F1": pytest.approx(negative),
        "step accuracy": 6 / 10,
        "first error accuracy": 1 / 2,
    }
    assert (result.overall, result.subsets["correct"]) == (result.sections["PRM score"], 0.0)


def test_labels_of_redundancy_stand_for_validity_in_their_classes_and_scores_of_steps_for_labels():
    redundant = {"scores": {"step_level_validity_labels": [True, True], "step_level_redundancy_labels": [False, True]}}
    steps = {"classification": "deception", "error_steps": [2], "score_steps": [0.6, 0.5]}
    rows = [{"classification": kind, "error_steps": [2], **redundant} for kind in ("redundency", "deception")]
    found = table("prm-bench", [*rows, {**steps, "classification": "confidence"}]).subsets
    assert found == {"redundency": 1.0, "deception": pytest.approx(0.5 * 2 / 3), "confidence": 1.0}


def test_only_the_first_row_of_a_solution_counts_and_only_labels_0_and_1_are_labels():
    rows = [solution("deception", [1], [0, 0.9], idx="a"), solution("deception", [1], [1, 1], idx="a")]
    assert table("prm-bench", rows).sections["step accuracy"] == 1 / 2
    failed = {"classification": "deception", "error_steps": [1], "score_steps": [0.1], "score_error": "cut"}
    found = table("prm-bench", [*rows, {**failed, "classification": "circular"}])
    assert (found.sections["step accuracy"], [*found.subsets]) == (1 / 2, ["deception"])


def trajectory(query, labels, dataset="tau2", **fields):
    where = {"dataset": dataset, "data_source": dataset, "query_index": query, "sample_index": 0}
    return {**where, "step_labels": labels, **fields}


def test_steps_of_trajectories_are_counted_over_all_and_what_has_no_label_is_wrong():
    known = [
        trajectory(0, {"2": 1, "4": -1, "6": -1}, messages=[]),
        trajectory(1, {"2": 1, "4": 0}, messages=[]),
        trajectory(2, {"2": -1}, messages=[]),
        trajectory(0, {"2": 0}, "bfcl", messages=[]),
    ]
    said = [
        trajectory(0, {"2": -1, "4": -1}, annotator="m", updated_at="2026-02-04T14:49:08"),
        trajectory(0, {"2": 1, "4": -1, "8": -1}, annotator="m", updated_at="2026-02-05T14:49:08"),
        trajectory(0, {"2": 1, "4": 1, "6": 1}, annotator="m", updated_at="2026-02-03T14:49:08"),
        trajectory(1, {"2": 0, "4": 0}, annotator="m"),
        trajectory(7, {"2": 0}, "bfcl", annotator="m"),
    ]
    result = table("agent-process-bench", known + said)
    assert result.details["tau2"] == {"step accuracy": 3 / 6, "first error accuracy": 2 / 3}
    assert result.details["bfcl"] == {"step accuracy": 0.0, "first error accuracy": 1.0}  # no label, and no error
    assert (result.overall, result.sections["first error accuracy"]) == (3 / 7, 3 / 4)
    assert result.counts == {"tau2": 3, "bfcl": 1}


@pytest.mark.parametrize(
    "rows",
    [
        [trajectory(0, {"2": 1}, messages=[])],
        [trajectory(0, {"2": 1}, messages=[])] * 2 + [trajectory(0, {"2": 1}, annotator="m")],
        [trajectory(0, {"2": 1}, messages=[]), *(trajectory(0, {"2": 1}, annotator=name) for name in "mn")],
    ],
)
def test_trajectories_are_labelled_once_by_one_model(rows):
    with pytest.raises(ConfigError, match="expected each trajectory once, and its labels by one model"):
        table("agent-process-bench", rows)


SOURCES = ["human_to_GPT-4", "a", "b", "c"]


def test_the_right_solution_must_be_strictly_above_all_others_and_ranks_behind_equal_ones():
    scores = [[3, 2, 1, 0], [3, 3, 1, 0], [1, 3, 1, 0], [0, 1, 2, 3]]  # ranks 1, 2, 3, 4
    result = table("reward-math", [{"solution_reference": SOURCES, "score": each} for each in scores])
    assert result.sections == pytest.approx(
        {"accuracy": 1 / 4, "mean reciprocal rank": (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4}
    )
    assert result.overall == 1 / 4
    texts = [{"solution_reference": SOURCES, "score": ["10", "9", "2", "1"]}]  # of a csv file
    assert table("reward-math", texts).overall == 1.0


def test_pairs_of_a_judge_rank_the_right_solution_behind_those_that_it_lost_to():
    rows = [
        {"solution_reference": SOURCES[1:], "score": said, "chosen_position": ["A", "B", "A"]}
        for said in (["A", "B", "A"], ["A", "A", None])  # ranks 1 and 3
    ]
    assert table("reward-math", rows).sections == {"accuracy": 0.5, "mean reciprocal rank": (1 + 1 / 3) / 2}


def test_steps_are_reduced_in_each_way():
    assert {name: reduce([0.5, 0.25, 0.5]) for name, reduce in REDUCTIONS.items()} == {
        "min": 0.25,
        "product": 0.0625,
        "geometric mean": 0.0625 ** (1 / 3),
        "mean": 1.25 / 3,
        "last": 0.5,
        "max": 0.5,
    }
    row = {"solution_reference": SOURCES, "score": [[0.6, 0.6], [0.5, 0.9], [0.9, 0.5], [0.6]]}
    found = table("reward-math", [row]).sections
    ranks = {name: 1 / found[f"mean reciprocal rank ({name})"] for name in REDUCTIONS}
    assert ranks == {"min": 2, "product": 4, "geometric mean": 4, "mean": 4, "last": 3, "max": 4}
    assert found["accuracy (min)"] == 0.0


def test_ppe_leaves_ties_of_people_out_and_counts_equal_scores_as_wrong():
    said = [("model_a", 2, 1), ("model_b", 2, 1), ("model_b", [1.0], [3.0]), ("model_a", 1, 1), ("tie", 1, 2)]
    rows = [{"winner": who, "score_1": one, "score_2": other} for who, one, other in said]
    assert table("ppe", rows).sections == {"accuracy": 2 / 4}
    assert table("ppe", [{"winner": "model_a", "score_1": [1.0], "score_2": "$ERROR$"}]).overall == 1.0


def test_a_reply_whose_score_is_missing_is_never_picked():
    row = {"scores": [1, 0, 0], "score_1": None, "score_2": "$ERROR$", "score_3": 0, "sampled_conflict_pairs": [[0, 1]]}
    found = table("ppe", [row]).sections
    assert (found["accuracy"], found["best of K: end"], found["ROC area"]) == (0.0, 0.0, 0.25)


def test_ppe_has_pairs_the_best_of_k_and_the_area_within_each_prompt():
    """The best of 1, 2 and 3: 1/3, 2/3, 1 in the first row, and 2/3, 1/3, 0 in the second; perfect is 1/3, 2/3, 1 and
    2/3, 1, 1."""
    rows = [
        {"scores": [True, False, False], "score_1": 3, "score_2": 1, "score_3": 1, "sampled_conflict_pairs": [[0, 1]]},
        {
            "scores": [1, 1, 0],
            "score_1": 1,
            "score_2": "$ERROR$",
            "score_3": 2,
            "sampled_conflict_pairs": [[2, 0], [1, 2]],
        },
    ]
    found = table("ppe", rows).sections
    loss = (0 + ((1 + 2 / 3) / 2 - 1 / 2) ** 2 + (1 - 1 / 2) ** 2) / 3
    assert found == {
        "accuracy": 1 / 3,
        "best of K: maximum": pytest.approx(1 / 2),
        "best of K: end": pytest.approx(1 / 2),
        "best of K: loss": pytest.approx(loss),
        "ROC area": 1 / 2,
    }


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("process-bench", {"label": 1}),
        ("prm-bench", {"classification": "circular", "error_steps": [1]}),
        ("agent-process-bench", {"step_labels": {"2": 1}}),
        ("agent-process-bench", trajectory(0, [1], messages=[])),
        ("agent-process-bench", trajectory(0, {"2": 1}, annotator="m")),
        ("reward-math", {"solution_reference": SOURCES, "score": [1, 2]}),
        ("ppe", {"winner": "model_a", "score_1": 1}),
        ("ppe", {"winner": "Model A", "score_1": 1, "score_2": 2}),
        ("reward-math", {"solution_reference": SOURCES[:2] * 2, "score": [3, 2, 1, 0]}),
        ("reward-math", {"score": ["A", "B"], "chosen_position": ["A"]}),
        ("ppe", {"scores": [1, 0], "sampled_conflict_pairs": [[0, 1]], "score_1": 1}),
        ("reward-math", {"solution_reference": SOURCES[1:], "score": [1, 2, 3]}),
        ("reward-math", {"solution_reference": SOURCES, "score": [[], [0.1], [0.2], [0.3]]}),
    ],
)
def test_rows_without_results_are_refused(name, row):
    with pytest.raises(ConfigError, match=r"rows\[0\]: rows lack results"):
        table(name, [row])


def test_files_of_one_benchmark_are_joined_by_their_names(tmp_path):
    known, said = trajectory(0, {"2": 1}, messages=[]), trajectory(0, {"2": 1}, annotator="m")
    known.pop("dataset")
    for name, row in (("tau2.jsonl", known), ("tau2__blind_m.jsonl", said)):
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    result = table("agent-process-bench", [str(path) for path in sorted(tmp_path.iterdir())])
    assert (result.overall, result.counts) == (1.0, {"tau2": 1})
