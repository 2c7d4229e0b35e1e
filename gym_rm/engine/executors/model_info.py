"""What callers need to know of a loaded model: its precision, its limits, and how many tokens a batch may have."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from gym_rm.engine.backbones.decoder import num_embeddings, num_positions
from gym_rm.engine.backbones.devices import device_of
from gym_rm.engine.backbones.reward_model import RewardModel
from gym_rm.engine.backbones.sharded import ranks_of
from gym_rm.engine.executors.executor import LoadSpec, ModelInfo
from gym_rm.engine.loading.checkpoint import ModelFiles
from gym_rm.engine.loading.trial import max_batchable_length

CUDA_BATCHED_TOKENS = 32_768  # enough to use a GPU fully; larger batches only need more memory
CPU_BATCHED_TOKENS = 2048  # activations of larger batches do not fit into the CPU's caches


def model_info(loaded: RewardModel, spec: LoadSpec) -> ModelInfo:
    """Return the properties of a loaded model; the trial chooses its layout later."""
    model = loaded.models[0]
    return ModelInfo(
        layout="one_by_one",
        fused=False,
        num_values=loaded.num_values,
        dtype=str(dtype_of(model)).removeprefix("torch."),
        device=str(device_of(model)),
        max_num_batched_tokens=_automatic_budget(model),
        max_positions=min(filter(None, map(max_positions, loaded.models)), default=None),
        num_embeddings=num_embeddings(model),
        num_positions=min(filter(None, map(num_positions, loaded.models)), default=None),
        max_batchable_length=max_batchable_length(model.config),
        sampled_revision=revision_of_sources(spec, sampled=True),
        torch=torch.__version__,
        transformers=transformers.__version__,
        attention=str(model.config._attn_implementation),
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions that a model has or was configured for; None without a limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return num_positions(model) or (int(limit) if limit and limit > 0 else None)  # XLNet has -1 for no limit


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """Return the precision of a model's backbone."""
    dtype: torch.dtype = next(model.base_model.parameters()).dtype
    return dtype


def revision_of_sources(spec: LoadSpec, *, sampled: bool = False) -> str | None:
    """Return the revision of the model and, if there is one, of its reference model; None if unknown."""
    revisions = [
        source.read_revision(sampled=sampled)
        if isinstance(source, ModelFiles)
        else getattr(source.config, "_commit_hash", None)
        for source in spec.sources
    ]
    return " and ".join(str(revision) for revision in revisions) if any(revisions) else None


def _automatic_budget(model: PreTrainedModel) -> int:
    """Return the token budget of a batch, from the free memory of the model's device."""
    device = device_of(model)
    if device.type != "cuda":
        return CPU_BATCHED_TOKENS
    free, _ = torch.cuda.mem_get_info(device)
    ranks = ranks_of(model)
    free = free if ranks is None else ranks.smallest(free)
    return min(CUDA_BATCHED_TOKENS, max(CPU_BATCHED_TOKENS, int(0.5 * free / bytes_per_token(model))))


def bytes_per_token(model: PreTrainedModel) -> int:
    """Return an upper estimate of the memory of one token's activations in one layer, in bytes."""
    config = model.config.get_text_config()
    hidden = int(config.hidden_size)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    return dtype_of(model).itemsize * (12 * hidden + 4 * inner)
