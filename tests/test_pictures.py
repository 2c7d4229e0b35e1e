"""The scripts that draw the pictures of the pages, on small inputs."""

from xml.etree import ElementTree

import pytest

from scripts import make_comparison_picture, make_curve_pictures, make_tree_picture

pytestmark = pytest.mark.slow  # most of it is imports
SVG = "{http://www.w3.org/2000/svg}"


def words(drawn):
    """Return the words of a picture, which is well-formed."""
    return " | ".join(element.text for element in ElementTree.fromstring(drawn).iter(f"{SVG}text"))


def test_the_tree_has_the_counts_of_the_engine():
    prompt = list(range(40))
    rows = [[*prompt, 50], [*prompt, 51, 52], [*prompt, 51, 53, 54]]
    drawn = words(make_tree_picture.draw(rows, "three rows"))
    assert "3 × 43 = 129 tokens" in drawn
    assert "45 tokens, 35 % of the padded batch" in drawn  # the prompt, 50, 51, 52, and 53 and 54
    assert "4 pages of 32" in drawn  # of the first row two, of each other one more


def test_curves_end_with_their_values():
    def run(last):
        return {"right": {"0": 0.2, "10": last}}

    seeds = {"grpo, 1": run(0.8), "grpo, 2": run(0.9)}
    values = {
        "verified": {"math": run(0.75)},
        "tool": {"with the calculator, seed 1": run(0.96), "without, seed 1": run(0.25)},
        "judge": seeds,
        "reward model": seeds,
    }
    assert "20 % | 75 %" in words(make_curve_pictures.verified(values))
    assert "with the calculator | without" in words(make_curve_pictures.tools(values))
    assert "mean and range of 2 seeds" in words(make_curve_pictures.judged(values))
    judge = {name: {"0": 0.2, "10": 0.9} for name in ("readable", "right", "consistent")}
    assert "20 % | 90 %" in words(make_curve_pictures.trained_judge([judge, judge]))


def test_the_comparison_shows_slower_and_faster_methods():
    result = {
        "hardware": {"CPU": "a CPU", "threads": 2},
        "values": {
            "25M": {
                "pairs": {"times": {"TRL": 2.5, "sentence-transformers": 0.5}},
                "singles": {"times": {"TRL": 1.02}},
            }
        },
    }
    drawn = make_comparison_picture.draw(result, "25M")
    assert "2.5× | singles | 1.0×" in words(drawn)
    assert "0.5×" in words(drawn)
    kinds = [element.get("class") for element in ElementTree.fromstring(drawn).iter(f"{SVG}rect")]
    assert kinds == ["card", "second", "third", "strong", "second", "third", "strong"]  # and the legend's
