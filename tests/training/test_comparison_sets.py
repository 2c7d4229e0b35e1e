"""What a run reads: rows that are left out are counted with the reason, and prompts are not divided."""

import json
import re

import pytest

import gym_rm
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from tests.training.runs import curve, open_run, pairs, settings_of, trained, write_rows


def test_dropped_rows_are_named_with_their_reasons(saved_model, tmp_path, caplog):
    rows = [
        *pairs(6),
        {"prompt": "Long", "chosen": "yes " * 200, "rejected": "no"},
        {"prompt": "Equal", "chosen": "yes", "rejected": "yes"},
        {"context": "Tie", "response1": "yes", "response2": "no", "overall_preference": 0},
        {"prompt": "Malformed", "chosen": 3, "rejected": "no"},
        {"prompt": "Empty", "chosen": "", "rejected": "no"},
        {"prompt": "Tools", "chosen": "yes", "rejected": "no", "tools": [{"type": "function"}]},
    ]
    options = ("data.on_error=drop", "max_steps=1", "model.reward_model_kwargs={max_length: 128}")
    run = open_run(settings_of(tmp_path, saved_model("qwen3"), rows, *options))
    assert len(run.learner.training.examples) == 6
    assert "training: 6 of 12 comparisons are not used" in caplog.text
    expected = ["max_length", "replies are equal", "a tie", "'chosen'", "is empty", "'tools'[0] must be"]
    for line, words in enumerate(expected, start=7):
        (first,) = [row.where for row in run.learner.training.dropped if words in row.reason]
        assert re.search(rf"\b{line}\b", first), first
        assert first in caplog.text


def test_cut_conversations_are_counted(saved_model, tmp_path, caplog):
    turns = [("user", "Long " * 100), ("assistant", "So?"), ("user", "Short.")]
    prompt = [{"role": role, "content": text} for role, text in turns]
    rows = [*pairs(4), {"prompt": prompt, "chosen": "yes", "rejected": "no"}]
    kwargs = "model.reward_model_kwargs={max_length: 128, overlong: drop_turns}"
    run = open_run(settings_of(tmp_path, saved_model("qwen3"), rows, kwargs))
    assert run.learner.training.tokens_cut > 100
    assert "training: 2 conversations were cut by" in caplog.text


def test_a_validation_share_keeps_rows_with_one_prompt_together(saved_model, tmp_path):
    options = ("data.validation_share=0.33",)
    first, second = (
        open_run(settings_of(tmp_path, saved_model("qwen3"), pairs(24), *options, f"output={tmp_path / name}")).learner
        for name in "ab"
    )
    prompts = []
    for each in (first.training, first.validation[0]):
        texts = [first.start.tokenizer.decode(example.sequences[0].input_ids) for example in each.examples]
        prompts.append({re.search("Question [0-9]+", text)[0] for text in texts})
    assert len(first.validation[0].examples) == 8
    assert len(prompts[1]) == 4
    assert not prompts[0] & prompts[1]
    assert first.training.digest() == second.training.digest()


def test_metrics_of_several_sets_by_name(saved_model, tmp_path):
    for name, count in (("easy", 4), ("hard", 8)):
        write_rows(tmp_path / f"{name}.jsonl", pairs(count))
    sets = json.dumps({name: str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")})
    finished = trained(tmp_path, saved_model("qwen3"), None, f"data.validation={sets}", "max_steps=2")
    rows = [row for row in curve(finished.folder / "validation.csv") if row["step"] == "2"]
    assert [(row["set"], row["num_pairs"]) for row in rows] == [("easy", "4.0"), ("hard", "8.0")]
    assert set(finished.measured) == {"easy", "hard"}
    assert finished.best_value is not None


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (
            [{"context": "Tie", "response1": "a", "response2": "b", "overall_preference": 0}] * 3,
            [],
            "a tie, from which",
        ),
        ([], [], "has no rows"),
        (pairs(2), ["data.validation_share=0.1"], "of 1 prompts is 0 prompts"),
        (pairs(4), ["loss.preferences=margin_bradley_terry"], "no margin"),
        (pairs(4), ["data.validation={training: x.jsonl}"], "the name 'training' is taken"),
        (pairs(4), ["data.train=[]"], "data.train is missing"),
        (pairs(4), ["data.train=missing.jsonl"], "missing.jsonl"),
        (pairs(4), ["loss.objective=steps"], "does not fit"),
        (pairs(4), ["loss.objective=ratings"], "no rating for any of the objectives"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_the_reason(rows, overrides, message, saved_model, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_run(settings_of(tmp_path, saved_model("qwen3"), rows, *overrides))
    assert not (tmp_path / "run").exists()


def test_tools_of_a_row_are_written_in_training_as_in_scoring(saved_model, tmp_path):
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    )
    row = {"prompt": "Now?", "chosen": "yes", "rejected": "no", "tools": json.dumps([{"name": "now"}])}
    options = f"model.reward_model_kwargs={{chat_template: {template}}}"
    run = open_run(settings_of(tmp_path, saved_model("qwen3"), [row] * 4, options))
    (prompt,) = load_prompts([row])
    scorer = gym_rm.load_scorer(saved_model("qwen3"), chat_template=str(template))
    (scored,) = scorer.renderer.encode([[*prompt.messages, {"role": "assistant", "content": "yes"}]], [prompt.tools])
    assert run.learner.training.examples[0].sequences[0].input_ids.tolist() == scored.input_ids.tolist()
    assert "now" in scorer.renderer.tokenizer.decode(scored.input_ids)
