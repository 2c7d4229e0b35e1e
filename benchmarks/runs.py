"""Train with agents/grpo.py as the pages describe, and save what the runs came to.

    python benchmarks/runs.py --folder outputs --make           # an hour and a half on one core; what exists is kept
    python benchmarks/runs.py --folder outputs --save runs      # the numbers; scripts/make_curve_pictures.py draws them
    python benchmarks/runs.py --judge --make --save judgements  # only the judge that is trained

`right` is the share of right answers to held-out prompts, checked without a model, and `proper` that of replies that
are one of the four sentences of the task. Curves are those of held-out prompts, by step. Of the judge that is trained:
`readable` are the verdicts that can be read, `right` those that are right in all and in the readable ones, and
`consistent` the pairs whose verdict is the same in both orders; `before` and `after` are what `gym-rm evaluate` says of
the judge at temperature 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agents.three_numbers import is_proper
from benchmarks import results
from gym_rm.reports.curves import read_curve
from gym_rm.reports.runs import Run, read_run

SEEDS, FEW_SEEDS, ESTIMATORS = (1, 2, 3, 4, 5), (1, 2, 3), ("grpo", "leave_one_out")
PROCESS_MODEL = '{path: outputs/number-steps/reward-model/best, kind: process, step_token: "<|endoftext|>"}'
ALONE = f"advantage.reward_weight=0 'env.reward_model={PROCESS_MODEL}'"
STEPS = {  # what a run of process rewards is, and its settings beside those of configs/grpo/steps.yaml
    "min": ("verifier and min (the config)", ""),
    "sum": ("verifier and sum", "advantage.steps=sum"),
    "last": ("verifier and last", "advantage.steps=last"),
    "verifier": ("verifier alone", "advantage.steps=null advantage.reward_weight=0"),
    "alone-min": ("process model alone, min", ALONE),
    "alone-sum": ("process model alone, sum", f"advantage.steps=sum {ALONE}"),
    "alone-last": ("process model alone, last", f"advantage.steps=last {ALONE}"),
}


def commands() -> dict[str, str]:
    """Return the command that makes each folder, in order; agents/grpo.py also gets the folder as `output`."""
    grpo = "agents/grpo.py"
    judged, two, tool, steps = (
        f"{grpo} --config configs/grpo/{name}.yaml" for name in ("judged", "two_questions", "tool", "steps")
    )
    found = {f"demo-{seed}": f"{grpo} seed={seed}" for seed in SEEDS}
    found |= {name: f"{grpo} --config configs/grpo/{name}.yaml" for name in ("math", "mixture")}
    found |= {"short-programs": "agents/short_programs.py outputs/short-programs"}
    found |= {"code": f"{grpo} --config configs/grpo/code.yaml"}
    for estimator in ESTIMATORS:
        chosen = f"advantage.estimator={estimator}"
        found |= {f"judge-{estimator}-{seed}": f"{judged} seed={seed} {chosen}" for seed in SEEDS}
    chosen = "advantage.estimator=leave_one_out"
    found |= {f"reward-model-leave_one_out-{seed}": f"{grpo} seed={seed} {chosen}" for seed in SEEDS}
    found |= {"two-questions": "agents/two_questions.py outputs/two-questions"}
    found |= {f"two-questions-{seed}": f"{two} seed={seed}" for seed in FEW_SEEDS}
    found |= {"arithmetic": "agents/arithmetic.py outputs/arithmetic"}
    for seed in (1, 2):
        found |= {
            f"tool-with-{seed}": f"{tool} seed={seed}",
            f"tool-without-{seed}": f"{tool} env.tools=null seed={seed}",
        }
    found |= {"number-steps": "agents/number_steps.py outputs/number-steps"}
    found |= {"number-steps/reward-model": "-m gym_rm train configs/rm/steps.yaml"}
    for name, (_, settings) in STEPS.items():
        found |= {f"steps-{name}-{seed}": f"{steps} seed={seed} {settings}" for seed in FEW_SEEDS}
    return found


def judge_commands() -> dict[str, str]:
    """Return the commands of the judge that is trained, as `commands`."""
    grpo = "agents/grpo.py --config configs/grpo/judge.yaml"
    return {"judgements": "agents/judgements.py outputs/judgements"} | {
        f"trained-judge-{seed}": f"{grpo} seed={seed}" for seed in SEEDS
    }


def make(folder: Path, commands: Mapping[str, str]) -> None:
    """Run the commands whose folders do not exist, one after the other, with one thread."""
    if folder.resolve() != Path("outputs").resolve():
        sys.exit("the settings of some runs name models in outputs, so --make needs --folder outputs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, command in commands.items():
        trains_policy = command.startswith("agents/grpo.py")  # a run that was stopped goes on
        if (folder / name / ("final" if trains_policy else "")).exists():
            continue
        words = [sys.executable, *shlex.split(command), *([f"output={folder / name}"] if trains_policy else [])]
        print(shlex.join(words[1:]), flush=True)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment)


# --- one run ----------------------------------------------------------------------------------------------------------


def replies_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return shares of replies to held-out prompts, and their mean reward if they have rewards."""
    replies = [row["messages"][-1]["content"] for row in rows]
    shares = {
        "right": statistics.mean(bool(row["right"]) for row in rows),
        "proper": statistics.mean(map(is_proper, replies)),
        "I would say": statistics.mean(reply.startswith("I would say") for reply in replies),
    }
    rewards = [row["reward"] for row in rows]
    return shares if None in rewards else shares | {"reward": statistics.mean(rewards)}


def before_and_after(run: Run) -> dict[str, dict[str, float]]:
    """Return the numbers of the replies in the first and in the last measurement."""
    before, after = zip(*run.before_and_after(), strict=True)
    return {"before": replies_of(before), "after": replies_of(after)}


def of_run(folder: Path) -> dict[str, Any]:
    """Return the numbers of a run."""
    run = read_run(folder)
    measured = {str(row["step"]): row for row in run.held_out}
    names = ("accuracy", "verdict/passed", "reward_mean")  # a task without reference answers has no accuracy
    right = {step: next(row[name] for name in names if row.get(name) is not None) for step, row in measured.items()}
    first, last = run.held_out[0], run.held_out[-1]
    found: dict[str, Any] = before_and_after(run)
    found["before"]["right"], found["after"]["right"] = right[str(first["step"])], right[str(last["step"])]
    found["before"]["tokens"], found["after"]["tokens"] = first["completion_tokens"], last["completion_tokens"]
    found["held-out prompts"] = sum(row["step"] == last["step"] for row in run.measured())
    found |= {"right": right, "steps": len(run.training)}
    if "steps_per_reply" in first:
        rated = [row["steps_per_reply"] for row in run.held_out if row["steps_per_reply"] is not None]
        found["rated steps"] = {"first": rated[0], "last": rated[-1]}
    return found


def of_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what runs of process rewards came to: the lowest, the median and the highest of each number."""
    numbers = {
        "before": [run["before"]["right"] for run in runs],
        "right": [run["after"]["right"] for run in runs],
        "best": [max(run["right"].values()) for run in runs],
        "tokens before": [run["before"]["tokens"] for run in runs],
        "tokens": [run["after"]["tokens"] for run in runs],
        "rated steps before": [run["rated steps"]["first"] for run in runs],
        "rated steps": [run["rated steps"]["last"] for run in runs],
    }
    return {
        name: {"lowest": min(values), "median": statistics.median(values), "highest": max(values)}
        for name, values in numbers.items()
    }


def of_judge(folder: Path) -> dict[str, Any]:
    """Return the numbers of the runs of the judge that is trained."""
    found: dict[str, Any] = {"before": evaluated(folder / "judgements" / "judge", folder), "after": {}, "seeds": {}}
    for seed in SEEDS:
        run = folder / f"trained-judge-{seed}"
        curves: dict[str, dict[str, float]] = {"readable": {}, "right": {}, "right of readable": {}, "consistent": {}}
        for row in read_run(run).held_out:
            readable, right = 1 - (row.get("verdict/unreadable") or 0.0), row.get("verdict/right") or 0.0
            values = (readable, right, right / readable, row["position_consistent"])
            for curve, value in zip(curves.values(), values, strict=True):
                curve[str(row["step"])] = value
        found["seeds"][f"{seed}"] = curves
        found["after"][f"{seed}"] = evaluated(run / "final", folder)
    return found


def evaluated(judge: Path, folder: Path) -> dict[str, float]:
    """Return what `gym-rm evaluate` says of a judge about the held-out pairs."""
    options = {"kind": "judge", "style": "genrm", "temperature": 0, "max_new_tokens": 32}
    words = ["evaluate", f"{folder}/judgements/held_out_pairs.jsonl", "--json", "--reward-model"]
    command = [sys.executable, "-m", "gym_rm", *words, json.dumps({**options, "model": str(judge)})]
    (found,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["sets"]
    report = found["preferences"]["judge"]
    return {
        "right": found["preferences"]["accuracy"]["value"],
        "refused": report["refused"]["value"],
        "prefers first": report["prefers_first"]["value"],
        "consistent": report["position_consistent"]["value"],
        "pairs": found["preferences"]["metrics"]["num_pairs"],
    }


# --- all runs ---------------------------------------------------------------------------------------------------------


def collect(folder: Path) -> dict[str, Any]:
    """Return the numbers of all runs that exist, by what they show."""
    names = {"demo": {f"{seed}": f"demo-{seed}" for seed in SEEDS}}
    names["judge"] = {f"{each}, {seed}": f"judge-{each}-{seed}" for each in ESTIMATORS for seed in SEEDS}
    names["reward model"] = {f"grpo, {seed}": f"demo-{seed}" for seed in SEEDS}
    names["reward model"] |= {f"leave_one_out, {seed}": f"reward-model-leave_one_out-{seed}" for seed in SEEDS}
    names["verified"] = {name: name for name in ("math", "code", "mixture")}
    names["two questions"] = {f"{seed}": f"two-questions-{seed}" for seed in FEW_SEEDS}
    names["tool"] = {
        f"{label}, seed {seed}": f"tool-{name}-{seed}"
        for name, label in {"with": "with the calculator", "without": "without (`env.tools=null`)"}.items()
        for seed in (1, 2)
    }
    found = {
        topic: {label: of_run(folder / name) for label, name in of.items() if (folder / name / "final").exists()}
        for topic, of in names.items()
    }
    found["steps"] = {}
    for name, (label, _) in STEPS.items():
        folders = [folder / f"steps-{name}-{seed}" for seed in FEW_SEEDS]
        if all((each / "final").exists() for each in folders):
            found["steps"][label] = of_seeds([of_run(each) for each in folders])
    process_model = folder / "number-steps" / "reward-model" / "validation.csv"
    if process_model.exists():
        found["process model"] = {"accuracy": max(float(row["step_accuracy"]) for row in read_curve(process_model))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="folder of the runs; default: %(default)s")
    parser.add_argument("--make", action="store_true", help="make the runs that do not exist")
    parser.add_argument("--judge", action="store_true", help="only the runs of the judge that is trained")
    results.add_argument(parser)
    args = parser.parse_args()
    if args.make:
        make(args.folder, judge_commands() if args.judge else commands())
    if args.save:
        results.save(args.save, of_judge(args.folder) if args.judge else collect(args.folder))


if __name__ == "__main__":
    main()
