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
from tests.planning.example_plans import apart, together
from tests.reports.example_run import text_of


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1], "0, 1"), ([2, 0, 1], "0 to 2"), ([0, 1, 2, 5, 7, 8], "0 to 2, 5, 7, 8")]
)
def test_numbers_are_shortened_to_ranges(numbers, text):
    assert ranges(numbers) == text


def test_the_summary_has_the_answers():
    text = summary(together()).plain
    assert "fits on 1 x 8 h100_sxm" in text
    assert "A step takes 40.3 s: 12.7 conversations/s" in text
    assert "Slowest: generate of generation, 53% of the step, by memory bandwidth." in text
    assert "Least free memory: 25.5 GiB of 80.0 GiB, in generate of generation (in decode)" in text


def test_the_summary_says_whether_the_plan_is_the_best():
    assert "No placement is better" in summary(together()).plain
    assert "tried in steps" in summary(together(exact=False)).plain


def test_the_placement_names_nodes_gpus_and_divisions():
    text = text_of(placement_table(apart()))
    for part in (
        "nodes 0, 1: all 8",
        "node 2: all 8",
        "the same",
        "FSDP 8 x 2 replicas",
        "TP 2 x 4 replicas",
        "sleeps",
    ):
        assert part in text


def test_memory_rows_are_phases_with_their_largest_instant():
    text = text_of(memory_table(together()))
    row = next(line for line in text.splitlines() if "update" in line)
    assert re.search(r"update +policy +18\.4 GiB +30\.2 GiB +49\.8 GiB +backward", row)


def test_the_tightest_pool_is_by_share_of_its_own_gpus():
    plan = apart()
    pool, memory = tightest_of(plan)
    assert (pool.name, memory.component) == ("generation", "generation")
    smaller = dataclasses.replace(plan.pools[2], gpu_memory=90 * 2**30)
    plan = dataclasses.replace(plan, pools=(*plan.pools[:2], smaller))
    assert tightest_of(plan)[0].name == "rewards"


def test_times_have_shares_and_idle_gpus():
    text = text_of(times_table(apart()))
    assert re.search(r"generate +generation +14\.2 s +58% +memory bandwidth 75%", text)
    assert re.search(r"idle +policy +17\.9 s +74% +16 GPUs", text)


def test_names_with_markup_or_control_characters_are_shown_as_they_are():
    text = text_of(plan_report(together(name="[red]x[/]\x1b[31m", notes=("[bold]a note[/]",))))
    assert "[red]x[/]\\x1b[31m" in text
    assert "note: [bold]a note[/]" in text


def test_plans_side_by_side_show_the_changes_from_the_first():
    plans = {"as it is": together(), "gpus=16": together(2), "apart": apart(), "gpus=1": "does not fit: 3 GiB"}
    text = text_of(compare_table(plans))
    assert re.search(r"as it is +8 of 8 +40\.3 s +12\.7 ", text)
    assert re.search(r"gpus=16 +16 of 16 +20\.8 s \(-48%\)", text)
    assert re.search(r"apart +32 of 32 +24\.3 s \(-40%\) +21\.1 \(\+66%\)", text)
    assert re.search(r"gpus=1 .*does not", text)
