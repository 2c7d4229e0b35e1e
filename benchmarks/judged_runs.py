"""Train the embedded policy by a judge that compares its replies, and by the embedded reward model; compare the curves.

    python benchmarks/judged_runs.py [--seeds 1 2 3 4 5] [--estimators grpo leave_one_out] [--plot curves.svg]

All runs are those of `agents/grpo.py` with its defaults, one after another; the judged ones have the settings of
`configs/grpo/judged.yaml`. `right` is the share of right answers to the held-out prompts, before and after training,
and `proper` that of replies that are one of the four sentences of the task; both are checked without a model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_rm.reports.runs import read_run
from scripts.check_demo import check

ROOT = Path(__file__).parents[1]
REWARDS = {"reward model": [], "judge": ["--config", str(ROOT / "configs" / "grpo" / "judged.yaml")]}
COLOURS = {"reward model": "tab:gray", "judge": "tab:blue"}
PHASES = ("generate", "score", "update")


def run(rewards, estimator, seed, folder, settings):
    """Train a policy in a process of its own, and return what came of it."""
    command = [sys.executable, str(ROOT / "agents" / "grpo.py"), *REWARDS[rewards]]
    command += [f"seed={seed}", f"advantage.estimator={estimator}", f"output={folder}", *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    finished = read_run(folder)
    before, after, _ = check(finished)
    steps = len(finished.training)
    return {
        "rewards": rewards,
        "estimator": estimator,
        "seed": seed,
        "right": [before[0], after[0]],
        "proper": [before[1], after[1]],
        "seconds": finished.held_out[-1]["seconds"],
        "step": {name: sum(row[f"phase_seconds/{name}"] for row in finished.training) / steps for name in PHASES},
        "curve": [[row["step"], row["seconds"], row["accuracy"]] for row in finished.held_out],
    }


def plot(path, runs):
    """Draw the share of right answers to held-out prompts over the steps, a panel for each estimator."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    estimators = list(dict.fromkeys(each["estimator"] for each in runs))
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "judged runs", "font.size": 9}
    figure, axes = plt.subplots(
        1, len(estimators), figsize=(4 * len(estimators), 2.8), sharey=True, squeeze=False, constrained_layout=True
    )
    for axis, estimator in zip(axes[0], estimators, strict=True):
        for rewards, colour in COLOURS.items():
            chosen = [each for each in runs if (each["rewards"], each["estimator"]) == (rewards, estimator)]
            for number, each in enumerate(chosen):
                steps, _, right = zip(*each["curve"], strict=True)
                axis.plot(steps, right, color=colour, linewidth=1, label=None if number else rewards)
        axis.set(title=estimator, xlabel="step", ylim=(0.3, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("right answers, held out")
    axes[0][0].legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--estimators", nargs="+", default=["grpo", "leave_one_out"])
    parser.add_argument("--json", type=Path, help="file for the numbers of all runs")
    parser.add_argument("--plot", type=Path, help="file for the curves")
    parser.add_argument("settings", nargs="*", metavar="name=value", help="settings of all runs, such as steps=40")
    args = parser.parse_args()
    runs = []
    print("| rewards | estimator | seed | right | proper | seconds | generate, score, update: seconds of a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for estimator in args.estimators:
            for seed in args.seeds:
                for rewards in REWARDS:  # beside each other, so that a busy machine slows both
                    found = run(rewards, estimator, seed, Path(folder) / str(len(runs)), args.settings)
                    runs.append(found)
                    cells = [rewards, estimator, str(seed)]
                    cells += [f"{found[name][0]:.1%} to {found[name][1]:.1%}" for name in ("right", "proper")]
                    cells += [f"{found['seconds']:.0f}", ", ".join(f"{each:.2f}" for each in found["step"].values())]
                    print(f"| {' | '.join(cells)} |", flush=True)
    for estimator in args.estimators:
        for rewards in REWARDS:
            chosen = [each for each in runs if (each["rewards"], each["estimator"]) == (rewards, estimator)]
            right, seconds = [each["right"][1] for each in chosen], [each["seconds"] for each in chosen]
            spread = f"{statistics.mean(right):.1%} right, from {min(right):.1%} to {max(right):.1%}"
            print(f"{rewards}, {estimator}: {spread}; {statistics.median(seconds):.0f} s")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    if args.plot:
        plot(args.plot, runs)


if __name__ == "__main__":
    main()
