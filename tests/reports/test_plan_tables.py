import dataclasses
import re

import pytest

from gym_rm.reports.plan_tables import (
    compare_table,
    memory_table,
    placement_table,
    plan_report,
    ranges,
    summary,
    tightest_of,
    times_table,
)
from tests.planning.plans import apart, together
from tests.reports.example_run import text_of


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1], "0, 1"), ([2, 0, 1], "0 to 2"), ([0, 1, 2, 5, 7, 8], "0 to 2, 5, 7, 8")]
)
def test_numbers_are_shortened_to_ranges(numbers, text):
    assert ranges(numbers) == text


def test_the_summary_has_the_answers():
    text = summary(together()).plain
    assert "by hand: fits on by hand." in text
    assert "A step takes 10 s: 51.2 conversations/s, 6,250 tokens/s per GPU." in text
    assert "Slowest: generate of generation, 20% of the step, by compute." in text
    assert "Least free memory: 60.0 GiB of 80.0 GiB, in update of policy (in forward)" in text


def test_the_summary_says_whether_the_plan_is_the_best():
    assert "No placement is better" in summary(together()).plain
    assert "tried in steps" in summary(dataclasses.replace(together(), exact=False)).plain


def test_the_placement_names_nodes_gpus_and_divisions():
    text = text_of(placement_table(apart(nodes=3, count=4)))
    parts = ("node 0: all 8", "node 2: GPUs 0 to 3", "the same", "FSDP 8 x 1 replica", "TP 2 x 4 replicas", "sleeps")
    assert all(part in text for part in parts)


def test_memory_rows_are_phases_with_their_largest_instant():
    row = next(line for line in text_of(memory_table(together())).splitlines() if "update" in line)
    assert re.search(r"update +policy +20\.0 GiB +20\.0 GiB +60\.0 GiB +forward", row)


def test_the_tightest_pool_is_by_share_of_its_own_gpus():
    plan = apart()
    smaller = dataclasses.replace(plan.pools[1], gpu_memory=40 * 2**30)
    assert tightest_of(plan)[1].component == "policy"
    assert tightest_of(dataclasses.replace(plan, pools=(plan.pools[0], smaller)))[1].component == "rm"


def test_times_have_shares_and_idle_gpus():
    text = text_of(times_table(apart()))
    assert re.search(r"generate +generation +2 s +20% +compute 100%", text)
    assert re.search(r"idle +rm +4 s +40% +8 GPUs", text)


def test_names_with_markup_or_control_characters_are_shown_as_they_are():
    plan = dataclasses.replace(together(), name="[red]x[/]\x1b[31m", notes=("[bold]a note[/]",))
    text = text_of(plan_report(plan))
    assert "[red]x[/]\\x1b[31m" in text
    assert "note: [bold]a note[/]" in text


def test_plans_side_by_side_show_the_changes_from_the_first():
    faster = dataclasses.replace(together(16), step_seconds=5.0)
    text = text_of(compare_table({"as it is": together(), "gpus=16": faster, "gpus=1": "does not fit: 3 GiB"}))
    assert re.search(r"as it is +8 of 8 +10 s +51\.2 ", text)
    assert re.search(r"gpus=16 +16 of 16 +5 s \(-50%\) +102 \(\+100%\)", text)
    assert re.search(r"gpus=1 .*does not", text)
