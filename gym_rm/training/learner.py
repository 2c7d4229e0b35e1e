"""The policy of a GRPO run where it learns: its weights, optimizer, reference and processes.

What is learned from is in `agents/grpo.py`; here is how: token trees under a token budget, gradients of several
processes, the weights for samplers, and the state that a run goes on from.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedDataParallelKwargs, gather_object
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from gym_rm.engine.backbones.decoder import num_positions
from gym_rm.engine.loading.trial import longest_shared
from gym_rm.errors import ConfigError, logger
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.training.checkpoints import Checkpoint, whole_folder
from gym_rm.training.model import choose_layout
from gym_rm.training.optimizers import load_optimizer_state, make_optimizers, optimizer_state, set_learning_rates
from gym_rm.training.parallel import copy_into, make_accelerator, reshard, shard, whole
from gym_rm.training.policy_batches import PolicyBatch, policy_batches
from gym_rm.training.policy_model import TrainedPolicy, open_policy, save_policy
from gym_rm.training.policy_settings import GRPOSettings
from gym_rm.training.rollouts import Turn

TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 16_384


class Learner:
    """The policy, its reference and its optimizer, on the ranks of a run.

    Args:
        settings: settings of the run, without `null` where there is a default.

    Attributes:
        accelerator: the processes.
        start: the opened policy: `model`, `peft`, `tokenizer`, `name`.
        version: number of updates that are done.
        unsharded: the model for samplers: a copy on the CPU if the policy itself is sharded, with the first weights.

    Raises:
        ConfigError: the policy cannot be opened, or a setting does not fit it.
    """

    def __init__(self, settings: GRPOSettings) -> None:
        self.settings, self.version = settings, 0
        policy, options = settings.policy, settings.optimizer
        self.num_updates = settings.steps * options.updates_per_step * options.epochs
        self.accelerator = make_accelerator(
            folder=str(settings.output),
            precision="no" if policy.dtype == "bfloat16" else policy.precision,
            report_to=settings.report_to,
            fsdp=options.fsdp,
        )
        self.device: torch.device = self.accelerator.device
        dtype = getattr(torch, policy.dtype)
        self.start = open_policy(policy.model, lora=policy.lora, dtype=dtype, seed=settings.seed)
        self.unsharded: Any = copy.deepcopy(self.start.trained) if options.fsdp else self.start.trained
        temperature = settings.sampling.temperature
        self.policy = TrainedPolicy(self.start, temperature=temperature).to(self.device)
        fuse = not (options.fsdp or policy.lora is not None)
        self.layout = choose_layout(self.policy, self.start.model, tree=options.tree, fuse=fuse)
        logger.info("training %s with %s", self.start.name, self.layout)
        if policy.gradient_checkpointing:
            self.policy.enable_checkpointing(self.layout)
        self.budget = options.max_num_batched_tokens or (TOKENS_ON_GPU if self.device.type == "cuda" else TOKENS_ON_CPU)
        loss = settings.loss
        self.measures_kl = bool(loss.kl_coef or loss.measure_kl)
        self.reference: TrainedPolicy | None = None
        if self.measures_kl and self.start.peft is None:
            self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.module: torch.nn.Module = self.policy
        if options.fsdp:
            for each in filter(None, (self.policy, self.reference)):
                shard(each, each.model, self.accelerator)
        elif self.world > 1:
            self.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=self.policy.has_unused)
            self.module = self.accelerator.prepare_model(self.policy)
        self.optimizers = make_optimizers(self.policy, options)

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files."""
        return bool(self.accelerator.is_main_process)

    # --- forward and backward --------------------------------------------------------------------------------------

    def batches(
        self, turns: Sequence[Turn], groups: NDArray[Any], *, chosen: NDArray[Any] | None = None
    ) -> list[PolicyBatch]:
        """Pack turns into micro-batches under the token budget; those of a group share their prompt.

        Args:
            turns: M turns.
            groups: group of each turn `[M]`.
            chosen: indices of the turns to pack; None for all.
        """
        model, at = self.start.model, np.arange(len(turns)) if chosen is None else chosen
        packed = policy_batches(
            [turns[k] for k in at.tolist()],
            groups[at].tolist(),
            layout=self.layout.layout,
            max_num_batched_tokens=self.budget,
            max_width=num_positions(model),
            longest_shared=longest_shared(model.config),
        )
        return [replace(each, turns=tuple(at[list(each.turns)].tolist()), rows=at[each.rows]) for each in packed]

    def passes(
        self, batches: Sequence[PolicyBatch], *, spare: PolicyBatch, learn: bool = True
    ) -> Iterator[tuple[PolicyBatch, bool]]:
        """Yield the micro-batches of this rank, and whether they count.

        All ranks make the same number of passes; those with fewer micro-batches repeat `spare`, which does not count.
        Gradients are exchanged in the last pass.
        """
        count = max(self.gathered_objects([len(batches)]))
        self.policy.train(learn)
        for number in range(count):
            waits = learn and number < count - 1 and not self.settings.optimizer.fsdp and self.world > 1
            context: Any = self.accelerator.no_sync(self.module) if waits else contextlib.nullcontext()
            with context:
                yield (batches[number], True) if number < len(batches) else (spare, False)

    def forward(self, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the sampled tokens of a micro-batch, float32 `[N]` each."""
        with self.accelerator.autocast():
            log_probs, entropy = self.module(batch)
        return log_probs, entropy

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a part of the loss; the parts of all micro-batches and ranks add up."""
        torch.autograd.backward(loss * self.world)  # DDP and FSDP2 divide gradients by the number of ranks

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PolicyBatch], *, reference: bool = False) -> list[Tensor]:
        """Return the log-probabilities `[N]` of each micro-batch, under the policy or the reference."""
        module = self.reference if reference and self.reference is not None else self.policy
        without_adapters = reference and self.start.peft is not None
        found = []
        for batch, counts in self.passes(batches, spare=batches[0], learn=False):
            with self.accelerator.autocast(), self.start.peft.disable_adapter() if without_adapters else _NOTHING:
                values, _ = module(batch)
            if counts:
                found.append(values)
        if self.settings.optimizer.fsdp:
            reshard(module)
        return found

    def log_probs_of(self, prompt: TokenIds, completion: TokenIds) -> list[float]:
        """Return the log-probabilities of the tokens of one completion."""
        turn = Turn(prompt, Completion(completion, np.zeros(len(completion), np.float32), True, ""), 0.0)
        (values,) = self.log_probs(self.batches([turn], np.zeros(1, np.int64)))
        found: list[float] = values.tolist()
        return found

    def update(self) -> dict[str, float]:
        """Clip the gradient, change the weights, and return the norm of the gradient and the learning rate.

        Raises:
            FloatingPointError: the gradient is not finite; no weight was changed.
        """
        options = self.settings.optimizer
        learning_rate = set_learning_rates(self.optimizers, options, step=self.version + 1, num_steps=self.num_updates)
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        total = torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of update {self.version + 1} is {norm}; no weight was changed by it. Lower "
                "optimizer.learning_rate, or look at the rewards. The last checkpoint is kept."
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def skip_update(self) -> dict[str, float]:
        """Count an update that has nothing to learn from; without this, AdamW's averages would change the weights."""
        self.policy.zero_grad(set_to_none=True)
        self.version += 1
        return {"grad_norm": 0.0}

    # --- processes -------------------------------------------------------------------------------------------------

    def shared(self, values: NDArray[Any]) -> tuple[NDArray[Any], slice]:
        """Return the arrays of all ranks as one, in the order of ranks, and where this rank's part is."""
        parts = self.gathered_objects([values])
        start = sum(len(part) for part in parts[: self.rank])
        return np.concatenate(parts), slice(start, start + len(values))

    def gathered_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return the lists of all ranks as one, in the order of ranks."""
        return list(gather_object(list(values))) if self.world > 1 else list(values)

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over all ranks."""
        every = self.gathered_objects([dict(values)])
        return {name: math.fsum(each[name] for each in every) for name in values}

    # --- weights and state -----------------------------------------------------------------------------------------

    def weights(self, *, keep: bool) -> dict[str, Tensor]:
        """Return copies of the trained weights on the CPU by name, whole, if `keep`; all ranks must call this."""
        return whole(((n, p) for n, p in self.start.trained.named_parameters() if p.requires_grad), keep=keep)

    def refresh_reference(self) -> None:
        """Make the current policy the reference."""
        if self.reference is not None:
            with torch.no_grad():
                for ours, theirs in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                    ours.copy_(theirs)

    def checkpoint(self, step: int, *, settings: Mapping[str, Any], **rest: Any) -> Checkpoint:
        """Return the state to go on from; only the main process has the tensors, but all ranks must call this."""
        keep = self.is_main
        tensors = dict(rest.pop("tensors", {}))
        if self.reference is not None and self.settings.loss.reference_every:
            named = ((f"reference/{name}", each) for name, each in self.reference.named_parameters())
            tensors |= whole(named, keep=keep)
        states = whole(optimizer_state(self.policy, self.optimizers), keep=keep)
        rest["state"] = {**rest.get("state", {}), "version": self.version}
        return Checkpoint(step, self.weights(keep=keep), states, settings, tensors=tensors, **rest)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the state of a checkpoint.

        Raises:
            ConfigError: it is of another model.
        """
        parameters = {name: each for name, each in self.start.trained.named_parameters() if each.requires_grad}
        if parameters.keys() != checkpoint.model.keys():
            raise ConfigError("the checkpoint is of another model; use another output folder.")
        for name, tensor in checkpoint.model.items():
            copy_into(parameters[name], tensor)
        load_optimizer_state(self.policy, self.optimizers, checkpoint.optimizer)
        if self.reference is not None:
            for name, each in self.reference.named_parameters():
                if self.settings.loss.reference_every:
                    copy_into(each, checkpoint.tensors[f"reference/{name}"])
        self.version = int(checkpoint.state["version"])

    def export(self, folder: Path) -> None:
        """Write the policy as a plain Hugging Face folder, with adapters merged; all ranks must call this."""
        weights, start = self.weights(keep=self.is_main), self.start
        if start.peft is not None:
            start = replace(start, peft=self.unsharded)
        if self.is_main:
            with whole_folder(folder) as unfinished:
                save_policy(start, unfinished, weights)
        self.accelerator.wait_for_everyone()


_NOTHING = contextlib.nullcontext()
