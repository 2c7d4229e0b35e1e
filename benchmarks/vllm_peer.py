"""Measure scoring and sampling beside a real vLLM for CPUs.

    python benchmarks/vllm_peer.py [--vllm FOLDER] [--model FOLDER] [--only eager "4 x 8"] [--rounds 3]

vLLM runs in an environment of its own (`--vllm`; by default the one of scripts/vllm_environment.sh), in one process at
a time, which answers over a pipe and alternates with gym_rm. The model is a causal language model with a chat template,
and the reward model is the same with a random head. Without `--model` it is a Llama of the shape of SmolLM2-135M with
random weights.

Where there was a choice, it favours vLLM. It gets token ids; gym_rm renders and tokenises each conversation in its
time. Its prefix cache is empty before each measurement, and has blocks of 32 tokens where the table says so: by default
they have 128 on a CPU, and share less. All of it runs in one process, which saves it messages and waiting in loops;
`--processes` runs its usual three. It samples without seeds and writes no text. Both compute the log-probability of
every token that they sample.

Processor time is that of all threads and processes of a side. A row depends on its batch if it has other bits alone
than in a batch, in another order, or when the prefix cache has it. The error of bfloat16 is the mean distance from the
float32 rewards of the same side, over their standard deviation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generation
import numpy as np
import results
import torch
import workloads
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig
from workloads import Conversation

import gym_rm
from gym_rm.generation.sampling import LocalSampler, end_tokens

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = {"dtype": "float32", "max_model_len": 2048}
SHAPES = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152},
    "tiny": workloads.SHAPES["1M"] | {"vocab_size": 8000},
}
BLOCKS = {"block_size": 32}
SCORING: dict[str, tuple[int, dict[str, Any]]] = {  # number of threads, and options of vLLM
    "compiled, prefix cache": (1, {}),
    "compiled, blocks of 32": (1, BLOCKS),
    "compiled, no prefix cache": (1, {"enable_prefix_caching": False}),
    "compiled, blocks of 32, bfloat16": (1, BLOCKS | {"dtype": "bfloat16"}),
    "eager, blocks of 32": (1, BLOCKS | {"enforce_eager": True}),
    "compiled, prefix cache, two threads": (2, {}),
    "compiled, blocks of 32, two threads": (2, BLOCKS),
}
SAMPLING = {  # prompts, replies to each, most tokens of a reply, and whether end tokens end it
    "4 x 8": (4, 8, 64, False),
    "32 x 1": (32, 1, 64, False),
    "4 x 8, to the end": (4, 8, 128, True),
}
Rewards = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Measured:
    """What a piece of work found, and its seconds."""

    found: Any
    processor: float
    clock: float


Methods = dict[str, Callable[[], Measured]]


class VLLM:
    """A process of vLLM with one model, whose log is written to a file."""

    def __init__(self, environment: Path, folder: Path, threads: int, *, alone: bool, **options: Any) -> None:
        settings = SETTINGS | {"OMP_NUM_THREADS": str(threads)}
        if alone:
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            options["distributed_executor_backend"] = "uni"
        command = [environment / "bin" / "python", "-P", Path(__file__).with_name("vllm_worker.py")]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*map(str, command), json.dumps({"model": str(folder)} | OPTIONS | options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1,
            env=os.environ | settings,
        )  # fmt: skip
        self.version: str = self._answer()["version"]

    def ask(self, task: str, ids: Sequence[Sequence[int]], *, reset: bool = True, **options: Any) -> Measured:
        """Send a request and wait for its answer; `reset` empties the prefix cache before."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"task": task, "ids": ids, "reset": reset, **options}) + "\n")
        return Measured(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            self._log.seek(0)
            sys.exit(f"{self._log.read()[-4000:]}\nvLLM ended with status {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measured(work: Callable[[], Any]) -> Measured:
    processor, clock = time.process_time(), time.perf_counter()
    found = work()
    return Measured(found, time.process_time() - processor, time.perf_counter() - clock)


def alternate(methods: Methods, rounds: int, *, rates: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what each method found in a first run, and medians over the rounds: seconds or tokens/s, and ratios."""
    found = {name: work().found for name, work in methods.items()}
    runs = [{name: work() for name, work in methods.items()} for _ in range(rounds)]
    values: dict[str, Any] = {}
    for kind in ("processor", "clock"):
        of = {
            name: [run[name].found / getattr(run[name], kind) if rates else getattr(run[name], kind) for run in runs]
            for name in methods
        }
        values[kind] = {name: statistics.median(each) for name, each in of.items()}
        ratios = np.divide(of["gym_rm"], of["vLLM"]) if rates else np.divide(of["vLLM"], of["gym_rm"])
        values[kind]["times"] = statistics.median(ratios.tolist())
    return found, values


def moved(score: Callable[[list[int]], Rewards], warm: Callable[[list[int]], Rewards], rows: int) -> int:
    """Return the number of rows that have other bits in one of several batches, or from the cache, than alone."""
    alone = np.concatenate([score([row]) for row in range(rows)])
    order = np.random.default_rng(0).permutation(rows).tolist()
    other = np.zeros(rows, dtype=bool)
    for batch in (list(range(rows)), order, order[: rows // 2], order[rows // 2 :]):
        other[batch] |= score(batch) != alone[batch]
    warm(order)  # fills the cache
    other[order] |= warm(order) != alone[order]
    return int(other.sum())


class Benchmark:
    """The folders of the models, and what the measurements need of each other."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.policy, self.reward_model = args, args.model or folder / "policy", folder / "reward_model"
        self.versions: dict[str, str] = {}
        self.float32: dict[str, dict[str, Rewards]] = {}  # rewards of each workload and side
        torch.manual_seed(0)
        if args.model is None:
            tokenizer = workloads.tokenizer()
            config = LlamaConfig(
                **SHAPES["tiny" if args.tiny else "135M"], max_position_embeddings=8192, initializer_range=0.05,
                tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )  # fmt: skip
            AutoModelForCausalLM.from_config(config).save_pretrained(self.policy)
            tokenizer.save_pretrained(self.policy)
        self.tokenizer = AutoTokenizer.from_pretrained(self.policy)
        model = AutoModelForSequenceClassification.from_pretrained(self.policy, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight, std=0.02)
        model.config.pad_token_id = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        model.save_pretrained(self.reward_model)
        self.tokenizer.save_pretrained(self.reward_model)
        load: Callable[..., Any] = functools.partial(gym_rm.load_scorer, str(self.reward_model), device="cpu")
        self.scorer = functools.cache(load)

    def start(self, folder: Path, threads: int, **options: Any) -> VLLM:
        torch.set_num_threads(threads)
        self.scorer.cache_clear()  # a scorer is tried with the threads that it was loaded with
        vllm = VLLM(self.args.vllm, folder, threads, alone=not self.args.processes, **options)
        self.versions["vllm"] = vllm.version
        return vllm

    def score(self, case: str) -> dict[str, Any]:
        """Return the seconds of each workload, the largest difference, and the rows that depend on their batch."""
        threads, options = SCORING[case]
        dtype = options.get("dtype", "float32")
        vllm, scorer = self.start(self.reward_model, threads, runner="pooling", **options), self.scorer(dtype=dtype)
        count, found = 1 if self.args.tiny else self.args.conversations // 8, {}
        for name, make in (("GSM8K, groups of 8", workloads.gsm8k_groups), ("HH, groups of 8", workloads.hh_groups)):
            conversations: list[Conversation] = make(count, 8)
            ids = [one.input_ids.tolist() for one in scorer.renderer.encode(conversations)]
            methods: Methods = {
                "gym_rm": lambda: measured(lambda: scorer.score(conversations)),  # noqa: B023
                "vLLM": lambda: vllm.ask("classify", ids),  # noqa: B023
            }
            first, seconds = alternate(methods, self.args.rounds)
            rewards, work = (
                {"gym_rm": first["gym_rm"].rewards, "vLLM": np.array(first["vLLM"], dtype=np.float32)},
                first["gym_rm"].workload,
            )
            of_case: dict[str, Any] = {"tokens": work.num_tokens, "unique tokens": work.unique_tokens, **seconds}
            of_case["largest difference"] = float(np.abs(rewards["gym_rm"] - rewards["vLLM"]).max())
            if dtype == "float32":
                self.float32.setdefault(name, rewards)
            elif reference := self.float32.get(name):
                of_case["error"] = {
                    side: float(np.abs(rewards[side] - reference[side]).mean() / reference[side].std())
                    for side in rewards
                }
            if options in (BLOCKS, BLOCKS | {"dtype": "bfloat16"}) and threads == 1:
                of_case["depend on batch"] = self.depend(vllm, dtype, conversations[:16], ids[:16])
            found[name] = of_case
        vllm.close()
        return found

    def depend(self, vllm: VLLM, dtype: str, conversations: list[Conversation], ids: list[list[int]]) -> dict[str, int]:
        """Return the number of rows whose bits depend on the batch."""

        def ours(rows: list[int], **options: int) -> Rewards:
            scorer = self.scorer(dtype=dtype, **options)
            rewards: Rewards = scorer.score([conversations[row] for row in rows]).rewards
            return rewards

        def theirs(rows: list[int], *, reset: bool = True) -> Rewards:
            found = vllm.ask("classify", [ids[row] for row in rows], reset=reset).found
            return np.array(found, dtype=np.float32)

        return {
            "rows": len(ids),
            "gym_rm": moved(ours, functools.partial(ours, prefix_cache_tokens=100_000), len(ids)),
            "vLLM": moved(theirs, functools.partial(theirs, reset=False), len(ids)),
        }

    def sample(self, cases: list[str]) -> dict[str, Any]:
        """Return tokens for each second of each case."""
        vllm = self.start(self.policy, 1, logprobs_mode="processed_logprobs", **BLOCKS)
        model, found = AutoModelForCausalLM.from_pretrained(self.policy, dtype=torch.float32).eval(), {}
        for case in cases:
            count, replies, tokens, ends = SAMPLING[case]
            tokens = 8 if self.args.tiny else tokens
            prompts = generation.prompts_of(self.tokenizer, count)
            sampler = LocalSampler(model, self.tokenizer, max_new_tokens=tokens)
            sampler.ends = end_tokens(model, self.tokenizer) if ends else []
            rows, ids = [prompt for prompt in prompts for _ in range(replies)], [one.tolist() for one in prompts]

            def ours() -> int:
                return sum(len(one.token_ids) for one in sampler.sample(rows, seeds=range(len(rows))))  # noqa: B023

            asked: dict[str, Any] = {"replies": replies, "new_tokens": tokens, "ends": ends}
            methods: Methods = {
                "gym_rm": lambda: measured(ours),
                "vLLM": lambda: vllm.ask("generate", ids, **asked),  # noqa: B023
            }
            _, rates = alternate(methods, self.args.rounds, rates=True)
            found[case] = {"prompt tokens": sum(map(len, ids)), **rates}
        vllm.close()
        return found


def environment() -> Path:
    """Return the environment of vLLM, which is installed if it is not there."""
    script = ROOT / "scripts" / "vllm_environment.sh"
    built = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder of the environment that has vLLM")
    parser.add_argument("--model", type=Path, help="folder of a causal language model with a chat template")
    parser.add_argument("--conversations", type=int, default=32, help="conversations per workload")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each side")
    parser.add_argument("--only", nargs="+", default=[""], help="run only cases whose name contains one of these")
    parser.add_argument("--processes", action="store_true", help="run vLLM in its three processes, as a server does")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few rows, to try the script")
    args = workloads.parse_args(parser)
    args.vllm = args.vllm or environment()
    scoring, sampling = (
        [case for case in cases if any(part in case for part in args.only)] for cases in (SCORING, SAMPLING)
    )
    console = Console(width=160)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    values: dict[str, Any] = {"conversations": args.conversations, "scoring": {}, "sampling": {}}
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(args, Path(folder))
        for case in (*scoring, *sampling[:1]):
            if case in SCORING:
                for workload, of_case in benchmark.score(case).items():
                    values["scoring"].setdefault(workload, {})[case] = of_case
                    console.print(workload, case, of_case)
            else:
                values["sampling"] = benchmark.sample(sampling)
                console.print(values["sampling"])
            torch.set_num_threads(1)
            results.save(args.save, values, versions=benchmark.versions)  # what was measured so far


if __name__ == "__main__":
    main()
