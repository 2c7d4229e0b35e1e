import dataclasses
import itertools

import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.plan_drawing import SMALLEST, spread
from gym_rm.reports.plan_pictures import COLORS, OTHER, colors_of, contrast, picture_of, plot_plan
from tests.planning.example_plans import apart, together

PLANS = {
    "1 GPU": together(1, 1, gpu="rtx_4090", scale=0.1),
    "8 GPUs": together(),
    "16 GPUs": together(2),
    "32 GPUs": apart(),
    "1024 GPUs": apart(128, unused=4),
    "a node of 1024": together(1, 1024),
    "long names": apart(name="n" * 200, cluster="c" * 200),
}


@pytest.fixture(params=PLANS)
def drawing(request):
    return picture_of(PLANS[request.param])


def texts(drawing):
    return [label.text for label in drawing.labels]


def test_no_text_lies_over_another_or_outside(drawing):
    for label in drawing.labels:
        left, top, right, bottom = label.extent
        assert left >= 0, label
        assert right <= drawing.width, label
        assert top >= 0, label
        assert bottom <= drawing.height, label
    for one, other in itertools.combinations(drawing.labels, 2):
        (left, top, right, bottom), (left2, top2, right2, bottom2) = one.extent, other.extent
        apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
        assert apart, (one.text, other.text)


def test_no_text_is_smaller_than_eight_points(drawing):
    assert min(label.size for label in drawing.labels) >= SMALLEST >= 8


def test_every_gpu_of_a_small_cluster_is_numbered_and_has_the_colours_of_its_components():
    plan = PLANS["16 GPUs"]
    drawing = picture_of(plan)
    assert [text for text in texts(drawing) if text.isdecimal()] == [str(gpu) for gpu in range(8)] * 2
    colors = colors_of(plan)
    boxes = [box for box in drawing.boxes if box.width == pytest.approx((0.36 - 0.05) / 3)]
    assert [box.color for box in boxes] == list(colors.values()) * 16


def test_many_nodes_are_drawn_in_groups():
    shown = texts(picture_of(PLANS["1024 GPUs"]))
    assert {"nodes 0 to 63", "nodes 64 to 95", "nodes 96 to 126", "node 127"} <= set(shown)


def test_a_large_node_is_drawn_in_runs():
    assert "0 to 1023" in texts(picture_of(PLANS["a node of 1024"]))


def test_an_unused_gpu_has_no_colour():
    boxes = picture_of(apart(unused=2)).boxes
    assert sum(box.dashed for box in boxes) == 2


def test_a_bar_is_as_high_as_its_peak_and_below_the_line_of_the_gpu():
    plan = together()
    drawing = picture_of(plan)
    line = next(stroke for stroke in drawing.strokes if stroke.thickness == 1.2)
    floor = next(stroke for stroke in drawing.strokes if stroke.y > line.y).y
    scale = (floor - line.y) / plan.pools[0].gpu_memory
    lefts = sorted({box.x for box in drawing.boxes if box.color == "none"})
    for memory, x in zip(plan.pools[0].memory, lefts, strict=True):
        bar = [box for box in drawing.boxes if box.x == x and box.color not in ("none", "#eceff1") and box.y >= line.y]
        bar = [box for box in bar if box.y + box.height <= floor + 1e-9]
        assert sum(box.height for box in bar) == pytest.approx(memory.peak * scale)
        hatched = sum(box.height for box in bar if box.hatch)
        assert hatched == pytest.approx(memory.largest.bytes * scale)
        assert min(box.y for box in bar) > line.y


def test_a_bar_above_the_memory_of_the_gpu_crosses_the_line():
    plan = together()
    plan = dataclasses.replace(plan, pools=(dataclasses.replace(plan.pools[0], gpu_memory=40 * 2**30),))
    drawing = picture_of(plan)
    line = next(stroke for stroke in drawing.strokes if stroke.thickness == 1.2)
    assert min(box.y for box in drawing.boxes if box.hatch) < line.y


def test_the_instant_of_a_peak_is_written():
    shown = texts(picture_of(together()))
    assert "peak: backward" in shown
    assert "54.5 of 80.0" in shown


def test_what_belongs_to_no_component_is_grey():
    assert OTHER in {box.color for box in picture_of(together()).boxes}


def test_the_timeline_has_every_block_in_scale():
    plan = apart()
    drawing = picture_of(plan)
    rows = [box for box in drawing.boxes if box.color == "#eceff1"]
    assert len(rows) == len(plan.pools)
    for row, pool in zip(rows, plan.pools, strict=True):
        blocks = [box for box in drawing.boxes if box.y == row.y and box is not row]
        assert sum(box.width for box in blocks) / row.width == pytest.approx(pool.busy_seconds / plan.step_seconds)


def test_every_work_of_a_step_is_named():
    shown = " ".join(texts(picture_of(apart())))
    for text in (
        "generate 14.2 s",
        "policy: score 1.1 s",
        "reference: score 1.1 s",
        "update 3.9 s",
        "safe: score 700 ms",
    ):
        assert text in shown


def test_text_on_every_colour_has_the_contrast_of_wcag():
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in (*COLORS, OTHER):
        low, high = sorted([luminance(color), luminance(contrast(color))])
        assert (high + 0.05) / (low + 0.05) >= 4.5, color


def test_labels_in_a_row_are_moved_apart():
    places = spread([1.0, 1.1, 1.2], [0.5, 0.5, 0.5], 0.0, 3.0, gap=0.1)
    assert all(later - earlier >= 0.6 - 1e-9 for earlier, later in itertools.pairwise(places))
    assert spread([2.9], [0.5], 0.0, 3.0) == [2.5]
    assert spread([1.0, 1.0], [2.0, 2.0], 0.0, 3.0) is None


def test_equal_plans_give_equal_files(tmp_path):
    first, second = (plot_plan(together(), tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert first == second
    assert "peak: backward</text>" in first  # text, which can be searched


def test_a_png_is_written_into_a_new_folder(tmp_path):
    path = plot_plan(together(name="$5 plan_a"), tmp_path / "new" / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        plot_plan(together(), tmp_path / "plan.gif")


def test_the_policy_has_the_same_colour_in_every_plan():
    assert colors_of(together())["policy"] == colors_of(apart())["policy"]
    assert len(set(colors_of(apart()).values())) == 5


def test_a_step_shorter_than_a_second_has_round_ticks():
    assert [text for text in texts(picture_of(PLANS["1024 GPUs"])) if text.startswith("0.2")] == ["0.25 s"]
