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


def rewards(run):
    return [json.loads(line)["reward"] for line in (run / "conversations.jsonl").read_text().splitlines()]


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


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]


def steps_of(run):
    return len(curve(run / "metrics.csv")) if (run / "metrics.csv").exists() else 0


def test_a_process_killed_by_sigkill_resumes_to_the_same_end(tmp_path):
    options = ("steps=6",)
    finished(f"output={tmp_path / 'whole'}", *options)
    run = tmp_path / "run"
    for step in (1, 3):
        process = start(f"output={run}", *options)
        wait_for(lambda step=step: steps_of(run) >= step, process)
        process.kill()
        process.communicate()
    finished(f"output={run}", *options)
    require_same_run(run, tmp_path / "whole")


def test_a_second_process_on_the_same_folder_is_refused_and_signals_end_the_first(tmp_path):
    run = tmp_path / "run"
    process = start(f"output={run}", "steps=100000")
    wait_for(lambda: steps_of(run) >= 1, process)
    second = start(f"output={run}", "steps=100000")
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 2
    assert "another process writes to output=" in " ".join(output.split())
    assert "Traceback" not in output
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert "to resume" in " ".join(output.split())
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{steps_of(run):08d}"


def test_a_second_interrupt_ends_the_process_at_once(tmp_path):
    process = start(f"output={tmp_path / 'run'}", "steps=100000")
    wait_for(lambda: steps_of(tmp_path / "run") >= 1, process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (-signal.SIGINT, 130), output
    assert "Traceback" not in output


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_of_which_one_is_killed_resume_with_another_number(fsdp, tmp_path):
    """The scorer of one process kills it in the fourth step."""
    (tmp_path / "dying.py").write_text(
        "import os, signal\ncalls = []\n"
        "def score(conversations):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5 and os.environ.get('RANK') == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [float(len(messages[-1]['content']) % 7) for messages in conversations]\n"
    )
    options = ("env.reward_model=dying:score",)
    run = tmp_path / "run"
    sharded = ("optimizer.fsdp=true",) if fsdp else ()
    killed = start(f"output={run}", *options, *sharded, processes=2, path=tmp_path)
    killed.communicate(timeout=400)
    assert killed.returncode != 0
    assert [each.name for each in (run / "checkpoints").iterdir()] == ["step-00000002"]
    finished(f"output={run}", *options, path=tmp_path)
    finished(f"output={tmp_path / 'whole'}", *options, path=tmp_path)
    for ours, theirs in zip(*(curve(each / "metrics.csv") for each in (run, tmp_path / "whole")), strict=True):
        for column in ("reward_mean", "loss", "kl"):
            assert float(ours[column]) == pytest.approx(float(theirs[column]), rel=1e-3, abs=1e-5)


def test_an_error_of_one_process_ends_the_others(tmp_path):
    (tmp_path / "failing.py").write_text(
        "import os\n"
        "def score(conversations):\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise RuntimeError('out of scores')\n"
        "    return [0.0 for _ in conversations]\n"
    )
    process = start(
        f"output={tmp_path / 'run'}", "env.reward_model=failing:score", "eval.num_prompts=0", processes=2, path=tmp_path
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "RuntimeError: out of scores" in " ".join(output.split())
