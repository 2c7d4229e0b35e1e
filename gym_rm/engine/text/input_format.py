"""What a kind of reward model reads besides the messages themselves."""

from __future__ import annotations

from dataclasses import dataclass

from gym_rm.types import Conversation, Message


@dataclass(frozen=True, slots=True)
class InputFormat:
    """What is written around and between the messages of a conversation for one kind of reward model.

    The renderer writes all of it after it has escaped the control tokens that messages spell, so a message cannot
    forge any of it.

    Attributes:
        encoder: the model is an encoder. The tokenizer's `[CLS]` and `[SEP]` are added, and without a chat template
            (everything before the reply, reply) is encoded as a text pair.
        question: asked by the user after the conversation.
        generation_prompt: end where the template starts the model's own turn.
        step_token: written after every step of the last assistant message.
        step_separator: what separates two steps in that message; it is not written.
        control_tokens: further tokens that only the template may write.
        mark_reply: find out where the last message starts.
    """

    encoder: bool = False
    question: str | None = None
    generation_prompt: bool = False
    step_token: str | None = None
    step_separator: str = "\n\n"
    control_tokens: tuple[str, ...] = ()
    mark_reply: bool = False

    def steps(self, conversation: Conversation) -> list[str]:
        """The steps of the last message, if it is the assistant's and this kind reads steps."""
        if self.step_token is None or conversation[-1]["role"] != "assistant":
            return []
        pieces = conversation[-1]["content"].split(self.step_separator)
        return [piece.strip() for piece in pieces if piece.strip()]

    def arrange(self, conversation: Conversation) -> list[Message]:
        """The messages that the chat template is given."""
        messages = list(conversation)
        steps = self.steps(conversation)
        if steps:
            marked = "".join(f"{step}{self.step_token}" for step in steps)
            messages[-1] = Message(role=messages[-1]["role"], content=marked)
        if self.question is not None:
            messages.append(Message(role="user", content=self.question))
        return messages
