"""The page of a run: complete without a browser, and in a real one without network, errors or HTML of replies."""

import re

import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.curves import Curve
from gym_rm.reports.run_page import changed_settings, run_page, write_run_page
from gym_rm.reports.runs import RunWriter, read_run
from tests.reports.example_run import SETTINGS, conversation
from tests.reports.test_monitor import RUNS

HOSTILE = '</script><script>window.hacked = 1</script><img src="https://example.org/x" onerror="window.hacked = 1">'
ARABIC = "مرحبا \u202e abc"


def write_full(folder, *, steps=40, prompts=30, hostile=""):
    """Write a run with every metric, groups of training steps, and measurements every ten steps."""
    settings = SETTINGS | {"loss": {"kl_coef": 0.05}, "output": "x"}
    writer = RunWriter(folder, settings, changed={**settings, "policy": {"lora": {}}})
    for step in range(steps + 1):
        values = {"reward_mean": step / 10, "reward_std": 1.0, "accuracy": 0.2 + 0.6 * step / steps}
        if step % 10 == 0:
            writer.add_metrics("held_out", step, values)
            for n in range(prompts):
                said = conversation(f"Question {n}{hostile}?", f"Reply {'x' * (n + step)} to {n}{hostile}")
                writer.add_conversation(
                    step, said, prompt_id=f"p{n}", reward=step / 10 + n / 7, right=n < step, tokens=n + 3
                )
        if not step:
            continue
        zeros = dict.fromkeys(("failed", "truncated", "clipped", "clipped_low", "clipped_high"), 0.0)
        others = {"finished": 1.0, "kl": step / 1000, "entropy": 1 / step, "completion_tokens": 5.0, "grad_norm": 1.0}
        others |= {
            "learning_rate": 1e-6,
            "loss": -0.01,
            "flat_groups": 0.1,
            "repetition": 0.0,
            "length_correlation": None,
        }
        parts = {"component/help": 0.5, "component/safety": -0.5, "tokens_per_second": 100.0, "verdict/right": 0.75}
        phases = {"phase_seconds": {"generate": 2.0, "score": 0.5, "update": 1.0}}
        writer.add_metrics("train", step, values | zeros | others | parts | phases)
        for group, member in ((g, m) for g in range(3) for m in range(4) if step % 10 == 0):
            writer.add_conversation(
                step, conversation(f"Train {group}", f"Sample {member} of {group}{hostile}"), prompt_id=f"t{group}",
                reward=float(member), advantage=member - 1.5, phase="train", group=group, tokens=4, finished=member > 0,
                components={"help": 0.5}, verdicts={"verdict": "no_answer"},
            )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return read_run(write_full(tmp_path_factory.mktemp("runs") / "full"))


@pytest.fixture
def opened(open_file, tmp_path):
    return lambda run, **options: open_file(write_run_page(run, tmp_path / "page.html"), **options)


OVERLAPS = """() => {
  const box = (each) => each.getBoundingClientRect(), found = [];
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")], marks = [...svg.querySelectorAll(".line, .band, .dot")];
    const frame = box(svg);
    for (const mark of svg.querySelectorAll(".line, .band, .dot")) {
      const at = box(mark);
      if (at.top < frame.top || at.bottom > frame.bottom || at.right > frame.right) found.push("a mark is cut");
    }
    texts.forEach((text, i) => {
      const at = box(text), where = `${svg.getAttribute("aria-label")}: ${text.textContent}`;
      if (at.left < frame.left || at.right > frame.right || at.bottom > frame.bottom) found.push(`${where} is cut`);
      for (const mark of marks) if (meet(at, box(mark))) { found.push(`${where} on a ${mark.tagName}`); break; }
      for (const other of texts.slice(i + 1)) if (meet(at, box(other))) found.push(`${where} on ${other.textContent}`);
    });
  }
  return [document.querySelectorAll("svg").length, found];
}"""


def test_labels_sit_on_no_curve_and_on_no_other_label(opened, full):
    tab = opened(full)
    assert tab.evaluate(OVERLAPS) == [13, []]
    assert tab.evaluate("document.querySelectorAll('svg').length") == len(set(svg_labels(tab)))


def svg_labels(tab):
    return [svg.get_attribute("aria-label") for svg in tab.locator("svg").all()]


def test_a_held_out_prompt_is_shown_before_and_after(opened, full):
    tab = opened(full)
    assert tab.locator("#count").inner_text() == "30 prompts · page 1 of 2"
    card = tab.locator("article").nth(12)
    assert card.locator(".numbers").all_inner_texts() == [
        "before training\n✗ wrong\n+1.71\n15 tokens",
        "after step 40\n✓ right\n+5.71\n15 tokens",
    ]
    tab.select_option("#step", "20")
    tab.locator("article .sides", has_text="after step 20").first.wait_for()


def test_a_group_is_shown_side_by_side_by_reward(opened, full):
    tab = opened(full)
    tab.select_option("#view", "train")
    tab.locator("#count", has_text=re.compile("^12 groups")).wait_for()
    card = tab.locator("article").first
    assert card.locator("strong").all_inner_texts() == ["+3", "+2", "+1", "0"]
    assert "advantage +1.5" in card.locator(".numbers").first.inner_text()
    assert "cut" in card.locator(".numbers").last.inner_text()
    assert "no_answer" in card.locator(".numbers").last.inner_text()
    tops = [box.bounding_box()["y"] for box in card.locator(".reply").all()]
    assert len(set(tops)) == 1


def test_steps_are_coloured_by_their_rewards(opened, tmp_path):
    writer = RunWriter(tmp_path / "run", {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5})
    steps = ["50 \U0001f600 is low.", f"It is 50.{HOSTILE}"]
    ends = [len(steps[0]), len("\n\n".join(steps))]
    known = {"prompt_id": "p", "reward": 0.03, "step_rewards": [[0.98, 0.03]], "step_ends": [ends]}
    writer.add_conversation(1, conversation("Which?", "\n\n".join(steps) + "\n"), **known)
    tab = opened(read_run(tmp_path / "run"), scheme="dark")
    assert tab.locator(".step").all_inner_texts() == [f"{steps[0]}+0.98", f"{steps[1]}+0.03"]
    assert tab.locator(".step").last.get_attribute("title") == "reward of this step: +0.03"
    good, bad = (
        tab.evaluate(f"getComputedStyle(document.querySelectorAll('.step')[{k}]).backgroundColor") for k in "01"
    )
    assert good != bad
    assert tab.evaluate("window.hacked") is None


@pytest.mark.parametrize(
    ("view", "filters", "count"),
    [
        ("held_out", {"#text": "question 17?"}, 1),
        ("held_out", {"#step": "10", "#outcome": "wrong"}, 20),
        ("held_out", {"#outcome": "better", "#text": "question 2"}, 11),
        ("train", {"#text": "sample 2 of 0"}, 4),
        ("train", {"#outcome": "failed"}, 0),
    ],
)
def test_filters(opened, full, view, filters, count):
    tab = opened(full)
    tab.select_option("#view", view)
    for name, value in filters.items():
        (tab.select_option if name in ("#step", "#outcome") else tab.fill)(name, value)
    words = f"{count} {'group' if view == 'train' else 'prompt'}" if count else "No conversation"
    tab.locator("#count", has_text=re.compile(f"^{words}")).wait_for()
    assert tab.locator("article").count() == min(count, 20)


def test_texts_are_never_html_or_change_the_direction_of_others(opened, tmp_path):
    run = read_run(write_full(tmp_path / f"run{'<b>'}", prompts=3, hostile=f"{HOSTILE} {ARABIC}"))
    tab = opened(run)
    assert tab.evaluate("[document.images.length, document.scripts.length, window.hacked ?? null]") == [0, 2, None]
    reply = tab.locator(".reply .text").first
    assert HOSTILE in reply.inner_text()
    assert reply.evaluate("each => getComputedStyle(each).unicodeBidi") == "isolate"
    assert "run<b>" in tab.locator("h1").inner_text()
    right_to_left = "element => getComputedStyle(element).direction"
    run = read_run(write_full(tmp_path / "arabic", prompts=1, hostile=""))
    run.conversations[0]["messages"][-1]["content"] = ARABIC
    assert opened(run).locator(".reply .text").first.evaluate(right_to_left) == "rtl"


def test_dark_mode_phones_and_paper(opened, full):
    tab = opened(full, scheme="dark")
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert tab.evaluate(brightness) < 50
    tab.set_viewport_size({"width": 380, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate(brightness) == 255
    assert not tab.locator(".filters").is_visible()


# --- without a browser -------------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside(full):
    page = run_page(full)
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "nan" not in re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL).lower()


def test_the_verdict_comes_before_the_curves():
    page = run_page(read_run(RUNS / "invented_wording"))
    assert page.index("Signs of reward hacking") < page.index("<h2>Curves")
    assert "<code>loss.kl_coef</code>" in page
    assert "Since step 60" in page
    fine = run_page(read_run(RUNS / "proper_sentences"))
    assert "No sign of reward hacking" in fine


def test_only_settings_that_differ_are_shown(full):
    shown = {"seed": 7, "policy.lora": {}, "env.reward_model": "org/model", "loss.kl_coef": 0.05}
    assert dict(changed_settings(full)) == shown


def test_control_characters_and_lone_surrogates_are_written_as_escapes(tmp_path):
    run = read_run(write_full(tmp_path / "run", steps=10, prompts=2, hostile="\x00\x1b[31m \ud800"))
    text = write_run_page(run, tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert "\x00" not in text
    assert "\x1b" not in text


def test_turns_that_all_replies_share_are_written_once(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5})
    first = conversation("shared question", "first")
    for n in range(3):
        turns = [*first[:1], {"role": "assistant", "content": f"own {n}"}, *conversation(f"then {n}?", f"last {n}")]
        writer.add_conversation(1, turns, prompt_id="p", reward=1.0, phase="train", group=0)
    page = run_page(read_run(tmp_path))
    assert page.count("shared question") == 1
    assert all(f"own {n}" in page and f"last {n}" in page for n in range(3))


def test_a_run_without_lines_is_an_error(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,seconds\n")
    with pytest.raises(ConfigError, match="has no step yet"):
        run_page(read_run(tmp_path))


def test_a_run_of_a_reward_model_has_its_curves(tmp_path):
    training, validation = (Curve(tmp_path / name, after=0) for name in ("metrics.csv", "validation.csv"))
    for step in range(1, 6):
        training.add({"step": step, "loss": 1 / step, "accuracy": step / 5})
    for name in ("held_out", "other"):
        validation.add({"step": 5, "set": name, "loss": 0.5, "accuracy": 0.8})
    page = run_page(read_run(tmp_path))
    assert page.count('class="dot held"') == 2
    assert page.count("<svg") == 2
    assert "reward hacking" not in page
