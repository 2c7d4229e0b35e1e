"""Part E of gpu_day.py: training, decoding and the planner; and the update and decoding of gpu_first.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import reward_training
import scoring
import torch
import workloads
from gpu_profile import by_class, kernels_of
from gpu_sizes import GROUP, Day

from gym_rm.config import load_config
from gym_rm.generation.completions import Completion
from gym_rm.generation.decoding import GraphDecoder, LeanDecoder
from gym_rm.generation.sampling import LocalSampler
from gym_rm.planning.hardware import calibration
from gym_rm.planning.hardware.devices import QUANTITIES
from gym_rm.planning.planner import plan
from gym_rm.policy.rollouts import Rollout, RolloutTurn


def part_e(day: Day) -> None:
    sizes = day.sizes
    work = {"size": sizes.small, "prompts": sizes.prompts, "group_size": GROUP, "reply_tokens": sizes.reply_tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learn = functools.partial(training_step, day, folder / "pairs")
        day.row("reward training", learn, expected=60, size=sizes.small)
        task = task_in(day, folder)
        day.row("calibration", calibrated, expected=20)
        day.row("GRPO step", functools.partial(grpo_step, day, task), expected=100, **work)
        day.row("planned step", functools.partial(planned_step, day, task), expected=5, **work)
        day.row("decoding of transformers", functools.partial(their_decoding, day, task), expected=60, **work)
        if importlib.util.find_spec("trl") and importlib.util.find_spec("datasets"):
            trl = replace(task, micro_batch=max(GROUP, task.num_completions // 16))
            day.row("GRPO step of TRL", functools.partial(grpo_step, day, trl, ours=False), expected=150, **work)
        else:
            day.skip("GRPO step of TRL", "trl is not installed", **work)


def task_in(day: Day, folder: Path) -> Any:
    """Write a policy and a reward model into a folder, and return the GRPO task of both."""
    import grpo

    sizes = day.sizes
    grpo.make_models(sizes.small, folder, device=str(day.device), dtype=getattr(torch, sizes.dtype))
    return grpo.Task(
        str(folder / "policy"), str(folder / "reward_model"), str(workloads.DATA / "gsm8k_graded.jsonl.gz"),
        sizes.prompts, sizes.reply_tokens, 1e-6, sizes.steps, dtype=sizes.dtype, batch_tokens=sizes.learned_tokens,
    )  # fmt: skip


def training_step(day: Day, folder: Path) -> dict[str, Any]:
    """Return seconds of the steps of reward training; the first ones compile."""
    model = workloads.reward_model(day.sizes.small, len(day.tokenizer), device=str(day.device))
    reward_training.save_model(folder, model, day.tokenizer)
    del model
    pairs, batch = day.sizes.learned_pairs
    read = reward_training.read_pairs("hh", day.tokenizer, SimpleNamespace(max_length=2048, limit=pairs))
    run = reward_training.train_ours(reward_training.Job(folder, read, batch), precision="auto")
    tokens = sum(len(ids) for pair in read for ids in pair.ids)
    return {
        "step_seconds": run.step_seconds,
        "best_step_seconds": min(run.step_seconds),
        "pairs_per_second": batch / min(run.step_seconds),
        "tokens_of_a_pair": tokens / len(read),
        "losses": run.losses,
    }


def calibrated() -> dict[str, Any]:
    device = calibration.calibrate()
    return {name: getattr(device, name).value for name in QUANTITIES}


def prompts_of(task: Any, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of the prompts of a step, each as often as its group is large."""
    prompts = task.ordered_prompts()[: task.num_prompts]
    texts = [list(prompt.messages) for prompt in prompts]
    encoded = tokenizer.apply_chat_template(texts, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [list(ids) for ids in encoded for _ in range(task.group_size)]


def policy_of(day: Day, task: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(task.policy, dtype=task.dtype).to(day.device).eval()


def decoding(day: Day, task: Any) -> dict[str, Any]:
    """Sample replies with the package's own decoder, which must run."""
    prompts = [np.array(ids, dtype=np.int32) for ids in prompts_of(task, day.tokenizer)]
    sampler = LocalSampler(policy_of(day, task), day.tokenizer, max_new_tokens=task.max_new_tokens)
    sampler.sample(prompts[:GROUP], seeds=range(GROUP))
    promised = GraphDecoder if day.device.type == "cuda" else LeanDecoder
    if type(sampler._decoder) is not promised:
        raise ArithmeticError(f"sampled with {type(sampler._decoder).__name__} instead of {promised.__name__}")
    found: list[Any] = []
    seconds = [
        scoring.timed(lambda: found.append(sampler.sample(prompts, seeds=range(len(prompts)))), day.device)
        for _ in range(2)  # the first can compile
    ]
    tokens = sum(len(each.token_ids) for each in found[-1])
    return {"replies": len(prompts), "tokens": tokens, "tokens_per_second": tokens / seconds[-1], "seconds": seconds}


def update(day: Day, task: Any) -> dict[str, Any]:
    """Return the seconds of updates of the policy with random replies; the first one compiles."""
    from agents import grpo

    random = np.random.default_rng(0)
    rollouts = []
    for row, prompt in enumerate(prompts_of(task, day.tokenizer)):
        ids = random.integers(5, len(day.tokenizer), task.max_new_tokens, dtype=np.int32)
        reply = Completion(ids, np.full(len(ids), -9.0, dtype=np.float32), True, "")
        turn = RolloutTurn(np.array(prompt, dtype=np.int32), reply, 0.0)
        rollouts.append(Rollout(row, row // task.group_size, "", None, [], (turn,), {}))
    table = grpo.RolloutTable(rollouts)
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "output": folder, "steps": task.steps, "threads": torch.get_num_threads(), "report_to": "none",
            "policy": {"model": task.policy, "precision": "no", "dtype": task.dtype},
            "sampling": {"max_new_tokens": task.max_new_tokens}, "env": {"num_prompts": task.num_prompts},
            "loss": {"measure_kl": False, "importance_cap": None},
            "optimizer": {"learning_rate": task.learning_rate, "max_num_batched_tokens": task.batch_tokens},
        }  # fmt: skip
        settings = grpo.fill_defaults(load_config(grpo.GRPOSettings, values))
        learner = grpo.Learner(settings)
        measured = learner.measure(table, np.arange(len(table.turns)))
        learn = functools.partial(
            learner.update, table, random.standard_normal(table.lengths.sum()), np.ones(len(table.turns), dtype=bool),
            functools.partial(grpo.policy_loss, settings=settings.loss),
            measured=measured, groups=np.arange(task.num_prompts),
        )  # fmt: skip
        seconds = [scoring.timed(learn, day.device) for _ in range(2)]
        kernels = kernels_of(day.device, functools.partial(learn, groups=np.arange(1)))
    tokens = sum(each.num_tokens for batch in measured.batches for each in batch.batches)
    layers = workloads.SHAPES[day.sizes.small]["num_hidden_layers"]
    return {
        "unique_tokens": tokens,
        "passes": len(measured.batches),
        "forward": str(learner.layout),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds[-1],
        "one_group": by_class(kernels, 1, layers),
    }


def their_decoding(day: Day, task: Any) -> dict[str, Any]:
    """Decode with transformers' continuous batching, or with `generate` where that cannot run."""
    from transformers import GenerationConfig

    prompts, model = prompts_of(task, day.tokenizer), policy_of(day, task)
    settings = GenerationConfig(
        max_new_tokens=task.max_new_tokens, do_sample=True, temperature=1.0, top_k=0, eos_token_id=1, pad_token_id=2
    )
    paged = day.device.type == "cuda" and hasattr(model, "generate_batch")
    if paged:

        def run(some: list[list[int]]) -> int:
            outputs = model.generate_batch(some, generation_config=settings, progress_bar=False)
            return sum(len(each.generated_tokens) for each in outputs.values())
    else:

        def run(some: list[list[int]]) -> int:
            batch = day.tokenizer.pad({"input_ids": some}, return_tensors="pt", padding_side="left").to(day.device)
            output = model.generate(**batch, generation_config=settings)
            return int((output[:, batch["input_ids"].shape[1] :] != 2).sum())

    run(prompts[:GROUP])
    counts: list[int] = []
    seconds = scoring.timed(lambda: counts.append(run(prompts)), day.device)
    method = "generate_batch" if paged else "generate"
    return {"tokens": counts[0], "tokens_per_second": counts[0] / seconds, "method": method}


def grpo_step(day: Day, task: Any, *, ours: bool = True) -> dict[str, Any]:
    """Return the mean seconds of the phases of a step, without the first step, which compiles."""
    import grpo

    watch = grpo.Stopwatch()
    run = grpo.train_ours(task, watch) if ours else grpo.train_trl(task, watch, same_scorer=False)
    every = [step["wall"]["step"] for step in watch.steps]
    return {**watch.means()["wall"], "tokens": run.tokens, "first_step": every[0], "steps": every}


def planned_step(day: Day, task: Any) -> dict[str, Any]:
    """Return the planner's seconds of the same step, with the numbers of the calibration."""
    sizes = day.sizes
    policy, reward_model = (
        json.loads(Path(folder, "config.json").read_text()) for folder in (task.policy, task.reward_model)
    )
    prompt = float(np.mean([len(ids) for ids in prompts_of(task, day.tokenizer)]))
    planned = plan(
        {
            "cluster": {"gpu": "here"},
            "policy": {"config": policy, "dtype": sizes.dtype, "shared_prompts": True},
            "generation": {"engine": "transformers"},
            "reward_models": {"rm": {"config": reward_model, "dtype": sizes.dtype}},
            "workload": {"num_prompts": sizes.prompts, "group_size": GROUP, "prompt_tokens": round(prompt)}
            | {"reply_tokens": sizes.reply_tokens},
        }
    )
    return {"step": planned.step_seconds} | {phase.value: seconds for phase, seconds in planned.phase_seconds}
