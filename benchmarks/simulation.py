"""Compare the simulation of a job with the real pool of replicas, then run it from 8 to 10,000 GPUs.

    python benchmarks/simulation.py pool [--size 25M] [--groups 48] [--rounds 3] [--most 4]
    python benchmarks/simulation.py scale [--conversations 10000000] [--seeds 5] [--picture docs/images/simulation.png]

`pool` measures what the simulation needs to know, on GSM8K groups that are not in the runs: seconds of a batch against
its tokens in one replica alone, how much replicas that compute at the same time slow each other, and the seconds of a
start. Then it scores with 1 to 4 replicas of one thread, without kills, with one and with two (SIGKILL at set times),
and prints measured and simulated conversations per second. Rounds alternate between all of these; inputs are medians.
During a run it counts other programs that want a core, and the simulation shares the cores with them.

`scale` has no measured times: the speeds are for a policy and a reward model of 8B parameters on H100 GPUs, from the
constants in this file.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from gym_rm.planning.quantities import Basis
from gym_rm.planning.simulate import BatchesResult, checkpoint_interval, simulate, simulate_batches
from gym_rm.planning.simulation.records import (
    LLAMA_3_HOURS,
    Failures,
    Generation,
    Scoring,
    SimulatedPool,
    Simulation,
    SimulationResult,
    Stragglers,
    Training,
)
from gym_rm.planning.workload.lengths import Lengths, constant

# --- the real pool


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the simulation needs to know about one replica; measured apart from the runs.

    Attributes:
        batch_seconds, token_seconds: of a batch, alone.
        cores: replicas' worth of work that as many replicas as there are cores do at the same time.
        load_seconds: time until a killed replica works again, alone.
    """

    batch_seconds: float
    token_seconds: float
    cores: float
    load_seconds: float


def cpu_seconds(pid: int) -> float:
    """Return the seconds that the threads of a process have computed."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measure(folder: str, groups: int, first: int, repeats: int = 2) -> Inputs:
    """Measure the inputs with replicas that are not in a pool.

    Seconds are those of the processor, which a replica with one thread takes also if other programs run.
    """
    from gym_rm.engine.executors.processes import ProcessReplica, num_cores

    plans = [recorded(folder, groups, first=first, replicas=1, budget=budget) for budget in (512, 1024, "auto")]
    different = [batch for _, batches, _, _ in plans for batch in batches[:3]]
    replicas = [ProcessReplica(i, threads=1) for i in range(num_cores())]

    def work(replica: ProcessReplica, seconds: list[float], batches: Sequence) -> None:
        for batch in batches:
            before = cpu_seconds(replica.process_ids[0])
            replica.run(batch, 600)
            seconds.append(cpu_seconds(replica.process_ids[0]) - before)

    try:
        starts, times = [], []
        for each in replicas:
            each.start(plans[0][0])
            each.run(different[0], 600)
            starts.append(cpu_seconds(each.process_ids[0]))
        for _ in range(repeats):
            times.append([])
            work(replicas[0], times[-1], different)
        alone = np.median(times, axis=0)
        beside: list[list[float]] = [[] for _ in replicas]
        threads = [
            threading.Thread(target=work, args=(each, seconds, different * repeats))
            for each, seconds in zip(replicas, beside, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        slope, offset = np.polyfit([batch.num_tokens for batch in different], alone, 1)
        cores = len(replicas) * min(1.0, repeats * sum(alone) * len(replicas) / np.sum(beside))
        loading = statistics.median(starts) - alone[0]
        return Inputs(max(0.0, float(offset)), float(slope), float(cores), float(loading))
    finally:
        for each in replicas:
            each.kill()


class Others(threading.Thread):
    """Counts other programs that want a core, while it runs.

    Linux shares the cores equally among threads; among sessions where `sched_autogroup_enabled` is on. Every replica is
    a session of one thread.

    Args:
        scorer: the scorer whose replicas, with this process, do not count.
    """

    def __init__(self, scorer) -> None:
        super().__init__(daemon=True)
        self._scorer, self._ended, self._counts = scorer, threading.Event(), []
        setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
        self._sessions = setting.exists() and setting.read_text().strip() == "1"

    def run(self) -> None:
        while not self._ended.wait(0.2):
            own = {os.getpid(), *(pid for each in self._scorer.executor.replicas for pid in each.process_ids)}
            found = []
            for task in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    state, _, _, session = task.read_text().rsplit(")", 1)[1].split()[:4]
                    if state == "R" and int(task.parts[2]) not in own:
                        found.append(session)
            self._counts.append(len(set(found)) if self._sessions else len(found))

    def mean(self) -> float:
        """Stop, and return the mean."""
        self._ended.set()
        self.join()
        return statistics.fmean(self._counts or [0])


def recorded(folder: str, groups: int, *, first: int, replicas: int, budget: int | str = "auto") -> tuple:
    """Return the spec, the batches for so many replicas, the number of conversations, and the seconds before a run."""
    import workloads

    import gym_rm
    from gym_rm.engine.executors.executor import BatchResult
    from gym_rm.engine.executors.local import LocalExecutor

    class Recorder(LocalExecutor):
        """Plans for several replicas, and computes nothing."""

        def load(self, spec):
            self.spec, self.batches = spec, []
            self.info = replace(super().load(spec), num_replicas=replicas)
            return self.info

        def run(self, batches):
            self.batches = list(batches)
            return [BatchResult(np.zeros((each.num_reads, self.info.num_values), np.float32)) for each in batches]

    conversations = workloads.gsm8k_groups(groups, 8, first=first)
    recorder = Recorder()
    scorer = gym_rm.load_scorer(folder, executor=recorder, max_num_batched_tokens=budget)
    scorer.score(conversations)
    started = time.perf_counter()
    scorer.score(conversations)
    return recorder.spec, recorder.batches, len(conversations), time.perf_counter() - started


def real_pool(folder: str, count: int):
    """Return a scorer with replicas of one thread, warm."""
    import workloads

    import gym_rm
    from gym_rm.engine.executors.processes import ProcessReplica
    from gym_rm.engine.executors.replica import ParallelOptions
    from gym_rm.engine.executors.replicas import ReplicatedExecutor

    executor = ReplicatedExecutor(
        ParallelOptions(num_replicas=count), functools.partial(ProcessReplica, num_replicas=count, threads=1)
    )
    scorer = gym_rm.load_scorer(folder, executor=executor)
    scorer.score(workloads.gsm8k_groups(2 * count, 8, first=300))
    return scorer


Kills = Sequence[tuple[float, int]]
Run = tuple[float, float, Kills]  # seconds of the call, `Others.mean`, and the kills that met a process


def run_real(scorer, conversations: list, kills: Kills) -> Run:
    """Score, and kill processes of replicas at the given times."""
    executor = scorer.executor
    done: list[tuple[float, int]] = []

    def kill(replica: int) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(executor.replicas[replica].process_ids[0], signal.SIGKILL)
            done.append((time.perf_counter() - started, replica))

    timers = [threading.Timer(at, kill, (replica,)) for at, replica in kills]
    others = Others(scorer)
    others.start()
    started = time.perf_counter()
    for timer in timers:
        timer.start()
    result = scorer.score(conversations)
    seconds = time.perf_counter() - started
    beside = others.mean()
    assert not any(result.errors), result.errors
    for timer in timers:
        timer.join()
    time.sleep(2)  # until an idle replica that was killed is missed
    latest = time.perf_counter() + 20.0  # a replica that died twice while it started is started once
    while executor.stats.restarts < executor.stats.deaths and time.perf_counter() < latest:
        time.sleep(0.05)
    return seconds, beside, [each for each in done if each[0] < seconds]


def predict(
    inputs: Inputs,
    batches: Sequence,
    replicas: int,
    before: float,
    kills: Sequence[tuple[float, int]],
    others: float = 0.0,
) -> BatchesResult:
    """Simulate a call whose batches start `before` seconds after it."""
    pool = SimulatedPool(
        "reward model",
        Scoring(inputs.token_seconds, inputs.batch_seconds),
        replicas,
        load_seconds=inputs.load_seconds,
        cores=inputs.cores,
        others=others,
        load_computes=True,
        lease_seconds=120.0,
        max_restarts=3,
    )
    works = [(each.num_reads, inputs.batch_seconds + inputs.token_seconds * each.num_tokens) for each in batches]
    return simulate_batches(
        pool,
        works,
        kills=[(max(0.0, at - before), replica) for at, replica in kills],
        failures=Failures(detection_seconds=0.0),
    )


def median_of(inputs: Sequence[Inputs]) -> Inputs:
    """Return the median of each number."""
    names = ("batch_seconds", "token_seconds", "cores", "load_seconds")
    return Inputs(*(statistics.median(getattr(each, name) for each in inputs) for name in names))


def compare(args: argparse.Namespace, console: Console) -> None:
    """Print measured and simulated conversations per second."""
    import workloads

    console.print(workloads.machine("cpu"))
    conversations = workloads.gsm8k_groups(args.groups, 8)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = workloads.tokenizer()
        tokenizer.save_pretrained(folder)
        workloads.reward_model(args.size, len(tokenizer)).save_pretrained(folder)
        inputs = [measure(folder, 8, args.groups)]
        plans = {n: recorded(folder, args.groups, first=0, replicas=n) for n in range(1, args.most + 1)}
        measured: dict[tuple[int, int], list[Run]] = {(n, kills): [] for n in plans for kills in range(3)}
        for number in range(args.rounds):
            if number:
                inputs.append(measure(folder, 8, args.groups + 8 * number))
            for n in plans:
                with contextlib.closing(real_pool(folder, n)) as scorer:
                    usual = run_real(scorer, conversations, ())
                    times = ((0.3 * usual[0], 0), (0.6 * usual[0], n - 1))
                    measured[n, 0].append(usual)
                    measured[n, 1].append(run_real(scorer, conversations, times[:1]))
                    measured[n, 2].append(run_real(scorer, conversations, times))
        median = median_of(inputs)
        console.print(
            f"measured apart: {1e3 * median.batch_seconds:.1f} ms + {1e6 * median.token_seconds:.1f} us per token; "
            f"{median.cores:.2f} replicas' work on {os.cpu_count()} cores; {median.load_seconds:.2f} s to start again"
        )
        report(console, median, plans, measured)


def report(console: Console, inputs: Inputs, plans: dict, measured: dict) -> None:
    """Print a row for each case; each run is compared with a simulation beside as many other programs."""
    table = Table("replicas", "killed after (s)", "batches", "other programs", "conversations/s", "simulated", "ratio")
    medians = []
    for (n, _), runs in measured.items():
        _, batches, count, before = plans[n]
        rates = [count / seconds for seconds, _, _ in runs]
        seconds = [before + predict(inputs, batches, n, before, kills, beside).seconds for _, beside, kills in runs]
        simulated = [count / each for each in seconds]
        ratios = [there / here for here, there in zip(rates, simulated, strict=True)]
        medians.append(statistics.median(ratios))
        table.add_row(
            f"{n}",
            "; ".join(", ".join(f"{at:.1f}" for at, _ in kills) for _, _, kills in runs),
            f"{len(batches)}",
            ", ".join(f"{beside:.1f}" for _, beside, _ in runs),
            ", ".join(f"{rate:.2f}" for rate in rates),
            ", ".join(f"{rate:.2f}" for rate in simulated),
            f"{medians[-1]:.2f}",
        )
    console.print(table)
    console.print(f"simulated / measured, medians of the rounds: {min(medians):.2f} to {max(medians):.2f}")


# --- at scale

# 8B policy and 8B reward model in bfloat16 on H100 SXM: 3.35e12 bytes/s, of which 0.8 are reached; 989e12 FLOP/s.
ROUND = 16e9 / (3.35e12 * 0.8)  # reading the weights
CONTEXT = 131_072 / (3.35e12 * 0.8)  # reading the cache of one token: 32 layers, 8 heads of 128, 2 values of 2 bytes
REPLY = 2e-5  # sampling and the driver, per reply and round: an assumption
PREFILL = 1 / 47_000  # per token; AIConfigurator's prediction for 8B
UPDATE = (
    6 * 8e9 * 4 / 3 / (989e12 * 0.4)
)  # per token on one GPU: forward, backward and recomputation at 40 % of the peak
GROUP = 8
PROMPT = 512
# Long replies of a reasoning model: median 3,000 tokens, 95 % below 16,000, at most 32,768 (lognormal, cut).
LENGTHS = Lengths(
    tuple(
        min(32_768.0, 3000 * float(np.exp(statistics.NormalDist().inv_cdf((i + 0.5) / 64) * 1.018))) for i in range(64)
    ),
    Basis.ASSUMPTION,
    "lognormal",
)
PER_GPU = 32  # conversations of a step for each GPU
SIZES = (8, 64, 512, 2048, 10_000)
RATES = (0, 1, 10)  # times as many failures as in the training of Llama 3
DETECTION, LOAD, TRAINER_LOAD, SAVE = 30.0, 120.0, 300.0, 10.0


def job(gpus: int, asynchronous: bool, times: float, conversations: int, seed: int, step_seconds: float) -> Simulation:
    """Return a job whose step has `PER_GPU` conversations for each GPU; checkpoints are as far apart as Young says.

    Synchronous: all GPUs generate, score and update in turn. Asynchronous: 1/8 trains, 1/32 scores,
    the others generate.
    """
    scoring, training = max(1, gpus // 32), gpus // 8
    parts = (gpus - scoring - training, scoring, training) if asynchronous else (gpus,) * 3
    shared = "" if asynchronous else "all"
    slow = Stragglers(share=0.01, factor=1.2, spread=0.05)
    failures = Failures(LLAMA_3_HOURS / times if times else float("inf"), DETECTION)
    interval = checkpoint_interval(SAVE, LLAMA_3_HOURS * 3600 / times / parts[2]) if times else float("inf")
    every = max(1, round(interval / step_seconds)) if times else conversations
    pools = (
        SimulatedPool("generation", Generation(ROUND, REPLY, CONTEXT, PREFILL, 256), parts[0], 1, shared, LOAD, slow),
        SimulatedPool("reward model", Scoring(PREFILL, 0.005, 65_536), parts[1], 1, shared, LOAD, slow),
        SimulatedPool(
            "training",
            Training(UPDATE / parts[2], 0.5, every, SAVE),
            parts[2],
            1,
            shared,
            TRAINER_LOAD,
            Stragglers(spread=0.02),
        ),
    )
    return Simulation(
        pools,
        conversations,
        PER_GPU * gpus,
        LENGTHS,
        constant(PROMPT),
        GROUP,
        asynchronous,
        5.0,
        failures,
        seed,
    )


def scale(args: argparse.Namespace, console: Console) -> None:
    """Print and draw how throughput, idle share and the cost of failures grow with the number of GPUs."""
    names = ("GPUs", "steps", "failures a day", "conversations/s", "idle", "lost", "p50 step", "p95", "simulated in")
    table = Table(*names)
    rows: dict[tuple[bool, float, int], tuple[float, float, float]] = {}
    for asynchronous in (False, True):
        for gpus in SIZES:
            count = args.conversations if gpus >= 1000 else min(args.conversations, 400 * PER_GPU * gpus)
            usual: list[SimulationResult] = []
            for times in RATES:
                results: list[SimulationResult] = []
                longest = 0.0
                for seed in range(args.seeds):
                    step = usual[seed].step_quantile(0.5) if times else 0.0
                    started = time.perf_counter()
                    results.append(simulate(job(gpus, asynchronous, times, count, seed, step)))
                    longest = max(longest, time.perf_counter() - started)
                usual = usual or results  # without failures, of the same seeds
                total = sum(each.seconds for each in results)
                rate = sum(each.conversations for each in results) / total
                idle = sum(each.idle_share * each.seconds for each in results) / total
                lost = 1 - sum(each.seconds for each in usual) / total
                rows[asynchronous, times, gpus] = rate, idle, lost
                steps = [seconds for each in results for seconds in each.step_seconds]
                table.add_row(
                    f"{gpus:,} {'asynchronous' if asynchronous else 'synchronous'}",
                    f"{len(steps):,}",
                    f"{gpus * 24 / LLAMA_3_HOURS * times:.2f}",
                    f"{rate:,.1f}",
                    f"{idle:.1%}",
                    f"{lost:.1%}",
                    f"{np.quantile(steps, 0.5):.0f} s",
                    f"{np.quantile(steps, 0.95):.0f} s",
                    f"{longest:.1f} s",
                )
    console.print(table)
    draw(rows, args.picture)


def draw(rows: dict[tuple[bool, float, int], tuple[float, float, float]], path: Path) -> None:
    """Draw throughput and what failures cost."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = {False: "#1f6f8b", True: "#c8553d"}
    names = {False: "synchronous", True: "asynchronous"}
    styles = {0: ":", 1: "-", 10: "--"}
    labels = {0: "no failures", 1: "failures as in Llama 3", 10: "10 times as many"}
    for asynchronous, colour in colours.items():
        for times, style in styles.items():
            values = [rows[asynchronous, times, gpus] for gpus in SIZES]
            label = f"{names[asynchronous]}, {labels[times]}"
            per_gpu = [3600 * rate / gpus for (rate, _, _), gpus in zip(values, SIZES, strict=True)]
            left.plot(SIZES, per_gpu, style, color=colour, marker="o", markersize=3, label=label)
            if times:
                lost = [100 * each for _, _, each in values]
                right.plot(SIZES, lost, style, color=colour, marker="o", markersize=3, label=label)
    left.set_title("Throughput", loc="left", fontsize=11)
    left.set_ylabel("conversations per GPU and hour")
    left.set_ylim(bottom=0)
    right.set_title("Cost of failures", loc="left", fontsize=11)
    right.set_ylabel("throughput lost, %")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xticks(SIZES, [f"{gpus:,}" for gpus in SIZES])
        axis.minorticks_off()
        axis.set_xlabel("GPUs")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    pool = commands.add_parser("pool", help="compare with the real pool on this machine")
    pool.add_argument("--size", default="25M")
    pool.add_argument("--groups", type=int, default=48)
    pool.add_argument("--rounds", type=int, default=3)
    pool.add_argument("--most", type=int, default=4, help="largest number of replicas")
    large = commands.add_parser("scale", help="simulate 8 to 10,000 GPUs")
    large.add_argument("--conversations", type=int, default=10_000_000)
    large.add_argument("--seeds", type=int, default=5, help="runs of each case with failures")
    large.add_argument("--picture", type=Path, default=Path("docs/images/simulation.png"))
    args = parser.parse_args()
    console = Console(width=120)
    console.print(f"python {' '.join(sys.argv)}")
    (compare if args.command == "pool" else scale)(args, console)


if __name__ == "__main__":
    main()
