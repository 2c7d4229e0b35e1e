"""The policy of a GRPO run where it learns: its weights, optimizer, reference and processes.

What is learned is in `agents/grpo.py`; here is how: token trees under a token budget, log-probabilities under the
policy and the reference, the weights for samplers, and the state that a run resumes from.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.loading.trial import max_batchable_length
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.losses import LossInputs, LossTerms, token_weights
from gym_rm.policy.rollouts import RolloutTable, RolloutTurn
from gym_rm.policy.trained_policy import TrainedPolicy, open_policy, save_policy
from gym_rm.policy.turn_batches import PolicyBatch, policy_batches
from gym_rm.training.checkpoints import atomic_folder
from gym_rm.training.parallel_model import ParallelModel, make_accelerator, reshard, shard


@dataclass(frozen=True)
class Measured:
    """What is known of this rank's turns before the updates of a step.

    Attributes:
        turns: indices of the turns in the table of all ranks.
        batches: micro-batches of all of them.
        policy, reference: log-probabilities of the tokens `[N]`, NaN for those of other ranks; None if not measured.
    """

    turns: NDArray[Any]
    batches: Sequence[PolicyBatch]
    policy: NDArray[np.float32] | None
    reference: NDArray[np.float32] | None


class Learner(ParallelModel):
    """The policy, its reference and its optimizer, on the ranks of a run.

    Args:
        run: settings of the run, without `null` where there is a default.

    Attributes:
        start: the opened policy: `model`, `peft`, `tokenizer`, `name`.
        reference: the initial policy, or None if the divergence is not measured, or is measured without adapters.
        unsharded: the model for samplers: a copy on the CPU if the policy itself is sharded, with the first weights.

    Raises:
        ConfigError: the policy cannot be opened, or a setting does not fit it.
    """

    def __init__(self, run: GRPOSettings) -> None:
        self.run = run
        policy, options, loss = run.policy, run.optimizer, run.loss
        accelerator = make_accelerator(
            folder=str(run.output),
            precision="no" if policy.dtype == "bfloat16" else policy.precision,
            report_to=run.report_to,
            fsdp=options.fsdp,
        )
        self.device: torch.device = accelerator.device
        dtype = getattr(torch, policy.dtype)
        self.start = open_policy(policy.model, lora=policy.lora, dtype=dtype, seed=run.seed)
        self.unsharded: Any = copy.deepcopy(self.start.trained) if options.fsdp else self.start.trained
        self.policy = TrainedPolicy(self.start, temperature=run.sampling.temperature).to(self.device)
        self.measures_kl = bool(loss.kl_coef or loss.measure_kl)
        self.reference: TrainedPolicy | None = None
        if self.measures_kl and self.start.peft is None:
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        super().__init__(
            self.policy,
            self.start,
            accelerator,
            options,
            num_updates=run.steps * options.updates_per_step * options.epochs,
            tree=options.tree,
            fsdp=options.fsdp,
            checkpointing=policy.gradient_checkpointing,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        if self.reference is not None:
            for decoder in self.reference.decoders:
                decoder.use(fuse=self.layout.fuse, kernels=self.layout.kernels)
            if options.fsdp:
                shard(self.reference, self.reference.model, accelerator)

    def batches(
        self, turns: Sequence[RolloutTurn], groups: NDArray[Any], *, chosen: NDArray[Any] | None = None
    ) -> list[PolicyBatch]:
        """Pack turns into micro-batches under the token budget; those of a group share their prompt.

        Args:
            turns: M turns.
            groups: group of each turn `[M]`.
            chosen: indices of the turns to pack; None for all.
        """
        return policy_batches(
            turns,
            groups,
            layout=self.layout.layout,
            max_num_batched_tokens=self.budget,
            max_width=num_positions(self.start.model),
            max_batchable_length=max_batchable_length(self.start.model.config),
            chosen=chosen,
        )

    @torch.no_grad()
    def log_probs(
        self, batches: Sequence[PolicyBatch], *, reference: bool = False
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield the turns of each micro-batch and the log-probabilities of their tokens `[N]`.

        Args:
            batches: the micro-batches of this rank.
            reference: under the reference instead of the policy.
        """
        module = self.reference if reference and self.reference is not None else self.policy
        for batch, counts in self.passes(batches, padding_batch=batches[0], learn=False):
            initial = reference and self.start.peft is not None
            with (
                self.accelerator.autocast(),
                self.start.peft.disable_adapter() if initial else contextlib.nullcontext(),
            ):
                log_probs, _ = module(batch)
            if counts:
                yield batch.turns, log_probs
        if self.fsdp:
            reshard(module)

    @torch.no_grad()
    def log_probs_of(self, prompts: Sequence[TokenIds], completions: Sequence[Completion]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of the tokens of completions; a sharded policy needs all ranks."""
        turns = [RolloutTurn(*each, reward=0.0) for each in zip(prompts, completions, strict=True)]
        found: dict[int, NDArray[np.float32]] = {}
        for batch in self.batches(turns, np.zeros(len(turns), np.int64)):
            with self.accelerator.autocast():
                log_probs = self.policy(batch)[0].float().cpu().numpy()
            ends = np.cumsum([len(completions[turn].token_ids) for turn in batch.turns])
            found |= dict(zip(batch.turns, np.split(log_probs, ends[:-1]), strict=True))
        if self.fsdp:
            reshard(self.policy)
        return [found[turn] for turn in range(len(turns))]

    def measure(self, table: RolloutTable, turns: NDArray[Any]) -> Measured:
        """Return the log-probabilities before the updates of a step, of this rank's turns in the table of all ranks.

        With a single update, those of the policy are those of its own forward, and are not measured.
        """
        batches = self.batches(table.turns, table.groups, chosen=turns)
        once = self.run.optimizer.updates_per_step * self.run.optimizer.epochs == 1
        return Measured(
            turns,
            batches,
            policy=None if once else table.scatter(self.log_probs(batches)),
            reference=table.scatter(self.log_probs(batches, reference=True)) if self.measures_kl else None,
        )

    def update(
        self,
        table: RolloutTable,
        advantages: NDArray[np.float64],
        mask: NDArray[np.bool_],
        loss: Callable[[Tensor, Tensor, LossInputs], LossTerms],
        *,
        measured: Measured,
        groups: NDArray[Any],
    ) -> dict[str, float]:
        """Run all passes of one update and change the weights; return sums over all ranks and what the optimizer did.

        Args:
            table, advantages: rollouts of all ranks, and the advantages of their tokens `[N]`.
            mask: turns that count in the loss `[M]`; the others have weight 0.
            loss: loss of the tokens of a micro-batch, from their log-probabilities and entropies now.
            measured, groups: what `measure` returned, and the groups that the update learns from.
        """
        members = np.isin(table.groups, groups)
        own = measured.turns[members[measured.turns]]
        whole = len(own) == len(measured.turns)
        batches = measured.batches if whole else self.batches(table.turns, table.groups, chosen=own)
        counted = mask & members
        limit = self.run.sampling.max_new_tokens or 0
        of_turns = token_weights(
            table.lengths, counted, normalisation=self.run.loss.normalisation, max_new_tokens=limit
        )
        sums: dict[str, Tensor | float] = {}
        smallest = min(measured.batches, key=lambda batch: batch.num_tokens)
        for batch, counts in self.passes(batches, padding_batch=smallest):
            log_probs, entropy = self.forward(batch)
            tokens = table.tokens_of(batch.turns)
            tensor = functools.partial(torch.as_tensor, dtype=torch.float32, device=log_probs.device)
            old, reference = measured.policy, measured.reference
            inputs = LossInputs(
                old_log_probs=log_probs.detach() if old is None else tensor(old[tokens]),
                sampler_log_probs=tensor(table.log_probs[tokens]),
                reference_log_probs=None if reference is None else tensor(reference[tokens]),
                advantages=tensor(advantages[tokens]),
                weights=tensor(of_turns[batch.rows] * counts),
            )
            terms = loss(log_probs, entropy, inputs)
            self.backward(terms.loss)
            for name, value in vars(terms).items():
                sums[name] = sums.get(name, 0.0) + value.detach()
        done = self.optimizer_step() if counted.any() else self.skip_update()
        sums["unique_tokens"] = sum(each.num_tokens for batch in batches for each in batch.batches)
        every = self.gathered([{name: float(value) for name, value in sums.items()}])
        return {name: math.fsum(of_rank[name] for of_rank in every) for name in sums} | done

    def export(self, folder: Path) -> None:
        """Write the policy as a plain Hugging Face folder, with adapters merged; all ranks must call this."""
        weights = self.weights(keep=self.is_main)
        if self.is_main:
            with atomic_folder(folder) as unfinished:
                self.save(unfinished, weights)
        self.accelerator.wait_for_everyone()

    def save(self, folder: Path, weights: Mapping[str, Tensor], *, tied_once: bool = True) -> None:
        """Write whole weights as a plain Hugging Face folder, see `save_policy`."""
        peft = None if self.start.peft is None else self.unsharded
        save_policy(replace(self.start, peft=peft), folder, weights, tied_once=tied_once)
