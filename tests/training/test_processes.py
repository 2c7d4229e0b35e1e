"""Several processes train as one does: DDP and FSDP2 over gloo."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.cli.command import runner
from tests.training.runs import curve, pairs, write_rows

# The rank of a process cannot be broken from outside, so the losses are compared with those of one process.
OPTIONS = ["batch.batch_size=5", "optimizer.learning_rate=3e-3", "epochs=2", "evaluate_every=2", "threads=1"]


def run(folder, model, processes, *options):
    folder.mkdir()
    data = write_rows(folder / "rows.jsonl", pairs(16))
    arguments = [f"data.train={data}", f"model.path={model}", f"output={folder / 'run'}", "data.validation_share=0.3"]
    command = ["train", *arguments, *OPTIONS, *options]
    if processes == 1:  # here, because a process takes seconds to start
        runner()(*command)
        return folder / "run"
    world = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [sys.executable, *world, "-m", "gym_rm", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", []),
        ("qwen3", ["batch.fsdp=true"]),
        ("gemma2", ["batch.fsdp=true", "batch.gradient_checkpointing=true"]),
        ("mixtral", []),
        ("xlnet", ["batch.max_num_batched_tokens=200"]),  # some of its parameters change no value
        ("qwen3", ["model.lora={rank: 4}", "batch.fsdp=true"]),
    ],
    ids=str,
)
def test_two_processes_have_the_losses_of_one(architecture, options, saved_model, tmp_path):
    """A step has 5 comparisons, and the last one of an epoch has 1: fewer than processes."""
    if any("lora" in each for each in options):
        pytest.importorskip("peft")
    model = saved_model(
        architecture, **({"dropout": 0.0, "summary_last_dropout": 0.0} if architecture == "xlnet" else {})
    )
    alone = [each for each in options if "fsdp" not in each]
    one, two = run(tmp_path / "one", model, 1, *alone), run(tmp_path / "two", model, 2, *options)
    for name in ("metrics.csv", "validation.csv"):
        ours, theirs = ([float(row["loss"]) for row in curve(folder / name)] for folder in (two, one))
        assert len(theirs) >= 4
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    (ours, theirs) = (sorted(each.name for each in (folder / "final").iterdir()) for folder in (two, one))
    assert ours == theirs
    (name,) = (each for each in ours if each.endswith(".safetensors"))
    saved, expected = load_file(two / "final" / name), load_file(one / "final" / name)
    assert saved.keys() == expected.keys()
    states = [load_file(next((each / "checkpoints").iterdir()) / "optimizer.safetensors") for each in (two, one)]
    assert states[0].keys() == states[1].keys()
