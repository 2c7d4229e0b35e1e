import math
import re

import pytest

from gym_rm.reports.runs import RunWriter, read_run
from gym_rm.reports.tables import MOST_CHARACTERS, conversations_table, results_table, signed
from tests.reports.example_run import text_of, write_replies


def test_results_compare_the_first_and_last_measurement(folder):
    text = text_of(results_table(read_run(folder)))
    assert re.search(r"right answers.* 25\.0% .* 75\.0% ", text)
    assert re.search(r"reward +│ +0\.00 │ +\+4\.00 ", text)
    assert "20 steps" in text
    assert "seed 7" in text


def test_results_without_held_out_prompts_compare_training_steps(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step in range(1, 21):
        writer.add_metrics("train", step, {"reward_mean": step, "accuracy": None})
    text = text_of(results_table(read_run(tmp_path)))
    assert re.search(r"reward +│ +\+1\.5 │ +\+19\.5 ", text)
    assert "right answers" not in text


def test_results_with_one_measurement_compare_training_steps(tmp_path):
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


@pytest.mark.parametrize(
    ("reply", "shown"), [("[red]", "[red]"), ("\x1b[31mred", r"\x1b[31mred"), ("", "(nothing)")], ids=repr
)
def test_a_reply_is_shown_as_text(tmp_path, reply, shown):
    write_replies(tmp_path, (reply,), (reply,), question="[bold]hi[/]")
    text = text_of(conversations_table(read_run(tmp_path)))
    assert "[bold]hi[/]" in text
    assert text.count(shown) == 2
    assert "\x1b" not in text


def test_the_middle_of_a_long_reply_is_cut(tmp_path):
    reply = "begin " + "so on and " * MOST_CHARACTERS + "end"
    write_replies(tmp_path, (reply,), (reply,))
    text = text_of(conversations_table(read_run(tmp_path)))
    assert text.count("begin") == text.count("characters…]") == text.count("end") == 2
    assert len(text) < len(reply) * 2


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (3.4159, [], "+3.42"),
        (-0.001234, [], "-0.00123"),
        (-0.004, [3.4], "0.00"),
        (0.0, [], "0.00"),
        (123.4, [], "+123"),
        (1.5, [19.5], "+1.5"),
        (1.5, [-math.inf, math.inf], "+1.50"),
        (-math.inf, [1.5], "-inf"),
    ],
)
def test_rewards_are_formatted_with_sign_and_three_digits(value, like, text):
    assert signed(value, like=like) == text


def test_a_reply_without_a_reward_is_shown(tmp_path):
    writer = RunWriter(tmp_path, {})
    for step in (0, 1):
        writer.add_metrics("held_out", step, {"reward_mean": None})
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        writer.add_conversation(step, messages, prompt_id="a", reward=float("nan"))
    assert "no reward" in text_of(conversations_table(read_run(tmp_path)))
