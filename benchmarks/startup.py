"""How long does a start take? Compares imports, the first score and a load with transformers alone, in new processes.

    python benchmarks/startup.py [--rounds 9] [--save NAME]

The two sides alternate, with one thread each, so that other programs slow both alike. The first score is that of the
embedded reward model; a load is that of 25M weights, in a process that has loaded it before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from statistics import median

import torch
import workloads
from transformers.utils import logging

from gym_rm.checks import model_source

CLOCKS = ("wall", "processor")
CONVERSATION = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "7"}]
BEGIN = "import time; clocks = lambda: (time.perf_counter(), time.process_time()); began = clocks()"
END = "print([end - begin for end, begin in zip(clocks(), began)])"
GYM_RM = "import gym_rm, torch; torch.set_num_threads(1)"
TRANSFORMERS = """import torch; torch.set_num_threads(1)
from transformers import AutoModelForSequenceClassification, AutoTokenizer"""
SCORE = "gym_rm.load_scorer({folder!r}).score([{conversation!r}])"
FORWARD = """model = AutoModelForSequenceClassification.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
with torch.inference_mode():
    model(**tokenizer.apply_chat_template({conversation!r}, return_tensors='pt', return_dict=True))"""

Program = tuple[str, ...]


def programs(embedded: str, folder: str) -> dict[str, dict[str, Program]]:
    """Return the programs of both sides by what they measure."""

    def written(code: str, source: str) -> str:
        return code.format(folder=source, conversation=CONVERSATION)

    score, forward = written(SCORE, embedded), written(FORWARD, embedded)
    load, plain = written(SCORE, folder), written(FORWARD, folder)
    return {
        "import": {"gym_rm": (BEGIN, "import gym_rm", END), "transformers": (BEGIN, "import transformers", END)},
        "first score": {
            "gym_rm": (BEGIN, GYM_RM, score, END),
            "transformers": (BEGIN, TRANSFORMERS, forward, END),
        },
        "load of 25M weights": {
            "gym_rm": (GYM_RM, load, BEGIN, load, END),
            "transformers": (TRANSFORMERS, plain, BEGIN, plain, END),
        },
    }


def seconds(program: Program) -> list[float]:
    """Return the seconds of a program by both clocks, from a new process."""
    command = [sys.executable, "-c", "\n".join(program)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    times: list[float] = json.loads(output.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = workloads.parse_args(parser)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    times = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = workloads.tokenizer()
        for part in (tokenizer, workloads.reward_model("25M", len(tokenizer))):
            part.save_pretrained(folder)
        measured = programs(str(model_source("path", "embedded:reward_model")), folder)
        for number in range(args.rounds + 1):
            for name, sides in measured.items():
                for side, program in sides.items():
                    taken = seconds(program)
                    if number:  # the first round fills the caches of files and of compiled modules
                        times[name, side].append(taken)
    values = {
        name: {
            side: dict(zip(CLOCKS, map(median, zip(*times[name, side], strict=True)), strict=True)) for side in sides
        }
        for name, sides in measured.items()
    }
    for name, sides in values.items():
        shown = "   ".join(f"{side} {took['wall']:.2f} s ({took['processor']:.2f})" for side, took in sides.items())
        print(f"{name:<20}{shown}")
    workloads.results.save(args.save, values)


if __name__ == "__main__":
    main()
