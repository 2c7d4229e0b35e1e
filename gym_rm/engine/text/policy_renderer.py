"""What a policy reads: a conversation up to where it replies, and what comes between two of its replies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import check_conversation
from gym_rm.engine.text.rendered import TokenIds
from gym_rm.engine.text.renderer import Renderer, Tools
from gym_rm.engine.text.templates import TOOL, USER
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

MARK = "82655628"
SAID = Message(role="assistant", content=MARK)
RESULT: Message = {**TOOL, "tool_call_id": "call00001", "name": "tool"}


class PolicyRenderer(Renderer):
    """Writes what a policy reads with its chat template: the tokens of `apply_chat_template` with a generation prompt.

    A control token in a message or a tool is plain text, as in `Renderer`, so what a user or a tool says cannot forge
    a turn.

    Args:
        tokenizer: tokenizer of the policy.
        chat_template: Jinja source; None for the tokenizer's own.
        **variables: extra variables for the chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, **variables: Any) -> None:
        super().__init__(
            tokenizer,
            input_format=InputFormat(generation_prompt=True, policy=True),
            chat_template=chat_template,
            chat_template_kwargs=variables,
            add_bos=False,
        )

    def prompts(
        self, conversations: Sequence[Conversation], tools: Sequence[Tools | None] | None = None
    ) -> list[TokenIds]:
        """Return the tokens of N conversations, int32 `[P]` each, with the tools of each.

        Raises:
            ConversationError: a message is invalid, or the template cannot write a conversation.
        """
        rows = zip(conversations, [None] * len(conversations) if tools is None else tools, strict=True)
        prompts: list[TokenIds] = []
        for (conversation, tools_of_row), same in itertools.groupby(rows):  # the rows of a group are equal
            ids = self._ids(*self._write(self._check(conversation, tools_of_row or ())))
            prompts += [ids for _ in same]
        return prompts

    def next_turn(self, reply: Sequence[int], messages: Conversation) -> TokenIds:
        """Return the tokens between a reply and the next one: the messages after it, and the beginning of the next.

        They follow the sampled tokens, which stay as they are, also where the template would write the reply in other
        words or without its thinking.

        Args:
            reply: the sampled tokens. If they end with the end token that the template writes, it is not repeated.
            messages: what was said after the reply: tool results, or what the user says.

        Raises:
            ConversationError: the template cannot write the messages after a reply without calls.
        """
        messages = check_conversation(messages)
        if any(message["role"] == "tool" for message in messages) and not self._writes_results:
            raise ConversationError(
                "the chat template of the policy does not write the results of tools, or only after a call that it "
                "has written itself (gpt-oss, Gemma 4); pass chat_template= with another one."
            )
        text, hidden = self._write([USER, SAID, *messages])
        _, mark, after = (text if hidden is None else hidden.named).partition(MARK)
        if not mark:
            raise ConversationError("the chat template of the policy does not write what an assistant says.")
        ids = self._ids(after, None if hidden is None else replace(hidden, named=after, num_control_tokens=0))
        ended = len(ids) and ids[0] in self._control.ids and list(reply[-1:]) == [ids[0]]
        return ids[1:] if ended else ids

    @functools.cached_property
    def _writes_results(self) -> bool:
        try:
            return RESULT["content"] in self._write([USER, SAID, RESULT])[0].partition(MARK)[2]
        except ConversationError:
            return False
