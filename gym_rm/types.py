"""The records that travel between stages: conversations in, scores out.

Shapes: `[N]` is one entry per conversation of a `score` call, in the order they were given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray


class Message(TypedDict):
    """One turn of a conversation; `role` is the speaker (`"system"`, `"user"`, `"assistant"`, ...)."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Where an episode starts, and what the user will say in its later turns.

    Attributes:
        messages: the conversation up to and including the message that the policy answers.
        prompt_id: stable name of the prompt, reported in `infos`.
        user_turns: what the scripted user says after the first, second, ... reply.
        answer: the reference answer, for verifiers; never shown to the policy.
        metadata: everything else that the row held.
    """

    messages: tuple[Message, ...]
    prompt_id: str
    user_turns: tuple[str, ...] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt with the reply that was preferred and the one that was not.

    Attributes:
        prompt: the shared context.
        chosen: the messages after the prompt in the preferred conversation.
        rejected: the messages after the prompt in the other one.
        margin: how much better `chosen` was rated, where the data says so.
        metadata: everything else that the row held (subset, source, ...).
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made a score: enough to tell two runs apart that should have agreed.

    Attributes:
        scorer: class of the scorer.
        model: folder, hub id, URL or name of what scored.
        revision: commit of the weights, where known.
        template_hash: first 16 hex digits of the SHA-256 of the chat template.
        dtype: precision of the backbone; the head is always float32.
        device: where the forward ran.
        path: how it ran: `"tree"`, `"padded"`, `"one_by_one"`, `"remote"`, ...
        settings: what else decides the number (pooling, max_length, overlong, ...).
    """

    scorer: str
    model: str
    revision: str | None = None
    template_hash: str | None = None
    dtype: str | None = None
    device: str | None = None
    path: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a `score` call cost.

    Attributes:
        num_tokens: tokens of all conversations, each counted in full.
        unique_tokens: tokens left once shared prefixes are merged.
        reused_tokens: of these, the ones whose keys and values an earlier call had computed.
        padded_tokens: padding that went through the model.
        num_batches: forwards run.
        render_seconds: templates and tokenisation.
        plan_seconds: building trees or padded batches.
        run_seconds: the forwards, with the copies to and from the device.
    """

    num_tokens: int = 0
    unique_tokens: int = 0
    reused_tokens: int = 0
    padded_tokens: int = 0
    num_batches: int = 0
    render_seconds: float = 0.0
    plan_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of `Scorer.score` for N conversations.

    Attributes:
        rewards: float32 `[N]`, NaN where `errors` holds a reason.
        heads: the named parts of the reward, each float32 `[N]` (objectives, ensemble members, ...).
        num_tokens: int64 `[N]`, tokens of the conversation as it was scored; 0 where the scorer counts none.
        truncated_tokens: int64 `[N]`, tokens that were cut to fit; 0 when nothing was.
        errors: `[N]`, None or why this conversation has no score.
        turn_rewards: with `turns="all"`, `[N]` arrays of float32, one value per assistant turn.
        step_rewards: of a process reward model, `[N]` arrays of float32, one value per step of the last reply.
        provenance: what made these numbers.
        workload: what they cost.

    Example:
        >>> scores = Scores.from_rewards([0.5, 1.0])
        >>> scores.rewards.tolist(), len(scores)
        ([0.5, 1.0], 2)
    """

    rewards: NDArray[np.float32]
    heads: Mapping[str, NDArray[np.float32]]
    num_tokens: NDArray[np.int64]
    truncated_tokens: NDArray[np.int64]
    errors: tuple[str | None, ...]
    turn_rewards: tuple[NDArray[np.float32], ...] | None = None
    step_rewards: tuple[NDArray[np.float32], ...] | None = None
    provenance: Provenance | None = None
    workload: Workload | None = None

    def __len__(self) -> int:
        return len(self.errors)

    @property
    def failed_rows(self) -> tuple[int, ...]:
        """Indices of the conversations without a score."""
        return tuple(row for row, error in enumerate(self.errors) if error is not None)

    @classmethod
    def from_rewards(
        cls,
        rewards: Sequence[float] | NDArray[Any],
        *,
        heads: Mapping[str, NDArray[np.float32]] | None = None,
        errors: Sequence[str | None] | None = None,
        provenance: Provenance | None = None,
    ) -> Scores:
        """Scores of a scorer that counts no tokens; a non-finite reward without an error gets one."""
        values = np.asarray(rewards, dtype=np.float32).reshape(-1)
        reasons: list[str | None] = list(errors) if errors is not None else [None] * len(values)
        for row in np.flatnonzero(~np.isfinite(values)).tolist():
            reasons[row] = reasons[row] or f"the reward is {values[row]}"
        values = values.copy()
        values[[row for row, reason in enumerate(reasons) if reason is not None]] = np.nan
        zeros = np.zeros(len(values), dtype=np.int64)
        return cls(values, dict(heads or {}), zeros, zeros.copy(), tuple(reasons), provenance=provenance)
