import signal
import subprocess
import sys
import time

import pytest

import gym_rm
import gym_rm.cli.score
from gym_rm.errors import RemoteError
from tests.cli.command import ROWS, LengthScorer, read, run, scores_of, write

# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--on-error", "ignore"], "Invalid value for '--on-error'"),
        (["--reward-mode", "x"], "No such option"),
        (["--option", "x"], "expected the form name=value"),
        (["--reward-model", '{"kind": '], "error: "),
    ],
)
def test_invalid_arguments_exit_with_code_2(tmp_path, arguments, message):
    assert message in run(write(tmp_path / "in.jsonl", ROWS), *arguments, code=2).stderr


def test_options_are_passed_to_load_scorer(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args, **options: seen.append((args, options)) or LengthScorer())
    source = write(tmp_path / "in.jsonl", ROWS)
    run(source, "--reward-model", '{"kind": "x", "a": [1]}', "--option", "dtype=float32", "--option", "b.c=3e-4")
    run(source, "--reward-model", "org/name", "--option", "max_length=7")
    assert seen == [
        (({"kind": "x", "a": [1]},), {"dtype": "float32", "b": {"c": 3e-4}}),
        (("org/name",), {"max_length": 7}),
    ]


# --- errors ------------------------------------------------------------------------------------------------------


def test_an_interruption_prints_how_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: LengthScorer(raises=KeyboardInterrupt()))
    source = write(tmp_path / "in.jsonl", ROWS)
    result = run(source, "-o", tmp_path / "out.jsonl", "--batch-size", 2, code=130)
    assert "interrupted after 4 finished lines; repeat the same command to resume." in result.stderr


def test_the_error_of_a_scorer_names_the_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args: LengthScorer(raises=RemoteError("the server is gone")))
    source = write(tmp_path / "in.jsonl", ROWS)
    result = run(source, "--batch-size", 2, code=1)
    assert "error: the server is gone\nraised by the scorer LengthScorer" in result.stderr
    assert f"\nwhile scoring {source} line 5 to {source} line 6\n" in result.stderr


def test_a_bad_first_line_is_reported_before_the_model_is_loaded(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(gym_rm, "load_scorer", lambda *args, **options: loaded.append(args) or LengthScorer())
    source = write(tmp_path / "in.jsonl", ["{", *ROWS])
    assert "in.jsonl line 1: not valid JSON" in run(source, code=1).stderr
    assert loaded == []
    run(write(tmp_path / "bad.jsonl", ["{", "}"]), "--on-error", "skip", code=3)
    assert loaded == []


# --- warnings ----------------------------------------------------------------------------------------------------


def test_scores_of_the_embedded_model_are_announced_once(tmp_path, saved_model):
    source = write(tmp_path / "in.jsonl", ROWS)
    result = run(source, "--batch-size", 2, "-o", tmp_path / "out.jsonl")
    assert result.stderr.count("warning: the scores come from the small reward model that is part of the package") == 1
    assert "Pass --reward-model" in result.stderr
    assert run(source, "--reward-model", saved_model("qwen3"), "-o", tmp_path / "two.jsonl").stderr == ""


# --- the process -------------------------------------------------------------------------------------------------

SLOW_COMMAND = """
import sys, time
import gym_rm, gym_rm.cli.main

def slow(conversations):
    time.sleep(0.2)
    return [len(conversation[-1]["content"]) for conversation in conversations]

gym_rm.load_scorer = lambda *args, load=gym_rm.load_scorer: load(slow)
sys.argv = ["gym-rm", *sys.argv[1:]]
gym_rm.cli.main.main()
"""


def test_a_stopped_process_leaves_a_file_that_can_be_continued(tmp_path):
    source = write(tmp_path / "in.jsonl", [{**row, "copy": copy} for copy in range(100) for row in ROWS])
    out, store = tmp_path / "out.jsonl", tmp_path / "out.jsonl.scores"
    command = [sys.executable, "-c", SLOW_COMMAND, "score", source, "-o", out, "--batch-size", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not (store.exists() and store.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            stderr = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "repeat the same command to resume" in stderr
    assert 0 < len(read(store)) < 1000


# --- verifiers ---------------------------------------------------------------------------------------------------

VERIFIER = '''
from gym_rm import Scores

def exact_match(conversations, prompts):
    """Return 1 if the reply ends with the answer of its row, else 0."""
    errors = [None if prompt.answer else f"row {prompt.prompt_id} has no answer" for prompt in prompts]
    answers = [(prompt.answer or "").replace(",", "") for prompt in prompts]
    said = [conversation[-1]["content"].rpartition(" ")[2].replace(",", "") for conversation in conversations]
    rewards = [float(one == other) for one, other in zip(said, answers)]
    return Scores.from_rewards(rewards, errors=errors).raise_for_errors().rewards
'''
GRADED = [
    {"id": "a", "prompt": "What is 2 + 2?", "response": "It is 4", "answer": "4"},
    {"id": "b", "prompt": "What is 3 + 3?", "response": "It is 6"},
    {"id": "c", "prompt": "What is 999 + 1?", "responses": ["It is 1,000", "It is 998"], "answer": 1000},
]


@pytest.fixture
def verify(tmp_path, monkeypatch):
    """Function that runs the command in a folder with `my_verifier.py` and returns stderr."""
    (tmp_path / "my_verifier.py").write_text(VERIFIER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_verifier", raising=False)

    def verify(source, *options, code=0):
        return run(source, "--reward-model", "my_verifier:exact_match", "-o", "out.jsonl", *options, code=code).stderr

    return verify


def test_a_verifier_compares_replies_with_the_answer_of_their_row(tmp_path, verify):
    write(tmp_path / "in.jsonl", GRADED)
    expected = "1 of 3 lines have no score; their field score_error has the reason.\n"
    assert verify("in.jsonl", "--on-error", "skip", code=3) == expected
    assert scores_of(tmp_path / "out.jsonl") == [1.0, None, [1.0, 0.0]]
    assert [row.get("score_error") for row in read(tmp_path / "out.jsonl")] == [None, "row b has no answer", None]


def test_columns_of_other_names_are_read_and_kept(tmp_path):
    rows = [{"Question": "Which is the largest, 12, 30 or 27?", "Reply": f"It is {n}."} for n in (30, 12)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run(source, "-o", out, "--column", "prompt=Question", "--column", "response=Reply")
    right, wrong = scores_of(out)
    assert right > wrong
    assert read(out)[0].keys() == {"Question", "Reply", "score"}
    assert (
        "there is no column 'Query', got the fields ['Question', 'Reply']"
        in run(source, "--column", "prompt=Query", code=1).output
    )
