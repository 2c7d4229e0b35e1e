"""GRPO runs in processes of their own: DDP and FSDP2 over gloo, real kills, and errors in one line."""

import collections
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.policy.policy_runs import ROOT, SMALL, curve, finished, require_same_run, start

pytestmark = pytest.mark.slow

SCORER = """
import json, os
def score(conversations):
    with open(os.path.join(os.path.dirname(__file__), f"calls.{os.environ.get('RANK', '0')}.jsonl"), "a") as file:
        file.writelines(json.dumps(messages) + "\\n" for messages in conversations)
    return [float(len(messages[-1]["content"]) % 7) for messages in conversations]
"""


def calls(folder):
    """Return the conversations that were scored, with the number of times."""
    lines = [line for path in folder.glob("calls.*.jsonl") for line in path.read_text().splitlines()]
    return collections.Counter(lines)


def messages(run):
    rows = [json.loads(line) for line in (run / "conversations.jsonl").read_text().splitlines()]
    return [row["messages"] for row in rows if row["step"] == 0]


SMALL_UPDATES = ("optimizer.updates_per_step=4", "optimizer.max_num_batched_tokens=64")


@pytest.mark.parametrize(
    ("both", "together"),
    [
        ((), ()),
        ((), ("optimizer.fsdp=true",)),
        (SMALL_UPDATES, ()),  # an update has one group, so one of the two processes has none
        (("policy.lora={rank: 4}",), ("optimizer.fsdp=true",)),
    ],
    ids=["ddp", "fsdp", "small updates", "lora"],
)
def test_two_processes_have_the_metrics_of_one(both, together, tmp_path):
    if any("lora" in each for each in both):
        pytest.importorskip("peft")
    found = {}
    for processes, options in ((1, both), (2, (*both, *together))):
        folder = found[processes] = tmp_path / str(processes)
        folder.mkdir()
        (folder / "calls_scorer.py").write_text(SCORER)
        output = f"output={folder / 'run'}"
        finished("env.reward_model=calls_scorer:score", output, *options, processes=processes, path=folder)
    assert calls(found[1]) == calls(found[2])
    assert messages(found[1] / "run") == messages(found[2] / "run")
    for name in ("metrics.csv", "held_out.csv"):
        pairs = list(zip(*(curve(found[each] / "run" / name) for each in (2, 1)), strict=True))
        for number, (ours, theirs) in enumerate(pairs):
            assert ours.keys() == theirs.keys()
            updated = number or both is SMALL_UPDATES  # Adam divides small rounding errors by small gradients
            tolerance, least = (1e-3, 1e-4) if updated else (1e-5, 1e-5)  # the loss is a difference near 0
            for column in sorted(ours.keys() - {"unique_tokens"}):
                values = [float(row[column]) if row[column] else np.nan for row in (ours, theirs)]
                np.testing.assert_allclose(*values, rtol=tolerance, atol=least, err_msg=column)


def test_low_precision_weights_are_sharded_and_checkpointed(tmp_path):
    options = ("policy.dtype=bfloat16", "optimizer.fsdp=true", "policy.gradient_checkpointing=true", "steps=2")
    finished(f"output={tmp_path / 'run'}", *options, processes=2)
    rows = curve(tmp_path / "run" / "metrics.csv")
    assert all(0 < float(row["grad_norm"]) < 10 for row in rows)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    states = load_file(checkpoint / "optimizer.safetensors")
    masters = {name: each for name, each in states.items() if name.endswith("/master")}
    assert masters
    assert all(each.dtype == torch.float32 for each in masters.values())


def test_accelerate_launch_starts_processes_too(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launch, str(ROOT / "agents" / "grpo.py"), *SMALL, "steps=1", f"output={tmp_path / 'run'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(curve(tmp_path / "run" / "metrics.csv")) == 1


SLOW = """
import pathlib, time
folder, scored = pathlib.Path(__file__).parent, []
def score(conversations):
    scored.extend(conversations)
    while len(scored) > 24 and not (folder / "continue").exists():  # 8 that are held out and a step of 16
        (folder / "waits").write_text("in the second step")
        time.sleep(0.01)
    return [float(len(messages[-1]["content"]) % 7) for messages in conversations]
"""


def wait_for(path, text, process):
    """Wait until a file has a text, at most for 300 s."""
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_text() == text):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_the_first_interrupt_ends_a_run_after_its_step_and_the_second_at_once(interrupts, tmp_path):
    """The scorer waits in the second step, so that signals come within it."""
    (tmp_path / "slow.py").write_text(SLOW)
    run, options = tmp_path / "run", ("env.reward_model=slow:score", "steps=100000")
    process = start(f"output={run}", *options, path=tmp_path)
    wait_for(tmp_path / "waits", "in the second step", process)
    if interrupts == 1:
        output, _ = start(f"output={run}", *options, path=tmp_path).communicate(timeout=300)
        assert "another process writes to output=" in " ".join(output.split())
    process.send_signal(signal.SIGINT)
    if interrupts == 1:
        (tmp_path / "continue").touch()
    else:
        while "a second Ctrl-C" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert "Traceback" not in output
    if interrupts == 1:
        assert process.returncode == 130, output
        assert "SIGINT came; repeat the command" in " ".join(output.split())
        assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    else:
        assert process.returncode == -signal.SIGINT, output


def test_two_processes_of_which_one_is_killed_resume_with_another_number(tmp_path):
    """The scorer of one process kills it in the fourth step."""
    (tmp_path / "dying.py").write_text(
        "import os, signal\nscored = []\n"
        "def score(conversations):\n"
        "    scored.extend(conversations)\n"
        "    if len(scored) > 4 + 2 * 8 + 4 + 8 and os.environ.get('RANK') == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [float(len(messages[-1]['content']) % 7) for messages in conversations]\n"
    )
    options = ("env.reward_model=dying:score",)
    run = tmp_path / "run"
    killed = start(f"output={run}", *options, "optimizer.fsdp=true", processes=2, path=tmp_path)
    killed.communicate(timeout=400)
    assert killed.returncode != 0
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    finished(f"output={run}", *options, path=tmp_path)
    finished(f"output={tmp_path / 'whole'}", *options, path=tmp_path)
    for ours, theirs in zip(*(curve(each / "metrics.csv") for each in (run, tmp_path / "whole")), strict=True):
        for column in ("reward_mean", "loss", "kl"):
            assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("options", [(), ("optimizer.fsdp=true",)], ids=["copied", "sharded"])
def test_a_server_that_one_process_loses_is_waited_for_by_all(options, tmp_path):
    for name, rank in (("lost", "1"), ("kept", "-1")):
        (tmp_path / f"{name}.py").write_text(
            "import os, gym_rm, agents.grpo\nagents.grpo.SECONDS_BETWEEN_CALLS = 0.01\n"
            "answered, lost_after, lost_calls = 0, [4 + 8, 4 + 3 * 8 + 4], 0\n"  # rows, in steps 2 and 3
            "def score(conversations):\n"
            "    global answered, lost_calls\n"
            f"    if os.environ['RANK'] == '{rank}' and lost_after and answered + len(conversations) > lost_after[0]:\n"
            "        del lost_after[0]\n"
            "        lost_calls = 3\n"  # a call of several sends that fails is repeated for each alone
            "    if lost_calls:\n"
            "        lost_calls -= 1\n"
            "        raise gym_rm.RemoteError('no answer')\n"
            "    answered += len(conversations)\n"
            "    return [float(len(messages[-1]['content']) % 7) for messages in conversations]\n"
        )
        output = finished(
            f"output={tmp_path / name}-run", f"env.reward_model={name}:score", *options, processes=2, path=tmp_path
        )
        assert ("step 2 waits, 1 are saved: rank 1: no answer" in " ".join(output.split())) == (name == "lost")
    require_same_run(tmp_path / "lost-run", tmp_path / "kept-run")
