"""A run that was stopped at any moment resumes as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from gym_rm.errors import ConfigError
from gym_rm.reports.curves import Curve, read_curve
from gym_rm.training import checkpoints
from gym_rm.training import export as export_module
from gym_rm.training import trainer as trainer_module
from gym_rm.training.parallel_model import ParallelModel
from gym_rm.training.trainer import Trainer
from tests.training.runs import Killed, curve, kill_at, pairs, settings_of, train, write_rows

OPTIONS = ("data.validation_share=0.33", "epochs=3")


@pytest.fixture(scope="module")
def uninterrupted(saved_model, tmp_path_factory):
    _, finished = train(tmp_path_factory.mktemp("whole"), saved_model("qwen3"), None, *OPTIONS)
    return finished.folder


def require_same_run(run, other):
    for name in ("metrics.csv", "validation.csv"):
        assert curve(run / name) == curve(other / name)
    for part in ("final", "best"):
        ours, theirs = (load_file(folder / part / "model.safetensors") for folder in (run, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(run.rglob(".*"))


# Moments: the owner and name of a function, and the call that does not return.
MOMENTS = {
    "in the first step, before a checkpoint": (ParallelModel, "optimizer_step", 1),
    "in the middle of a step": (ParallelModel, "optimizer_step", 4),
    "after a measurement, before its checkpoint": (trainer_module, "save_checkpoint", 2),
    "while the weights of a checkpoint are written": (checkpoints, "save_file", 3),
    "while the optimizer of a checkpoint is written": (checkpoints, "save_file", 4),
    "while a checkpoint reaches the disk": (checkpoints, "_flush", 30),
    "while the best model is written": (trainer_module, "export", 2),
    "after the last step, before the export": (Trainer, "finish", 1),
    "while the last model is written": (export_module, "model_card", 4),
}


QUICK = ("in the middle of a step", "after a measurement, before its checkpoint", "while the best model is written")


@pytest.mark.parametrize(
    "moment", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS]
)
def test_a_killed_run_resumes_to_the_same_end(moment, saved_model, tmp_path, monkeypatch, uninterrupted):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS)
    with monkeypatch.context() as patch:
        kill_at(patch, *MOMENTS[moment])
        with pytest.raises(Killed):
            Trainer(settings).run()
    assert not (tmp_path / "run" / "final").exists()
    for folder in (tmp_path / "run").glob("best"):
        assert (folder / "README.md").exists()
        assert (folder / "model.safetensors").exists()
    torch.manual_seed(len(moment))  # nothing may depend on the state of another process
    Trainer(settings).run()
    require_same_run(tmp_path / "run", uninterrupted)
    assert "held_out" in (tmp_path / "run" / "final" / "README.md").read_text().split("## Metrics")[1]


def test_a_killed_run_with_dropout_and_adapters_resumes_to_the_same_end(saved_model, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    options = ("model.lora={rank: 4, dropout: 0.3}", "epochs=2")
    (tmp_path / "whole").mkdir()
    _, whole = train(tmp_path / "whole", saved_model("qwen3"), None, *options)
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *options)
    with monkeypatch.context() as patch:
        kill_at(patch, ParallelModel, "optimizer_step", 4)
        with pytest.raises(Killed):
            Trainer(settings).run()
    torch.manual_seed(7)
    Trainer(settings).run()
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
    trainer = Trainer(settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS))
    handler = signal.getsignal(number)

    def stop(step, metrics):
        if step == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as stopped:
        trainer.run(stop)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == handler
    assert [each.name for each in (trainer.folder / "checkpoints").iterdir()] == ["step-00000003"]
    Trainer(settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS)).run()
    require_same_run(tmp_path / "run", uninterrupted)


def test_a_finished_run_is_not_trained_again(saved_model, tmp_path, uninterrupted, monkeypatch):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS)
    Trainer(settings).run()
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    monkeypatch.setattr(Trainer, "train_step", None)
    finished = Trainer(settings).run()
    assert finished.metrics["held_out"]["num_pairs"] == 4
    require_same_run(tmp_path / "run", uninterrupted)
    assert (tmp_path / "run" / "final" / "README.md").read_text() == card


def test_max_steps_of_a_finished_run_can_be_raised_but_not_lowered(saved_model, tmp_path):
    options = ["data.validation_share=0.33", "epochs=3", "optimizer.schedule=constant", "optimizer.warmup_share=0"]
    settings = [settings_of(tmp_path, saved_model("qwen3"), None, *options, f"max_steps={n}") for n in (2, 4)]
    for each in settings:
        assert Trainer(each).run().steps == each.max_steps
    assert [row["step"] for row in curve(tmp_path / "run" / "metrics.csv")] == ["1", "2", "3", "4"]
    with pytest.raises(ConfigError, match="has 4 steps already, more than max_steps=2"):
        Trainer(settings[0])


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate: now 0.0001, before 0.003"),
        ("seed=5", "seed: now 5, before 1"),
        ("epochs=4", "epochs: now 4, before 3"),
        ("loss.centring=0.5", "loss.centring: now 0.5, before 0.0"),
    ],
)
def test_other_settings_with_the_same_output_are_refused_by_name(override, name, saved_model, tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path / "run")
    settings = settings_of(tmp_path, saved_model("qwen3"), None, *OPTIONS, override)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    state = (checkpoint / "state.json").read_text().replace(str(uninterrupted.parent), str(tmp_path))
    (checkpoint / "state.json").write_text(state)
    with pytest.raises(ConfigError, match="contains a run with other settings") as refused:
        Trainer(settings)
    assert name in str(refused.value)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="without a checkpoint to resume from"):
        Trainer(settings)


def test_other_rows_in_the_same_file_are_refused(saved_model, tmp_path):
    train(tmp_path, saved_model("qwen3"), None, "max_steps=1")
    settings = settings_of(tmp_path, saved_model("qwen3"), pairs(14), "max_steps=1")
    with pytest.raises(ConfigError, match=r"contents of data set training"):
        Trainer(settings)


@pytest.mark.parametrize("lora", ["null", "{rank: 4}"])
def test_a_run_is_not_resumed_from_a_model_whose_files_changed(lora, saved_model, tmp_path):
    if lora != "null":
        pytest.importorskip("peft")
    base = shutil.copytree(saved_model("qwen3"), tmp_path / "base")
    settings = settings_of(tmp_path, base, None, "max_steps=1", f"model.lora={lora}")
    Trainer(settings).run()
    weights = load_file(base / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"files of model\.path: now 'sha256:"):
        Trainer(settings)


@pytest.mark.parametrize("damage", ["model.safetensors", "optimizer.safetensors", "state.json", "keys", "zeros"])
def test_a_damaged_checkpoint_is_a_clear_error(damage, saved_model, tmp_path):
    settings = settings_of(tmp_path, saved_model("qwen3"), None, "max_steps=1")
    Trainer(settings).run()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    if damage == "keys":
        (checkpoint / "state.json").write_text(json.dumps({"step": 1}))
    elif damage == "zeros":  # as a file system leaves blocks that never reached the disk
        with (checkpoint / "model.safetensors").open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
    else:
        data = (checkpoint / damage).read_bytes()
        (checkpoint / damage).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"step-00000001.* cannot be read"):
        Trainer(settings)


SCRIPT = """
import os, signal, sys
from gym_rm.training import checkpoints, parallel_model, trainer
from gym_rm.cli.main import main
name, call, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
owner = {"optimizer_step": parallel_model.ParallelModel, "save_file": checkpoints, "finish": trainer.Trainer}[name]
function, calls = getattr(owner, name), []
def dying(*a, **k):
    calls.append(1)
    if len(calls) == call and os.environ.get("LOCAL_RANK", "0") == os.environ.get("LOCAL_WORLD_SIZE", "1")[-1:].replace(
        "1", "0").replace("2", "1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*a, **k)
setattr(owner, name, dying)
sys.argv = ["gym-rm", "train", *arguments]
main()
"""


def start(tmp_path, arguments, *, name="finish", call=0, processes=1):
    (tmp_path / "dying.py").write_text(SCRIPT)
    world = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *world, str(tmp_path / "dying.py"), name, str(call), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def arguments_of(folder, model, *options):
    folder.mkdir()
    data = write_rows(folder / "rows.jsonl", pairs())
    given = [f"data.train={data}", f"model.path={model}", f"output={folder / 'run'}", "evaluate_every=2", "threads=1"]
    return [*given, "batch.batch_size=4", "optimizer.learning_rate=3e-3", *OPTIONS, *options]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"), [("optimizer_step", 1), ("optimizer_step", 4), ("save_file", 3), ("finish", 1)]
)
def test_a_process_killed_by_sigkill_resumes_to_the_same_end(name, call, saved_model, tmp_path, uninterrupted):
    arguments = arguments_of(tmp_path / "killed", saved_model("qwen3"))
    killed = start(tmp_path, arguments, name=name, call=call)
    killed.communicate(timeout=200)
    assert killed.returncode == -signal.SIGKILL
    again = start(tmp_path, arguments)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    require_same_run(tmp_path / "killed" / "run", uninterrupted)


@pytest.mark.slow
def test_a_process_stopped_by_sigterm_exits_with_143(saved_model, tmp_path, uninterrupted):
    arguments = arguments_of(tmp_path / "stopped", saved_model("qwen3"), "epochs=200")
    process = start(tmp_path, arguments)
    run = tmp_path / "stopped" / "run"
    deadline = time.monotonic() + 200
    while not (run / "metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 143, output
    assert "repeat the command to resume" in output
    steps = len(curve(run / "metrics.csv"))
    assert [each.name for each in (run / "checkpoints").iterdir()] == [f"step-{steps:08d}"]


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_of_which_one_is_killed_resume_with_any_number(fsdp, saved_model, tmp_path, uninterrupted):
    options = ["batch.fsdp=true"] if fsdp else []
    arguments = arguments_of(tmp_path / "killed", saved_model("qwen3"))
    killed = start(tmp_path, [*arguments, *options], name="optimizer_step", call=4, processes=2)
    killed.communicate(timeout=300)
    assert killed.returncode != 0
    run = tmp_path / "killed" / "run"
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    again = start(tmp_path, arguments)
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    for name in ("metrics.csv", "validation.csv"):
        ours, theirs = ([float(row["loss"]) for row in curve(folder / name)] for folder in (run, uninterrupted))
        assert ours == pytest.approx(theirs, rel=1e-4)
