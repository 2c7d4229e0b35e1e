"""A run that was stopped at any moment resumes as if nothing had happened; GRPO's runs have the same folder."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from agents import train_reward_model
from gym_rm.errors import ConfigError
from gym_rm.reports.curves import Curve, read_curve
from gym_rm.training import checkpoints, reward_learner, run_folder
from gym_rm.training import export as export_module
from gym_rm.training.parallel_model import ParallelModel
from gym_rm.training.reward_run_folder import RewardRunFolder
from tests.training.runs import Killed, curve, kill_at, open_run, pairs, settings_of, train, trained, write_rows

OPTIONS = ("data.validation_share=0.33", "epochs=3")


@pytest.fixture(scope="module")
def uninterrupted(saved_model, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), saved_model("qwen3"), None, *OPTIONS).folder


def require_same_run(run, other):
    for name in ("metrics.csv", "validation.csv"):
        assert curve(run / name) == curve(other / name)
    for part in ("final", "best"):
        ours, theirs = (load_file(folder / part / "model.safetensors") for folder in (run, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(run.rglob(".*"))


# Moments: the owner and name of a function, and the call that does not return.
QUICK = {
    "in the middle of a step": (ParallelModel, "optimizer_step", 4),
    "after a measurement, before its checkpoint": (run_folder, "save_checkpoint", 2),
    "while the best model is written": (reward_learner, "export", 2),
}
MOMENTS = {
    "in the first step, before a checkpoint": (ParallelModel, "optimizer_step", 1),
    "while the weights of a checkpoint are written": (checkpoints, "save_file", 3),
    "while the optimizer of a checkpoint is written": (checkpoints, "save_file", 4),
    "while a checkpoint reaches the disk": (checkpoints, "_flush", 30),
    "after the last step, before the export": (RewardRunFolder, "finish", 1),
    "while the last model is written": (export_module, "model_card", 4),
}


@pytest.mark.parametrize("moment", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS)])
def test_a_killed_run_resumes_to_the_same_end(moment, saved_model, tmp_path, monkeypatch, uninterrupted):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS)
    with monkeypatch.context() as patch:
        kill_at(patch, *{**QUICK, **MOMENTS}[moment])
        with pytest.raises(Killed):
            train(settings)
    assert not (tmp_path / "run" / "final").exists()
    for folder in (tmp_path / "run").glob("best"):
        assert (folder / "README.md").exists()
        assert (folder / "model.safetensors").exists()
    torch.manual_seed(len(moment))  # nothing may depend on the state of another process
    train(settings)
    require_same_run(tmp_path / "run", uninterrupted)
    assert "held_out" in (tmp_path / "run" / "final" / "README.md").read_text().split("## Metrics")[1]


def test_a_killed_run_with_dropout_and_adapters_resumes_to_the_same_end(saved_model, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    options = ("model.lora={rank: 4, dropout: 0.3}", "epochs=2")
    (tmp_path / "whole").mkdir()
    whole = trained(tmp_path / "whole", saved_model("qwen3"), None, *options)
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *options)
    with monkeypatch.context() as patch:
        kill_at(patch, ParallelModel, "optimizer_step", 4)
        with pytest.raises(Killed):
            train(settings)
    torch.manual_seed(7)
    train(settings)
    assert curve(tmp_path / "run" / "metrics.csv") == curve(whole.folder / "metrics.csv")


def test_a_kill_while_the_curves_are_cut_loses_no_line(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    made = Curve(path, after=0)
    for step in range(1, 6):
        made.add({"step": step, "loss": step / 3, **({"late": step} if step > 3 else {})})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Curve, "_write", lambda self, rows: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            Curve(path, after=3)
    assert path.read_bytes() == before
    path.write_bytes(before + b"6,0.1")  # a line that was not written to its end
    assert len(read_curve(path)) == 5
    Curve(path, after=3)
    assert path.read_text().splitlines() == ["step,loss", "1,0.3333333333333333", "2,0.6666666666666666", "3,1.0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_resumes(number, saved_model, tmp_path, uninterrupted):
    settings, handler = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS), signal.getsignal(number)

    def stop(step, metrics):
        if step == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as stopped:
        train_reward_model.train(open_run(settings), stop)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == handler
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
    train(settings)
    require_same_run(tmp_path / "run", uninterrupted)


def test_a_finished_run_is_not_trained_again(saved_model, tmp_path, monkeypatch):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS, "max_steps=2")
    train(settings)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    monkeypatch.setattr(train_reward_model, "train_step", None)
    assert train(settings).measured["held_out"]["num_pairs"] == 4
    assert (tmp_path / "run" / "final" / "README.md").read_text() == card


def test_max_steps_of_a_finished_run_can_be_raised_but_not_lowered(saved_model, tmp_path):
    options = ["optimizer.schedule=constant", "optimizer.warmup_share=0"]
    settings = [settings_of(tmp_path, saved_model("qwen3"), None, *options, f"max_steps={n}") for n in (1, 2)]
    for each in settings:
        assert train(each).step == each.max_steps
    assert [row["step"] for row in curve(tmp_path / "run" / "metrics.csv")] == ["1", "2"]
    with pytest.raises(ConfigError, match="has 2 steps already, more than the 1 of this run"):
        open_run(settings[0])


def test_other_settings_or_rows_in_the_same_folder_are_refused_by_name(saved_model, tmp_path):
    model, options = saved_model("qwen3"), ("max_steps=1", "data.validation_share=0.33")
    trained(tmp_path, model, None, *options)
    for override, message in (
        ("optimizer.learning_rate=1e-4", r"optimizer\.learning_rate: now 0\.0001, before 0\.003"),
        ("seed=5", "seed: now 5, before 1"),
        ("loss.centring=0.5", r"loss\.centring: now 0\.5, before 0\.0"),
        # The values of another metric cannot be compared with the one that is kept.
        ("checkpoint.metric=held_out/accuracy", r"checkpoint\.metric: now 'held_out/accuracy', before 'held_out/loss'"),
    ):
        with pytest.raises(ConfigError, match=f"contains a run with other settings .*{message}"):
            open_run(settings_of(tmp_path, model, None, *options, override))
    with pytest.raises(ConfigError, match="contents of data set training"):
        open_run(settings_of(tmp_path, model, pairs(14), *options))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="without a checkpoint to resume from"):
        open_run(settings_of(tmp_path, model, None, *options))


def test_a_run_is_not_resumed_from_a_model_whose_files_changed(saved_model, tmp_path):
    base = shutil.copytree(saved_model("qwen3"), tmp_path / "base")
    settings = settings_of(tmp_path, base, None, "max_steps=1")
    train(settings)
    weights = load_file(base / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files of model\.path: now 'sha256:"):
        open_run(settings)


def test_a_damaged_checkpoint_is_a_clear_error(saved_model, tmp_path):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, "max_steps=1")
    train(settings)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    whole = {path: path.read_bytes() for path in checkpoint.iterdir()}
    damaged = [(path, content[: len(content) // 2]) for path, content in whole.items()]
    damaged.append((checkpoint / "state.json", b'{"step": 1}'))
    weights = checkpoint / "model.safetensors"
    damaged.append((weights, whole[weights][:-64] + bytes(64)))  # blocks that never reached the disk
    for path, content in damaged:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"step-00000001.* cannot be read"):
            open_run(settings)
        path.write_bytes(whole[path])
    open_run(settings)


# The rank that is killed is the last one.
SCRIPT = """
import os, signal, sys
from gym_rm.training import checkpoints, parallel_model
from gym_rm.cli.main import main
name, call, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
owner = {"optimizer_step": parallel_model.ParallelModel, "save_file": checkpoints}[name]
function, calls = getattr(owner, name), []
def dying(*a, **k):
    calls.append(1)
    if len(calls) == call and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*a, **k)
setattr(owner, name, dying)
sys.argv = ["gym-rm", "train", *arguments]
main()
"""


def run_script(tmp_path, arguments, *, name="save_file", call=0, processes=1):
    (tmp_path / "dying.py").write_text(SCRIPT)
    world = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, *world, str(tmp_path / "dying.py"), name, str(call), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def arguments_of(folder, model):
    folder.mkdir()
    data = write_rows(folder / "rows.jsonl", pairs())
    given = [f"data.train={data}", f"model.path={model}", f"output={folder / 'run'}", "evaluate_every=2", "threads=1"]
    return [*given, "batch.batch_size=4", "optimizer.learning_rate=3e-3", *OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "call"), [("optimizer_step", 4), ("save_file", 3)])
def test_a_process_killed_by_sigkill_resumes_to_the_same_end(name, call, saved_model, tmp_path, uninterrupted):
    arguments = arguments_of(tmp_path / "killed", saved_model("qwen3"))
    assert run_script(tmp_path, arguments, name=name, call=call).returncode == -signal.SIGKILL
    again = run_script(tmp_path, arguments)
    assert again.returncode == 0, again.stderr
    require_same_run(tmp_path / "killed" / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_of_which_one_is_killed_resume_with_any_number(fsdp, saved_model, tmp_path, uninterrupted):
    options = ["batch.fsdp=true"] if fsdp else []
    arguments = arguments_of(tmp_path / "killed", saved_model("qwen3"))
    killed = run_script(tmp_path, [*arguments, *options], name="optimizer_step", call=4, processes=2)
    assert killed.returncode != 0
    run = tmp_path / "killed" / "run"
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    again = run_script(tmp_path, arguments)
    assert again.returncode == 0, again.stderr
    for name in ("metrics.csv", "validation.csv"):
        ours, theirs = ([float(row["loss"]) for row in curve(folder / name)] for folder in (run, uninterrupted))
        assert ours == pytest.approx(theirs, rel=1e-4)
