"""Pairwise reward models, which compare two replies, as scorers of single conversations and of pairs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gym_rm.engine.loading.files import check_tokenizer, read_config, require_source
from gym_rm.engine.reward_model_scorer import RewardModelScorer, load_reward_model
from gym_rm.engine.text.messages import extra_fields
from gym_rm.engine.text.templates import own_template, read_template
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError
from gym_rm.scorer import check_rows, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt, Prompts, Provenance

Reference: TypeAlias = str | Callable[[Conversation, Prompt | None], str | None]

# RLHFlow's pair-preference models (arXiv 2405.07863) were trained with these two templates.
CONTEXT = (
    "\n{% for message in messages %}{% if loop.index0 % 2 == 0 %}\n\n<turn> user\n {{ message['content'] }}{% else %}"
    "\n\n<turn> assistant\n {{ message['content'] }}{% endif %}{% endfor %}\n\n\n"
)
PAIR = "[CONTEXT] {context} [RESPONSE A] {first} [RESPONSE B] {second} \n"
PAIR_MARKS = ("[CONTEXT]", "[RESPONSE A]", "[RESPONSE B]")


class PairwiseScorer:
    """Log-odds that a reply is better than another reply, from a model that reads both.

    Models prefer the reply that comes first. Therefore every pair is scored in both orders: `(f(a, b) - f(b, a)) / 2`.

    `score_pairs` compares two lists of conversations. `score`, which environments call, compares each reply with a
    reference reply; its reward does not depend on the other rows of the call. Without a reference, `score` compares
    each reply with all other replies to the same prompt in the call, and returns the mean. This reward depends on the
    other rows, so pass whole groups (`group_size`).

    Args:
        path: a folder or hub id. A causal language model must read `[RESPONSE A]` and `[RESPONSE B]` in one user
            message and answer A or B, like RLHFlow's pair-preference models.
        reference: a reply; or a function that returns a reply, or None, from the messages before the reply and the
            conversation's `Prompt` or None.
        options: options of `load_reward_model`.

    Raises:
        ConfigError: the checkpoint is not a pairwise reward model.
    """

    def __init__(self, path: str | os.PathLike[str], *, reference: Reference | None = None, **options: Any) -> None:
        source, revision = os.fspath(path), options.get("revision")
        require_source(source, revision)
        architecture = str((read_config(source, revision).get("architectures") or [""])[0])
        self.reference = reference
        if not architecture.endswith("ForCausalLM"):
            raise ConfigError(
                f"{source!r} is a {architecture or 'model of no known class'}; a pairwise reward model must be a "
                "causal language model that answers A or B."
            )
        tokenizer = options.pop("tokenizer", None)
        tokenizer = load_tokenizer(source, revision=revision) if tokenizer is None else check_tokenizer(tokenizer)
        template = read_template(options.pop("chat_template", None)) or own_template(tokenizer)
        if template is None:
            raise ConfigError(f"chat_template is missing in the tokenizer of {os.fspath(path)!r}; pass chat_template=.")
        # These models were trained without the BOS token that their templates write.
        self.scorer: RewardModelScorer = load_reward_model(
            path,
            kind="generative",
            question=None,
            answers=("A", "B"),
            tokenizer=tokenizer,
            add_bos=False,
            chat_template="{% set bos_token = '' %}" + template,
            **options,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PairwiseScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and the model must not be loaded twice."""
        return self

    def __repr__(self) -> str:
        reference = "" if self.reference is None else f", reference={self.reference!r:.80}"
        return f"PairwiseScorer({self.scorer!r}{reference})"

    def score_pairs(self, first: Sequence[Conversation], second: Sequence[Conversation]) -> Scores:
        """Return the log-odds that `first[n]` is better than `second[n]`; both must have the same prompt.

        The components `shown_first` and `shown_second` are the log-odds with `first[n]` shown first and shown second.

        Raises:
            ScoringError: some pairs have no score.
        """
        return self._compare(first, second).raise_for_errors()

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Return the log-odds of each reply against the reference, or the mean against the other replies to its prompt.

        Raises:
            ScoringError: some rows have no score, for example because there is no other reply to the prompt.
        """
        check_rows(conversations, prompts)
        if self.reference is None:
            return self._round_robin(conversations).raise_for_errors()
        others: list[Conversation] = []
        for row, conversation in enumerate(conversations):
            prompt = None if prompts is None else prompts[row]
            reply = None if _malformed(conversation) else self._reference_to(conversation[:-1], prompt)
            others.append([] if reply is None else [*conversation[:-1], Message(role="assistant", content=reply)])
        return self._compare(conversations, others).raise_for_errors()

    def sleep(self) -> None:
        """Free the device memory; see `RewardModelScorer.sleep`."""
        self.scorer.sleep()

    def wake(self) -> None:
        """Undo `sleep`."""
        self.scorer.wake()

    def clear_cache(self) -> None:
        """Clear everything computed from earlier weights; see `RewardModelScorer.clear_cache`."""
        self.scorer.clear_cache()

    def close(self) -> None:
        """Release the model."""
        self.scorer.close()

    def _reference_to(self, messages: Conversation, prompt: Prompt | None) -> str | None:
        if isinstance(self.reference, str):
            return self.reference
        assert self.reference is not None
        return self.reference(messages, prompt)

    def _round_robin(self, conversations: Sequence[Conversation]) -> Scores:
        groups: dict[str, list[int]] = {}
        for row, conversation in enumerate(conversations):
            groups.setdefault(repr(list(conversation[:-1])), []).append(row)
        pairs = [pair for rows in groups.values() for pair in itertools.combinations(rows, 2)]
        compared = self._compare([conversations[a] for a, _ in pairs], [conversations[b] for _, b in pairs])
        totals, games = np.zeros(len(conversations)), np.zeros(len(conversations))
        errors: list[str | None] = [None] * len(conversations)
        for pair, (a, b) in enumerate(pairs):
            totals[a] += compared.rewards[pair]
            totals[b] -= compared.rewards[pair]
            games[[a, b]] += 1
            if compared.errors[pair] is not None:
                errors[a] = errors[a] or compared.errors[pair]
                errors[b] = errors[b] or compared.errors[pair]
        for row in np.flatnonzero(games == 0).tolist():
            errors[row] = (
                "expected another reply to the same prompt in this call; score whole groups, or pass reference="
            )
        rewards = totals / np.maximum(games, 1)
        return Scores.from_rewards(rewards, errors=errors, provenance=self._provenance("the call"))

    def _compare(self, first: Sequence[Conversation], second: Sequence[Conversation]) -> Scores:
        if len(first) != len(second):
            raise ConfigError(
                f"first and second must have the same length, got {len(first)} and {len(second)} conversations."
            )
        errors: list[str | None] = [_mismatch(a, b) for a, b in zip(first, second, strict=True)]
        texts: list[list[Message]] = []
        rows: list[int] = []
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            if errors[row] is None:
                try:
                    replies = a[-1]["content"], b[-1]["content"]
                    both = [self._write(a[:-1], *replies), self._write(a[:-1], *reversed(replies))]
                except ValueError as error:
                    errors[row] = str(error)
                else:
                    texts += both
                    rows.append(row)
        scores = try_score(self.scorer, texts)
        shown = np.full((2, len(first)), np.nan)
        shown[0, rows], shown[1, rows] = scores.rewards[0::2], -scores.rewards[1::2]
        for k, row in enumerate(rows):
            errors[row] = scores.errors[2 * k] or scores.errors[2 * k + 1]
        return Scores.from_rewards(
            shown.mean(axis=0),
            components={"shown_first": shown[0], "shown_second": shown[1]},
            errors=errors,
            provenance=self._provenance("pairs" if self.reference is None else "a reference"),
        )

    def _write(self, prompt: Conversation, first: str, second: str) -> list[Message]:
        for mark in PAIR_MARKS:
            if mark in first or mark in second:
                raise ValueError(
                    f"a reply must not contain {mark!r}, because this model uses it to separate the replies."
                )
        tokenizer = self.scorer.renderer.tokenizer
        context = tokenizer.apply_chat_template(list(prompt), chat_template=CONTEXT, tokenize=False)
        return [Message(role="user", content=PAIR.format(context=context, first=first, second=second))]

    def _provenance(self, opponents: str) -> Provenance:
        inner = self.scorer.provenance
        return dataclasses.replace(
            inner, scorer=type(self).__name__, settings={**inner.settings, "compared_with": opponents}
        )


def _malformed(conversation: Any) -> str | None:
    """Return why a conversation is not a prompt with a reply, or None if it is valid."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or len(conversation) < 2:
        return f"expected a prompt and a reply, got {conversation!r:.100}"
    for message in conversation:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"a message must be {{'role': ..., 'content': ...}} with texts, got {message!r:.100}"
        for field in extra_fields(message):
            if message[field] is not None:
                return f"a message has the field {field!r}, which pairwise models do not read; remove it"
    if conversation[-1]["role"] != "assistant":
        return f"the last message must have the role 'assistant', got {conversation[-1]['role']!r:.100}"
    return None


def _mismatch(a: Conversation, b: Conversation) -> str | None:
    """Return why two conversations cannot be compared, or None if they can."""
    if reason := _malformed(a):
        return reason
    if not b:
        return "the reference has no reply for this prompt"
    if reason := _malformed(b):
        return reason
    if list(a[:-1]) != list(b[:-1]):
        return "the two conversations must be equal before their last message"
    return None
