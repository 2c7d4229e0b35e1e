"""Reward models that read a reply beside a reference reply, such as POLAR."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from gym_rm.engine.reward_model_scorer import load_reward_model
from gym_rm.engine.text.messages import joined, reply_text
from gym_rm.errors import ConversationError, RowError
from gym_rm.scorer import NeverCopied, check_conversations, try_score
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt, Prompts

NAMES = ("prompt", "reference", "reply")


class ReferenceScorer(NeverCopied):
    """Scores how close a reply is to the reference reply of its data row, with a scalar reward model.

    The reference is `prompt.metadata["reference_reply"]`, or else `prompt.answer`. The model reads three messages: the
    prompt (its contents joined by line breaks), the reference (role `reference`) and the reply.

    Args:
        path: folder or hub id of the model.
        text: Jinja source of what the model reads, with the texts `prompt`, `reference` and `reply`.
        **options: options of `load_scorer`.

    Raises:
        ConfigError: there is no such model.
    """

    def __init__(self, path: str | os.PathLike[str], *, text: str, **options: Any) -> None:
        template = "".join(f"{{% set {name} = messages[{k}].content %}}" for k, name in enumerate(NAMES)) + text
        self.scorer = load_reward_model(os.fspath(path), chat_template=template, **options)
        self.max_concurrent_calls = self.scorer.max_concurrent_calls
        self.provenance = dataclasses.replace(self.scorer.provenance, scorer="ReferenceScorer")

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations that end with a reply.

        Raises:
            ScoringError: a row has no reference, or the model cannot read it.
        """
        check_conversations(conversations, prompts)
        errors: dict[int, RowError] = {}
        texts: dict[int, list[Message]] = {}
        for row, conversation in enumerate(conversations):
            try:
                texts[row] = _messages(conversation, None if prompts is None else prompts[row])
            except ConversationError as error:
                errors[row] = RowError.of(error)
        scores = try_score(self.scorer, list(texts.values())).scatter(texts, len(conversations))
        marked = tuple(errors.get(row, error) for row, error in enumerate(scores.errors))
        return dataclasses.replace(scores, errors=marked, provenance=self.provenance).raise_for_errors()

    def close(self) -> None:
        """Release the model."""
        self.scorer.close()


def _messages(conversation: Conversation, prompt: Prompt | None) -> list[Message]:
    reply = reply_text(conversation)
    known = () if prompt is None else (prompt.metadata.get("reference_reply"), prompt.answer)
    given = next((each for each in known if isinstance(each, str) and each.strip()), None)
    if given is None:
        raise ConversationError(
            "the model compares a reply with a reference: the data row needs `reference_reply` or `answer`, got "
            f"{known!r:.80}"
        )
    contents = (joined(conversation[:-1]), given, reply)
    roles = ("user", "reference", "assistant")
    return [Message(role=role, content=content) for role, content in zip(roles, contents, strict=True)]
