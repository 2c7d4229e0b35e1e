"""RewardBench 1 and 2.

The numbers called golden were computed once from the inputs that `random_subsets` and `random_ties` generate, with
`calculate_scores_per_section` (rewardbench 0.1.4 and 0.1.5), `get_average_over_rewardbench` (`analysis/` of its
repository) and `process_single_model` (0.1.5; without spreads of 0, 0.1.4 returns the same).
"""

import importlib
import math
import random
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gym_rm
from gym_rm.data.rows import rows_of
from gym_rm.errors import ConfigError
from gym_rm.evaluation.rewardbench import (
    SECTIONS,
    best_of_n_result,
    evaluate_rewardbench,
    evaluate_rewardbench_2,
    overall_score,
    section_scores,
    ties_score,
)

SLICE = Path(__file__).parents[2].parent / "shared" / "data" / "rewardbench_slice.jsonl.gz"
SECTION_NAMES = ("Chat", "Chat Hard", "Safety", "Reasoning")


def random_subsets(seed, *, share=1.0):
    generator = random.Random(seed)
    names = [subset for weights in SECTIONS.values() for subset in weights]
    return {name: generator.random() for name in names if generator.random() < share}


def random_ties(seed, *, coarse):
    generator = random.Random(seed)
    rows = []
    for number in range(12):
        for kind, right in (("ref", 1), ("tied", generator.randint(2, 5))):
            scores = [3.0 * (index < right) + generator.gauss(0, 2) for index in range(right + generator.randint(1, 4))]
            rows.append((f"{kind}:{number}", [4.0 * round(score / 4) for score in scores] if coarse else scores, right))
    return rows[:-2] + rows[-1:]  # the last prompt is there once


@pytest.fixture(scope="module")
def reference():
    """The functions of the package rewardbench, without its models, which need other versions of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        models = types.ModuleType("rewardbench.models")
        models.REWARD_MODEL_CONFIG, models.DPO_MODEL_CONFIG = {}, {}
        patch.setitem(sys.modules, "rewardbench.models", models)
        try:
            return importlib.import_module("rewardbench.utils")
        except ImportError as error:
            pytest.skip(f"rewardbench is not installed ({error})")


def test_sections_and_total_have_the_golden_values():
    sections = section_scores(random_subsets(0))
    golden = {
        "Chat": 0.4767857892124646,
        "Chat Hard": 0.6452017712930335,
        "Safety": 0.7187552027410256,
        "Reasoning": 0.6265954484299486,
        "Prior Sets": 0.5757687917547328,
    }
    assert sections == pytest.approx(golden, rel=1e-12)
    assert overall_score(sections) == pytest.approx(0.6122716905675197, rel=1e-12)


def test_missing_subsets_are_left_out_of_their_section_as_in_the_golden_values():
    subsets = random_subsets(1, share=0.6)
    golden = {
        "Chat": 0.6728892834246414,
        "Chat Hard": 0.6072895195119761,
        "Safety": 0.32073898993761263,
        "Reasoning": 0.48678236790502183,
    }
    assert {name: section_scores(subsets)[name] for name in SECTION_NAMES} == pytest.approx(golden, rel=1e-12)


def test_sections_equal_those_of_the_package(reference):
    constants = pytest.importorskip("rewardbench.constants")
    assert {name: list(SECTIONS[name]) for name in SECTION_NAMES} == constants.SUBSET_MAPPING
    for seed in range(50):
        subsets = random_subsets(seed, share=0.7)
        theirs = reference.calculate_scores_per_section(constants.EXAMPLE_COUNTS, constants.SUBSET_MAPPING, subsets)
        ours = section_scores(subsets)
        assert {name: ours[name] or 0 for name in SECTION_NAMES} == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("coarse", "golden"), [(False, 0.38184391070882956), (True, 0.2785409814834124)])
def test_ties_have_the_golden_score(coarse, golden):
    assert ties_score(random_ties(2, coarse=coarse))["score"] == pytest.approx(golden, rel=1e-12)


def test_ties_equal_those_of_the_package(reference):
    datasets = pytest.importorskip("datasets")
    for seed in range(20):
        rows = random_ties(seed, coarse=False)
        stored = [{"id": name, "scores": scores, "num_correct": right} for name, scores, right in rows]
        theirs = reference.process_single_model(datasets.Dataset.from_list(stored))[1]
        assert ties_score(rows)["score"] == pytest.approx(theirs, rel=1e-12)


def test_ties_by_hand():
    rows = [("ref:1", [2.0, 0.0], 1), ("tied:1", [3.0, 2.0, 0.5, 0.0], 2), ("ref:2", [0.0, 1.0], 1)]
    parts = ties_score([*rows, ("tied:2", [1.0, 1.0, 1.0], 2)])
    expected = {
        "accuracy_tied": 0.5,
        "accuracy_ref": 0.5,
        "gap_above_spread": 0.5,  # 1.5 > 1 and not 0 > 0
        "smaller_gap_above_spread": 0.5,  # min(2, 1.5) > 1 and not min(-1, 0) > 0
        "relative_gap": (math.tanh(0.5) - 1) / 2,  # -1 / 0 is minus infinity
    }
    assert parts == pytest.approx({"score": 0.3 + 0.2 + 0.005 * (math.tanh(0.5) - 1), **expected})


def test_ties_without_a_prompt_that_is_there_twice_have_no_score():
    assert ties_score([("ref:1", [2.0, 0.0], 1), ("tied:2", [3.0, 2.0, 0.5], 2)])["score"] is None


def test_a_prompt_that_is_there_too_often_is_refused():
    with pytest.raises(ConfigError, match="unique; got 'ref:1'"):
        ties_score([("ref:1", [1.0, 0.0], 1)] * 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("other:1", [1.0, 0.0], 1), "got 'other:1'"),
        (("tied", [1.0, 0.0], 1), "got 'tied'"),
        (("ref:1", [1.0], 1), "Ties, ref:1: expected right and wrong answers, got 1 of 1"),
    ],
)
def test_invalid_ties_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        ties_score([row])


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=6))
def test_the_results_of_all_replies_share_one_point(scores):
    rotations = [scores[start:] + scores[:start] for start in range(len(scores))]
    assert sum(best_of_n_result(rotation) for rotation in rotations) == pytest.approx(1.0)


def stored(subset, chosen, rejected):
    return {"subset": subset, "scores_chosen": chosen, "scores_rejected": rejected}


def test_equal_scores_are_wrong():
    result = evaluate_rewardbench(None, [stored("hep-go", 1.0, 1.0), stored("hep-go", 1.5, 1.0)])
    assert result.subsets == {"hep-go": 0.5}


def test_subsets_count_by_their_number_of_prompts_in_the_benchmark_not_in_the_file():
    rows = [stored("math-prm", 1, 0), *[stored("hep-go", 0, 1)] * 50]
    assert evaluate_rewardbench(None, rows).sections["Reasoning"] == pytest.approx(984 / (984 + 164))


def test_missing_and_unknown_subsets_are_named():
    result = evaluate_rewardbench(None, [stored("hep-go", 1, 0), stored("mine", 0, 1), stored("shp", 0, 1)])
    assert result.overall == pytest.approx((2 * 1.0 + 1 * 0.0) / 3)
    assert result.not_counted == ("mine",)
    assert "hep-cpp" in result.missing
    assert "hep-go" not in result.missing
    assert result.sections["Chat"] is None
    assert result.notes()[0].startswith("Without rows, and left out of every mean: alpacaeval-easy, ")
    assert result.notes()[1] == "Not part of rewardbench, and in no section: mine."


def test_stored_results_are_used_where_scores_are_missing():
    rows = [{**stored("hep-go", None, None), "results": 0.5}, {"subset": "hep-go", "results": 1}]
    assert evaluate_rewardbench(None, rows).subsets == {"hep-go": 0.75}


@pytest.mark.parametrize("score", [None, math.inf, 10**400], ids=["missing", "infinite", "huge"])
def test_a_stored_score_that_is_missing_is_reported_and_is_not_a_zero(score):
    result = evaluate_rewardbench(None, [stored("hep-go", 1.0, score), stored("hep-go", [0.5], [0.25])])
    assert result.subsets == {"hep-go": 1.0}
    assert result.failed == {"rows[0]": "the score is missing or not a finite number"}
    assert result.counts["Reasoning"] == 1


def test_real_rows_are_scored_with_the_embedded_model():
    if not SLICE.exists():
        pytest.skip("no ../shared/data beside the checkout")
    rows = sorted((row for _, row in rows_of(SLICE, "rows")), key=lambda row: len(row["chosen"] + row["rejected"]))
    rows = [row for row in rows if row["subset"] == "llmbar-natural"][:4] + rows[:4]
    scorer = gym_rm.load_scorer()
    result = evaluate_rewardbench(scorer, rows)
    replies = [
        [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}] for row in rows]
        for name in ("chosen", "rejected")
    ]
    chosen, rejected = (scorer.score(conversations).rewards for conversations in replies)
    natural = [row["subset"] == "llmbar-natural" for row in rows]
    assert 0 < sum(natural) < len(rows)
    assert result.sections["Chat Hard"] == pytest.approx((chosen > rejected)[natural].mean())
    assert result.not_counted == ("mt-bench-pairs",)


def choice(subset, scores, num_correct=1, row_id="1"):
    return {"id": row_id, "subset": subset, "scores": scores, "num_correct": num_correct}


def test_the_total_of_version_2_is_the_mean_of_its_subsets():
    rows = [
        choice("Math", [1.0, 0.0, 0.5, 0.5]),
        choice("Math", [1.0, 1.0, 0.5, 0.5]),
        choice("Focus", [[0.0], [1.0], [0.5], [0.5]]),
        choice("ties", [3.0, 1.0], 1, "ref:4"),
        choice("ties", [3.0, 2.0, 0.0], 2, "tied:4"),
        choice("mine", [1.0, 0.0]),
    ]
    result = evaluate_rewardbench_2(None, rows)
    ties = 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(1.0)
    assert result.subsets == pytest.approx({"Focus": 0.0, "Math": 0.75, "Ties": ties, "mine": 1.0})
    assert result.overall == pytest.approx((0.0 + 0.75 + ties) / 3)
    assert result.missing == ("Factuality", "Precise IF", "Safety")
    assert result.not_counted == ("mine",)
    assert result.details["Ties"]["accuracy_ref"] == 1.0


class ByLength:
    """Scorer whose reward is the length of the last message; replies that begin with "no" cannot be scored."""

    def score(self, conversations, prompts=None):
        texts = [conversation[-1]["content"] for conversation in conversations]
        errors = ["the reply begins with no" if text.startswith("no") else None for text in texts]
        scores = gym_rm.Scores.from_rewards([len(text) for text in texts], errors=errors)
        return scores.raise_for_errors()


def test_rows_of_version_2_are_scored_with_the_right_replies_first():
    row = {"id": "tied:1", "subset": "Ties", "prompt": "p", "chosen": ["aaaa", "aaa"], "rejected": ["a", "aa"]}
    reference = {"id": "ref:1", "subset": "Ties", "prompt": "p", "chosen": ["aaa"], "rejected": ["a"]}
    result = evaluate_rewardbench_2(ByLength(), [row, reference], model="m")
    assert result.details["Ties"]["accuracy_tied"] == 1.0


def test_rows_that_cannot_be_scored_are_named_and_the_others_are_kept():
    rows = [{"subset": "hep-go", "prompt": "p", "chosen": reply, "rejected": ""} for reply in ("yes", "no")]
    result = evaluate_rewardbench(ByLength(), rows)
    assert result.subsets == {"hep-go": 1.0}
    assert result.failed == {"rows[1]": "the reply begins with no"}
    assert result.notes()[-1] == (
        "Rows without a score, in no value: 1; the first is rows[1]: the reply begins with no"
    )


def test_if_no_row_can_be_scored_the_error_of_the_scorer_is_raised():
    with pytest.raises(gym_rm.ScoringError, match="the reply begins with no"):
        evaluate_rewardbench(ByLength(), [{"subset": "hep-go", "prompt": "p", "chosen": "no", "rejected": "yes"}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, r"rows\[0\]: expected a row of the benchmark, got int 3"),
        ({"scores_chosen": 1, "scores_rejected": 0}, r"rows\[0\]: 'subset' must be a text, got NoneType None"),
        ({"subset": "hep-go"}, "without a scorer, a row needs 'scores_chosen' and 'scores_rejected'"),
        (stored("hep-go", "1.0", 0.0), "'scores_chosen' must be a number, got str '1.0'"),
        (stored("hep-go", True, 0.0), "'scores_chosen' must be a number, got bool True"),
        (stored("hep-go", None, None), "none of the 1 rows has a score"),
    ],
)
def test_invalid_stored_rows_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_rewardbench(None, [row])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"subset": "hep-go", "chosen": "a", "rejected": "b"}, "'prompt' must be a text or a list of messages"),
        ({"subset": "hep-go", "prompt": "p", "chosen": "a"}, "'rejected' must be a text or a list of messages"),
    ],
)
def test_invalid_rows_to_score_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_rewardbench(ByLength(), [row])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"subset": "Math"}, "without a scorer, a row needs 'scores'"),
        (choice("Math", []), "'scores' must be a list of at least one entries"),
        (choice("Math", [1.0, 0.0], 2), "2 right replies, but only the subset Ties may have more than one"),
        (choice("Math", [1.0, 0.0], None), "'num_correct' must be a number of at least 1, got NoneType None"),
        (choice("Ties", [1.0, 0.0], 1, 4), "'id' must be a text, got int 4"),
    ],
)
def test_invalid_rows_of_version_2_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_rewardbench_2(None, [row])
