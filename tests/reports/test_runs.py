import io
import json
import sys

import pytest
from rich.console import Console

from gym_rm.errors import ConfigError
from gym_rm.reports.runs import RunWriter, conversations_table, plot_run, read_run, results_table

SETTINGS = {"seed": 7, "policy": {"model": None}, "env": {"reward_model": "org/model"}}


def conversation(question, reply):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


@pytest.fixture
def folder(tmp_path):
    """A run of 20 steps with answers, measured before, in the middle and after."""
    writer = RunWriter(tmp_path / "run", SETTINGS)
    for step in range(21):
        if step:
            writer.add_metrics("train", step, {"reward_mean": step / 4, "accuracy": step / 20})
        if step % 10 == 0:
            writer.add_metrics("held_out", step, {"reward_mean": step / 5, "accuracy": 0.25 + step / 40})
            for number in (0, 1, 1):
                said = conversation(f"What is 1 + {number}?", f"It is {step}.")
                writer.add_conversation(step, said, prompt_id=f"p{number}", reward=step / 5, right=step == 20)
    return writer.folder


def text_of(renderable, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_what_was_written_is_read_back(folder):
    run = read_run(folder)
    assert run.settings == SETTINGS
    assert [row["step"] for row in run.training] == list(range(1, 21))
    assert [row["step"] for row in run.held_out] == [0, 10, 20]
    assert run.conversations[0]["messages"] == conversation("What is 1 + 0?", "It is 0.")


def test_every_line_is_on_disk_at_once(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5})
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["reward_mean"] == 0.5
    assert row["seconds"] >= 0


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunWriter(tmp_path, {}).add_metrics("train", 1, {"reward_mean": float("nan")})


def test_a_run_is_not_written_over(folder):
    with pytest.raises(ConfigError, match="holds a run already"):
        RunWriter(folder, {})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no metrics\.jsonl"):
        read_run(tmp_path)


def test_results_compare_the_first_and_last_measurement(folder):
    text = text_of(results_table(read_run(folder)))
    assert "25.0%" in text
    assert "75.0%" in text
    assert "+0.00" in text
    assert "+4.00" in text
    assert "20 steps" in text
    assert "seed 7" in text


def test_results_without_held_out_prompts_compare_training_steps(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step in range(1, 21):
        writer.add_metrics("train", step, {"reward_mean": step, "accuracy": None})
    text = text_of(results_table(read_run(tmp_path)))
    assert "+1.50" in text
    assert "+19.50" in text
    assert "right answers" not in text


def test_a_run_that_was_cut_short_compares_training_steps(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("held_out", 0, {"reward_mean": 0.0})
    writer.add_metrics("train", 1, {"reward_mean": 3.0})
    assert "Training prompts" in text_of(results_table(read_run(tmp_path)))


def test_conversations_show_each_prompt_once_before_and_after(folder):
    text = text_of(conversations_table(read_run(folder)))
    assert text.count("What is 1 + 1?") == 1
    assert "✗ It is 0." in text
    assert "✓ It is 20." in text
    assert "It is 10." not in text
    assert "What is 1 + 1?" not in text_of(conversations_table(read_run(folder), limit=1))


def test_what_was_said_is_shown_as_it_is(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step in (0, 1):
        writer.add_conversation(step, conversation("[bold]hi[/]", "[red]"), prompt_id="p", reward=0.0)
    writer.add_metrics("train", 1, {"reward_mean": 0.0})
    text = text_of(conversations_table(read_run(tmp_path)))
    assert "[bold]hi[/]" in text
    assert "[red]" in text


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_picture_has_a_panel_for_each_curve(folder, tmp_path):
    both = png_size(plot_run(read_run(folder), folder / "curve.png"))
    writer = RunWriter(tmp_path / "no answers", {})
    writer.add_metrics("train", 1, {"reward_mean": 0.5, "accuracy": None})
    one = png_size(plot_run(read_run(writer.folder), tmp_path / "pictures" / "curve.png"))
    assert both[0] == 2 * one[0]
    assert both[1] == one[1]


def test_a_step_without_any_reward_leaves_a_gap(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step, reward in enumerate((0.5, None, 1.0), start=1):
        writer.add_metrics("train", step, {"reward_mean": reward, "accuracy": None})
    assert plot_run(read_run(tmp_path), tmp_path / "curve.png").exists()


def test_a_run_without_steps_has_no_picture(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer.add_metrics("held_out", 0, {"reward_mean": 0.5})
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_run(read_run(tmp_path), tmp_path / "curve.png")


def test_reading_and_tables_need_no_matplotlib(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert text_of(results_table(read_run(folder)))
    with pytest.raises(ImportError):
        plot_run(read_run(folder), folder / "curve.png")
