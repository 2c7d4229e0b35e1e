"""No command replaces what it reads, by whatever name its output is given, and none leaves a working file."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gym_rm.checks import keep_inputs
from gym_rm.errors import ConfigError
from gym_rm.evaluation.stored_scores.file import FileScoring
from gym_rm.training.checkpoints import lock_folder
from tests.cli.command import ROWS, LengthScorer, runner, write

PAIRS = [{"prompt": f"{n} + 2?", "chosen": "4", "rejected": "five"} for n in range(4)]
FUNCTION = "def ones(conversations):\n    return [1.0] * len(conversations)\n"
REQUEST = "{policy: {model: ./model}, cluster: {gpu: h100_sxm, gpus_per_node: 1}}"

# The input, the command, and where it writes.
COMMANDS = [
    ("in.jsonl", "score in.jsonl --reward-model rewards.py:ones -o OUT", "in.jsonl"),
    ("out.jsonl.scores", "score out.jsonl.scores --reward-model rewards.py:ones -o OUT", "out.jsonl"),
    ("in.csv", "score in.csv --reward-model rewards.py:ones -o OUT", "in.csv"),
    ("in.parquet", "score in.parquet --reward-model rewards.py:ones -o OUT --overwrite", "in.parquet"),
    ("pairs.json", "audit rewards.py:ones --data pairs.json -o OUT", "pairs.json"),
    ("model/config.json", "audit model -o OUT", "model/config.json"),
    ("model/config.json", "audit model -o OUT", "model/audit.json"),
    ("template.json", "audit model --option chat_template=template.json -o OUT", "template.json"),
    ("d/report.json", "evaluate d/report.json --reward-model rewards.py:ones -o OUT", "d"),
    ("d/scores.jsonl", "evaluate d/scores.jsonl --reward-model rewards.py:ones -o OUT", "d"),
    ("d/against.jsonl", "evaluate in.jsonl --scores d/against.jsonl --against rewards.py:ones -o OUT", "d"),
    ("request.yaml", "plan request.yaml -o OUT", "request.yaml"),
    ("request.yaml", "plan request.yaml -o other.json -o OUT", "request.yaml"),
    ("model/config.json", "plan policy.model=model -o OUT", "model/config.json"),
    ("model/config.json", "plan request.yaml -o OUT", "model/config.json"),
    ("run/metrics.csv", "report run -o OUT", "page.html"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("rewards.py").write_text(FUNCTION)
    yield tmp_path
    sys.modules.pop("rewards", None)


def put(name: str) -> bytes:
    """Write an input of the format of its name."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name == "model":
        path.write_text('{"model_type": "qwen3"}')
        Path("request.yaml").write_text(REQUEST)
    elif name == "in.parquet":
        pytest.importorskip("pyarrow.parquet").write_table(__import__("pyarrow").Table.from_pylist(PAIRS), name)
    elif path.suffix == ".yaml":
        path.write_text(REQUEST)
    elif path.suffix == ".csv":
        path.write_text("prompt,response\n2 + 2?,4\n")
    else:
        path.write_text(json.dumps(PAIRS)) if path.suffix == ".json" else write(path, PAIRS)
    return path.read_bytes()


def link(kind: str, output: str, source: str) -> str:
    """Return another name of an output; the input itself has the name that the output leads to."""
    if kind == "as it is":
        return output
    new = Path("link") / Path(output).name
    new.parent.mkdir()
    if kind == "symlink" or Path(output).is_dir() or not Path(output).exists():
        new.symlink_to(os.path.abspath(output))
    else:
        os.link(output, new)
    return str(new)


@pytest.mark.parametrize("kind", ["as it is", "symlink", "hard link"])
@pytest.mark.parametrize(("source", "command", "output"), COMMANDS)
def test_a_command_refuses_an_output_that_is_its_input(folder, source, command, output, kind):
    before = put(source)
    if output == "page.html":
        os.link(source, output)
    if kind == "hard link" and source.endswith(".scores"):
        pytest.skip("the working files of a hard link are beside the link")
    name, *arguments = command.replace("OUT", link(kind, output, source)).split()
    result = runner(name)(*arguments, code=(1, 2))
    assert "output must not be the input" in result.output
    assert Path(source).read_bytes() == before


def test_other_files_beside_the_input_are_fine(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    keep_inputs(["in.jsonl", {"path": "model", "separator": "/"}, None, 3], ["model.json", "models/out", "out.jsonl"])


@pytest.mark.parametrize("source", ["run/metrics.csv", "run/final/x.jsonl", "run/.conversations.jsonl"])
def test_a_run_refuses_to_replace_its_data(folder, source):
    put(source)
    with pytest.raises(ConfigError, match=f"output must not be the input '{source}'"):
        lock_folder(Path("run"), {"data": {"train": (source,)}})


def test_an_input_that_changes_while_it_is_read_is_a_clear_error(tmp_path):
    source = write(tmp_path / "in.jsonl", ROWS)

    class Changing(LengthScorer):
        def score(self, conversations, prompts=None, turns="last"):
            write(source, ROWS[1:])
            return super().score(conversations, prompts, turns)

    with pytest.raises(ConfigError, match="the input changed while it was scored"):
        FileScoring(make_scorer=Changing, source=source, output=tmp_path / "out.jsonl").run()
    assert not [*tmp_path.glob(".out*")]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_full_disk_leaves_no_working_file(folder, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    write(folder / "in.jsonl", [{"prompt": "2 + 2?", "response": f"{n} {n * 7919}" * 40} for n in range(300)])
    output = folder / f"out{suffix}"
    command = [sys.executable, "-m", "gym_rm", "score", "in.jsonl", "--reward-model", "rewards.py:ones", "-o", output]
    limits = {".parquet": 16_000}  # larger than the scores, smaller than the output
    result = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limits.get(suffix, 40_000),) * 2),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "File too large" in result.stderr
    assert sorted(path.name for path in folder.iterdir() if "out" in path.name) == [
        f"out{suffix}",
        f"out{suffix}.scores",
    ]
