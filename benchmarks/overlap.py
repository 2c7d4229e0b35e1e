"""What is hidden if each reply is sent to the environment when it is written?

    python benchmarks/overlap.py [--vllm FOLDER] [--model FOLDER] [--only code "judge of 2 s"] [--rounds 3]

Two loops play the same episodes in turn: one after the other (sample all replies, then step the environments), and
`play` of agents/grpo.py, which sends each reply when it is written. Wall time is what matters here; processor time is
that of this process, so without the sampler's server, the judge's and the sandbox's. Replies come from a real vLLM for
CPUs, which writes 4 at a time on the same cores, up to a full stop; or from elsewhere: the replies of the data, which
take their number of tokens over `--rate` and no processor, as those of a server on another machine.

Generation and scoring alone are the two phases of the first loop. What cannot be hidden is the verdict on the last
reply, which is that of one reply alone. Other work on the machine makes vLLM slower in one loop than in the other; how
long `play` goes on after its last reply does not depend on it. Then a run of GRPO takes a few steps with
`sampling.steps_ahead` of 0 and 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import results
import torch
import vllm_peer
import workloads
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm.cli.real_models import fetch
from gym_rm.config import load_config
from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.generation.completions import Completion, Sampler, TokenIds, sample_all
from gym_rm.generation.sampling import end_tokens
from gym_rm.policy.remote_sampler import RemoteSampler
from gym_rm.policy.rollout_batch import RolloutBatch
from gym_rm.training.phase_timer import PhaseTimer

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = Path(gym_rm.__file__).parent / "assets" / "policy"
sys.path += [str(ROOT), str(ROOT / "tests")]

from agents import grpo  # noqa: E402
from tests.generation.chat_servers import ChatApp, grade  # noqa: E402

CODE = {"kind": "code", "num_workers": 2}
AT_A_TIME = 4  # replies that vLLM writes at the same time


@dataclass(frozen=True)
class Case:
    """What scores the replies.

    Attributes:
        tasks: the rows to answer, in alternation: those of HumanEval, and dialogues.
        judge, connections: seconds of an answer of the judge, and its answers at the same time.
        in_process: a reward model in this process.
    """

    tasks: tuple[str, ...]
    judge: float = 0.0
    connections: int = 8
    in_process: bool = False

    def scorer(self, judges: str, reward_model: Path | None) -> Any:
        """Return the scorer."""
        judge = {"kind": "judge", "path": judges, "name": f"{self.judge:g}", "max_connections": self.connections}
        of_task: dict[str, dict[str, Any]] = {"code": CODE, "chat": judge}
        if self.in_process:
            return gym_rm.load_scorer(reward_model, device="cpu")
        if len(self.tasks) == 1:
            return gym_rm.load_scorer(**of_task[self.tasks[0]])
        return gym_rm.load_scorer(kind="weighted", scorers=of_task, route="task")


CASES = {
    "sandbox of 2 processes": Case(("code",)),
    "judge of 0.5 s, 2 at a time": Case(("chat",), 0.5, 2),
    "judge of 2 s, 8 at a time": Case(("chat",), 2.0),
    "half sandbox, half judge of 1 s": Case(("code", "chat"), 1.0),
    "reward model in this process": Case(("chat",), in_process=True),
}


# --- samplers and judges ---------------------------------------------------------------------------------------------


class Elsewhere:
    """A sampler whose completions are known: each takes its number of tokens over a rate, and no processor."""

    in_waves = False

    def __init__(self, known: Mapping[bytes, Completion], rate: float) -> None:
        self._known, self._rate = known, rate
        self._open: dict[int, tuple[float, Completion]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def stream(self, *, calibrate: bool = True) -> Elsewhere:
        return self

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        return sample_all(self, prompts, seeds=seeds)

    def add(self, keys: Sequence[int], prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> None:
        now = time.monotonic()
        for key, prompt in zip(keys, prompts, strict=True):
            completion = self._known[prompt.tobytes()]
            self._open[key] = now + len(completion.token_ids) / self._rate, completion

    def take(self, timeout: float | None = None) -> dict[int, Completion]:
        waits = min((end for end, _ in self._open.values()), default=0.0) - time.monotonic()
        time.sleep(max(0.0, waits if timeout is None else min(waits, timeout)))
        now = time.monotonic()
        return {key: self._open.pop(key)[1] for key, (end, _) in list(self._open.items()) if end <= now}

    def update_weights(self, weights: Any, *, version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._open.clear()


class Judge(ChatApp):  # type: ignore[misc]
    """A chat server whose answers take as many seconds as the name of the model says."""

    def __init__(self) -> None:
        super().__init__(grade(lambda messages: 1 + len(messages[-1]["content"]) % 10), models=("0.1", "0.5", "1", "2"))

    async def answer_to(self, request: dict[str, Any]) -> Any:
        await asyncio.sleep(float(request["model"]))
        return await super().answer_to(request)


def serve_judges() -> None:
    """Serve judges until the standard input is closed."""
    from tests.reward_servers import serve

    with serve(Judge()) as url:
        print(url, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def judges() -> Iterator[str]:
    """Yield the address of judges in a process of their own."""
    command = [sys.executable, __file__, "--serve-judges"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


@contextlib.contextmanager
def vllm_server(environment: Path, model: Path, log: Path) -> Iterator[str]:
    """Yield the address of a vLLM."""
    from tests.vllm_servers import Server

    options = ("--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(AT_A_TIME))
    server = Server(environment, model, log, *options).start()
    try:
        yield server.wait().url
    finally:
        server.kill()


def vllm_version(url: str) -> str:
    with urllib.request.urlopen(f"{url}/version") as reply:
        version: str = json.load(reply)["version"]
    return version.partition("+")[0]


# --- the two loops ---------------------------------------------------------------------------------------------------


def in_turn(envs: Any, sampler: Sampler, batch: RolloutBatch, timer: PhaseTimer) -> Any:
    """Sample all replies, then step the environments."""
    batch.begin(*envs.reset(options={"prompt_indices": batch.prompt_indices}))
    while batch.playing.any():
        rows, prompts, seeds = batch.requests()
        with timer.measure("generate"):
            completions = dict(zip(rows, sampler.sample(prompts, seeds=seeds), strict=True))
        with timer.measure("score"):
            replies, written = batch.replies(completions)
            batch.add(envs.step(replies, rows=written), rows=written)
    return batch.table()


@dataclass(frozen=True)
class Played:
    """Seconds of a loop, by clock and by phase, and what it wrote and got."""

    wall: float
    processor: float
    phases: Mapping[str, float]
    rewards: Sequence[float]
    replies: Sequence[tuple[str, int]]
    verdicts: Sequence[str]


def played(loop: Callable[..., Any], envs: Any, sampler: Sampler, batch: RolloutBatch) -> Played:
    timer, processor, wall = PhaseTimer(), time.process_time(), time.perf_counter()
    table = loop(envs, sampler, batch, timer)
    seconds = time.perf_counter() - wall, time.process_time() - processor
    rollouts = sorted(table.rollouts, key=lambda rollout: rollout.row)
    replies = [(each.turns[0].reply, len(each.turns[0].completion.token_ids)) for each in rollouts]
    verdicts = [verdict for each in rollouts for verdict in each.verdicts.values()]
    return Played(*seconds, timer.take(), [each.reward for each in rollouts], replies, verdicts)


class Benchmark:
    """The rows, the policy's tokenizer and what scores."""

    def __init__(self, args: argparse.Namespace, folder: Path, judges: str) -> None:
        self.args, self.folder, self.judges, self.model = args, folder, judges, args.model
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.renderer = PolicyRenderer(self.tokenizer)

    def rows(self, tasks: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows of each task in alternation, with the reply of the data."""
        code = [
            {key: row[key] for key in ("prompt", "entry_point", "test")}
            | {"task": "code", "told": f"```python\n{row['prompt']}{row['canonical_solution']}```"}
            for row in workloads.rows("humaneval")
        ]
        chat = [
            {"messages": row["context"], "task": "chat", "told": row["completions"][0]["completion"][0]["content"]}
            for row in workloads.rows("hh_harmless")
            if len(row["context"]) == 1
        ]
        rows = {"code": code, "chat": chat}
        return [rows[tasks[k % len(tasks)]][k // len(tasks)] for k in range(self.args.rows)]

    def elsewhere(self, rows: Sequence[dict[str, Any]]) -> Elsewhere:
        """Return a sampler that knows the replies of the data."""
        prompts = self.renderer.prompts(
            [row.get("messages", [{"role": "user", "content": row.get("prompt")}]) for row in rows], [None] * len(rows)
        )
        known = {}
        for row, prompt in zip(rows, prompts, strict=True):
            ids = np.array(self.tokenizer(row["told"], add_special_tokens=False)["input_ids"], dtype=np.int32)
            known[prompt.tobytes()] = Completion(ids, np.zeros(len(ids), np.float32), finished=True, text=row["told"])
        return Elsewhere(known, self.args.rate)

    def remote(self, url: str) -> RemoteSampler:
        """Return the sampler of a vLLM."""
        model = AutoModelForCausalLM.from_pretrained(self.model)
        ends = [*end_tokens(model, self.tokenizer), self.tokenizer.convert_tokens_to_ids(".")]  # few are short without
        return RemoteSampler(
            url, model=str(self.model), tokenizer=self.tokenizer, ends=ends,
            save=lambda folder, weights: None, weights_folder=self.folder / "none",
            max_new_tokens=self.args.max_new_tokens,
        )  # fmt: skip

    @functools.cached_property
    def reward_model(self) -> Path | None:
        """Folder of the policy's weights with a random head; the embedded reward model with `--tiny`."""
        if self.args.tiny:
            return None
        torch.manual_seed(0)
        folder = self.folder / "reward-model"
        model = AutoModelForSequenceClassification.from_pretrained(self.model, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight, std=0.02)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder

    def compare(self, name: str, sampler: Sampler | None, console: Console) -> dict[str, Any]:
        """Return medians over the rounds of a case, with the replies of the data if there is no sampler."""
        case, size = CASES[name], self.args.rows
        rows = self.rows(case.tasks)
        sampler = sampler or self.elsewhere(rows)
        scorer = case.scorer(self.judges, self.reward_model if case.in_process else None)
        prompts = [{key: value for key, value in row.items() if key != "told"} for row in rows]
        options = {"prompts": prompts, "max_turns": 1, "autoreset_mode": "Disabled"}
        envs = gym.make_vec("RewardModel-v0", size, reward_model=scorer, **options)
        runs: list[tuple[Played, Played]] = []
        try:
            played(grpo.play, envs, sampler, self.batch())  # starts interpreters, connections and threads
            for round_number in range(self.args.rounds):
                order = [in_turn, grpo.play] if round_number % 2 else [grpo.play, in_turn]
                of_round = {loop: played(loop, envs, sampler, self.batch()) for loop in order}
                runs.append((of_round[in_turn], of_round[grpo.play]))
            last = self.one_verdict(scorer, envs, runs[-1][0])
        finally:
            envs.close()
            scorer.close()
        found = summary(runs, last)
        numbers = {key: round(value, 2) for key, value in found.items() if not isinstance(value, dict)}
        rounds = "; ".join(f"{turn.wall:.2f} and {over.wall:.2f}" for turn, over in runs)
        console.print(f"{name}: {rounds} s; {numbers}, verdicts {Counter(runs[-1][1].verdicts)}", highlight=False)
        return found

    def batch(self) -> RolloutBatch:
        """Return the episodes, one for each row."""
        rows = np.arange(self.args.rows)
        return RolloutBatch(self.renderer, rows, rows, group_size=1, seed=(1,), rows=rows >= 0)

    def one_verdict(self, scorer: Any, envs: Any, run: Played) -> float:
        """Return the seconds of a reply that is scored alone: the median over some, of the slower task."""
        seconds: dict[str, list[float]] = {}
        for prompt, (reply, _) in list(zip(envs.prompts, run.replies, strict=True))[:8]:
            started = time.perf_counter()
            scorer.score([[*prompt.messages, {"role": "assistant", "content": reply}]], [prompt])
            seconds.setdefault(prompt.metadata["task"], []).append(time.perf_counter() - started)
        return max(map(statistics.median, seconds.values()))

    def train(self, url: str | None, ahead: int) -> dict[str, float]:
        """Return the seconds of a step of GRPO and of its phases; medians of all but the first."""
        folder, rows = self.folder / f"grpo-{ahead}", self.rows(("chat",))
        (self.folder / "prompts.jsonl").write_text(
            "".join(f"{json.dumps({'messages': r['messages']})}\n" for r in rows)
        )
        judge = {"kind": "judge", "path": self.judges, "name": "0.1" if self.args.tiny else "0.5", "max_connections": 2}
        values: dict[str, Any] = {
            "output": str(folder), "steps": self.args.steps, "threads": torch.get_num_threads(),
            "policy": {"model": str(self.model)},
            "sampling": {"server": url, "steps_ahead": ahead, "max_new_tokens": self.args.max_new_tokens},
            "env": {"reward_model": judge, "prompts": str(self.folder / "prompts.jsonl"), "num_prompts": 4}
            | {"group_size": 2},
            "loss": {"measure_kl": False},
            "eval": {"num_prompts": 0},
        }  # fmt: skip
        grpo.train(grpo.fill_defaults(load_config(grpo.GRPOSettings, values)), Console(quiet=True))
        with (folder / "metrics.csv").open(newline="") as file:
            steps = list(csv.DictReader(file))[1:]
        names = ["generate", "score", "update", "score_hidden", "generate_hidden"]
        found = {name: [float(step.get(f"phase_seconds/{name}") or 0.0) for step in steps] for name in names}
        found["step"] = [sum(step) for step in zip(*(found[name] for name in names[:3]), strict=True)]
        return {name: statistics.median(each) for name, each in found.items()}


def summary(runs: Sequence[tuple[Played, Played]], last: float) -> dict[str, Any]:
    """Return medians over the rounds."""

    def median(value: Callable[[Played, Played], float]) -> float:
        return statistics.median(value(*each) for each in runs)

    def longer(run: Played) -> float:
        return max(run.phases["generate"], run.phases["score"])

    lengths = [length for _, length in runs[0][0].replies]
    return {
        "generation": median(lambda turn, _: turn.phases["generate"]),
        "scoring": median(lambda turn, _: turn.phases["score"]),
        "last verdict": last,
        "one after the other": median(lambda turn, _: turn.wall),
        "overlapped": median(lambda _, over: over.wall),
        "last reply": median(lambda _, over: over.phases["generate"]),
        "not hidden": median(lambda _, over: over.phases["score"]),
        "times": median(lambda turn, over: turn.wall / over.wall),
        "of the longer": median(lambda turn, over: over.wall / longer(turn)),
        "of the longer and the last": median(lambda turn, over: over.wall / (longer(turn) + last)),
        "processor": {
            "one after the other": median(lambda turn, _: turn.processor),
            "overlapped": median(lambda _, over: over.processor),
        },
        "tokens": {"fewest": min(lengths), "most": max(lengths), "all": sum(lengths)},
        "equal replies": median(
            lambda turn, over: float(np.mean([a == b for a, b in pairs(turn.replies, over.replies)]))
        ),
        "other rewards": max(sum(a != b for a, b in of_equal_replies(*each)) for each in runs),
    }


def of_equal_replies(turn: Played, over: Played) -> list[tuple[float, float]]:
    """Return the rewards of both loops for the replies that are equal: vLLM may write others in another batch."""
    replies, rewards = pairs(turn.replies, over.replies), pairs(turn.rewards, over.rewards)
    return [reward for reply, reward in zip(replies, rewards, strict=True) if reply[0] == reply[1]]


def pairs(one: Sequence[Any], other: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder of the environment that has vLLM")
    parser.add_argument("--model", type=Path, help="folder of the policy; by default SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=8, help="replies of a loop")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="most tokens of a reply of vLLM")
    parser.add_argument("--rate", type=float, default=100.0, help="tokens per second of each reply from elsewhere")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each loop")
    parser.add_argument("--steps", type=int, default=4, help="steps of GRPO")
    parser.add_argument("--samplers", nargs="+", default=["elsewhere", "vLLM"], choices=["elsewhere", "vLLM"])
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="the embedded models, few rows and no vLLM, for a try")
    parser.add_argument("--serve-judges", action="store_true", help=argparse.SUPPRESS)
    args = workloads.parse_args(parser)
    if args.serve_judges:
        return serve_judges()
    torch.set_num_threads(1)
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}", highlight=False)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.tiny:
            args.samplers = ["elsewhere"]
            args.model, args.rows, args.rate, args.rounds, args.steps = EMBEDDED, 4, 1000.0, 1, 2
        args.model = args.model or fetch("smollm2")
        benchmark, url = Benchmark(args, folder, stack.enter_context(judges())), None
        samplers: dict[str, Sampler | None] = dict.fromkeys(args.samplers)
        if "vLLM" in samplers:
            url = stack.enter_context(vllm_server(args.vllm or vllm_peer.environment(), args.model, folder / "log"))
            samplers["vLLM"] = benchmark.remote(url)
        values: dict[str, Any] = {"rows": args.rows, "cases": {}}
        for sampler_name, sampler in samplers.items():
            values["cases"][sampler_name] = {
                case: benchmark.compare(case, sampler, console)
                for case in CASES
                if any(part in case for part in args.only)
            }
        if url or args.tiny:
            values["GRPO"] = {f"{ahead}": benchmark.train(url, ahead) for ahead in (0, 1)}
        console.print(json.dumps(results.plain(values), indent=1))
        results.save(args.save, values, versions={"vllm": vllm_version(url)} if url else {})


if __name__ == "__main__":
    main()
