"""Every measured number on a page comes from benchmarks/results; `python scripts/write_figures.py` writes them again.

A number with a unit that is no figure of `docs/figures.toml` and stands in no table of figures and no code must be a
setting, a limit or part of a definition: it is in `ALLOWED`, or in a table of the page between `<!-- limits -->` and
`<!-- end -->`.
"""

import re
from types import MappingProxyType

import pytest

from scripts.write_figures import ROOT, SOURCE, TABLE, figures, pages, spans, written

UNITS = (
    r"times|%|percent|ms|us|µs|s|seconds?|milliseconds?|microseconds?|minutes?|hours?|KB|KiB|MB|MiB|GB|GiB|TB"
    r"|tokens/s|conversations/s|conv\./s|pairs/s|posts/s|G?FLOP/s|GFLOP|TFLOP/s|TB/s"
)
WORDS = "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|a hundred|half|a third"
NUMBER = rf"(?:\d[\d,.]*\d|\d|{WORDS})"
MEASURED = re.compile(
    rf"(?<![\w.-]){NUMBER}(?: to {NUMBER})?(?:x|[ -]?(?:{UNITS}))(?![\w-])|\b(?:twice|thrice) (?:as|the)\b"
)
ALLOWED = (  # settings, limits and definitions, as they are without line breaks, figures and code
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
NAMES = [page.relative_to(ROOT).as_posix() for page in pages()]
PAIRS = "real/pairs d"


def without_figures(page, text, entries):
    """Return a page without figures, code, and what other scripts write between their marks."""
    for start, end in spans(page, text, entries):
        text = text[:start] + text[end:]
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = SOURCE.sub("", TABLE.sub("", text))
    text = re.sub(r"<!-- [\w-]+: [^>]*-->.*?<!-- end -->", "", text, flags=re.S)  # of scripts/make_plan_docs.py
    text = re.sub(r"<!-- limits -->.*?<!-- end -->", "", text, flags=re.S)
    text = re.sub(r"`[^`\n]*`|\]\([^)\s]*\)", "", text)
    return re.sub(r"\s+", " ", text)


def measurements(text, entries=MappingProxyType({}), page="page.md"):
    """Return the numbers with units that have no source, each with what stands around it."""
    text = without_figures(page, text, entries)
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return [text[max(0, unit.start() - 40) : unit.end() + 40] for unit in MEASURED.finditer(text)]


@pytest.mark.parametrize("page", NAMES)
def test_a_page_has_the_numbers_of_the_results_and_no_others(page):
    text, entries = (ROOT / page).read_text(encoding="utf-8"), figures().get(page, {})
    assert written(page, text, entries) == text, "run: python scripts/write_figures.py"
    assert measurements(text, entries, page) == []


@pytest.mark.parametrize("page", NAMES)
def test_a_page_has_no_mark_in_its_text(page):
    assert re.findall(r"<!--=.*|.+<!-- source .*", (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    ["It is 7 times faster.", "| a step | **12.5 ms** |", "It takes two minutes.", "| TRL | 2.1x |", "97 to 98 %"],
)
def test_a_typed_measurement_is_found(text):
    assert len(measurements(text)) == 1


@pytest.mark.parametrize("text", ["`limit=30 s` and 3 prompts", "```\n7 times\n```"])
def test_code_or_a_count_is_not(text):
    assert measurements(text) == []


def test_a_figure_of_the_page_is_not():
    assert measurements("At 7 to 8 times,\nit", {"At {} to #": "a d", "to {} times, it": "b d"}) == []


@pytest.mark.parametrize(
    ("piece", "text", "number"),
    [
        ("{} of # pairs", "64 of 9\n  pairs", "64"),
        ("| GSM8K | # | {}x |", "| GSM8K | 1,024 | 2.5x |", "2.5"),
        ("it is {}", "it is +84%, of 1", "+84%"),
        ("at most {}", "at most 1.2e-6.", "1.2e-6"),
    ],
)
def test_a_piece_is_found_whatever_its_numbers_and_line_breaks_are(piece, text, number):
    assert [text[start:end] for start, end in spans("page.md", text, {piece: "a d"})] == [number]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"and {} pairs": PAIRS}, "page.md: must have 'and {} pairs' once, has it 0 times"),
        ({"{} pairs": PAIRS}, "page.md: must have '{} pairs' once, has it 2 times"),
        ({"of # pairs": PAIRS}, "page.md: 'of # pairs' must have one {}"),
        ({"One of {}": PAIRS, "of {} pairs.": PAIRS}, "page.md: 'of {} pairs.' is the number of another figure"),
        ({"One of {}": "real/pair d"}, "page.md: 'real/pair' must be one number, got 0 values"),
    ],
)
def test_a_figure_that_is_not_found_once_or_has_no_result_is_refused(entries, message):
    with pytest.raises((ValueError, KeyError), match=re.escape(message)):
        written("page.md", "One of 24 pairs. Two of 24 pairs", entries)


def test_figures_of_a_page_that_does_not_exist_are_refused(tmp_path):
    (tmp_path / "figures.toml").write_text("['docs/no.md']\n'{} pairs' = 'real/pairs d'\n")
    with pytest.raises(ValueError, match=r"figures of docs/no\.md: no such page"):
        figures(tmp_path / "figures.toml")


def test_a_changed_digit_is_written_again():
    text, entries = (ROOT / "README.md").read_text(encoding="utf-8"), figures()["README.md"]
    for start, _ in spans("README.md", text, entries):
        changed = text[:start] + "9" + text[start:]
        assert changed != written("README.md", changed, entries) == text
