"""Replies that are scored while others are written, and steps that are played ahead: the same run, also if killed."""

import json
import random
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import torch

from agents import grpo
from gym_rm.errors import ConfigError, GymRMError, RemoteError
from gym_rm.generation.completions import Completion
from gym_rm.generation.sampling import LocalSampler
from gym_rm.policy import rollouts_ahead
from gym_rm.policy.learner import Learner
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.policy.rollouts_ahead import KeptCompletions, RolloutsAhead, completion_tensors, completions_of
from gym_rm.policy.run_folder import GRPORunFolder
from gym_rm.training import checkpoints
from gym_rm.training.phase_timer import PhaseTimer
from tests.policy.policy_runs import curve, finished, lengths_and_vowels, require_same_run, settings_of, start, train
from tests.policy.test_grpo_resuming import losing_the_server
from tests.training.runs import Killed, kill_at

AHEAD = "sampling.steps_ahead=1"
DELAYS = random.Random()


def delayed_calls(conversations):
    """Score replies after a random time, one call at a time."""
    time.sleep(DELAYS.uniform(0, 0.01))
    return lengths_and_vowels(conversations)


def many_delayed_calls(conversations):
    """Score replies after a random time, eight calls at a time."""
    return delayed_calls(conversations)


many_delayed_calls.max_concurrent_calls = 8


def plain_calls(conversations):
    """Score replies in the thread of the caller."""
    return lengths_and_vowels(conversations)


plain_calls.max_concurrent_calls = 0


def of(scorer):
    return f"env.reward_model={__name__}:{scorer.__name__}"


def weights(run):
    return (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)], ids=lambda steps: f"{steps} steps")
@pytest.mark.parametrize("options", [(), (AHEAD,)], ids=["now", "ahead"])
def test_delays_of_the_scorer_change_nothing(options, steps, tmp_path):
    train(tmp_path / "plain", of(plain_calls), f"steps={steps}", *options)
    scorers = [delayed_calls, many_delayed_calls] * (1 if steps == 4 else 2)
    for number, scorer in enumerate(scorers):
        train(tmp_path / str(number), of(scorer), f"steps={steps}", *options)
        assert weights(tmp_path / str(number)) == weights(tmp_path / "plain")
        assert curve(tmp_path / str(number) / "metrics.csv") == curve(tmp_path / "plain" / "metrics.csv")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead") / "run"
    assert train(folder, AHEAD) is None
    return folder


def require_resumed(folder, whole, *options):
    torch.manual_seed(3)  # nothing may depend on the state of another process
    assert train(folder, AHEAD, *options) is None
    require_same_run(folder, whole)


def test_the_lag_is_that_of_one_step_but_for_the_first(tmp_path, uninterrupted):
    assert [row["lag"] for row in curve(uninterrupted / "metrics.csv")] == ["0.0", "1.0", "1.0", "1.0"]
    rows = [json.loads(line) for line in (uninterrupted / "conversations.jsonl").read_text().splitlines()]
    assert {row["lag"] for row in rows if row["phase"] == "train"} == {1}
    assert all(row["lag"] is None for row in rows if row["phase"] == "held_out")
    train(tmp_path / "run", AHEAD, "steps=2", "optimizer.updates_per_step=2", "optimizer.epochs=3")
    assert [float(row["lag"]) for row in curve(tmp_path / "run" / "metrics.csv")] == [0, 6]


def test_without_steps_ahead_there_is_no_lag(tmp_path):
    train(tmp_path / "run", "steps=1", "eval.every=1")
    assert "lag" not in curve(tmp_path / "run" / "metrics.csv")[0]
    assert '"lag": null' in (tmp_path / "run" / "conversations.jsonl").read_text()


def test_what_was_done_during_the_update_is_hidden(uninterrupted):
    header = (uninterrupted / "metrics.csv").read_text().splitlines()[0].split(",")
    names = {"generate", "score", "update", "generate_hidden", "score_hidden"}
    assert {name for name in header if "phase_seconds" in name} == {f"phase_seconds/{name}" for name in names}


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Learner, "optimizer_step", 3),  # while the fourth step is played
        (GRPORunFolder, "save", 2),
        (grpo.RolloutsAhead, "begin", 3),
        pytest.param(grpo.RolloutsAhead, "begin", 1, marks=pytest.mark.slow),
        pytest.param(grpo.RolloutsAhead, "take", 3, marks=pytest.mark.slow),
        pytest.param(grpo.RolloutBatch, "table", 5, marks=pytest.mark.slow),
        pytest.param(Learner, "checkpoint", 2, marks=pytest.mark.slow),
        pytest.param(checkpoints, "save_file", 3, marks=pytest.mark.slow),  # the kept completions of step 3
    ],
)
def test_a_killed_run_resumes_to_the_same_end(owner, name, call, tmp_path, monkeypatch, uninterrupted):
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call)
        with pytest.raises(Killed):
            train(tmp_path / "run", AHEAD)
    require_resumed(tmp_path / "run", uninterrupted)


OTHERS = [
    ("advantage.dynamic_sampling=2", "sampling.max_new_tokens=2"),
    ("env.max_turns=2", "env.respond=tests.policy.test_rollouts_ahead:asking"),
    ("optimizer.updates_per_step=2", "eval.every=3", "checkpoint.save_every=1"),
]


def asking(conversations, prompts, scores):
    """Ask again after each reply."""
    return ["And then?"] * len(conversations)


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS, ids=lambda options: options[0])
@pytest.mark.parametrize(("name", "call"), [("optimizer_step", 3), ("checkpoint", 2)])
def test_a_killed_run_with_other_settings_resumes_to_the_same_end(name, call, options, tmp_path, monkeypatch):
    assert train(tmp_path / "whole", AHEAD, *options) is None
    with monkeypatch.context() as patch:
        kill_at(patch, Learner, name, call)
        with pytest.raises(Killed):
            train(tmp_path / "run", AHEAD, *options)
    require_resumed(tmp_path / "run", tmp_path / "whole", *options)


def test_a_signal_saves_the_step_that_is_played_ahead(tmp_path, monkeypatch, uninterrupted):
    update = Learner.optimizer_step

    def signalled(self):
        if self.version == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "optimizer_step", signalled)
        assert train(tmp_path / "run", AHEAD) == signal.SIGTERM
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000003"
    assert (checkpoint / "others.safetensors").exists()
    require_resumed(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "most"), [(1, 3), (2, 2)])
def test_runs_that_are_killed_at_random_moments_resume_to_the_same_end(processes, most, tmp_path):
    options = (AHEAD, "steps=12", "eval.every=2", of(many_delayed_calls))
    finished(f"output={tmp_path / 'whole'}", *options, processes=processes)
    random_numbers, kills = random.Random(processes), 0
    while not (tmp_path / "run" / "final").exists():
        process = start(f"output={tmp_path / 'run'}", *options, processes=processes)
        before = written(tmp_path / "run")
        while process.poll() is None and written(tmp_path / "run") == before:
            time.sleep(0.01)
        time.sleep(random_numbers.uniform(0, 0.5))
        if kills < most and process.poll() is None:
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                each.kill()
            kills += 1
        output, _ = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGKILL), output
    assert kills
    require_same_run(tmp_path / "run", tmp_path / "whole")


def written(run):
    path = run / "metrics.csv"
    return path.read_text().count("\n") if path.exists() else 0


BROKEN = {}  # what `failing_calls` raises, and the number of conversations that it got
STEP_2 = 8 + 16  # conversations that are scored before: held-out ones, and those of a step


def failing_calls(conversations):
    """Score replies, and fail from the second step on."""
    BROKEN["scored"] = BROKEN.get("scored", 0) + len(conversations)
    if "error" in BROKEN and BROKEN["scored"] > STEP_2:
        raise BROKEN["error"]
    return lengths_and_vowels(conversations)


failing_calls.max_concurrent_calls = 0


def test_a_server_that_is_lost_in_the_thread_and_comes_back_changes_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.BROKEN", {"error": RemoteError("no answer")})
        patch.setattr(grpo.time, "sleep", lambda seconds: BROKEN.pop("error"))
        assert train(tmp_path / "run", AHEAD, of(failing_calls)) is None
        assert "error" not in BROKEN
    assert train(tmp_path / "whole", AHEAD, of(failing_calls)) is None
    require_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_step_whose_sampler_is_lost_is_written_with_the_weights_of_then_also_if_the_run_is_killed(
    tmp_path, monkeypatch
):
    for name in ("whole", "killed"):
        with monkeypatch.context() as patch:
            losing_the_server(patch, {4})  # in the thread that plays the third step
            if name == "whole":
                train(tmp_path / name, AHEAD)
                continue
            kill_at(patch, Learner, "optimizer_step", 3)
            with pytest.raises(Killed):
                train(tmp_path / name, AHEAD)
    assert [row["lag"] for row in curve(tmp_path / "whole" / "metrics.csv")] == ["0.0", "1.0", "0.0", "1.0"]
    require_resumed(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("error", [ValueError("a bug"), GymRMError("no score"), OSError("no disk")])
def test_an_error_in_the_thread_is_the_error_of_the_run(error, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BROKEN", {"error": error})
    with pytest.raises(type(error), match=str(error)):
        train(tmp_path / "run", AHEAD, of(failing_calls))
    assert not [each for each in threading.enumerate() if each.name == rollouts_ahead.THREAD]
    saved = [each.name for each in (tmp_path / "run").glob("checkpoints/*")]
    assert saved == ([] if isinstance(error, ValueError) else ["step-00000001"])


def test_a_run_that_fails_leaves_no_thread(tmp_path, monkeypatch):
    kill_at(monkeypatch, Learner, "optimizer_step", 2)
    with pytest.raises(Killed):
        train(tmp_path / "run", AHEAD, "sampling.max_new_tokens=64")
    assert not [each for each in threading.enumerate() if each.name == rollouts_ahead.THREAD]


@pytest.mark.parametrize("override", ["loss.importance_cap=null", "env.sleep=true"])
def test_what_steps_ahead_need(override, tmp_path):
    with pytest.raises(ConfigError, match=r"sampling\.steps_ahead=1 scores replies of older weights"):
        settings_of(tmp_path, AHEAD, override)


def test_completions_in_a_file_are_those_of_the_sampler(tmp_path):
    run = Learner(settings_of(tmp_path))
    tokenizer = run.start.tokenizer
    ends, ids = tokenizer.eos_token_id, tokenizer("two words", add_special_tokens=False)["input_ids"]
    kept = {
        seed: Completion(
            np.array(row, dtype=np.int32), np.full(len(row), -0.5, np.float32), row[-1:] == [ends], text, 3
        )
        for seed, row, text in [(2**62 + 1, [*ids, ends], "two words"), (5, ids, "two words"), (0, [ends], "")]
    }
    assert repr(completions_of(completion_tensors(kept), tokenizer)) == repr(kept)
    assert completions_of(completion_tensors({}), tokenizer) == {}


def test_a_step_is_played_once_and_its_error_is_raised_where_it_is_taken():
    def play_step(step, timer):
        if step == 2:
            raise ValueError("of the thread")
        return RolloutTable([])

    ahead = RolloutsAhead(play_step, KeptCompletions(None))
    ahead.wait()  # for nothing
    for step in (1, 2):
        ahead.begin(step)
        assert ahead.plays(step)
        if step == 1:
            assert ahead.take(PhaseTimer()).rollouts == []
    ahead.wait()
    with pytest.raises(ValueError, match="of the thread"):
        ahead.take(PhaseTimer())
    assert not ahead.plays(2)


def test_a_kept_completion_belongs_to_its_prompt(tmp_path):
    run = Learner(settings_of(tmp_path))
    sampler = LocalSampler(run.start.model, run.start.tokenizer, max_new_tokens=4)
    kept = KeptCompletions(sampler)
    first, second = np.array([5, 6, 7], dtype=np.int32), np.array([5, 6, 8], dtype=np.int32)
    found = []
    for prompt in (first, second, first):
        stream = kept.stream()
        stream.add([0], [prompt], seeds=[3])
        found.append(stream.take()[0])
    assert repr(found[0]) == repr(found[2])
    assert repr(found[1]) == repr(sampler.sample([second], seeds=[3])[0])
