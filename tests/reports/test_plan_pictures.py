import itertools

import pytest
from matplotlib.text import Text

from gym_rm.errors import ConfigError
from gym_rm.planning.quantities import GIB
from gym_rm.reports.plan_pictures import colors_of, equal_nodes, figure_of, plot_plan, timeline
from tests.planning.example_plans import apart, together

PLANS = {
    "1 GPU": together(1, 1, gpu="rtx_4090", scale=0.1),
    "1024 GPUs": apart(128, unused=4),
    "long names": apart(name="n" * 200, cluster="c" * 200),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_text_lies_over_another_or_outside(plan):
    figure = figure_of(plan)
    figure.draw_without_rendering()
    shown = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        shown += [*axes.texts, axes.xaxis.label, *(child for child in axes.get_children() if isinstance(child, Text))]
    shown = [text for text in dict.fromkeys(shown) if text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    for text, box in boxes:
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for (one, box), (other, beside) in itertools.combinations(boxes, 2):
        apart = box.x1 <= beside.x0 or beside.x1 <= box.x0 or box.y1 <= beside.y0 or beside.y1 <= box.y0
        assert apart, (one, other)


def test_bars_are_as_high_as_peaks_and_blocks_as_long_as_work():
    plan = together()
    _, memory, times = figure_of(plan).axes
    heights = {}
    for bar in memory.patches:
        heights[bar.get_x()] = max(heights.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    assert sorted(heights.values()) == pytest.approx(sorted(memory.peak / GIB for memory in plan.pools[0].memory))
    lengths = sorted(bar.get_width() for bar in times.patches if bar.get_width() < plan.step_seconds)
    assert lengths == pytest.approx(sorted(time.seconds for time in plan.times))


def test_equal_plans_give_equal_files(tmp_path):
    first, second = (plot_plan(together(name="$5 a_b"), tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert "$5 a_b" in first  # text, which can be searched
    path = plot_plan(together(), tmp_path / "new" / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        plot_plan(together(), tmp_path / "plan.gif")


def test_the_policy_has_the_same_colour_in_every_plan():
    assert colors_of(together())["policy"] == colors_of(apart())["policy"]
    assert len(set(colors_of(apart()).values())) == 5


def test_nodes_with_equal_contents_are_one_row():
    rows = equal_nodes(apart(128, unused=4))
    assert [len(nodes) for nodes, _ in rows] == [64, 32, 31, 1]
    assert rows[-1] == ([127], (2, 2, 2, 2, None, None, None, None))


def test_a_phase_begins_for_all_pools_together():
    plan = apart()
    starts = {(time.component, str(time.phase)): start for pool in timeline(plan).values() for time, start in pool}
    assert starts["generation", "generate"] == 0
    assert starts["policy", "score"] == starts["helpful", "score"] == pytest.approx(14.2)
    assert starts["reference", "score"] == pytest.approx(14.2 + 1.1)
    assert starts["policy", "update"] == pytest.approx(14.2 + 5.9)
    assert timeline(apart(step_seconds=14.5))["policy"][0][1] == 0  # phases overlap
