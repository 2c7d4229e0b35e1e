"""What a policy reads: a conversation up to where it replies, and what comes between two of its replies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import check_conversation
from gym_rm.engine.text.rendered import TokenIds, common_prefix
from gym_rm.engine.text.renderer import Renderer, Tools
from gym_rm.engine.text.templates import RESULT, USER
from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

MARK = "82655628"
SAID = Message(role="assistant", content=MARK)


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
        written = [self._write(self._check(conversation, of_row or ())) for conversation, of_row in rows]
        plain = iter(self.tokenize([text for text, hidden in written if hidden is None], add_special_tokens=False))
        return [
            next(plain) if hidden is None else np.array(self._control.encode(hidden).ids, dtype=np.int32)
            for _, hidden in written
        ]

    def next_turn(self, reply: Sequence[int], messages: Conversation) -> TokenIds:
        """Return the tokens between a reply and the next one: the messages after it, and the beginning of the next.

        They follow the sampled tokens, which stay as they are, also where the template would write the reply in other
        words or without its thinking.

        Args:
            reply: the sampled tokens. If they end with the end token that the template writes, it is not repeated.
            messages: what was said after the reply: tool results, or what the user says.

        Raises:
            ConversationError: the template cannot write the messages after a reply.
        """
        messages = check_conversation(messages)
        results = [message for message in messages if message["role"] == "tool"]
        after_calls = bool(results) and self._results_need_calls
        text, hidden = self._write([USER, _calling(results) if after_calls else SAID, *messages])
        _, mark, after = (text if hidden is None else hidden.named).partition(MARK)
        if not mark:
            raise ConversationError("the chat template of the policy does not write what an assistant says.")
        if hidden is None:
            ids = self.tokenize([after], add_special_tokens=False)[0]
        else:
            ids = np.array(self._control.encode(replace(hidden, named=after, num_control_tokens=0)).ids, dtype=np.int32)
        if after_calls:
            calling = self._template.write([USER, _calling(results)], add_generation_prompt=False)
            return ids[common_prefix(ids, self._ids(calling.partition(MARK)[2])) :]
        ended = len(ids) and ids[0] in self._control.ids and list(reply[-1:]) == [ids[0]]
        return ids[1:] if ended else ids

    @functools.cached_property
    def _results_need_calls(self) -> bool:
        """Whether the template writes tool results only after a message with calls (gpt-oss, Gemma 4).

        Raises:
            ConversationError: it never writes them.
        """
        found = []
        for message in (SAID, _calling([RESULT])):
            try:
                found.append(RESULT["content"] in self._write([USER, message, RESULT])[0].partition(MARK)[2])
            except ConversationError:
                found.append(False)
        if not any(found):
            raise ConversationError("the chat template of the policy does not write the results of tools.")
        return not found[0]


def _calling(results: Sequence[Message]) -> Message:
    """Return a message with the calls that have these results, and the mark at its end."""
    calls: list[dict[str, Any]] = [
        {
            "type": "function",
            "id": result.get("tool_call_id", f"call{number:05d}"),
            "function": {"name": result.get("name", "tool"), "arguments": {}},
        }
        for number, result in enumerate(results, start=1)
    ]
    calls[-1]["function"]["arguments"] = {"x": MARK}
    return Message(role="assistant", content="", tool_calls=calls)
