"""Pairs, and the training runs of gym_rm and of TRL that `reward_training.py` compares."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from agents.train_reward_model import train_step
from gym_rm.config import load_config
from gym_rm.training.reward_learner import RewardLearner
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.types import Message


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse reply, as messages and as token ids."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    ids: tuple[list[int], list[int]] = ([], [])

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))


@dataclass(frozen=True)
class Job:
    """What both trainers do: a model, the pairs in order, and the settings of a step."""

    folder: Path
    pairs: Sequence[Pair]
    batch_size: int
    learning_rate: float = 1e-4
    micro_batch: int | None = None
    """Pairs in one forward of TRL; None for the whole batch."""

    @property
    def steps(self) -> int:
        return -(-len(self.pairs) // self.batch_size)


@dataclass
class Run:
    """What a run came to."""

    model: PreTrainedModel | None
    losses: list[float] = field(default_factory=list)
    wall: float = 0.0
    processor: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    """Wall time of each step of gym_rm."""


def train_ours(job: Job, *, tree: bool = True, precision: str = "no") -> Run:
    """Train with gym_rm; the steps are timed."""
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "pairs.jsonl"
        rows = ({"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in job.pairs)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = {
            "output": str(Path(name) / "run"), "threads": torch.get_num_threads(),
            "model": {"path": str(job.folder)}, "data": {"train": str(data)},
            "batch": {"batch_size": job.batch_size, "shuffle": False, "precision": precision, "tree": tree},
            "optimizer": {"learning_rate": job.learning_rate, "schedule": "linear", "warmup_share": 0.0},
        }  # fmt: skip
        learner = RewardLearner(load_config(RewardModelTraining, settings))
        expected = [ids for pair in job.pairs for ids in pair.ids]
        read = [s.input_ids.tolist() for example in learner.training.examples for s in example.sequences]
        assert read == expected, "gym_rm reads other token ids than the template gives"
        run = Run(learner.start.model)
        wall, processor = time.perf_counter(), time.process_time()
        for step in range(1, len(learner.steps) + 1):
            started = time.perf_counter()
            run.losses.append(train_step(step, learner)["loss"])
            run.step_seconds.append(time.perf_counter() - started)
        run.wall, run.processor = time.perf_counter() - wall, time.process_time() - processor
        run.model.eval()
        return run


def train_trl(job: Job) -> Run:
    """Train with TRL; its steps are timed from the first to the last, with collation."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import PrinterCallback, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    disable_progress_bar()
    run = Run(AutoModelForSequenceClassification.from_pretrained(job.folder, dtype=torch.float32))
    micro = min(job.micro_batch or job.batch_size, job.batch_size)

    class Recorded(RewardTrainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            run.losses.append(float(loss.detach()))
            return loss

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            run.wall, run.processor = time.perf_counter(), time.process_time()

        def on_train_end(self, *arguments: Any, **options: Any) -> None:
            run.wall, run.processor = time.perf_counter() - run.wall, time.process_time() - run.processor

    with tempfile.TemporaryDirectory() as name:
        config = RewardConfig(
            output_dir=name, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
            per_device_train_batch_size=micro, gradient_accumulation_steps=job.batch_size // micro,
            num_train_epochs=1, learning_rate=job.learning_rate, lr_scheduler_type="linear", optim="adamw_torch_fused",
            train_sampling_strategy="sequential",  # the order of group_by_length is that of the job
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected} for p in job.pairs]
        trainer = Recorded(
            model=run.model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(job.folder),
            callbacks=[Clock()],
        )
        prepared = trainer.train_dataset
        read = [list(ids) for ids in zip(prepared["chosen_ids"], prepared["rejected_ids"], strict=True)]
        assert read == [list(pair.ids) for pair in job.pairs], "TRL reads other token ids than the template gives"
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        run.losses = np.array(run.losses).reshape(-1, job.batch_size // micro).mean(axis=1).tolist()
    run.model.eval()
    return run


def train(method: str, job: Job) -> Run:
    if method != "trl micro":
        job = replace(job, micro_batch=None)
    if method == "trl random":
        order = np.random.default_rng(1).permutation(len(job.pairs)).tolist()
        job = replace(job, pairs=[job.pairs[row] for row in order])
    return train_trl(job) if method.startswith("trl") else train_ours(job, tree=method == "ours")
