"""Fidelity: are the scores of natural conversations those of the plain forward at the precision of the stored weights?

The trial compares forwards of the model as it was loaded, on random tokens. What the load itself changes (8-bit
products, a lower precision, a merged adapter) shows here, and only on text: there, the activations of real models have
outliers that random tokens do not have.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from gym_rm.engine.kinds import Kind
from gym_rm.engine.loading.checkpoint import ModelFiles, load_model
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError, ConversationError, brief, logger
from gym_rm.scores import FloatArray
from gym_rm.types import Conversation, Fidelity

SHIPPED = Path(__file__).parents[2] / "assets" / "fidelity.jsonl"
# Of `Fidelity.mean_error`: bfloat16 of float32 weights has 0.01 to 0.05, 8-bit products that lose outliers 0.33.
WARNED_ABOVE, REFUSED_ABOVE = 0.1, 0.25
LEAST_SPREAD = 1e-4  # relative to the largest score; scores that differ by less are equal but for rounding


@dataclass(frozen=True, slots=True)
class CheckedConversations:
    """N natural conversations as a scorer reads them.

    Attributes:
        kind: how values become scores.
        sequences: `[N]`, token ids and the positions to read.
        prompts: `[N]`, index of the prompt; replies to the same prompt follow each other.
    """

    kind: Kind
    sequences: tuple[TokenSequence, ...]
    prompts: tuple[int, ...]

    @classmethod
    def render(cls, source: Any, kind: Kind, renderer: Renderer, judged: JudgedOptions) -> CheckedConversations | None:
        """Render a file of pairs, without conversations that have no score: True for the shipped one, False for None.

        Raises:
            ConfigError: the file cannot be read, or a line has no `prompt`, `chosen` and `rejected`.
        """
        if source is False:
            return None
        found: list[tuple[TokenSequence, int]] = []
        for prompt, pair in enumerate(read_pairs(SHIPPED if source is True else source)):
            for row in renderer.encode(judged.read(pair, None)[0]):
                with contextlib.suppress(ConversationError):
                    if not isinstance(row, ConversationError):
                        positions = kind.read_positions(row)
                        found.append((TokenSequence(row.input_ids, positions, row.second_segment), prompt))
        return cls(kind, *zip(*found, strict=True)) if found else cls(kind, (), ())

    def compare(self, scores: FloatArray, expected: FloatArray, dtype: str) -> Fidelity:
        """Return how far scores `[N]` are from those of the plain forward; where it alone has one, infinitely far."""
        (rows,) = np.isfinite(expected).nonzero()
        if len(rows) < 2:
            return Fidelity(not_measured="fewer than two conversations have a score")
        got, plain = scores[rows].astype(np.float64), expected[rows].astype(np.float64)
        spread = max(plain.std(), LEAST_SPREAD * np.abs(plain).max(), np.finfo(np.float32).tiny)
        error = np.nan_to_num(np.abs(got - plain), nan=np.inf).mean() / spread
        groups = itertools.groupby(range(len(rows)), key=lambda k: self.prompts[rows[k]])
        pairs = [pair for _, group in groups for pair in itertools.combinations(group, 2)]
        kept = [np.sign(plain[a] - plain[b]) == np.sign(got[a] - got[b]) for a, b in pairs if plain[a] != plain[b]]
        return Fidelity(float(error), len(kept), len(kept) - int(sum(kept)), len(rows), dtype)


def read_pairs(file: Any) -> list[list[Conversation]]:
    """Return the two conversations of each pair in a file; raise ConfigError as `CheckedConversations.render` does."""
    try:
        rows = [json.loads(line) for line in Path(file).expanduser().read_text("utf-8").splitlines() if line.strip()]
        asked: list[Any] = [
            [{"role": "user", "content": p}] if isinstance(p := row["prompt"], str) else p for row in rows
        ]
        replies: list[Any] = [
            [{"role": "assistant", "content": row[k]} for k in ("chosen", "rejected")] for row in rows
        ]
        return [[[*prompt, reply] for reply in pair] for prompt, pair in zip(asked, replies, strict=True)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            "check must be True, False, or a file with a JSON object in each line: prompt (a text or messages), chosen "
            f"and rejected (texts); got {file!r:.200}: {brief(error)}."
        ) from error


def require_fidelity(found: Fidelity, name: str, changes: Mapping[str, str]) -> None:
    """Warn of a large error of a model's scores; raise ConfigError for a very large one. `changes` say what to set.

    In 16 bits of its own, a model whose scores hardly differ has such an error by rounding, so it is only warned of.
    """
    if found.mean_error is None or found.mean_error <= WARNED_ABOVE:
        return
    in_16_bits = not changes and found.dtype in ("bfloat16", "float16")
    own = "pass dtype='float32'" if in_16_bits else "pass tree=False, and please report it"
    advice = "; ".join(changes.values()) or own
    setting = " and ".join(changes) or "its own precision"
    text = f"{name} with {setting} has other scores than its stored weights: {found}"
    if found.mean_error > REFUSED_ABOVE and not in_16_bits:
        raise ConfigError(f"{text}; at most {REFUSED_ABOVE} is accepted: {advice}. check=False loads it unchecked.")
    logger.warning("%s; usual is less than %s. For smaller errors: %s.", text, WARNED_ABOVE, advice)


def changes_of(*sources: ModelFiles | PreTrainedModel) -> dict[str, str]:
    """Return what loading changes of the stored weights, and what to set instead; nothing for models passed in."""
    changes = {}
    for source in (each for each in sources if isinstance(each, ModelFiles)):
        dtype, stored = (str(each).removeprefix("torch.") for each in (source.dtype, source.reference_dtype))
        if dtype != stored:
            changes[f"dtype={dtype!r}"] = f"pass dtype={stored!r}"
        if source.adapter is not None:
            changes["a merged adapter"] = "merge the adapter with peft, and load the saved model"
        if source.options.quantization_config is not None:
            changes["quantization_config"] = "leave quantization_config out"
    return changes


def load_as_stored(source: ModelFiles | PreTrainedModel) -> PreTrainedModel:
    """Return a model with its weights at the precision of its files, an adapter beside its base.

    Raises:
        MemoryError: the weights take more than half of the machine, where too little memory would end the process.
    """
    if isinstance(source, PreTrainedModel):
        return source
    size = source.stored_dtypes.total() * source.reference_dtype.itemsize
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        raise MemoryError(f"{size / 2**30:.0f} GiB of weights in {source.reference_dtype}")
    return load_model(source, dtype=source.reference_dtype, as_stored=True)
