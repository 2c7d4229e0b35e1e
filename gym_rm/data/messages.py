"""From what a library holds to conversations, and from scores to what it can take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from gym_rm.errors import ConfigError, ScoringError, logger
from gym_rm.scorer import Scorer
from gym_rm.types import Conversation, Message, Scores

# What chat templates write around turns: ChatML and Qwen, Llama 3, Gemma, Llama 2 and Mistral, Phi, DeepSeek.
_RENDERED = re.compile(
    r"<\|(im_start|im_end|start_header_id|eot_id|user|assistant|end|begin_of_text)\|>|<start_of_turn>|\[INST\]|<｜User｜>"
)


def conversation(prompt: Any, reply: Any, where: str = "prompt") -> Conversation:
    """A prompt and a reply, each a text or messages, as one conversation.

    A text prompt is one user message, a text reply one assistant message. Messages are passed on as they are: what
    the scorer cannot read in them (images, tool calls) it refuses, row by row.

    Raises:
        ConfigError: a prompt that is neither text nor messages, or that a chat template has been applied to.
    """
    if isinstance(prompt, str):
        refuse_rendered(prompt, where)
        prompt = [Message(role="user", content=prompt)]
    if isinstance(reply, str):
        reply = [Message(role="assistant", content=reply)]
    return [*_messages(prompt, where), *_messages(reply, f"the reply to {where}")]


def refuse_rendered(text: str, where: str) -> None:
    """Raise `ConfigError` for a prompt that a chat template has been applied to: it would be templated twice."""
    found = _RENDERED.search(text)
    if found is not None:
        raise ConfigError(
            f"{where} holds {found[0]!r}: the policy's chat template has been applied to it, and the reward model's "
            "would be applied on top. Give messages, or name the tokenizer that wrote it with policy_tokenizer= where "
            f"the adapter has that; got {text[:200]!r}."
        )


def score_rows(scorer: Scorer, conversations: Sequence[Conversation]) -> Scores:
    """Score N conversations, keeping the scores of the others where some have none.

    The failed rows hold NaN and a reason, which is logged.
    """
    try:
        return scorer.score(conversations)
    except ScoringError as error:
        logger.warning("%s", error)
        return error.scores


def rewards_or_none(scores: Scores) -> list[float | None]:
    """N rewards as Python floats, None where there is no score."""
    return [
        None if error is not None else float(reward)
        for reward, error in zip(scores.rewards, scores.errors, strict=True)
    ]


def rewards_or_fallback(scores: Scores, fallback_reward: float | None) -> list[float]:
    """N rewards, the fallback where there is no score.

    Raises:
        ScoringError: some row has no score, and there is no fallback.
    """
    if scores.failed_rows and fallback_reward is None:
        raise ScoringError(scores)
    return [cast(float, fallback_reward) if reward is None else reward for reward in rewards_or_none(scores)]


def _messages(value: Any, where: str) -> list[Message]:
    """Messages from a list, a tuple or an array of dicts."""
    try:
        messages = [{**message, "content": plain_content(message.get("content"))} for message in value]
    except (TypeError, AttributeError):
        messages = []
    if not messages:
        raise ConfigError(f"{where} must be a text or a list of messages, got {value!r:.200}.")
    return cast("list[Message]", messages)


def plain_content(content: Any) -> Any:
    """The text of a content in parts, `[{"type": "text", "text": ...}]`; whatever else it is, as it is."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content
