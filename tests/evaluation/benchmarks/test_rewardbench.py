"""RewardBench.

The numbers called golden were computed once from the inputs that `random_subsets` generates, with
`calculate_scores_per_section` (rewardbench 0.1.4 and 0.1.5) and `get_average_over_rewardbench` (`analysis/` of its
repository).
"""

import random

import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation.benchmarks.rewardbench import SECTIONS, overall_score, section_scores
from tests.evaluation.benchmarks.stored import LengthOfReply, StoredScores, evaluate_benchmark

SECTION_NAMES = ("Chat", "Chat Hard", "Safety", "Reasoning")


def random_subsets(seed, *, share=1.0):
    generator = random.Random(seed)
    names = [subset for weights in SECTIONS.values() for subset in weights]
    return {name: generator.random() for name in names if generator.random() < share}


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


def evaluate(*pairs):
    """Return the result for `(subset, score of chosen, score of rejected)`."""
    rows = [{"subset": subset, "prompt": "p", "chosen": "a", "rejected": "b"} for subset, _, _ in pairs]
    return evaluate_benchmark("rewardbench", StoredScores([score for _, *both in pairs for score in both]), rows)


def test_equal_scores_are_wrong():
    assert evaluate(("hep-go", 1.0, 1.0), ("hep-go", 1.5, 1.0)).subsets == {"hep-go": 0.5}


def test_subsets_count_by_their_number_of_prompts_in_the_benchmark_not_in_the_file():
    pairs = [("math-prm", 1, 0), *[("hep-go", 0, 1)] * 50]
    assert evaluate(*pairs).sections["Reasoning"] == pytest.approx(984 / (984 + 164))


def test_missing_and_unknown_subsets_are_named():
    result = evaluate(("hep-go", 1, 0), ("mine", 0, 1), ("shp", 0, 1))
    assert result.overall == pytest.approx((2 * 1.0 + 1 * 0.0) / 3)
    assert result.not_counted == ("mine",)
    assert "hep-cpp" in result.missing
    assert "hep-go" not in result.missing
    assert result.sections["Chat"] is None
    assert result.notes()[0].startswith("Without rows, and left out of every mean: alpacaeval-easy, ")
    assert result.notes()[1] == "Not part of rewardbench, and in no section: mine."


def test_rows_that_cannot_be_scored_are_named_and_the_others_are_kept():
    rows = [{"subset": "hep-go", "prompt": "p", "chosen": reply, "rejected": ""} for reply in ("yes", "no")]
    result = evaluate_benchmark("rewardbench", LengthOfReply(), rows)
    assert result.subsets == {"hep-go": 1.0}
    assert result.failed == {"rows[1]": "the reply begins with no"}
    assert result.notes()[-1] == (
        "Rows without a score, in no value: 1; the first is rows[1]: the reply begins with no"
    )


def test_if_no_row_can_be_scored_the_error_of_the_scorer_is_raised():
    with pytest.raises(gym_rm.ScoringError, match="the reply begins with no"):
        evaluate_benchmark(
            "rewardbench", LengthOfReply(), [{"subset": "hep-go", "prompt": "p", "chosen": "no", "rejected": "yes"}]
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, r"rows\[0\]: expected a row of the benchmark, got int 3"),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, r"rows\[0\]: 'subset' must be a text, got NoneType None"),
        ({"subset": "hep-go", "chosen": "a", "rejected": "b"}, "'prompt' must be a text or a list of messages"),
        ({"subset": "hep-go", "prompt": "p", "chosen": "a"}, "'rejected' must be a text or a list of messages"),
    ],
)
def test_invalid_rows_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_benchmark("rewardbench", LengthOfReply(), [row])
