"""Train a policy with agents/grpo.py and with TRL's GRPOTrainer: seconds per step by phase, peak memory, reward curves.

    python benchmarks/grpo.py [--tasks gsm8k embedded] [--rounds 3] [--steps 3]
    python benchmarks/grpo.py --curves [--seeds 0 1 2] [--steps 40]

Both start from the same weights and sample groups of 8 replies to the same prompts in the same order, at temperature 1.
Both learn in float32 without dropout: one update of AdamW (fused, betas 0.9 and 0.95, no weight decay) per step, a
constant learning rate, gradient norm up to 1, advantages divided by the standard deviation of their group, a mean over
tokens, and no KL term. Neither logs, measures or saves during the steps that are timed.

- gsm8k: prompts of GSM8K, replies of up to 64 tokens, and policy and reward model with random weights in a shape of
  Qwen3. Such a policy hardly ever ends a reply, so that all have 64 tokens and TRL pads only prompts.
- embedded: policy, reward model and prompts of the package, whose replies have about 5 tokens.

TRL runs without gradient checkpointing and gets its own path for reward models, a classifier of transformers. `trl
micro` is TRL with gradients accumulated over `--micro-batch` replies; TRL has no padding-free batches for GRPO, and its
continuous batching needs a GPU. Each run has a process of its own, and the sides alternate. The first step of a run is
not counted. Generate is from prompts to texts, score from texts to rewards, and update is everything else.

With `--curves`, both get their rewards from the same scorer, so that the mean reward of a step can be compared.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
import transformers
import workloads
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

import gym_rm
from gym_rm.data.prompts import load_prompts
from gym_rm.types import Prompt

ROOT = Path(__file__).parents[1]
METHODS = {"ours": "gym_rm", "trl": "TRL", "trl micro": "TRL, small forwards"}
PHASES = ("generate", "score", "update", "step")
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Task:
    """What both train: models, prompts, and the sizes of a step."""

    policy: str
    reward_model: str
    prompts: str | None
    num_prompts: int
    max_new_tokens: int
    learning_rate: float
    steps: int
    micro_batch: int | None = None
    group_size: int = 8
    seed: int = 0
    dtype: str = "float32"
    batch_tokens: int | None = None
    """Most tokens in a forward and backward of ours; None for its default."""

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.group_size

    def ordered_prompts(self) -> list[Prompt]:
        """Return the prompts of all steps, in the order in which agents/grpo.py visits them."""
        prompts = load_prompts(self.prompts)
        epochs = range(-(-self.steps * self.num_prompts // len(prompts)))
        order = [np.random.default_rng([self.seed, epoch]).permutation(len(prompts)) for epoch in epochs]
        return [prompts[row] for row in np.concatenate(order)[: self.steps * self.num_prompts].tolist()]


@dataclass
class Run:
    """What a run came to: seconds of each phase and step by clock, tokens sampled, mean reward of each step."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: float = 0.0
    rewards: list[float] = field(default_factory=list)
    peak: float = 0.0


class Stopwatch:
    """Seconds of processor and wall time spent in functions, by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, dict[str, float]]] = []
        self._spent = {clock: defaultdict(float) for clock in CLOCKS}
        self._started: dict[str, float] = {}

    def measured(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time is added to a phase."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            before = {clock: read() for clock, read in CLOCKS.items()}
            try:
                return function(*arguments, **options)
            finally:
                for clock, read in CLOCKS.items():
                    self._spent[clock][phase] += read() - before[clock]

        return timed

    def next_step(self) -> None:
        """End a step, if one was begun, and begin another."""
        now = {clock: read() for clock, read in CLOCKS.items()}
        if self._started:
            step = {clock: dict(self._spent[clock]) | {"step": now[clock] - self._started[clock]} for clock in CLOCKS}
            for spent in step.values():
                spent["update"] = spent["step"] - spent["generate"] - spent["score"]
            self.steps.append(step)
        self._started, self._spent = now, {clock: defaultdict(float) for clock in CLOCKS}

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean of all steps but the first, by clock and phase."""
        counted = self.steps[1:] or self.steps
        return {
            clock: {phase: statistics.mean(step[clock][phase] for step in counted) for phase in PHASES}
            for clock in CLOCKS
        }


# --- tasks -----------------------------------------------------------------------------------------------------------


def make_models(size: str, folder: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
    """Write a policy and a reward model with random weights and one tokenizer."""
    tokenizer = workloads.tokenizer()
    shape = {"vocab_size": len(tokenizer)} | workloads.SHAPES[size]
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(1)
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(
            Qwen3Config(**shape, **ids, max_position_embeddings=2048), dtype=dtype
        )
    if shape["vocab_size"] > len(tokenizer):
        # Tokens without text, and the end, have logits of 0, others about +-5: replies are full of text.
        head = policy.get_output_embeddings().weight.detach()
        head.mul_(8)[len(tokenizer) :] = 0
        head[tokenizer.eos_token_id] = 0
    models = {
        "policy": policy,
        "reward_model": workloads.reward_model(size, len(tokenizer), device=device, dtype=dtype),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def task_of(name: str, args: argparse.Namespace, folder: Path) -> Task:
    if name == "embedded":
        assets = importlib.resources.files("gym_rm") / "assets"
        models = (str(assets / "policy"), str(assets / "reward_model"))
        return Task(*models, None, args.num_prompts or 32, 24, 5e-4, args.steps)
    if not (folder / "policy").exists():
        make_models(args.size, folder)
    prompts = str(workloads.DATA / "gsm8k_graded.jsonl.gz")
    models = (str(folder / "policy"), str(folder / "reward_model"))
    return Task(*models, prompts, args.num_prompts or 4, 64, 1e-5, args.steps)


# --- the two trainers ------------------------------------------------------------------------------------------------


def train_ours(task: Task, watch: Stopwatch) -> Run:
    from agents import grpo

    run, step = Run(), grpo.train_step

    def timed_step(number: int, *arguments: Any) -> Any:
        if number == 1:  # the clock starts with the first step
            watch.next_step()
        table, *results = step(number, *arguments)
        run.rewards.append(float(np.mean([rollout.reward for rollout in table.rollouts])))
        run.tokens += sum(rollout.num_tokens for rollout in table.rollouts) / task.steps
        watch.next_step()
        return table, *results

    class Timer(grpo.PhaseTimer):
        """Measures processor time beside wall time."""

        def measure(self, phase: str, *, hides: str | None = None) -> Any:
            return Phase(watch, phase, super().measure(phase, hides=hides))

    grpo.PhaseTimer, grpo.train_step = Timer, timed_step
    with tempfile.TemporaryDirectory() as name:
        values = {
            "output": f"{name}/run", "seed": task.seed, "steps": task.steps, "threads": torch.get_num_threads(),
            "policy": {"model": task.policy, "precision": "no", "dtype": task.dtype},
            "sampling": {"max_new_tokens": task.max_new_tokens},
            "env": {"reward_model": task.reward_model, "prompts": task.prompts, "num_prompts": task.num_prompts},
            "advantage": {"std_floor": 1e-4},
            "loss": {"measure_kl": False, "importance_cap": None},
            "optimizer": {"learning_rate": task.learning_rate, "warmup_share": 0.0}
            | {"max_num_batched_tokens": task.batch_tokens},
            "eval": {"num_prompts": 0, "every": task.steps + 1},
        }  # fmt: skip
        settings = grpo.fill_defaults(gym_rm.config.load_config(grpo.GRPOSettings, values))
        assert (settings.optimizer.betas, settings.optimizer.schedule) == (BETAS, "constant")
        console = Console(quiet=True)
        grpo.train(settings, console)
    return run


class Phase:
    """Measures a block as the stopwatch measures a function."""

    def __init__(self, watch: Stopwatch, name: str, inner: Any) -> None:
        self._watch, self._name, self._inner = watch, name, inner
        self._before: dict[str, float] = {}

    def __enter__(self) -> None:
        self._before = {clock: read() for clock, read in CLOCKS.items()}
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for clock, read in CLOCKS.items():
            self._watch._spent[clock][self._name] += read() - self._before[clock]


def train_trl(task: Task, watch: Stopwatch, *, same_scorer: bool) -> Run:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bar()
    run = Run()

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            watch.next_step()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            watch.next_step()

    tokenizer = AutoTokenizer.from_pretrained(task.policy, padding_side="left")
    if same_scorer:
        scorer = gym_rm.load_scorer(task.reward_model)

        def reward(prompts: Any, completions: Any, **rest: Any) -> list[float]:
            return scorer.score([p + c for p, c in zip(prompts, completions, strict=True)]).rewards.tolist()
    else:
        reward = AutoModelForSequenceClassification.from_pretrained(task.reward_model, dtype=task.dtype).eval()
    micro = task.micro_batch or task.num_completions
    with tempfile.TemporaryDirectory() as name:
        config = GRPOConfig(
            output_dir=name, use_cpu=not torch.cuda.is_available(), bf16=False, seed=task.seed,
            gradient_checkpointing=False,
            max_steps=task.steps, per_device_train_batch_size=micro,
            gradient_accumulation_steps=task.num_completions // micro, num_generations=task.group_size,
            max_completion_length=task.max_new_tokens, temperature=1.0, beta=0.0, loss_type="dapo",
            scale_rewards="group", shuffle_dataset=False, learning_rate=task.learning_rate,
            lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
            weight_decay=0.0, max_grad_norm=1.0, disable_dropout=True,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(task.policy, dtype=task.dtype),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": list(each.messages)} for each in task.ordered_prompts()]),
            processing_class=tokenizer,
            reward_processing_classes=None if same_scorer else AutoTokenizer.from_pretrained(task.reward_model),
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        generate, score = trainer._generate, trainer._calculate_rewards

        def scored(*arguments: Any) -> Any:
            rewards = score(*arguments)
            run.rewards.append(float(rewards.mean()))
            run.tokens += sum(map(len, arguments[-1])) / task.steps
            return rewards

        trainer._generate = watch.measured("generate", generate)
        trainer._calculate_rewards = watch.measured("score", scored)
        trainer.train()
    return run


# --- one run in a process of its own ---------------------------------------------------------------------------------


def status(name: str) -> float:
    """Return VmRSS or VmHWM of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def work(method: str, task: Task, *, same_scorer: bool) -> Run:
    import datasets  # noqa: F401
    import trl  # noqa: F401

    from agents import grpo  # noqa: F401

    watch = Stopwatch()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    run = train_ours(task, watch) if method == "ours" else train_trl(task, watch, same_scorer=same_scorer)
    run.peak = status("VmHWM") - before
    run.seconds = watch.means()
    return run


def start(method: str, task: Task, args: argparse.Namespace) -> Run:
    """Run a method in a process and return its result."""
    if method == "trl micro":
        task = Task(**asdict(task) | {"micro_batch": args.micro_batch})
    command = [sys.executable, __file__, "--worker", method, "--task", json.dumps(asdict(task))]
    command += ["--threads", str(args.threads), *(["--curves"] if args.curves else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{method} failed:\n{done.stderr[-4000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


# --- reports ---------------------------------------------------------------------------------------------------------


def compare(name: str, task: Task, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {method: [] for method in args.methods}
    for number in range(args.rounds):
        for method, of_method in runs.items():
            of_method.append(start(method, task, args))
        seconds = ", ".join(f"{m} {r[-1].seconds['processor']['step']:.2f}" for m, r in runs.items())
        console.print(f"{name}, round {number + 1}, seconds of processor time of a step: {seconds}")

    def median(method: str, clock: str, phase: str) -> float:
        return statistics.median(run.seconds[clock][phase] for run in runs[method])

    first = args.methods[0]
    console.print(f"\n{name}: {task.num_prompts} prompts x {task.group_size}, up to {task.max_new_tokens} tokens")
    console.print("| | generate | score | update | step | time / ours | wall, step | wall / ours | tokens | peak MiB |")
    console.print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    found: dict[str, Any] = {}
    for method, of_method in runs.items():
        ratios = [median(method, clock, "step") / median(first, clock, "step") for clock in CLOCKS]
        cells = [f"{median(method, 'processor', phase):.3g}" for phase in PHASES]
        cells += [f"{ratios[0]:.2f}x", f"{median(method, 'wall', 'step'):.3g}", f"{ratios[1]:.2f}x"]
        cells += [f"{statistics.median(run.tokens for run in of_method):.0f}"]
        cells += [f"{statistics.median(run.peak for run in of_method):.0f}"]
        console.print(f"| {METHODS[method]} | {' | '.join(cells)} |", highlight=False)
        found[METHODS[method]] = {phase: median(method, "processor", phase) for phase in PHASES} | {
            "times": ratios[0],
            "wall step": median(method, "wall", "step"),
            "wall times": ratios[1],
            "tokens of replies": statistics.median(run.tokens for run in of_method),
            "MiB": statistics.median(run.peak for run in of_method),
        }
    return found


def curves(task: Task, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    methods = [method for method in args.methods if method != "trl micro"]
    found: dict[str, list[list[float]]] = {method: [] for method in methods}
    for seed in args.seeds:
        for method in methods:
            found[method].append(start(method, Task(**asdict(task) | {"seed": seed}), args).rewards)
    steps = sorted({1, *range(args.every, args.steps + 1, args.every), args.steps})
    console.print("| step | " + " | ".join(METHODS[method] for method in methods) + " |")
    console.print("| --- " * (len(methods) + 1) + "|")
    values: dict[str, Any] = {}
    for step in steps:
        at = [np.array(found[method])[:, step - 1] for method in methods]
        console.print(f"| {step} | " + " | ".join(f"{each.mean():+.2f} ± {each.std(ddof=1):.2f}" for each in at) + " |")
        values[f"{step}"] = {
            METHODS[method]: {"mean": each.mean(), "std": each.std(ddof=1)}
            for method, each in zip(methods, at, strict=True)
        }
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", action="store_true", help="reward curves of the embedded task")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "embedded"], choices=["gsm8k", "embedded"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--size", default="25M", choices=list(workloads.SHAPES), help="of the models of gsm8k")
    parser.add_argument("--num-prompts", type=int, help="prompts in a step; 4 for gsm8k, 32 for embedded")
    parser.add_argument("--micro-batch", type=int, default=8, help="replies in a forward of `trl micro`")
    parser.add_argument("--steps", type=int, help="steps of a run; 3, or 40 for curves")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each method, in alternation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of curves; at least two")
    parser.add_argument("--every", type=int, default=5, help="steps between rows of the table of curves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", choices=list(METHODS), help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = workloads.parse_args(parser)
    args.steps = args.steps or (40 if args.curves else 3)
    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(ROOT))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    if args.worker:
        print(json.dumps(asdict(work(args.worker, Task(**json.loads(args.task)), same_scorer=args.curves))))
        return
    console = Console(width=160)
    libraries = ", ".join(f"{library} {version(library)}" for library in ("trl", "accelerate"))
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}, {libraries}", highlight=False)
    with tempfile.TemporaryDirectory() as name:
        if args.curves:
            found = curves(task_of("embedded", args, Path(name)), args, console)
        else:
            found = {task: compare(task, task_of(task, args, Path(name)), args, console) for task in args.tasks}
        results.save(args.save, found, peers=["trl"])


if __name__ == "__main__":
    main()
