"""What a policy reads: a conversation up to where it replies, and what comes between two of its replies."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import check_conversation, split_tools
from gym_rm.engine.text.rendered import TokenIds
from gym_rm.engine.text.renderer import Renderer, Tools
from gym_rm.engine.text.templates import TOOL, USER
from gym_rm.engine.text.tool_calls import calls_of
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.types import Conversation, Message

MARK = "82655628"
SAID = Message(role="assistant", content=MARK)
RESULT: Message = {**TOOL, "tool_call_id": "call00001", "name": "tool"}
TOOLS_TEXT = """You can call functions. Their schemas:
<tools>
{schemas}
</tools>
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Its result comes in the next message."""


class PolicyRenderer(Renderer):
    """Writes what a policy reads with its chat template: the tokens of `apply_chat_template` with a generation prompt.

    A control token in a message or a tool is plain text, as in `Renderer`, so what a user or a tool says cannot forge
    a turn.

    Args:
        tokenizer: tokenizer of the policy.
        chat_template: Jinja source; None for the tokenizer's own.
        tools_in_system: write the tools into the system message, for a template that does not write them; None for
            an error, False to go without.
        **variables: extra variables for the chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, tools_in_system: bool | None = None, **variables: Any
    ) -> None:
        super().__init__(
            tokenizer,
            input_format=InputFormat(generation_prompt=True, policy=True),
            chat_template=chat_template,
            chat_template_kwargs=variables,
            add_bos=False,
        )
        self._tools_in_system = tools_in_system

    def prompts(
        self, conversations: Sequence[Conversation], tools: Sequence[Tools | None] | None = None
    ) -> list[TokenIds]:
        """Return the tokens of N conversations, int32 `[P]` each, with the tools of each.

        Raises:
            ConfigError: the template does not write the tools.
            ConversationError: a message is invalid, or the template does not write it.
        """
        rows = zip(conversations, [None] * len(conversations) if tools is None else tools, strict=True)
        prompts: list[TokenIds] = []
        for (conversation, tools_of_row), same in itertools.groupby(rows):  # the rows of a group are equal
            ids = self._ids(*self._write(self._shown(conversation, tools_of_row or ())))
            prompts += [ids for _ in same]
        return prompts

    def _shown(self, conversation: Conversation, tools: Tools) -> Conversation:
        """Return the checked conversation with its tools, of which the template writes what the policy must see."""
        if tools and self._tools_in_system:
            conversation, tools = with_tools_as_text(self._check(conversation), tools), ()
        checked, write = self._check(conversation, tools), self._template.write
        if tools and self._tools_in_system is None and write(checked) == write(split_tools(checked)[1]):
            raise ConfigError(
                f"the chat template of the policy {self.tokenizer.name_or_path!r} does not write tools, so it would "
                "not know what it can call. Set env.tools_in_system=true, which writes them into the system message, "
                "or false if it knows them from its training; or give its tokenizer a template that writes them."
            )
        new = max((k + 1 for k, message in enumerate(checked) if message["role"] == "assistant"), default=0)
        for index in self._dropped.frame(checked).unwritten:
            if (role := checked[index]["role"]) == "system" or index >= new:
                raise ConversationError(
                    f"the chat template of the policy does not write message {index} with the role {role!r}, so the "
                    "policy would not see it; leave it out, or give the policy's tokenizer another template."
                )
        return checked

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


def with_tools_as_text(conversation: Conversation, tools: Tools) -> Conversation:
    """Return the conversation with tools and calls as text, as Hermes and Qwen have them: see `TOOLS_TEXT`."""
    system = TOOLS_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if conversation[0]["role"] == "system":
        system, conversation = f"{conversation[0]['content']}\n\n{system}", conversation[1:]
    changed = [Message(role="system", content=system)]
    for message in conversation:
        if calls := calls_of(message):
            values = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
            texts = filter(None, (message["content"], *map("<tool_call>\n{}\n</tool_call>".format, values)))
            message = Message(role=message["role"], content="\n".join(texts))
        changed.append(message)
    return changed
