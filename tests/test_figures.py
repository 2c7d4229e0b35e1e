"""Every measured number on a page comes from benchmarks/results; `python scripts/write_figures.py` writes them again.

A number with a unit that stands in no mark, no table of figures and no code must be a setting, a limit or part of a
definition: it is in `ALLOWED`, or in a table of the page between `<!-- limits -->` and `<!-- end -->`.
"""

import re

import pytest

from scripts.write_figures import MARK, ROOT, SOURCE, TABLE, pages, written

UNITS = (
    r"times|%|percent|ms|us|µs|s|seconds?|milliseconds?|microseconds?|minutes?|hours?|KB|KiB|MB|MiB|GB|GiB|TB"
    r"|tokens/s|conversations/s|conv\./s|pairs/s|posts/s|G?FLOP/s|GFLOP|TFLOP/s|TB/s"
)
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|a hundred|half|a third"
NUMBER = rf"(?:\d[\d,.]*\d|\d|{WORDS})"
MEASURED = re.compile(
    rf"(?<![\w.-]){NUMBER}(?: to {NUMBER})?(?:x|[ -]?(?:{UNITS}))(?![\w-])|\b(?:twice|thrice) (?:as|the)\b"
)
ALLOWED = (  # settings, limits and definitions, as they are without line breaks, marks and code
    "computed 8 times | once, in whole blocks | computed 8 times | computed 8 times |",
    "or ten times as often. A failure",
    "within 20 %.",
    "three times the difference is tolerated",
    "the rows wait together: 64 at a time, 60 seconds each",
    "above 3 %",
    "intervals of 99.98 %",
    "95 % bootstrap interval",
    "0.05 + 5 s/√n",
    "ten times as many cost",
    "16 GB for 8B, 141 GB for 70B",
    "(30 s) was too short",
)


def without_figures(text):
    """Return a page without figures, code, and what other scripts write between their marks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for figures in (TABLE, MARK, SOURCE):
        text = figures.sub("", text)
    text = re.sub(r"<!-- [\w-]+: [^>]*-->.*?<!-- end -->", "", text, flags=re.S)  # of scripts/make_plan_docs.py
    text = re.sub(r"<!-- limits -->.*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"`[^`\n]*`|\]\([^)\s]*\)", "", text)
    return re.sub(r"\s+", " ", text)


def measurements(text):
    """Return the numbers with units that have no source, each with what stands around it."""
    text = without_figures(text)
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return [text[max(0, found.start() - 40) : found.end() + 40] for found in MEASURED.finditer(text)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_numbers_of_the_results_and_no_others(page):
    text = page.read_text(encoding="utf-8")
    assert written(text) == text, "run: python scripts/write_figures.py"
    assert measurements(text) == []


@pytest.mark.parametrize(
    "text",
    ["It is 7 times faster.", "| a step | **12.5 ms** |", "It takes two minutes.", "| TRL | 2.1x |", "97 to 98 %"],
)
def test_a_typed_measurement_is_found(text):
    assert len(measurements(text)) == 1


@pytest.mark.parametrize("text", ["`limit=30 s` and 3 prompts", "```\n7 times\n```", "7<!--= a/b d --> times"])
def test_code_counts_and_marked_numbers_are_not(text):
    assert measurements(text) == []


def test_a_changed_digit_is_written_again():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    changed = MARK.sub(lambda mark: "9" + mark[0], text, count=1)
    assert changed != written(changed) == text
