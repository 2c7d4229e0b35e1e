"""The monitor of reward hacking on two recorded runs of agents/grpo.py, and on one invented drift at a time.

Both runs went from 46 % right answers to more than 93 %. In `invented_wording` all replies became " would say N.",
which an earlier embedded reward model scored highest; in `proper_sentences` they became "I would say N.", one of the
four wordings of the start policy. The files keep the metrics, and 100 replies of the first and the last measurement.
"""

from pathlib import Path

import pytest

from gym_rm.reports.monitor import Monitor, signs, template
from gym_rm.reports.runs import read_run

RUNS = Path(__file__).parent / "runs"
SAME = [0.2, 0.22, 0.2, 0.22]  # right answers of a run whose reward rises
VARIED = [f"{start} {n}." for n in range(10) for start in ("It is", "That is", "The answer is", "I would say")]


def found(*, steps=30, start=None, end=None, replies=(VARIED, VARIED), accuracy=None):
    """Names of the signs of a run whose reward rises, and whose other metrics go from `start` to `end`."""
    monitor, all_signs = Monitor(), []
    start, end = start or {}, end or {}
    right = accuracy or [None] * (steps // 10 + 1)
    for step in range(steps + 1):
        share = step / steps
        metrics = {name: start[name] + share * (end[name] - start[name]) for name in start}
        metrics |= {"reward_mean": 3 * share, "reward_std": 1.0}
        if step:
            all_signs += monitor.add(step, metrics)
        if step % 10 == 0:
            metrics["accuracy"] = right[step // 10]
            all_signs += monitor.add(step, metrics, replies[step == steps])
    return [(sign.name, sign.severity) for sign in all_signs]


def test_a_wording_that_the_start_policy_never_wrote_is_a_warning():
    (sign,) = signs(read_run(RUNS / "invented_wording"))
    assert (sign.name, sign.severity, sign.step) == ("template", "warning", 60)
    assert "'would say N', which the start policy wrote in 0% of its own" in sign.message
    assert "loss.kl_coef" in sign.what_to_turn
    assert "gym-rm audit" in sign.what_to_turn


def test_a_wording_of_the_start_policy_may_become_all_replies():
    run = read_run(RUNS / "proper_sentences")
    assert sum(after["messages"][-1]["content"].startswith("I would") for _, after in run.before_and_after()) > 90
    assert signs(run) == ()


def test_no_sign_without_a_higher_reward():
    monitor = Monitor()
    assert monitor.add(0, {"reward_mean": 1.0, "reward_std": 1.0}, VARIED) == []
    assert monitor.add(1, {"reward_mean": 1.2, "reward_std": 1.0}, ["new"] * 40) == []
    assert monitor.add(2, {"reward_mean": 1.3, "reward_std": 1.0}, ["new"] * 40)[0].name == "template"


def test_a_sign_is_given_once():
    monitor = Monitor()
    monitor.add(0, {"reward_mean": 0.0, "reward_std": 1.0}, VARIED)
    counts = [len(monitor.add(n, {"reward_mean": 2.0, "reward_std": 1.0}, ["new"] * 40)) for n in (1, 2, 3)]
    assert counts == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "reply"),
    [("opening", "Great question, dear friend! {n} {word}"), ("ending", "{word} {n}. Hope that helps you!")],
)
def test_a_common_opening_or_ending_that_is_new(name, reply):
    after = [reply.format(n=n, word=f"w{chr(97 + n)}" * (n + 1)) for n in range(20)]
    assert found(replies=(VARIED, after), accuracy=SAME) == [(name, "warning")]
    assert found(replies=(VARIED, after)) == [(name, "note")]
    # If more answers are right, it may be the format of the answers.
    assert found(replies=(VARIED, after), accuracy=[0.2, 0.5, 0.8, 0.9]) == [(name, "note")]


def test_few_replies_at_the_start_say_nothing_about_templates():
    assert found(replies=(VARIED[:17], ["new"] * 17)) == []
    assert found(replies=(VARIED[:20], ["new"] * 20)) == [("template", "warning")]


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("entropy", {"entropy": 1.0}, {"entropy": -0.04}),
        ("length", {"completion_tokens": 50}, {"completion_tokens": 200}),
        ("length", {"completion_tokens": 200}, {"completion_tokens": 50}),
        ("length_correlation", {"length_correlation": 0.0}, {"length_correlation": 0.8}),
        ("kl", {"kl": 0.0, "completion_tokens": 10}, {"kl": 1.5, "completion_tokens": 10}),
        ("kl", {"kl": 0.0, "completion_tokens": 1000}, {"kl": 0.1, "completion_tokens": 1000}),
    ],
)
def test_a_drift_is_a_sign_unless_more_answers_are_right(name, start, end):
    assert found(start=start, end=end, accuracy=SAME) == [(name, "warning")]
    assert found(start=start, end=end, accuracy=[0.2, 0.5, 0.8, 0.9]) == []
    assert found(start=start, end=end) == [(name, "note")]  # nobody checks answers
    middle = {key: start[key] + (end[key] - start[key]) * 0.2 for key in start}
    assert found(start=start, end=middle) == []


def test_repetition_is_a_sign_even_if_more_answers_are_right():
    drift = {"start": {"repetition": 0.0}, "end": {"repetition": 0.5}}
    assert found(**drift, accuracy=[0.2, 0.5, 0.8, 0.9]) == [("repetition", "warning")]


@pytest.mark.parametrize("accuracy", [[0.3, 0.7, 0.3, 0.2], [0.5, 0.5, 0.45, 0.5]], ids=["falls", "stays"])
def test_right_answers_that_do_not_follow_the_reward(accuracy):
    assert found(accuracy=accuracy) == [("held_out", "warning")]


def test_right_answers_that_rise_slowly_are_no_sign():
    assert found(accuracy=[0.2, 0.24, 0.27, 0.3]) == []


def test_memory_does_not_grow_with_the_steps():
    monitor = Monitor()
    for step in range(1, 2000):
        monitor.add(step, {"reward_mean": step / 2000})
    assert len(monitor._training) < 20


def test_templates_leave_out_numbers_names_spaces_and_stops():
    assert template(" I said,  Berlin has 3,500.5 of 10 parks.") == "I said X has N of N parks"
    assert template("It is 4!!") == "It is N!!"


@pytest.mark.parametrize(
    ("before", "after"),
    [("I would say {}.", "I would say {}"), ("It is {}", "It is {}."), ("Well: it is {}, I think.", "Well, it is {}.")],
)
def test_a_wording_with_another_full_stop_is_not_new(before, after):
    start = [before.format(n) for n in range(20)] + [f"{n} {'so' * n}" for n in range(60)]
    assert found(replies=(start, [f"{after.format(n)} {'so' * n}" for n in range(40)])) == []


def test_the_signs_of_a_run_have_the_numbers_of_its_end():
    monitor = Monitor()
    monitor.add(0, {"reward_mean": 0.0, "reward_std": 1.0}, VARIED)
    for step, share in ((1, 0.6), (2, 0.8)):
        replies = [f"Great question, dear friend! {n} {'so' * n}" for n in range(int(40 * share))]
        monitor.add(step, {"reward_mean": 2.0, "reward_std": 1.0}, [*replies, *VARIED[: 40 - len(replies)]])
    (sign,) = monitor.signs.values()
    assert sign.message.startswith("80% of the replies now begin with")
    assert sign.step == 1
    assert monitor.add(3, {"reward_mean": 2.0, "reward_std": 1.0}, VARIED) == []
    assert monitor.signs == {}
