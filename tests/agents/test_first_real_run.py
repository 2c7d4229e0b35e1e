"""The commands of `gym-rm demo --real`, with the embedded policy in place of a real model."""

import importlib.resources
import json
import sys

import pytest

from agents import first_real_run
from agents.first_real_run import FirstRealRun, one_short_sentence, split, write
from gym_rm.errors import ConfigError
from gym_rm.reports.runs import read_run
from tests.cli.command import runner

POLICY = importlib.resources.files("gym_rm") / "assets" / "policy"


def test_one_short_sentence_is_finished_and_has_five_to_ten_words():
    replies = ["It is made of milk.", "one two three " * 6 + "four five.", "It is made of", "Milk."]
    assert [one_short_sentence([{"role": "assistant", "content": each}], None) for each in replies] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]


def test_pairs_with_one_prompt_are_never_on_both_sides(tmp_path):
    pair = {"chosen": "good", "rejected": "bad"}
    write(tmp_path / "pairs.jsonl", ({"prompt": str(number % 6), **pair} for number in range(12)))
    train, held_out = split(tmp_path / "pairs.jsonl", FirstRealRun(num_pairs=3))
    prompts = [{json.dumps(row["prompt"]) for row in rows} for rows in (train, held_out)]
    assert [len(each) for each in prompts] == [3, 2]
    assert not prompts[0] & prompts[1]
    write(tmp_path / "pairs.jsonl", [{"prompt": "1", **pair}])
    with pytest.raises(ConfigError, match="1 prompts; at least 6"):
        split(tmp_path / "pairs.jsonl", FirstRealRun())


@pytest.mark.filterwarnings("ignore")
def test_its_commands_run_with_pairs_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(first_real_run, "gym_rm", runner())
    pairs = tmp_path / "hub.jsonl"
    asked = [f"\n\nHuman: Say {n}\n\nAssistant: " for n in range(12)]  # as HH writes conversations
    write(pairs, ({"chosen": f"{each}It is so.", "rejected": f"{each}No."} for each in asked))
    monkeypatch.setattr(first_real_run, "pairs_of_the_hub", lambda: str(pairs))
    sizes = {"steps": 2, "num_prompts": 4, "audited_rows": 2}
    first_real_run.run(FirstRealRun(model=str(POLICY), output=str(tmp_path), **sizes))
    assert read_run(tmp_path / "policy").before_and_after()
    assert read_run(tmp_path / "reward-model").training
    for file in ("policy/report.html", "evaluation/report.html", "audit.json"):
        assert (tmp_path / file).exists()
