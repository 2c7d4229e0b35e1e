"""Text that a kind of reward model reads in addition to the messages."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.types import Conversation, Message


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Text that the renderer adds around and between the messages of a conversation.

    The renderer adds it after it has hidden the control tokens in messages, so a message cannot forge it.

    Attributes:
        encoder: whether the model is an encoder. The tokenizer's `[CLS]` and `[SEP]` are then added. Without a chat
            template, the conversation is encoded as a text pair: all messages before the reply, and the reply.
        question: user message to add after the conversation, or None.
        generation_prompt: whether to add the template's generation prompt (the start of the model's own turn).
        step_token: token to add after every step of the last assistant message, or None.
        step_separator: text between two steps of that message. It is removed.
        mark_reply: whether to compute `Rendered.reply_start`.
        joins_pairs: whether a pair of rendered texts is one text; else the tokenizer joins it, as for cross-encoders.
        policy: whether the reader is the policy, for which a template writes today's date, not a fixed one.
    """

    encoder: bool = False
    question: str | None = None
    generation_prompt: bool = False
    step_token: str | None = None
    step_separator: str = "\n\n"
    mark_reply: bool = False
    joins_pairs: bool = False
    policy: bool = False

    def steps(self, conversation: Conversation) -> list[str]:
        """Return the steps of the last message; empty without a step token or an assistant message."""
        return [conversation[-1]["content"][start:end] for start, end in self.step_spans(conversation)]

    def step_spans(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Return the first character of each step in the content of the last message, and the one after its end."""
        if self.step_token is None or conversation[-1]["role"] != "assistant":
            return []
        position, spans = 0, []
        for piece in conversation[-1]["content"].split(self.step_separator):
            if piece.strip():
                spans.append((position + len(piece) - len(piece.lstrip()), position + len(piece.rstrip())))
            position += len(piece) + len(self.step_separator)
        return spans

    def arrange(self, conversation: Conversation) -> list[Message]:
        """Return the messages to pass to the chat template, with step tokens and the question added."""
        messages = list(conversation)
        steps = self.steps(conversation)
        if steps:
            marked = "".join(f"{step}{self.step_token}" for step in steps)
            messages[-1] = {**messages[-1], "content": marked}
        if self.question is not None:
            messages.append(Message(role="user", content=self.question))
        return messages
