"""The reward model of a run where it learns: its comparisons, weights, optimizer and processes.

What is learned is in `agents/train_reward_model.py`; here is how: token trees under a token budget, and the same number
of passes on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.loading.trial import max_batchable_length
from gym_rm.errors import ConfigError
from gym_rm.training.comparison_batches import MicroBatch, micro_batches, share_of_rank, steps_of
from gym_rm.training.comparison_sets import EncodedComparison, read_sets
from gym_rm.training.export import export
from gym_rm.training.objectives import Outcomes, make_objective
from gym_rm.training.parallel_model import ParallelModel, make_accelerator, reshard
from gym_rm.training.reward_model_settings import RewardModelTraining
from gym_rm.training.trained_reward_model import TrainedModel, open_model, output_names


class RewardLearner(ParallelModel):
    """The reward model, its comparisons and its optimizer, on the ranks of a run.

    Args:
        run: settings of the run, with its `output`.

    Attributes:
        start: the opened model: `model`, `peft`, `tokenizer`, `kind`, `renderer`, `name`.
        objective: the loss.
        training, validation: the set to learn from, and those to measure on.
        steps: epoch and indices of the comparisons of every step.

    Raises:
        ConfigError: a setting does not fit the model, or a file cannot be read.
    """

    def __init__(self, run: RewardModelTraining) -> None:
        if not run.data.train:
            raise ConfigError("data.train is missing: the files of comparisons to learn from.")
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        batch = run.batch
        accelerator = make_accelerator(
            folder=str(run.output), precision=batch.precision, report_to=run.report_to, fsdp=batch.fsdp
        )
        self.run, self.start = run, open_model(run.model, seed=run.seed)
        self.objective = make_objective(run.loss, self.start.kind, output_names(self.start))
        self.sets = read_sets(run.data, self.start, self.objective.settings, self.objective.objectives, seed=run.seed)
        self.training, *self.validation = self.sets
        sizes = [each.unique_tokens for each in self.training.examples]
        steps = steps_of(sizes, batch_size=batch.batch_size, epochs=run.epochs, seed=run.seed, shuffle=batch.shuffle)
        self.steps = list(steps)[: run.max_steps]
        trained = TrainedModel(self.start).to(accelerator.device)
        super().__init__(
            trained,
            self.start,
            accelerator,
            run.optimizer,
            num_updates=len(self.steps),
            tree=batch.tree,
            fsdp=batch.fsdp,
            checkpointing=batch.gradient_checkpointing,
            max_num_batched_tokens=batch.max_num_batched_tokens,
        )
        self._max_batchable_length = (
            0 if self.layout.layout == "one_by_one" else max_batchable_length(self.start.model.config)
        )
        self._require_one_forward_for_each_pass()
        (self._smallest,) = self.micro_batches([min(self.training.examples, key=lambda each: each.unique_tokens)])

    def examples_of(self, step: int) -> list[EncodedComparison]:
        """Return the comparisons of a step, counted from 1, on all ranks."""
        return [self.training.examples[index] for index in self.steps[step - 1][1].tolist()]

    def losses(self, examples: Sequence[EncodedComparison], *, learn: bool = True) -> Iterator[tuple[Tensor, Outcomes]]:
        """Yield the sum of the losses in each pass over this rank's share of comparisons, and what they came to.

        All ranks make the same number of passes; a further one of a rank has a loss of 0 and no outcomes.
        """
        share = self.micro_batches(share_of_rank(examples, self.rank, self.world))
        for batch, counts in self.passes(share, padding_batch=self._smallest, learn=learn):
            values = self.forward(batch.batches).float()
            loss, outcomes = self.objective.loss(values[torch.from_numpy(batch.value_index).to(values.device)], batch)
            yield loss * counts, outcomes if counts else Outcomes()
        if not learn:
            reshard(self.plain)  # the next checkpoint reads the parameters

    def micro_batches(self, examples: Sequence[EncodedComparison]) -> list[MicroBatch]:
        """Pack comparisons under the token budget."""
        return micro_batches(
            examples,
            tree=self.layout.layout == "tree",
            max_num_batched_tokens=self.budget,
            max_width=num_positions(self.start.model),
            max_batchable_length=self._max_batchable_length,
        )

    def export(self, folder: Path, *, metrics: Mapping[str, Mapping[str, float]], step: int) -> None:
        """Write the model as a plain Hugging Face folder with a model card; all ranks must call this."""
        weights = self.weights(keep=self.is_main)
        if self.is_main:
            export(folder, self.start, weights, settings=self.run, sets=self.sets, metrics=metrics, step=step)
        self.accelerator.wait_for_everyone()

    def _require_one_forward_for_each_pass(self) -> None:
        """Raise ConfigError if FSDP2 would run another number of forwards on each rank."""
        longest, most = (
            max(max(each.num_tokens) for part in self.sets for each in part.examples),
            self._max_batchable_length,
        )
        if self.run.batch.fsdp and most is not None and longest > most:
            raise ConfigError(
                f"batch.fsdp needs conversations that can share a batch; those of {self.start.name} cannot if they are "
                f"longer than {most} tokens, and one has {longest}. Set batch.fsdp=false."
            )
