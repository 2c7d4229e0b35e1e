"""docs/grpo.md: its launch lines are valid and run."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gym_rm.config import load_config, settings_file
from gym_rm.policy.grpo_settings import GRPOSettings

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
LAUNCHES = [line for line in COMMANDS if re.search("gym.rm grpo", line)]
TINY = [
    *(f"{name}=null" for name in ("policy.model", "env.reward_model", "env.prompts", "eval.prompts")),
    *("policy.dtype=float32", "policy.gradient_checkpointing=false", "env.num_prompts=4", "env.group_size=2"),
    *("steps=1", "eval.num_prompts=4", "sampling.max_new_tokens=4"),
]


def test_the_page_has_lines_for_one_gpu_eight_gpus_two_nodes_and_a_server():
    assert [(line.split()[0], "--nnodes" in line) for line in LAUNCHES] == [
        ("gym-rm", False),
        ("gym-rm", False),
        ("torchrun", False),
        ("torchrun", True),
        ("gym-rm", False),  # with a server that samples
        ("gym-rm", False),  # dialogues
        ("gym-rm", False),  # with a tool
        ("gym-rm", False),  # and without
    ]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_line_has_valid_settings(line):
    words = shlex.split(line)
    words = words[words.index("grpo") + 1 :]
    file = None
    if words[0] == "--config":
        file, words = settings_file(words[1], "grpo"), words[2:]
    assert load_config(GRPOSettings, file, words) != GRPOSettings()


def test_the_line_of_verl_has_the_settings_of_the_page_of_its_adapter():
    (line,) = (line for line in COMMANDS if "verl" in line)
    adapter = (ROOT / "docs" / "adapters" / "verl.md").read_text(encoding="utf-8")
    assert [word for word in line.split() if "reward." in word and word not in adapter] == []


@pytest.mark.slow
@pytest.mark.parametrize("line", LAUNCHES[2:4], ids=["eight GPUs", "two nodes"])
def test_a_line_of_torchrun_runs_on_two_processes(line, tmp_path):
    nodes = 2 if "--nnodes" in line else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = line.replace("$FIRST_NODE:29500", f"127.0.0.1:{port}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {2 // nodes}")
    line = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    line = f"{re.sub(r' output=.*', '', line)} {' '.join(TINY)} output={tmp_path / 'run'}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [
        subprocess.Popen(
            ["sh", "-ec", line], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(nodes)
    ]
    outputs = [each.communicate(timeout=300)[0] for each in started]
    assert [each.returncode for each in started] == [0] * nodes, outputs
    assert (tmp_path / "run" / "final" / "config.json").exists()
