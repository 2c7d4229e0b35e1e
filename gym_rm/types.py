"""Records: conversations, the data rows that they come from, and how scores were computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NotRequired, TypeAlias, TypedDict


class Message(TypedDict):
    """One turn of a conversation. `role` is the speaker (`"system"`, `"user"`, `"assistant"`, `"tool"`, ...).

    A tool call is `{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}`, where the arguments
    are a mapping, as chat templates read them; those that are no JSON object stay the text that the policy wrote.
    """

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Conversation: TypeAlias = Sequence[Message]


def copy_conversation(conversation: Conversation) -> list[Message]:
    """Return a new list with a copy of every message, also of the lists and mappings in it."""
    # Almost all messages are a role and a text.
    return [message.copy() if len(message) == 2 else copy_nested(message) for message in conversation]


def copy_nested(value: Any) -> Any:
    """Return a copy of nested dicts and lists; other values are shared."""
    if isinstance(value, dict):
        return {key: copy_nested(part) for key, part in value.items()}
    return [copy_nested(part) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Prompt:
    """Data row that an episode starts from.

    Scorers and responders receive the prompt and the conversation. The policy receives only `messages`.

    Attributes:
        messages: the conversation up to and including the message that the policy answers.
        prompt_id: stable name of the prompt, reported in `infos`.
        user_turns: messages of the scripted user after the first, second, ... reply.
        answer: the reference answer, for verifiers.
        metadata: all other fields of the row.
        tools: the tools that the policy may call, as chat templates read them: `{"type": "function", "function":
            {"name", "description", "parameters"}}`, where the parameters are a JSON schema.
    """

    messages: tuple[Message, ...]
    prompt_id: str
    user_turns: tuple[str, ...] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()


def copy_prompt(prompt: Prompt) -> Prompt:
    """Return a copy with its own messages and metadata; the values in the metadata and the tools are shared."""
    return replace(prompt, messages=tuple(copy_conversation(prompt.messages)), metadata=dict(prompt.metadata))


Prompts: TypeAlias = "Sequence[Prompt | None] | None"
"""One prompt or None per conversation; None if no conversation has a prompt."""


def tools_of(prompts: Prompts, size: int) -> list[tuple[Mapping[str, Any], ...]]:
    """Return the tools of each of N prompts."""
    return [() if prompt is None else prompt.tools for prompt in ([None] * size if prompts is None else prompts)]


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """One prompt with a preferred and a rejected reply.

    Attributes:
        prompt: the messages that both conversations share.
        chosen: the messages after the prompt in the preferred conversation.
        rejected: the messages after the prompt in the rejected conversation.
        margin: how much better `chosen` was rated than `rejected`, or None.
        metadata: all other fields of the row (subset, source, ...).
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt with K replies, and what is known about how good they are.

    A preference pair is a comparison of two replies with the ranks (0, 1), a tie one with the ranks (0, 0).

    Attributes:
        prompt: the messages that all conversations share.
        replies: for each of the K replies, the messages after the prompt.
        ranks: `[K]`, lower is better; equal ranks are a tie. None if the row has no preference.
        margin: how much better the best reply was rated than the worst one, or None.
        scores: `[K]` ratings of the replies for each objective by name; NaN where a rating is missing.
        step_labels: for each reply, the label of each of its steps: 1 for a good step, 0 for a bad one, NaN if it is
            missing. None if the row has no labels of steps.
        source: name of the data set or subset that the row comes from, for metrics by source; may be empty.
        where: file and line of the row, for messages.
        metadata: all other fields of the row.
        tools: the tools of the row, as in `Prompt`.
    """

    prompt: tuple[Message, ...]
    replies: tuple[tuple[Message, ...], ...]
    ranks: tuple[float, ...] | None = None
    margin: float | None = None
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    step_labels: tuple[tuple[float, ...], ...] | None = None
    source: str = ""
    where: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """The prompt with each reply."""
        return tuple(self.prompt + reply for reply in self.replies)

    @property
    def is_tie(self) -> bool:
        """Whether all replies have the same rank."""
        return self.ranks is not None and len(set(self.ranks)) == 1


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far the scores of some conversations are from the plain forward at the precision of the stored weights.

    It holds for the weights that were loaded; `update_weights` does not measure it again.

    Attributes:
        mean_error: mean absolute difference, divided by the standard deviation of the plain forward's scores.
        pairs: number of pairs of replies to the same prompt.
        flips: number of pairs that are in another order.
        conversations: number of conversations with a score.
        dtype: precision of the plain forward: the stored one, or that of the scores if it is higher.
        not_measured: why there are no numbers; None if there are.
    """

    mean_error: float | None = None
    pairs: int = 0
    flips: int = 0
    conversations: int = 0
    dtype: str | None = None
    not_measured: str | None = None

    def __str__(self) -> str:
        if self.mean_error is None:
            return f"not measured: {self.not_measured}"
        return (
            f"mean error {self.mean_error:.2g} of the spread of the scores of {self.conversations} conversations, "
            f"{self.flips} of {self.pairs} pairs in another order than in {self.dtype}"
        )


NOT_CHECKED = Fidelity(not_measured="nothing was compared (check=False)")


@dataclass(frozen=True, slots=True)
class Provenance:
    """How scores were computed, to find out why two runs have different scores.

    Attributes:
        scorer: class of the scorer.
        model: folder, hub id, URL or name of the model or function.
        revision: commit of the weights on the hub, or `"sha256:..."` of the files of a folder, joined by `+` for an
            adapter, its base and a tokenizer from elsewhere; for a function, a digest of its source file. None if
            unknown, for example for a model that was passed in.
        template_hash: first 16 hex digits of the SHA-256 of the chat template.
        dtype: precision of the backbone; the head is always float32.
        device: device of the forward passes.
        layout: layout of the batches: `"tree"`, `"padded"` or `"one_by_one"`.
        attention: `"tree"` for gym_rm's own attention, which the layout `"tree"` uses, or `"paths"` for that of its
            kernels on CUDA; otherwise the attention implementation of transformers, such as `"sdpa"`.
        batch_invariance: `"bit-equal"` if, in a check at load, the values of a text had the same bits in every batch.
            Otherwise, for example, `"within 1.2e-07"`: the largest difference, relative to the largest value.
        rows: numbers of rows of the matrix products: `"multiples of 16"`, or what the hardware needs for the same bits.
        fidelity: how far scores are from those of the stored weights, see `Fidelity`; None without weights.
        torch, transformers: versions of these libraries.
        settings: all other settings that change the scores (pooling, max_length, overlong, ...).
    """

    scorer: str
    model: str
    revision: str | None = None
    template_hash: str | None = None
    dtype: str | None = None
    device: str | None = None
    layout: str | None = None
    attention: str | None = None
    batch_invariance: str | None = None
    rows: str | None = None
    fidelity: Fidelity | None = None
    torch: str | None = None
    transformers: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for scores to belong together; the device and versions of libraries may differ."""
        names = ("scorer", "model", "revision", "template_hash", "dtype", "settings")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Workload:
    """Cost of a `score` call.

    Attributes:
        num_tokens: number of tokens of all conversations, before shared prefixes are merged.
        unique_tokens: number of tokens after shared prefixes are merged.
        reused_tokens: number of unique tokens whose keys and values came from the prefix cache.
        padded_tokens: number of padding tokens in the batches.
        num_batches: number of forward passes.
        render_seconds: time for chat templates and tokenisation.
        plan_seconds: time to build trees or padded batches.
        run_seconds: time of the forward passes and copies, without the text and plans that were made beside them.
        num_retries: number of batches that ran again what had failed before, for example because a replica died.
        peak_memory_bytes: largest memory of tensors on a GPU so far in the process that ran a batch; 0 on a CPU.
    """

    num_tokens: int = 0
    unique_tokens: int = 0
    reused_tokens: int = 0
    padded_tokens: int = 0
    num_batches: int = 0
    render_seconds: float = 0.0
    plan_seconds: float = 0.0
    run_seconds: float = 0.0
    num_retries: int = 0
    peak_memory_bytes: int = 0

    def __add__(self, other: Workload) -> Workload:
        """Return the sum of two costs, and the larger of their peaks."""
        names = [each.name for each in fields(self)]
        total = Workload(**{name: getattr(self, name) + getattr(other, name) for name in names})
        return replace(total, peak_memory_bytes=max(self.peak_memory_bytes, other.peak_memory_bytes))
