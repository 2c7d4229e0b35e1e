"""A longer task for `gym-rm grpo`: a second question, which the embedded policy cannot answer at first.

    gym-rm agent two_questions outputs/two-questions  # writes the prompts, made of the embedded ones
    gym-rm grpo --config two_questions

The user asks for the highest (or lowest) of three numbers, and then for the opposite. The embedded policy has seen only
first questions. Each reply has a reward with three components: `right` (it has the right number), `listed` (it has a
number of the question that was not said yet) and `sentence` (it is one short sentence).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import gym_rm
from gym_rm.data.prompts import load_prompts

WEIGHTS = {"right": 1.0, "listed": 0.3, "sentence": 0.1}


def score(conversations: Sequence[gym_rm.Conversation], prompts: Sequence[gym_rm.Prompt]) -> gym_rm.Scores:
    """Return the weighted sum of the components for the last reply of each conversation."""
    components: dict[str, list[bool]] = {name: [] for name in WEIGHTS}
    for conversation, prompt in zip(conversations, prompts, strict=True):
        *said, reply = [message["content"] for message in conversation if message["role"] == "assistant"]
        expected, found = answers(prompt.messages[-1]["content"]), re.findall(r"\d+", reply)
        fresh = set(re.findall(r"\d+", prompt.messages[-1]["content"])) - set(re.findall(r"\d+", " ".join(said)))
        components["right"].append(found == [expected[len(said)]])
        components["listed"].append(len(found) == 1 and found[0] in fresh)
        components["sentence"].append(re.fullmatch(r"[A-Z][a-z' ]+ \d+\.", reply) is not None)
    rewards = sum(weight * np.array(components[name], float) for name, weight in WEIGHTS.items())
    return gym_rm.Scores.from_rewards(rewards, components=components)


def answers(question: str) -> tuple[str, str]:
    """Return the right answers to a question and to its opposite."""
    lowest, *_, highest = sorted(re.findall(r"\d+", question), key=int)
    return (lowest, highest) if asks_for_lowest(question) else (highest, lowest)


def asks_for_lowest(question: str) -> bool:
    return re.search(r"smallest|smaller|lowest|worst", question) is not None


def write_prompts(folder: Path) -> None:
    """Write the embedded prompts with a second question; the answer is that of the second question."""
    rows = []
    for prompt in load_prompts(None):
        question = prompt.messages[-1]["content"]
        second = "And what is the highest?" if asks_for_lowest(question) else "And what is the lowest?"
        rows.append({"prompt": question, "user_turns": [second], "answer": answers(question)[1]})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {folder}; train with: gym-rm grpo --config two_questions")


if __name__ == "__main__":
    write_prompts(Path(sys.argv[1]))
