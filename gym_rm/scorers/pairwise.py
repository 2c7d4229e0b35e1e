"""Pairwise reward models, which compare two replies, as scorers of single conversations and of pairs."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gym_rm.config import parse_settings
from gym_rm.engine.loading.files import check_tokenizer, read_config, require_source
from gym_rm.engine.reward_model_scorer import RewardModelScorer, load_reward_model
from gym_rm.engine.text.judged import JudgedOptions
from gym_rm.engine.text.messages import check_conversation, extra_fields
from gym_rm.engine.text.templates import own_template, read_template
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scorer import NeverCopied, try_score
from gym_rm.scorers.groups import groups_of
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


class PairwiseScorer(NeverCopied):
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
        options: options of `load_reward_model`, and the fields of `JudgedOptions`. In `score_pairs`, a pair with
            a reply whose thinking has not ended is an error, whatever `unfinished` is.

    Raises:
        ConfigError: the checkpoint is not a pairwise reward model.
    """

    def __init__(self, path: str | os.PathLike[str], *, reference: Reference | None = None, **options: Any) -> None:
        source, revision = os.fspath(path), options.get("revision")
        require_source(source, revision)
        architecture = str((read_config(source, revision).get("architectures") or [""])[0])
        self.reference = reference
        judged = {name: options.pop(name) for name in JudgedOptions.model_fields if name in options}
        self._judged = parse_settings(JudgedOptions, judged)
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

    def __repr__(self) -> str:
        reference = "" if self.reference is None else f", reference={self.reference!r:.80}"
        return f"PairwiseScorer({self.scorer!r}{reference})"

    def score_pairs(self, first: Sequence[Conversation], second: Sequence[Conversation]) -> Scores:
        """Return the log-odds that `first[n]` is better than `second[n]`; both must have the same prompt.

        The components `shown_first` and `shown_second` are the log-odds with `first[n]` shown first and shown second.

        Raises:
            ScoringError: some pairs have no score.
        """
        read = self._judged.thinking.answered if self._judged.judged == "answer" else None
        return self._compare(first, second, read).raise_for_errors()

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Return the log-odds of each reply against the reference, or the mean against the other replies to its prompt.

        Raises:
            ScoringError: some rows have no score, for example because there is no other reply to the prompt.
        """
        return self._judged.score(conversations, prompts, self._score)

    def _score(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        if self.reference is None:
            return self._round_robin(conversations, prompts).raise_for_errors()
        others = [
            self._with_reference(conversation, None if prompts is None else prompts[row])
            for row, conversation in enumerate(conversations)
        ]
        return self._compare(conversations, others).raise_for_errors()

    @property
    def relative(self) -> bool:
        """Whether a reward depends on the other rows of a call; see `gym_rm.scorer.is_relative`."""
        return self.reference is None

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

    def _with_reference(self, conversation: Conversation, prompt: Prompt | None) -> Conversation:
        """Return the prompt of a conversation with the reference as the reply; empty if there is none."""
        try:
            messages = _with_reply(conversation)[:-1]
        except ConversationError:  # the error of the row
            return []
        reply = self.reference(messages, prompt) if callable(self.reference) else self.reference
        return [] if reply is None else [*messages, Message(role="assistant", content=reply)]

    def _round_robin(self, conversations: Sequence[Conversation], prompts: Prompts) -> Scores:
        groups = groups_of(conversations, prompts, range(len(conversations)))
        pairs = [pair for rows in groups for pair in itertools.combinations(rows, 2)]
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

    def _compare(
        self,
        first: Sequence[Conversation],
        second: Sequence[Conversation],
        read: Callable[[Conversation], Conversation] | None = None,
    ) -> Scores:
        if len(first) != len(second):
            raise ConfigError(
                f"first and second must have the same length, got {len(first)} and {len(second)} conversations."
            )
        errors: list[str | None] = [None] * len(first)
        texts: list[list[Message]] = []
        rows: list[int] = []
        for row, (one, other) in enumerate(zip(first, second, strict=True)):
            try:
                texts += self._both_orders(*((one, other) if read is None else map(read, (one, other))))
                rows.append(row)
            except ConversationError as error:
                errors[row] = str(error)
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

    def _both_orders(self, first: Conversation, second: Conversation) -> list[list[Message]]:
        """Return what the model reads of a pair, with either reply first. Raises ConversationError."""
        a = _with_reply(first)
        if not second:
            raise ConversationError("the reference has no reply for this prompt")
        b = _with_reply(second)
        if a[:-1] != b[:-1]:
            raise ConversationError("the two conversations must be equal before their last message")
        replies = a[-1]["content"], b[-1]["content"]
        for mark in PAIR_MARKS:
            if any(mark in reply for reply in replies):
                raise ConversationError(
                    f"a reply must not contain {mark!r}, because this model uses it to separate the replies."
                )
        tokenizer = self.scorer.renderer.tokenizer
        context = tokenizer.apply_chat_template(list(a[:-1]), chat_template=CONTEXT, tokenize=False)
        texts = [PAIR.format(context=context, first=one, second=two) for one, two in (replies, replies[::-1])]
        return [[Message(role="user", content=text)] for text in texts]

    def _provenance(self, opponents: str) -> Provenance:
        inner = self.scorer.provenance
        settings = {**inner.settings, **self._judged.settings, "compared_with": opponents}
        settings |= {"relative": True} if opponents == "the call" else {}
        return dataclasses.replace(inner, scorer=type(self).__name__, settings=settings)


def _with_reply(conversation: Any) -> Conversation:
    """Return a conversation, checked. Raises ConversationError if it is not a prompt with a reply, in texts alone."""
    checked = check_conversation(conversation)
    if len(checked) < 2 or checked[-1]["role"] != "assistant":
        raise ConversationError(f"expected a prompt and a reply of the role 'assistant', got {conversation!r:.100}")
    if fields := [field for message in checked for field in extra_fields(message)]:
        raise ConversationError(f"a message has the field {fields[0]!r}, which pairwise models do not read; remove it")
    return checked
