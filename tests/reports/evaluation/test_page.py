"""The page of an evaluation: complete without a browser, and in a real one without network, scripts or errors."""

import dataclasses
import re

import pytest

from gym_rm.data.comparisons import ComparisonSet
from gym_rm.evaluation.benchmarks.rows import BenchmarkResult
from gym_rm.evaluation.report import evaluate_set
from gym_rm.reports.evaluation.page import evaluation_page, write_evaluation_page
from gym_rm.reports.evaluation.tables import benchmark_tables, console_table, result_tables
from tests.evaluation.comparisons import comparison, scored

HOSTILE = '<script>window.hacked = 1</script><img src="https://example.org/x" onerror="window.hacked = 1">'


def evaluation(*, hostile="", two=True):
    rows = [
        comparison([f"good {i}{hostile}", f"worse {i} in more words"], (0, 1), prompt=f"q{i}{hostile}", turns=1 + i % 3,
                   source=f"s{i % 2}{hostile}", correct=(1, 0))
        for i in range(30)
    ]  # fmt: skip
    rewards = [[i % 7, 2.5] for i in range(30)]
    first = dataclasses.replace(
        scored(rows, rewards, model=f"first{hostile}"), provenance={"model": hostile, "settings": {"a": hostile}}
    )
    others = [scored(rows, [[2, i % 5] for i in range(30)], model="second")] if two else []
    return evaluate_set(ComparisonSet(f"set{hostile}", tuple(rows)), first, *others, gold="correct")


@pytest.fixture
def opened(open_file, tmp_path):
    return lambda *evaluations: open_file(write_evaluation_page(evaluations, tmp_path / "page.html"))


def test_charts_are_drawn_with_size_and_marks(opened):
    tab = opened(evaluation())
    boxes = [svg.bounding_box() for svg in tab.locator("svg").all()]
    assert len(boxes) == 3
    assert all(box["width"] > 300 and box["height"] > 100 for box in boxes)
    for svg in tab.locator("svg").all():
        assert svg.locator(".dot, .bar").count() > 0
        assert "NaN" not in svg.inner_html()
    labels = [tab.locator("svg").nth(i).get_attribute("aria-label") for i in range(3)]
    assert len(set(labels)) == 3


def test_colours_come_from_the_style_although_scripts_are_forbidden(opened):
    tab = opened(evaluation())
    fill = "element => getComputedStyle(element).fill"
    assert tab.locator(".dot.model").first.evaluate(fill) == "rgb(36, 80, 122)"
    assert tab.locator(".dot.against").first.evaluate(fill) == "rgb(184, 100, 30)"


def test_texts_are_never_html(opened):
    tab = opened(evaluation(hostile=HOSTILE))
    assert tab.evaluate("[document.images.length, document.scripts.length, window.hacked ?? null]") == [0, 0, None]
    assert tab.locator(".reply .text").first.inner_text().endswith(HOSTILE)
    assert HOSTILE in tab.locator("h2").first.inner_text()


def test_the_page_is_readable_on_a_phone(opened):
    tab = opened(evaluation())
    tab.set_viewport_size({"width": 380, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380


def test_numbers_of_both_models_are_on_the_page(opened):
    found = evaluation()
    text = opened(found).locator("body").inner_text()
    for report in (each.preferences for each in found.models):
        assert f"{report.accuracy.value:.3f} [{report.accuracy.low:.3f}, {report.accuracy.high:.3f}]" in text
    assert f"{found.comparison.difference.value:+.1%}" in text


# --- without a browser -------------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside():
    page = evaluation_page([evaluation()])
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}


def test_control_characters_and_lone_surrogates_are_written_as_escapes(tmp_path):
    path = write_evaluation_page(
        [evaluation(hostile="\x00\x1b[31m \ud800", two=False)], tmp_path / "deep" / "page.html"
    )
    text = path.read_text(encoding="utf-8")
    assert "\\x00\\x1b[31m \\ud800" in text
    assert "\x00" not in text


def test_a_long_reply_is_cut_in_the_middle():
    rows = (comparison(["start " + "x" * 9000 + " end", "b"], (0, 1)),)
    found = evaluate_set(ComparisonSet("long", rows), scored(rows, [[0, 1]]))
    page = evaluation_page([found])
    assert "start x" in page
    assert "x end" in page
    assert "6,010 characters…]" in page
    assert len(page) < 30_000


@pytest.mark.parametrize("rewards", [[[1, None]], [[1, 1]], [[1, 0]]], ids=["no-pair", "a-tie", "one-pair"])
def test_a_page_of_one_row(rewards):
    rows = (comparison(["a", "b"], (0, 1)),)
    page = evaluation_page([evaluate_set(ComparisonSet("one", rows), scored(rows, rewards))])
    assert "nan" not in re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL).lower().replace("dominant", "")
    assert ("<svg" in page) == (rewards != [[1, None]])


def test_tables_of_the_console_have_the_numbers():
    tables = result_tables(evaluation())
    assert [table.title for table in tables] == ["Accuracy", "Rows, margins and calibration", "Best-of-n by correct"]
    assert all(len(row) == len(table.head) for table in tables for row in table.rows)
    assert console_table(tables[0]).row_count == len(tables[0].rows)


def test_a_benchmark_has_a_column_for_each_model():
    results = [
        BenchmarkResult(
            value, {"alpacaeval-easy": value}, {"Chat": 100}, {"Chat": value}, benchmark="rewardbench", model=name
        )
        for name, value in (("a", 0.5), ("<b>", None))
    ]
    (table,) = benchmark_tables(results)
    assert table.head == ("", "rows", "a", "<b>")
    assert table.rows[0] == ["overall", "", "50.0%", ""]
    assert "&lt;b&gt;" in evaluation_page([], tables=[table])
