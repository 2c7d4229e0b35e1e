"""Train a reward model: the steps of a run, its measurements, and what it keeps.

A step takes comparisons, runs whole ones over token trees (forward, loss, backward), and updates the weights. The loss
of a step is divided by the number of its terms over all micro-batches and ranks, so that it does not depend on how they
are divided. All randomness of a step depends on the seed and its number alone: a run that goes on repeats nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from gym_rm.config import load_config
from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.loading.trial import longest_shared
from gym_rm.errors import ConfigError, logger
from gym_rm.reports.curves import Curve
from gym_rm.training.batches import MicroBatch, micro_batches, share_of_rank, steps_of
from gym_rm.training.checkpoints import (
    Checkpoint,
    hold,
    latest_checkpoint,
    let_go,
    read_checkpoint,
    require_same_settings,
    save_checkpoint,
    write_whole,
)
from gym_rm.training.examples import Example
from gym_rm.training.export import export
from gym_rm.training.kept import KeptModels
from gym_rm.training.model import (
    StartModel,
    TrainedModel,
    choose_layout,
    enable_checkpointing,
    open_model,
    output_names,
)
from gym_rm.training.objectives import Outcomes, make_objective
from gym_rm.training.optimizers import load_optimizer_state, make_optimizers, optimizer_state, set_learning_rates
from gym_rm.training.parallel import copy_into, make_accelerator, reshard, shard, whole
from gym_rm.training.sets import describe_sets, read_sets, warn_about_drops
from gym_rm.training.settings import RewardModelTraining, curve_settings, flat_settings
from gym_rm.training.stopping import STOPPED, hearing_signals

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16_384
SETTINGS = "settings.yaml"
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

    Args:
        settings: settings of the run.

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
            folder=name,
            precision=settings.batch.precision,
            report_to=settings.report_to,
            fsdp=settings.batch.fsdp,
        )
        (name,) = broadcast_object_list([name])
        self.settings = settings = settings.model_copy(update={"output": name})
        self.folder = Path(name)
        self.start: StartModel = open_model(settings.model, seed=settings.seed)
        self._plain = TrainedModel(self.start)
        self.objective = make_objective(settings.loss, self.start.kind, output_names(self.start))
        self.sets = read_sets(settings.data, self.start, self.objective, seed=settings.seed)
        self.training, *self.validation = self.sets
        self._prepare_model()
        self.steps = list(
            steps_of(
                [each.unique_tokens for each in self.training.examples],
                batch_size=settings.batch.batch_size,
                epochs=settings.epochs,
                seed=settings.seed,
                shuffle=settings.batch.shuffle,
            )
        )[: settings.max_steps]
        self.step = 0
        self.measured: dict[str, dict[str, float]] = {}
        self._require_metric_of_a_set()
        higher, most = settings.checkpoint.higher_is_better, settings.checkpoint.keep_best
        if higher is None:
            higher = bool(self.validation) and not self.metric[1].startswith(LOWER_IS_BETTER)
        self.kept = KeptModels(self.folder / "best", most=most, higher_is_better=higher)
        if self.accelerator.is_main_process:
            hold(self.folder)
        self._resume()
        if self.accelerator.is_main_process:
            self._start_files()
        if settings.report_to != "none":
            self.accelerator.init_trackers("reward-model", config=flat_settings(settings.model_dump(mode="json")))
        self.accelerator.wait_for_everyone()

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self, report: Callable[[int, Mapping[str, float]], None] | None = None) -> Finished:
        """Train until the last step, and write the model.

        On SIGTERM, the run saves a checkpoint after the current step and raises SystemExit.

        Args:
            report: called with the step and its metrics after every step.
        """
        settings = self.settings
        save_every = settings.checkpoint.save_every or settings.evaluate_every
        with hearing_signals() as signal_heard:
            if self.step == 0:
                self.evaluate()
            while self.step < len(self.steps):
                metrics = self.train_step()
                if report is not None:
                    report(self.step, metrics)
                last = self.step == len(self.steps)
                if last or self.step % settings.evaluate_every == 0:
                    self.evaluate()
                stop = any(gather_object([signal_heard() is not None]))
                if stop or last or self.step % save_every == 0:
                    self.save()
                if stop and not last:
                    logger.warning("stopped after step %d; repeat the command to go on.", self.step)
                    raise SystemExit(STOPPED)
        return self.finish()

    def train_step(self) -> dict[str, float]:
        """Run the next step and return its metrics."""
        started = time.perf_counter()
        epoch, chosen = self.steps[self.step]
        self.step += 1
        examples = [self.training.examples[index] for index in chosen.tolist()]
        learning_rate = set_learning_rates(
            self.optimizers, self.settings.optimizer, step=self.step, num_steps=len(self.steps)
        )
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed(_seed_of(self.settings.seed, self.step, rank))
        micro, num_passes = self._micro_batches(examples)
        scale = world / self.objective.weight(examples)  # DDP and FSDP2 divide gradients by the number of ranks
        self.module.train()
        outcomes = Outcomes()
        for number in range(num_passes):
            last = number == num_passes - 1
            with contextlib.nullcontext() if last else self._without_sync():
                if number < len(micro):
                    loss, found = self._forward(micro[number])
                    outcomes.extend(found)
                    torch.autograd.backward(loss * scale)
                else:  # another rank has more; all ranks must take part
                    loss, _ = self._forward(self._smallest)
                    torch.autograd.backward(loss * 0.0)
        norm = self._clip()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of step {self.step} is {norm}; no weight was changed by it. Lower "
                "optimizer.learning_rate, or check the data with gym-rm data inspect. The last checkpoint is kept."
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        metrics = self._gathered(outcomes).metrics()
        metrics |= {
            "epoch": epoch,
            "grad_norm": norm,
            "learning_rate": learning_rate,
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
        """Measure on all validation sets; return the metrics of each, and keep the model if it is among the best."""
        self.module.eval()
        measured: dict[str, dict[str, float]] = {}
        for each in self.validation:
            outcomes = self._gathered(self.outcomes(each.examples))
            measured[each.name] = outcomes.metrics()
            sources = outcomes.sources()
            parts = {source: outcomes.of_source(source).metrics() for source in sources} if len(sources) > 1 else {}
            for source, metrics in {"": measured[each.name], **parts}.items():
                if self.accelerator.is_main_process:
                    self._validation_curve.add({"step": self.step, "set": each.name, "source": source, **metrics})
                name = f"{each.name}/{source}" if source else each.name
                self.accelerator.log({f"{name}/{key}": value for key, value in metrics.items()}, step=self.step)
        reshard(self._plain)  # the next checkpoint reads the parameters
        self.measured = measured
        if measured:
            self._keep_if_best()
        return measured

    def outcomes(self, examples: Sequence[Example]) -> Outcomes:
        """Return the outcomes of this rank's share of comparisons, without gradients."""
        micro, num_passes = self._micro_batches(examples)
        found = Outcomes()
        for number in range(num_passes):
            _, of_batch = self._forward(micro[number] if number < len(micro) else self._smallest)
            if number < len(micro):
                found.extend(of_batch)
        return found

    def save(self) -> None:
        """Write a checkpoint to go on from."""
        main = self.accelerator.is_main_process
        weights, states = self._trained_weights(), whole(optimizer_state(self._plain, self.optimizers), keep=main)
        if main:
            state = Checkpoint(self.step, weights, states, self._identity(), self.kept.values, self.measured)
            save_checkpoint(self.folder, state)
        self.accelerator.wait_for_everyone()

    def finish(self) -> Finished:
        """Write the last model and close the trackers."""
        self._export(self.folder / "final")
        self.accelerator.end_training()
        let_go(self.folder)
        return Finished(self.folder, self.folder / "final", self.kept.best, self.measured, self.step)

    # --- the parts of a step ---------------------------------------------------------------------------------------

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Outcomes]:
        with self.accelerator.autocast():
            values = self.module(micro.batches)
        values = values.float()[torch.from_numpy(micro.value_index).to(values.device)]
        return self.objective.loss(values, micro)

    def _micro_batches(self, examples: Sequence[Example]) -> tuple[list[MicroBatch], int]:
        """Return the micro-batches of this rank, and the number of passes that every rank makes."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes

        def of_rank(number: int) -> list[MicroBatch]:
            return self._pack(share_of_rank(examples, number, world))

        ours = of_rank(rank)
        counts = [len(ours) if number == rank else len(of_rank(number)) for number in range(world)]
        return ours, max(counts)

    def _without_sync(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.batch.fsdp:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.accelerator.no_sync(self.module)
        return context

    def _clip(self) -> float:
        parameters = [parameter for parameter in self._plain.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.optimizer.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _gathered(self, outcomes: Outcomes) -> Outcomes:
        """Return the outcomes of all ranks."""
        if self.accelerator.num_processes == 1:
            return outcomes
        together = Outcomes()
        for each in gather_object([outcomes]):
            together.extend(each)
        return together

    # --- the model -------------------------------------------------------------------------------------------------

    def _prepare_model(self) -> None:
        """Move the model to its device, choose its layout, and make the optimizers."""
        batch, model = self.settings.batch, self.start.model
        device = self.accelerator.device
        self._plain.to(device)
        fuse = not (batch.fsdp or batch.compile or self.start.peft is not None)
        self.layout = choose_layout(self._plain, model, tree=batch.tree, fuse=fuse)
        logger.info("training %s with %s", self.start.name, self.layout)
        if batch.gradient_checkpointing:
            enable_checkpointing(model, self._plain.decoders, self.layout, option="batch.gradient_checkpointing")
        if batch.compile:
            for layer in getattr(model.base_model, "layers", [model.base_model]):
                layer.compile(dynamic=True)
        self.budget = batch.max_num_batched_tokens or (TOKENS_ON_GPU if device.type == "cuda" else TOKENS_ON_CPU)
        self._longest_shared = 0 if self.layout.layout == "one_by_one" else longest_shared(model.config)
        longest = max(max(each.num_tokens) for part in self.sets for each in part.examples)
        if batch.fsdp and self._longest_shared is not None and longest > self._longest_shared:
            raise ConfigError(
                f"batch.fsdp needs conversations that can share a batch; those of {self.start.name} cannot if they are "
                f"longer than {self._longest_shared} tokens, and one has {longest}. Set batch.fsdp=false."
            )
        smallest = min(self.training.examples, key=lambda each: each.unique_tokens)
        (self._smallest,) = self._pack([smallest])
        if batch.fsdp:
            shard(self._plain, model, self.accelerator)
            self.module: torch.nn.Module = self._plain
        else:
            self.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=self._plain.has_unused)
            self.module = self.accelerator.prepare_model(self._plain)
        self.optimizers = make_optimizers(self._plain, self.settings.optimizer)

    def _pack(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return micro_batches(
            examples,
            tree=self.layout.layout == "tree",
            max_num_batched_tokens=self.budget,
            max_width=num_positions(self.start.model),
            longest_shared=self._longest_shared,
        )

    def _trained_weights(self) -> dict[str, Tensor]:
        """Return the parameters that are trained, by name, in the main process; others return nothing."""
        named = ((name, each) for name, each in self._plain.named_parameters() if each.requires_grad)
        return whole(named, keep=self.accelerator.is_main_process)

    def _export(self, folder: Path) -> None:
        weights = {name.removeprefix("model."): tensor for name, tensor in self._trained_weights().items()}
        if self.accelerator.is_main_process:
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

    # --- what is kept ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Go on from the last checkpoint of the folder, if there is one."""
        found = latest_checkpoint(self.folder) if self.accelerator.is_main_process else None
        (folder,) = broadcast_object_list([found])
        if folder is None:
            before = self.folder / SETTINGS
            if before.exists() and any((self.folder / name).exists() for name in ("best", "final")):
                earlier = curve_settings(load_config(RewardModelTraining, before))
                require_same_settings(curve_settings(self.settings), earlier, self.folder)
            return
        checkpoint = read_checkpoint(folder)
        require_same_settings(self._identity(), checkpoint.settings, self.folder)
        parameters = {name: each for name, each in self._plain.named_parameters() if each.requires_grad}
        if parameters.keys() != checkpoint.model.keys():
            raise ConfigError(f"the checkpoint {str(folder)!r} is of another model; use another output folder.")
        for name, tensor in checkpoint.model.items():
            copy_into(parameters[name], tensor)
        load_optimizer_state(self._plain, self.optimizers, checkpoint.optimizer)
        self.step, self.kept.values = checkpoint.step, dict(checkpoint.kept)
        self.measured = {name: dict(values) for name, values in checkpoint.measured.items()}
        logger.info("going on after step %d of %s", self.step, self.folder)

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same to go on with a run: settings, training data, and the metric of kept models."""
        metric = "/".join(self.metric) if self.validation else None
        contents = self.training.digest()
        return {**curve_settings(self.settings), "contents of data.train": contents, "checkpoint.metric": metric}

    def _start_files(self) -> None:
        described = json.dumps(describe_sets(self.sets), indent=1)
        write_whole(self.folder / "data.json", described + "\n")
        plain = self.settings.model_dump(mode="json")
        write_whole(self.folder / SETTINGS, yaml.safe_dump(plain, sort_keys=False))
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
        if metric not in self.measured[set_name] and not self.kept.values:
            known = ", ".join(f"{set_name}/{key}" for key in self.measured[set_name])
            raise ConfigError(f"checkpoint.metric={set_name}/{metric} is not measured; known: {known}.")
        if self.kept.most and self.step and metric in self.measured[set_name]:
            value, is_main = self.measured[set_name][metric], self.accelerator.is_main_process
            self.kept.offer(self.step, value, self._export, is_main=is_main)


def _seed_of(*numbers: int) -> int:
    """Return one seed for several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
