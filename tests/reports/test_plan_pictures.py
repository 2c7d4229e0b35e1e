import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.plan_pictures import LETTER, kinds_of, plan_picture, plot_plan, timeline
from tests.planning.plans import apart, together

PLANS = {
    "2 GPUs": together(2),
    "1024 GPUs": apart(128, count=4),
    "long names": dataclasses.replace(apart(), name="n" * 200, cluster="c" * 200),
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_text_is_wider_than_the_picture(plan):
    root = ET.fromstring(plan_picture(plan))
    width = float(root.get("viewBox").split()[2])
    for text in root.iter(f"{SVG}text"):
        assert len(text.text or "") * LETTER <= width
        assert float(text.get("x", 0)) <= width


def test_bars_are_as_high_as_peaks_and_blocks_as_long_as_work():
    plan = together()
    memory, times = ET.fromstring(plan_picture(plan)).findall(f"{SVG}svg")
    bars = list(memory.iter(f"{SVG}rect"))
    heights = {}
    for bar in bars:
        heights[bar.get("x")] = heights.get(bar.get("x"), 0.0) + float(bar.get("height"))
    peaks = [memory.peak for memory in plan.pools[0].memory]
    assert [height / max(heights.values()) for height in heights.values()] == pytest.approx(
        [peak / max(peaks) for peak in peaks], abs=0.01
    )
    waits, *blocks = [float(rect.get("width")) for rect in times.iter(f"{SVG}rect")]
    assert [block / waits for block in blocks] == pytest.approx(
        [time.seconds / plan.step_seconds for time in plan.times], abs=0.01
    )


def test_a_picture_is_written_as_text_that_can_be_searched(tmp_path):
    path = plot_plan(dataclasses.replace(together(), name="$5 <a_b>"), tmp_path / "new" / "plan.svg")
    assert "$5 &lt;a_b&gt;" in path.read_text()
    assert "nodes 0" not in path.read_text()
    assert re.search("node 0: all 8", path.read_text())
    with pytest.raises(ConfigError, match=r"a \.svg file"):
        plot_plan(together(), tmp_path / "plan.gif")


def test_the_policy_has_the_same_colour_in_every_plan():
    assert kinds_of(together())["policy"] == kinds_of(apart())["policy"]
    assert len(set(kinds_of(apart()).values())) == 4


def test_a_phase_begins_for_all_pools_together():
    plan = apart()
    starts = {time.component: start for pool in timeline(plan).values() for time, start in pool}
    assert starts == {"generation": 0.0, "rm": 4.0, "reference": 4.0, "policy": 6.0}
    overlapping = timeline(dataclasses.replace(plan, step_seconds=5.0))
    assert overlapping["rm"][0][1] == 0
