"""Measuring a user's rows: real files, every form of row, and files with mistakes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_models
from conftest import DATA, rows

from gym_rm.data.pairs import load_pairs
from gym_rm.engine.token_tree import TokenSequence, plan_trees
from gym_rm.errors import ConfigError
from gym_rm.planning.quantities import Basis
from gym_rm.planning.workload import rows as measuring
from gym_rm.planning.workload.rows import count_unique, measure_rows


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tiny_models.tokenizer("chatml")
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


def write(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def engine_tokens(tokenizer, conversations):
    """All tokens, and those of the trees that the engine plans within a budget that holds them all."""
    ids = [
        np.array(tokenizer.apply_chat_template(list(conversation), tokenize=True, return_dict=False), np.int32)
        for conversation in conversations
    ]
    total = sum(map(len, ids))
    plan = plan_trees([TokenSequence(each, np.array([len(each) - 1])) for each in ids], max_num_batched_tokens=total)
    assert len(plan.batches) == 1
    return total, len(plan.batches[0])


def test_graded_solutions_have_the_unique_tokens_of_the_engines_tree(qwen, gsm8k_groups):
    folder, tokenizer = qwen
    found = measure_rows(str(DATA / "gsm8k_graded.jsonl.gz"), tokenizer=folder, limit=120)
    conversations = [conversation for group in gsm8k_groups[:120] for conversation in group]
    assert (found.all_tokens, found.unique_tokens) == engine_tokens(tokenizer, conversations)
    assert found.replies_per_prompt == 4
    assert found.prompts.basis is Basis.MEASURED
    assert 0 < found.shared.value < 0.3


@pytest.mark.parametrize("name", ["hh_harmless", "rewardbench_slice"])
def test_pairs_have_the_unique_tokens_of_the_engines_tree(qwen, name):
    folder, tokenizer = qwen
    pairs = load_pairs(rows(name)[:80])
    conversations = [pair.prompt + reply for pair in pairs for reply in (pair.chosen, pair.rejected)]
    found = measure_rows(str(DATA / f"{name}.jsonl.gz"), tokenizer=folder, limit=80)
    total, unique = engine_tokens(tokenizer, conversations)
    assert found.unique_tokens == unique
    assert found.all_tokens == total


def test_prompts_alone_have_no_replies(qwen):
    folder, tokenizer = qwen
    found = measure_rows(str(DATA / "gsm8k_train.jsonl.gz"), tokenizer=folder, limit=50)
    questions = [row["question"] for row in rows("gsm8k_train")[:50]]
    lengths = [
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=True, return_dict=False, add_generation_prompt=True
            )
        )
        for question in questions
    ]
    assert found.replies is None
    assert found.replies_per_prompt == 0
    assert found.prompts.values == tuple(sorted(lengths))


def test_the_length_of_a_reply_is_what_it_adds_to_its_prompt(qwen, tmp_path):
    folder, tokenizer = qwen
    path = write(tmp_path / "rows.jsonl", [{"prompt": "What is 12 + 30?", "response": "The sum is 42."}])
    found = measure_rows(path, tokenizer=folder, limit=None)
    prompt = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    reply = "The sum is 42.<|im_end|>\n"
    assert found.prompts.values == (len(tokenizer(prompt)["input_ids"]),)
    assert found.replies.values == (len(tokenizer(reply)["input_ids"]),)


def test_without_a_tokenizer_four_characters_are_a_token(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x" * 400, "response": "y" * 200}])
    found = measure_rows(path, tokenizer=None, limit=None)
    assert found.prompts.mean == pytest.approx(100, abs=3)
    assert found.replies.mean == pytest.approx(50, abs=4)
    assert found.prompts.basis is Basis.ASSUMPTION
    assert "4 characters" in found.replies.source


def test_a_system_prompt_is_shared_but_for_one(tmp_path):
    system = {"role": "system", "content": "s" * 800}
    lines = [{"messages": [system, {"role": "user", "content": f"{k:04d}" * 50}]} for k in range(10)]
    found = measure_rows(write(tmp_path / "rows.jsonl", lines), tokenizer=None, limit=None)
    prefix, rest = 202, 52
    assert found.shared.value == pytest.approx(0.9 * prefix / (prefix + rest), rel=0.02)


def test_sharing_of_a_step_is_less_than_that_of_the_file():
    path = str(DATA / "gsm8k_train.jsonl.gz")
    if not DATA.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    whole = measure_rows(path, tokenizer=None, limit=400)
    step = measure_rows(path, tokenizer=None, limit=400, num_prompts=16)
    assert 0 < step.shared.value < whole.shared.value


@pytest.mark.parametrize(
    ("row", "replies", "turns"),
    [
        ({"prompt": "a?", "response": "b"}, 1, 1),
        ({"prompt": "a?", "chosen": "b", "rejected": "c"}, 2, 1),
        ({"context": "a?", "completions": [{"rank": 0, "completion": "b"}, {"rank": 1, "completion": "c"}]}, 2, 1),
        ({"question": "a?", "solutions": [{"text": "b"}, {"text": "c"}, {"text": "d"}]}, 3, 1),
        ({"prompt": "a?", "responses": ["b", "c"]}, 2, 1),
        ({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}, 1, 1),
        ({"messages": [{"role": "user", "content": "a?"}]}, 0, 1),
        ({"prompt": "a?", "user_turns": ["and then?", "why?"]}, 0, 3),
        ("a?", 0, 1),
    ],
    ids=["response", "pair", "ranked", "solutions", "responses", "messages", "prompt", "turns", "text"],
)
def test_every_form_of_row_is_read(tmp_path, row, replies, turns):
    found = measure_rows(write(tmp_path / "rows.jsonl", [json.dumps(row)]), tokenizer=None, limit=None)
    assert found.replies_per_prompt == replies
    assert (found.replies is None) == (replies == 0)
    assert found.turns.values == (turns,)


def test_rows_with_the_same_prompt_are_replies_to_one_prompt(tmp_path):
    lines = [{"prompt": "a?", "response": reply} for reply in ("b", "c", "d")]
    found = measure_rows(write(tmp_path / "rows.jsonl", lines), tokenizer=None, limit=None)
    assert found.replies_per_prompt == 3
    assert found.shared.value == 0


def test_a_long_file_is_measured_in_its_beginning_and_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl", [{"prompt": f"{k}" * 40} for k in range(30)])
    found = measure_rows(path, tokenizer=None, limit=7)
    assert found.rows == 7
    assert "first 7 rows" in found.notes[0]
    assert measure_rows(path, tokenizer=None, limit=30).notes == ()
    monkeypatch.setattr(measuring, "MOST_CHARACTERS", 100)
    assert measure_rows(path, tokenizer=None, limit=None).rows < 30


def test_unique_tokens_are_the_different_prefixes():
    sequences = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 4, 5], [2], [1, 2, 3], [1])]
    assert count_unique(sequences) == len({tuple(ids[:k]) for ids in sequences for k in range(1, len(ids) + 1)})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no rows"),
        (["{"], "rows.jsonl line 1: not valid JSON"),
        ([{"prompt": "a"}, {"text": "b"}], "line 2: expected a prompt in one of the fields"),
        ([{"prompt": 5}], "line 1: 'prompt' must be a text or a list of messages"),
        ([{"chosen": "b"}], "line 1: the field 'rejected' is missing"),
        ([{"prompt": "a", "responses": []}], "'responses' must be a list of replies"),
    ],
    ids=["empty", "json", "fields", "type", "pair", "replies"],
)
def test_a_bad_file_gets_an_error_with_its_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        measure_rows(write(tmp_path / "rows.jsonl", lines), tokenizer=None, limit=None)


@pytest.mark.parametrize(("path", "limit"), [("missing.jsonl", None), ("x.txt", None), ("rows.jsonl", 0)])
def test_a_bad_path_or_limit_is_an_error(path, limit):
    with pytest.raises(ConfigError):
        measure_rows(path, tokenizer=None, limit=limit)


def test_a_template_that_refuses_a_row_is_an_error_with_its_line(tmp_path):
    tiny_models.tokenizer("gemma").save_pretrained(tmp_path / "gemma")
    line = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    path = write(tmp_path / "rows.jsonl", [line])
    with pytest.raises(ConfigError, match=r"line 1: the chat template of .* fails: System role not supported"):
        measure_rows(path, tokenizer=str(tmp_path / "gemma"), limit=None)


def test_measuring_needs_no_torch(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a?", "response": "b"}])
    code = (
        "import sys; from gym_rm.planning.workload.rows import measure_rows; "
        "from gym_rm.planning.model.loading import load_shape; "
        f"measure_rows({path!r}, tokenizer=None, limit=None); "
        "load_shape('Qwen/Qwen3-8B', None, num_labels=1, name='policy'); "
        "assert not {'torch', 'transformers', 'ray'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
