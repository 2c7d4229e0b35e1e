import pytest

from gym_rm.errors import ConfigError
from gym_rm.reports.runs import RunWriter, read_run
from tests.reports.example_run import SETTINGS, conversation


def test_read_run_returns_the_written_values(folder):
    run = read_run(folder)
    assert run.settings == SETTINGS
    assert [row["step"] for row in run.training] == list(range(1, 21))
    assert [row["step"] for row in run.held_out] == [0, 10, 20]
    assert run.conversations[0]["messages"] == conversation("What is 1 + 0?", "It is 0.")


def test_a_metric_that_is_not_finite_is_an_error(tmp_path):
    with pytest.raises(FloatingPointError, match="'reward_mean' of step 1 must be finite, got nan"):
        RunWriter(tmp_path, {}).add_metrics("train", 1, {"reward_mean": float("nan")})


def test_a_run_is_not_overwritten(folder):
    with pytest.raises(ConfigError, match="already contains a run"):
        RunWriter(folder, {})


def test_a_folder_without_a_run_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"must contain a run, but metrics\.csv is missing"):
        read_run(tmp_path)


def test_a_repeated_prompt_gives_one_pair(folder):
    pairs = read_run(folder).before_and_after()
    assert [(before["step"], after["step"], before["prompt_id"]) for before, after in pairs] == [
        (0, 20, "p0"),
        (0, 20, "p1"),
    ]
    assert all(before["prompt_id"] == after["prompt_id"] for before, after in pairs)


def test_values_come_back_with_their_types(tmp_path):
    values = {"a": 1, "b": 0.1 + 0.2, "c": True, "d": None, "phase_seconds": {"generate": 1.5, "x": {"y": 2}}}
    RunWriter(tmp_path, {}).add_metrics("train", 3, values)
    (row,) = read_run(tmp_path).training
    flat = {"a": 1, "b": 0.1 + 0.2, "c": True, "d": None, "phase_seconds/generate": 1.5, "phase_seconds/x/y": 2}
    assert {name: row[name] for name in flat} == flat
    assert [type(row[name]) for name in "abcd"] == [int, float, bool, type(None)]


def test_a_conversation_keeps_everything_that_is_known_of_it(tmp_path):
    said = conversation("What?", "\ud800 That.")
    RunWriter(tmp_path, {}).add_conversation(
        4, said, prompt_id="p", reward=float("nan"), phase="train", group=2, advantage=-0.5, tokens=7, finished=False,
        lag=1, components={"help": 0.5, "safety": float("nan")},
        verdicts={"math/verdict": "timeout"}, step_rewards=[[0.5]], step_ends=[[7]],
    )  # fmt: skip
    RunWriter.add_metrics(RunWriter(tmp_path, {}, resume_after=4), "train", 4, {})
    (row,) = read_run(tmp_path).conversations
    assert row == {
        "step": 4, "phase": "train", "group": 2, "prompt_id": "p", "reward": None, "advantage": -0.5, "right": None,
        "tokens": 7, "finished": False, "lag": 1, "messages": said, "components": {"help": 0.5, "safety": None},
        "verdicts": {"math/verdict": "timeout"}, "step_rewards": [[0.5]], "step_ends": [[7]],
    }  # fmt: skip


def write_steps(writer, steps):
    """Step s has the value 1 / s; every fifth step is measured and adds a column; times are left out of the files."""
    writer._started = 1e30
    for step in steps:
        writer.add_metrics(
            "train", step, {"reward_mean": 1 / step, "accuracy": None} | ({"kl": step} if step > 7 else {})
        )
        if step % 5 == 0:
            writer.add_metrics("held_out", step, {"reward_mean": 2 / step})
        writer.add_conversation(step, conversation("What?", f"{step}"), prompt_id="p", reward=1 / step)


def contents(folder):
    return {path.name: path.read_text().replace("-1e+30", "") for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("last", [5, 6, 9, 12], ids=lambda step: f"killed-at-{step}")
def test_a_resumed_run_has_the_files_of_an_uninterrupted_one(tmp_path, last):
    write_steps(RunWriter(tmp_path / "whole", SETTINGS), range(1, 13))
    write_steps(RunWriter(tmp_path / "killed", SETTINGS), range(1, last + 1))
    for name in ("metrics.csv", "held_out.csv", "conversations.jsonl"):
        with (tmp_path / "killed" / name).open("a") as file:
            file.write('{"step": 1' if name.endswith("jsonl") else "13,0.1")  # killed in the middle of a line
    write_steps(RunWriter(tmp_path / "killed", SETTINGS, resume_after=5), range(6, 13))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_the_seconds_of_a_resumed_run_go_on(tmp_path):
    writer = RunWriter(tmp_path, {})
    writer._started -= 100
    writer.add_metrics("train", 1, {})
    RunWriter(tmp_path, {}, resume_after=1).add_metrics("train", 2, {})
    assert [row["seconds"] >= 100 for row in read_run(tmp_path).training] == [True, True]


def test_a_run_without_a_checkpoint_can_begin_again(folder):
    RunWriter(folder, {}, replace=True).add_metrics("train", 1, {"reward_mean": 0.0})
    run = read_run(folder)
    assert (len(run.training), len(run.held_out), len(run.conversations)) == (1, 0, 0)


def test_a_line_that_was_not_written_to_its_end_is_not_read(folder):
    for name in ("metrics.csv", "conversations.jsonl"):
        (folder / name).open("a").write("21,")
    run = read_run(folder)
    assert (len(run.training), len(run.conversations)) == (20, 9)


def test_conversations_of_training_steps_are_not_before_and_after(folder):
    writer = RunWriter(folder, SETTINGS, resume_after=20)
    writer.add_conversation(20, conversation("What is 1 + 0?", "Sampled."), prompt_id="p0", reward=0.0, phase="train")
    assert all("Sampled" not in after["messages"][-1]["content"] for _, after in read_run(folder).before_and_after())


@pytest.mark.parametrize("damaged", ["3,0.1", "3,0.1,0.2,0.3,0.4", "garbage", "x,0.1,2", "3,1,\xff"])
def test_a_damaged_line_in_the_middle_of_a_curve_is_named(tmp_path, damaged):
    text = f"step,seconds,loss\n1,1,1\n2,1,1\n{damaged}\n4,1,1\n"
    (tmp_path / "metrics.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"line 4 of .*metrics.csv"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"line 4 of .*metrics.csv"):
        RunWriter(tmp_path, {}, resume_after=4)


@pytest.mark.parametrize("damaged", ['{"step"', "null", '{"step": "a"}'])
def test_a_damaged_conversation_is_named_when_a_run_goes_on(tmp_path, damaged):
    run = RunWriter(tmp_path, {})
    run.add_metrics("train", 1, {"loss": 1.0})
    (tmp_path / "conversations.jsonl").write_text(damaged + "\n")
    with pytest.raises(ConfigError, match=r"line 1 of conversations.jsonl"):
        RunWriter(tmp_path, {}, resume_after=1)


def test_a_settings_file_without_settings_is_named(tmp_path):
    RunWriter(tmp_path, {}).add_metrics("train", 1, {"loss": 1.0})
    (tmp_path / "settings.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match=r"settings.yaml' must be a mapping with settings"):
        read_run(tmp_path)
