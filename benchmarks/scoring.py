"""Measure the speed of scoring, compared with other libraries and with the matrix product rate of the hardware.

    python benchmarks/scoring.py                      # two CPU models, five workloads, every installed library

gpu_day.py measures the shapes of Qwen3-0.6B, 4B and 8B on a GPU.

Every round runs all methods one after the other in one process, so that other load on the machine affects all methods.
The table shows medians over the rounds. The time of every method includes chat templates and tokenisation:

- `ours`: gym_rm. `unshared`: gym_rm, with another beginning of each conversation, so that none shares its prompt.
- `sorted` and `arrival`: transformers in padded batches of 32, sorted by length or in the order of arrival.
- `trl` (`GRPOTrainer._calculate_rewards`) and `s-t` (`CrossEncoder.predict` of sentence-transformers), if installed.

The rates of matrix products are measured in the same rounds, with the shapes of the model: torch's, oneDNN's with
packed weights, which gym_rm uses, and NumPy's. Of torch's and of the fastest, the share that gym_rm reaches is shown:
on some processors torch's are far from the fastest. The columns `X / ours` are ratios of times.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import results
import torch
import workloads
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel
from workloads import Conversation

import gym_rm
from gym_rm.engine.backbones.packed_weights import packs
from gym_rm.engine.reward_model_scorer import RewardModelScorer

NAMES = {  # of methods, in the results
    "ours": "gym_rm",
    "sorted": "padded, sorted",
    "arrival": "padded, arrival",
    "unshared": "unshared",
    "trl": "TRL",
    "s-t": "sentence-transformers",
}
Method = Callable[[Sequence[Conversation]], "np.ndarray[Any, Any]"]


def padded(model: PreTrainedModel, tokenizer: Any, *, sort: bool, batch_size: int = 32) -> Method:
    """Score with transformers in padded batches."""

    @torch.inference_mode()
    def score(conversations: Sequence[Conversation]) -> np.ndarray[Any, Any]:
        texts = tokenizer.apply_chat_template(conversations, tokenize=False)
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row])) if sort else range(len(encoded))
        rewards = torch.empty(len(encoded))
        for start in range(0, len(encoded), batch_size):
            chosen = list(order)[start : start + batch_size]
            batch = tokenizer.pad(
                {"input_ids": [encoded[row] for row in chosen]}, return_tensors="pt", padding_side="right"
            )
            rewards[chosen] = model(**batch.to(model.device)).logits[:, 0].float().cpu()
        return rewards.numpy()

    return score


def unshared(scorer: RewardModelScorer) -> Method:
    """Score conversations whose first message begins with their number."""

    def score(conversations: Sequence[Conversation]) -> np.ndarray[Any, Any]:
        numbered = [
            [{**first, "content": f"{number} {first['content']}"}, *rest]
            for number, (first, *rest) in enumerate(conversations)
        ]
        return scorer.score(numbered).rewards

    return score


def loaded(model: PreTrainedModel, tokenizer: Any, **options: Any) -> Any:
    """Return a scorer of a copy of a model, for options that a model that is passed in cannot have."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        dtype = str(model.dtype).removeprefix("torch.")
        return gym_rm.load_scorer(folder, dtype=dtype, device=str(model.device), **options)


def quantized(model: PreTrainedModel, tokenizer: Any, **options: Any) -> Any:
    """Return a scorer of a model with 8-bit matrix products, whose layers are replaced when it is loaded."""
    return loaded(
        model, tokenizer, quantization="fp8" if model.device.type == "cuda" else "int8", check=False, **options
    )


def trl(model: PreTrainedModel, tokenizer: Any) -> Method:
    """Score with the method that TRL's GRPO trainer calls in a training step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Qwen3Config
    from trl import GRPOConfig, GRPOTrainer

    policy = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=len(tokenizer), **(workloads.SHAPES["1M"] | {"num_hidden_layers": 1}))
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=model.device.type == "cpu", bf16=False,
        per_device_train_batch_size=8, num_generations=8, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=[model],
        reward_processing_classes=[tokenizer],
        processing_class=tokenizer,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}] * 8),
    )

    def score(conversations: Sequence[Conversation]) -> np.ndarray[Any, Any]:
        prompts = [list(conversation[:-1]) for conversation in conversations]
        completions = [[conversation[-1]] for conversation in conversations]
        inputs = [{"prompt": prompt} for prompt in prompts]
        rewards = trainer._calculate_rewards(inputs, prompts, completions, [[0]] * len(prompts))
        return rewards[:, 0].float().cpu().numpy()

    return score


def sentence_transformers(model: PreTrainedModel, tokenizer: Any) -> Method:
    """Score the rendered texts with a cross-encoder, in batches of 32 sorted by length."""
    from sentence_transformers import CrossEncoder

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None  # otherwise the rendered text is rendered a second time
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plain.save_pretrained(folder)
        encoder = CrossEncoder(folder, device=str(model.device), activation_fn=torch.nn.Identity())
    encoder.tokenizer.model_max_length = 32_768

    def score(conversations: Sequence[Conversation]) -> np.ndarray[Any, Any]:
        texts = tokenizer.apply_chat_template(conversations, tokenize=False)
        return np.asarray(encoder.predict([(text, "") for text in texts], show_progress_bar=False)).reshape(-1)

    return score


def matmul_rates(model: PreTrainedModel, tokens: int) -> dict[str, float]:
    """Return FLOP/s of the matrix products of one layer with `tokens` rows, by who multiplies.

    `torch` is its own product. On a CPU also `oneDNN`, with packed weights, and `NumPy`.
    """
    layer = model.base_model.layers[0]
    weights = [module.weight.detach() for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.randn(tokens, weight.shape[1], device=model.device, dtype=model.dtype) for weight in weights]
    plain = torch.nn.functional.linear
    products: dict[str, list[Callable[[], Any]]] = {
        "torch": [functools.partial(plain, x, weight) for x, weight in zip(inputs, weights, strict=True)]
    }
    if (model.device.type, model.dtype) == ("cpu", torch.float32):
        if packs():
            packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
            product = torch.ops.mkldnn._linear_pointwise
            products["oneDNN"] = [
                functools.partial(product, x, weight, None, "none", [], "")
                for x, weight in zip(inputs, packed, strict=True)
            ]
        products["NumPy"] = [
            functools.partial(np.matmul, x.numpy(), weight.numpy().T) for x, weight in zip(inputs, weights, strict=True)
        ]
    repeats = 10 if model.device.type == "cuda" else 3
    flops = 2 * tokens * sum(weight.numel() for weight in weights) * repeats
    rates = {}
    for name, works in products.items():
        with torch.inference_mode():
            run(works)
            rates[name] = flops / timed(functools.partial(run, works * repeats), model.device)
    return rates


def run(works: Sequence[Callable[[], Any]]) -> None:
    for work in works:
        work()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def make_workloads(args: argparse.Namespace) -> dict[str, list[Conversation]]:
    n, first = args.conversations, args.first
    every = {
        "GSM8K, groups of 4": workloads.gsm8k_groups(n // 4, 4, first=first),
        "GSM8K, groups of 8": workloads.gsm8k_groups(n // 8, 8, first=first),
        "HH, groups of 8": workloads.hh_groups(n // 8, 8, first=first),
        "HH, pairs": workloads.hh_groups(n // 2, 2, first=first),
        "nothing shared": workloads.gsm8k_singles(n, first=first),
    }
    return {name: conversations for name, conversations in every.items() if any(part in name for part in args.only)}


def measure(size: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the table of a model, and return its numbers."""
    tokenizer = workloads.tokenizer()
    model = workloads.reward_model(size, len(tokenizer))
    scorer = RewardModelScorer(model, tokenizer)
    methods: dict[str, Method] = {
        "ours": lambda conversations: scorer.score(conversations).rewards,
        "sorted": padded(model, tokenizer, sort=True),
        "arrival": padded(model, tokenizer, sort=False),
        "unshared": unshared(scorer),
    }
    for name, module, make in (("trl", "trl", trl), ("s-t", "sentence_transformers", sentence_transformers)):
        if args.peers and importlib.util.find_spec(module):
            methods[name] = make(model, tokenizer)
    flops_per_token = 2 * workloads.weights(model)
    console.print(
        f"\n[bold]{size}[/bold]: {flops_per_token / 2e6:.1f}M weights in products, layout {scorer.layout}, "
        f"fused {scorer.info.fused}, budget {scorer.max_num_batched_tokens} tokens, {args.rounds} rounds"
    )
    headings = ["workload", "real", "unique", "padded", "ours s", "tokens/s", "of torch's products", "of fastest"]
    table = Table()
    for heading in [*headings, *(f"{name} / ours" for name in methods if name != "ours"), "largest difference"]:
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    found: dict[str, Any] = {}
    for name, conversations in track(make_workloads(args).items(), "workloads", console=console, transient=True):
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        rates = []
        rewards = {method: score(conversations) for method, score in methods.items()}  # warm-up
        for _ in range(args.rounds):
            rates.append(matmul_rates(model, min(scorer.max_num_batched_tokens, 16_384)))
            for method, score in methods.items():
                seconds[method].append(timed(functools.partial(score, conversations), model.device))
        work = scorer.score(conversations).workload
        median = {method: statistics.median(values) for method, values in seconds.items()}
        flops = flops_per_token * work.unique_tokens
        of_torch = statistics.median(
            flops / one / rate["torch"] for one, rate in zip(seconds["ours"], rates, strict=True)
        )
        of_fastest = statistics.median(
            flops / one / max(rate.values()) for one, rate in zip(seconds["ours"], rates, strict=True)
        )
        exact = [result for method, result in rewards.items() if method != "unshared"]
        difference = max(float(np.abs(result - rewards["sorted"]).max()) for result in exact)
        widest = sum(
            max(lengths[start : start + 32]) * len(lengths[start : start + 32])
            for lengths in [[len(one.input_ids) for one in scorer.renderer.encode(conversations)]]
            for start in range(0, len(lengths), 32)
        )
        times = {
            method: statistics.median(np.divide(seconds[method], seconds["ours"]).tolist())
            for method in methods
            if method != "ours"
        }
        found[name] = {
            "tokens": work.num_tokens,
            "unique tokens": work.unique_tokens,
            "padded tokens": widest,
            "seconds": {NAMES[method]: value for method, value in median.items()},
            "times": {NAMES[method]: value for method, value in times.items()},
            "of matmul rate": of_torch,
            "of fastest matmul rate": of_fastest,
            "torch of fastest": statistics.median(rate["torch"] / max(rate.values()) for rate in rates),
            "GFLOP per s": {name: statistics.median(rate[name] for rate in rates) / 1e9 for name in rates[0]},
            "largest difference": difference,
        }
        table.add_row(
            name,
            f"{work.num_tokens}",
            f"{work.unique_tokens}",
            f"{widest}",
            f"{median['ours']:.3f}",
            f"{work.num_tokens / median['ours']:.0f}",
            f"{of_torch:.0%}",
            f"{of_fastest:.0%}",
            *(f"{each:.2f}" for each in times.values()),
            f"{difference:.1e}",
        )
    console.print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(workloads.SHAPES), default=["25M", "100M"])
    parser.add_argument("--conversations", type=int, default=64, help="conversations per workload")
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements of each method")
    parser.add_argument("--only", nargs="+", default=[""], help="run only workloads whose name contains one of these")
    parser.add_argument("--first", type=int, default=0, help="index of the first data row, to measure on other rows")
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="leave out trl and sentence-transformers"
    )
    args = workloads.parse_args(parser)
    console = Console(width=200)
    console.print(f"python {' '.join(sys.argv)}\n{workloads.machine('cpu')}")
    values = {"conversations": args.conversations} | {size: measure(size, args, console) for size in args.sizes}
    results.save(args.save, values)


if __name__ == "__main__":
    main()
