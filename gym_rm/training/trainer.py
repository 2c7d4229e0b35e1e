"""Train a reward model: the steps of a run, its measurements, and what it keeps.

A step takes comparisons, runs whole ones over token trees (forward, loss, backward), and updates the weights. The loss
of a step is divided by the number of its terms over all micro-batches and ranks, so that it does not depend on how they
are divided. All randomness of a step depends on the seed and its number alone: a run that is resumed repeats nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.loading.checkpoint import EMBEDDED
from gym_rm.engine.loading.revision import revision_of_model
from gym_rm.engine.loading.trial import max_batchable_length
from gym_rm.errors import ConfigError, logger
from gym_rm.reports.curves import Curve
from gym_rm.reports.runs import write_settings
from gym_rm.training.checkpoints import (
    BestModel,
    checkpoint_to_resume,
    lock_folder,
    release_folder,
    save_checkpoint,
)
from gym_rm.training.comparison_batches import MicroBatch, micro_batches, share_of_rank, steps_of
from gym_rm.training.comparison_sets import EncodedComparison, read_sets, warn_about_drops
from gym_rm.training.export import export
from gym_rm.training.layouts import choose_layout, enable_checkpointing
from gym_rm.training.objectives import Outcomes, make_objective
from gym_rm.training.parallel_model import ParallelModel, make_accelerator, reshard, start_trackers, token_budget
from gym_rm.training.reward_model_settings import FREE_IN_RESUMING, RewardModelTraining
from gym_rm.training.stop_signals import first_signal, heard_signals
from gym_rm.training.trained_reward_model import StartModel, TrainedModel, open_model, output_names

LOWER_IS_BETTER = ("loss", "mse", "calibration_error", "ties")


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        folder: folder of the run.
        model: folder of the last model.
        best: folder of the best model by `checkpoint.metric`; None without validation sets.
        metrics: metrics of each validation set after the last step.
        steps: number of steps.
    """

    folder: Path
    model: Path
    best: Path | None
    metrics: Mapping[str, Mapping[str, float]]
    steps: int


class Trainer:
    """A run: its model, its data, and the number of steps that are done.

    Raises:
        ConfigError: a setting is invalid, a file cannot be read, or the output folder has another run.

    Example:
        >>> from gym_rm.config import load_config
        >>> settings = load_config(RewardModelTraining, overrides=["data.train=pairs.jsonl", "output=run"])
        >>> Trainer(settings).run()  # doctest: +SKIP
    """

    def __init__(self, settings: RewardModelTraining) -> None:
        if not settings.data.train:
            raise ConfigError("data.train is missing: the files of comparisons to learn from.")
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        name = settings.output or f"outputs/reward-model-{time.strftime('%Y%m%d-%H%M%S')}"
        self.accelerator = make_accelerator(
            folder=name, precision=settings.batch.precision, report_to=settings.report_to, fsdp=settings.batch.fsdp
        )
        (name,) = broadcast_object_list([name])
        self.settings = settings = settings.model_copy(update={"output": name})
        self.folder = Path(name)
        self.start: StartModel = open_model(settings.model, seed=settings.seed)
        named = settings.model.path or EMBEDDED, settings.model.reward_model_kwargs.get("revision")
        (self._revision,) = broadcast_object_list([self.accelerator.is_main_process and revision_of_model(*named)])
        self.objective = make_objective(settings.loss, self.start.kind, output_names(self.start))
        self.sets = read_sets(
            settings.data, self.start, self.objective.settings, self.objective.objectives, seed=settings.seed
        )
        self.training, *self.validation = self.sets
        sizes, batch = [each.unique_tokens for each in self.training.examples], settings.batch
        steps = steps_of(
            sizes, batch_size=batch.batch_size, epochs=settings.epochs, seed=settings.seed, shuffle=batch.shuffle
        )
        self.steps = list(steps)[: settings.max_steps]
        self._prepare_model()
        self.step = 0
        self.measured: dict[str, dict[str, float]] = {}
        self._require_metric_of_a_set()
        higher = bool(self.validation) and not self.metric[1].startswith(LOWER_IS_BETTER)
        self.best = BestModel(self.folder / "best", higher_is_better=higher)
        if self.accelerator.is_main_process:
            lock_folder(self.folder, settings.model_dump(exclude={"output"}))
        checkpoint = checkpoint_to_resume(self.folder, self._identity(), max_steps=len(self.steps))
        if checkpoint is not None:
            self.model.restore(checkpoint)
            self.step, self.best.value = checkpoint.step, checkpoint.state["best"]
            self.measured = dict(checkpoint.state["measured"])
        if self.accelerator.is_main_process:
            self._start_files()
        start_trackers(self.accelerator, "reward-model", settings.model_dump(mode="json"))
        self.accelerator.wait_for_everyone()

    def run(self, report: Callable[[int, Mapping[str, float]], None] | None = None) -> Finished:
        """Train until the last step, and write the model.

        On SIGTERM or SIGINT (Ctrl-C), the run saves a checkpoint after the current step and raises SystemExit.

        Args:
            report: called with the step and its metrics after every step.
        """
        settings = self.settings
        save_every = settings.checkpoint.save_every or settings.evaluate_every
        with heard_signals() as signal_heard:
            if self.step == 0:
                self.evaluate()
            while self.step < len(self.steps):
                metrics = self.train_step()
                if report is not None:
                    report(self.step, metrics)
                last = self.step == len(self.steps)
                if last or self.step % settings.evaluate_every == 0:
                    self.evaluate()
                stop = first_signal(self.model.gathered([signal_heard()]))
                if stop is not None or last or self.step % save_every == 0:
                    self.save()
                if stop is not None and not last:
                    if self.model.is_main:
                        message = "stopped after step %d; repeat the command to resume (with output=%s)."
                        logger.warning(message, self.step, self.folder)
                    raise SystemExit(128 + stop)
        return self.finish()

    def train_step(self) -> dict[str, float]:
        """Run the next step and return its metrics."""
        started = time.perf_counter()
        epoch, chosen = self.steps[self.step]
        self.step += 1
        examples = [self.training.examples[index] for index in chosen.tolist()]
        numbers = np.random.SeedSequence([self.settings.seed, self.step, self.model.rank])
        torch.manual_seed(int(numbers.generate_state(1, np.uint64)[0] >> 1))
        weight, outcomes = self.objective.weight(examples), Outcomes()
        for micro, counts in self.model.passes(self._micro_batches(examples), padding_batch=self._smallest):
            loss, of_batch = self._forward(micro)
            self.model.backward(loss / weight * counts)
            if counts:
                outcomes.extend(of_batch)
        update = self.model.optimizer_step()
        seconds = time.perf_counter() - started
        metrics = self._gathered(outcomes).metrics()
        metrics |= {
            "epoch": epoch,
            **update,
            "seconds": seconds,
            "comparisons_per_second": len(examples) / seconds,
            "tokens_per_second": sum(sum(each.num_tokens) for each in examples) / seconds,
            "unique_tokens": sum(each.unique_tokens for each in examples),
        }
        if self.accelerator.is_main_process:
            self._training_curve.add({"step": self.step, **metrics})
        self.accelerator.log({f"train/{name}": value for name, value in metrics.items()}, step=self.step)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Measure on all validation sets; return the metrics of each, and keep the model if it is the best."""
        measured: dict[str, dict[str, float]] = {}
        for each in self.validation:
            measured[each.name] = self._gathered(self.outcomes(each.examples)).metrics()
            if self.model.is_main:
                self._validation_curve.add({"step": self.step, "set": each.name, **measured[each.name]})
            named = {f"{each.name}/{name}": value for name, value in measured[each.name].items()}
            self.accelerator.log(named, step=self.step)
        reshard(self.model.plain)  # the next checkpoint reads the parameters
        self.measured = measured
        if measured:
            self._keep_if_best()
        return measured

    def outcomes(self, examples: Sequence[EncodedComparison]) -> Outcomes:
        """Return the outcomes of this rank's share of comparisons, without gradients."""
        outcomes = Outcomes()
        for micro, counts in self.model.passes(
            self._micro_batches(examples), padding_batch=self._smallest, learn=False
        ):
            _, of_batch = self._forward(micro)
            if counts:
                outcomes.extend(of_batch)
        return outcomes

    def save(self) -> None:
        """Write a checkpoint to resume from."""
        state = {"measured": self.measured, "best": self.best.value}
        checkpoint = self.model.checkpoint(self.step, settings=self._identity(), state=state)
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder, checkpoint)
        self.accelerator.wait_for_everyone()

    def finish(self) -> Finished:
        """Write the last model and close the trackers."""
        self._export(self.folder / "final")
        self.model.end_training()
        release_folder(self.folder)
        best = None if self.best.value is None else self.best.folder
        return Finished(self.folder, self.folder / "final", best, self.measured, self.step)

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        values = self.model.forward(micro.batches)
        values = values.float()[torch.from_numpy(micro.value_index).to(values.device)]
        return self.objective.loss(values, micro)

    def _micro_batches(self, examples: Sequence[EncodedComparison]) -> list[MicroBatch]:
        return self._pack(share_of_rank(examples, self.model.rank, self.model.world))

    def _gathered(self, outcomes: Outcomes) -> Outcomes:
        together = Outcomes()
        for of_rank in self.model.gathered([outcomes]):
            together.extend(of_rank)
        return together

    def _prepare_model(self) -> None:
        """Move the model to its device, choose its layout, and make the optimizers."""
        batch, model = self.settings.batch, self.start.model
        trained = TrainedModel(self.start).to(self.accelerator.device)
        fuse = not (batch.fsdp or self.start.peft is not None)
        self.layout = choose_layout(trained, model, tree=batch.tree, fuse=fuse)
        logger.info("training %s with %s", self.start.name, self.layout)
        if batch.gradient_checkpointing:
            enable_checkpointing(model, trained.decoders, self.layout, option="batch.gradient_checkpointing")
        self.budget = token_budget(batch.max_num_batched_tokens, self.accelerator.device)
        self._max_batchable_length = 0 if self.layout.layout == "one_by_one" else max_batchable_length(model.config)
        longest = max(max(each.num_tokens) for part in self.sets for each in part.examples)
        if batch.fsdp and self._max_batchable_length is not None and longest > self._max_batchable_length:
            raise ConfigError(
                f"batch.fsdp needs conversations that can share a batch; those of {self.start.name} cannot if they are "
                f"longer than {self._max_batchable_length} tokens, and one has {longest}. Set batch.fsdp=false."
            )
        smallest = min(self.training.examples, key=lambda each: each.unique_tokens)
        (self._smallest,) = self._pack([smallest])
        self.model = ParallelModel(
            trained,
            self.accelerator,
            self.settings.optimizer,
            num_updates=len(self.steps),
            fsdp=batch.fsdp,
            has_unused=trained.has_unused,
        )

    def _pack(self, examples: Sequence[EncodedComparison]) -> list[MicroBatch]:
        return micro_batches(
            examples,
            tree=self.layout.layout == "tree",
            max_num_batched_tokens=self.budget,
            max_width=num_positions(self.start.model),
            max_batchable_length=self._max_batchable_length,
        )

    def _export(self, folder: Path) -> None:
        weights = self.model.weights(keep=self.model.is_main)
        if self.model.is_main:
            export(
                folder,
                self.start,
                weights,
                settings=self.settings,
                sets=self.sets,
                metrics=self.measured,
                step=self.step,
            )
        self.accelerator.wait_for_everyone()

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same to resume a run: settings, training data, and the metric of the best model."""
        return {
            **self.settings.model_dump(mode="json", exclude=FREE_IN_RESUMING),
            **{f"contents of data set {each.name}": each.digest() for each in self.sets},
            "checkpoint.metric": "/".join(self.metric) if self.validation else None,
            "files of model.path": self._revision,
        }

    def _start_files(self) -> None:
        plain = self.settings.model_dump(mode="json")
        write_settings(self.folder, plain, self.settings.model_dump(mode="json", exclude_defaults=True))
        warn_about_drops(self.sets)
        self._training_curve = Curve(self.folder / "metrics.csv", after=self.step)
        self._validation_curve = Curve(self.folder / "validation.csv", after=self.step)

    @property
    def metric(self) -> tuple[str, str]:
        """The validation set and the metric by which models are kept."""
        set_name, _, metric = (self.settings.checkpoint.metric or f"{self.validation[0].name}/loss").rpartition("/")
        return set_name, metric

    def _require_metric_of_a_set(self) -> None:
        name, sets = self.settings.checkpoint.metric, [each.name for each in self.validation]
        if name is not None and self.metric[0] not in sets:
            known = f"has the validation sets {sets}" if sets else "has none; set data.validation_share"
            raise ConfigError(f"checkpoint.metric={name!r} must be SET/METRIC of a validation set; the run {known}.")

    def _keep_if_best(self) -> None:
        set_name, metric = self.metric
        if metric not in self.measured[set_name] and self.best.value is None:
            known = ", ".join(f"{set_name}/{key}" for key in self.measured[set_name])
            raise ConfigError(f"checkpoint.metric={set_name}/{metric} is not measured; known: {known}.")
        if self.settings.checkpoint.keep_best and self.step and metric in self.measured[set_name]:
            self.best.offer(self.measured[set_name][metric], self._export)
