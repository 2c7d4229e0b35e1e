"""Chat templates: where they come from, the fixed date that they write, and the text of a conversation."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import split_tools
from gym_rm.engine.text.tool_calls import encode_arguments, renumber, separate
from gym_rm.errors import ConfigError, ConversationError, warn_once
from gym_rm.types import Conversation, Message

DATE = datetime.date(2024, 7, 26)
"""Date for templates that write today's date. It is fixed so that scores do not depend on the day."""

TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")

# Contents of example messages: numbers that read the same backwards, which templates do not change.
USER: Message = {"role": "user", "content": "51844815"}
ASSISTANT: Message = {"role": "assistant", "content": "72944927"}
LATER: Message = {"role": "user", "content": "60311306"}
SYSTEM: Message = {"role": "system", "content": "83517538"}
TOOL: Message = {"role": "tool", "content": "94622649"}
CONTENTS = tuple(message["content"] for message in (USER, ASSISTANT, LATER, SYSTEM, TOOL))
# The examples end with a user message: tokens that a template writes only into the last reply, such as an empty
# `<think></think>`, must not count as control tokens, because replies may contain them. The first of the short ones
# that a template accepts is used.
SHORT_EXAMPLES = ([USER, ASSISTANT, LATER], [USER, ASSISTANT], [USER])
LONG_EXAMPLES = ([SYSTEM, USER, ASSISTANT, LATER], [USER, ASSISTANT, TOOL, LATER])


class ChatTemplate:
    """Writes the text of conversations with a tokenizer's chat template, the one that `apply_chat_template` chooses.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source: Jinja source, or the name of one of the tokenizer's templates; None for the tokenizer's own.
        input_format: text that the kind of reward model reads in addition to the messages.
        variables: extra variables for the template.

    Attributes:
        name: folder or hub id of the tokenizer.
        source: Jinja source, or None for an encoder without a chat template, which writes nothing.
        all_sources: this source, and that of the template named `"tool_use"`, which writes conversations with tools.
        hash: the first 16 hexadecimal digits of the SHA-256 of `all_sources`.
        date: the fixed date, if the template writes today's; else None.
        examples: example conversations as the template writes them, without those that it rejects.

    Raises:
        ConfigError: the tokenizer of a decoder has no chat template, or the template writes no text of the messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: str | None,
        *,
        input_format: InputFormat,
        variables: Mapping[str, Any],
    ) -> None:
        named = _named_templates(tokenizer)
        for_tools = None if source else named.get("tool_use")
        source = named.get(source or "", source) or own_template(tokenizer)
        if source is None and not input_format.encoder:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so conversations cannot be "
                "written in the format that the model was trained on; pass chat_template= (Jinja source)."
            )
        self._tokenizer, self.name = tokenizer, tokenizer.name_or_path
        self._input_format = input_format
        self._variables = variables
        self.all_sources = (source or "") + (for_tools or "")
        self.hash = None if source is None else hashlib.sha256(self.all_sources.encode()).hexdigest()[:16]
        self.date = DATE if "strftime_now" in self.all_sources and not input_format.policy else None
        if self.date is not None:
            source, for_tools = (each and freeze_date(each, DATE) for each in (source, for_tools))
        self.source = source
        self._for_tools = for_tools or source
        short = [text for text in map(self._try_to_write, SHORT_EXAMPLES) if text is not None][:1]
        long = [text for text in map(self._try_to_write, LONG_EXAMPLES) if text is not None]
        self._short = "".join(short)
        self.examples = (*short, *long)
        if self.examples and not any(content in text for text in self.examples for content in CONTENTS):
            raise ConfigError(
                "the chat template writes no text of the messages, so all conversations would have the same score; it "
                f"writes {self.examples[0][:80]!r}. Pass chat_template= with Jinja source or an existing file that "
                "writes `message['content']`, as text and not as a list of parts"
                f"{f', or the name of one of the templates {sorted(named)}' * bool(named)}."
            )
        if source is not None and not self.examples:
            warn_once(
                f"the chat template of {tokenizer.name_or_path!r} accepts none of the example conversations, so it is "
                "unchecked: it may mark turns with plain text, which a message can forge."
            )

    def write(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, which can begin with its tools (`with_tools`).

        Raises:
            ConfigError: the template is not valid Jinja.
            ConversationError: the template cannot write the conversation.
        """
        tools, messages = split_tools(conversation)
        arranged = self._input_format.arrange(messages)
        reason: Exception | None = None
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        for change in (list, _encoded, renumber, separate) if has_calls else (list,):
            try:
                text: str = self._tokenizer.apply_chat_template(
                    change(arranged),
                    tools=tools,
                    chat_template=self.source if tools is None else self._for_tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt or self._input_format.generation_prompt,
                    **self._variables,
                )
                return text
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat_template is not valid Jinja: {error.message} (line {error.lineno})."
                ) from error
            except Exception as error:  # a template can raise any exception
                reason = reason or error
        roles = [message["role"] for message in messages[:8]]
        raise ConversationError(
            f"the chat template cannot write this conversation (roles {roles}...): {reason}"
        ) from reason

    def plain_turn_marks(self, find: Callable[[str], Sequence[str]], forged_turns: str) -> tuple[str, ...]:
        """Return what the template writes between turns without a control token, so that a message can spell it.

        Args:
            find: function that returns the control tokens in a text.
            forged_turns: the option of this name, see `TextOptions`.
        """
        marks = re.split("|".join(CONTENTS), self._short)[1:-1]
        plain = tuple(dict.fromkeys(mark.strip() or mark for mark in marks if not find(mark)))
        if plain and forged_turns == "allow":
            warn_once(
                f"the chat template of {self._tokenizer.name_or_path!r} marks turns with plain text {list(plain)}, so "
                "a message that contains such a mark can forge a turn. Pass forged_turns='error' to report an error "
                "for these messages."
            )
        return plain

    def _try_to_write(self, conversation: Conversation) -> str | None:
        """Return the text of an example; None without a template, or if it rejects the example."""
        try:
            return None if self.source is None else self.write(conversation)
        except ConversationError:
            return None


def _encoded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose calls have JSON texts as arguments, which older templates of DeepSeek want."""
    return [encode_arguments(message) for message in messages]


def read_template(value: Any) -> Any:
    """Return the Jinja source of a chat template, given as source or as the path of a file.

    Raises:
        ConfigError: the file does not exist, or it is not text.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif not isinstance(value, str) or "{" in value or "\n" in value:
        return value
    try:
        path = os.path.expanduser(value)
        if os.path.isfile(path) or value.lower().endswith(TEMPLATE_SUFFIXES):
            return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={value!r:.200} is not a readable file: {error}; pass the path of a Jinja file, or Jinja "
            "source."
        ) from error
    return value


def own_template(tokenizer: Any) -> str | None:
    """Return the chat template of a tokenizer, or None.

    Raises:
        ConfigError: it has named templates, and none of them is the default.
    """
    if not (named := _named_templates(tokenizer)):
        return getattr(tokenizer, "chat_template", None) or None
    if "default" not in named:
        raise ConfigError(
            f"the tokenizer has chat templates {sorted(named)} and no default; pass chat_template= with one of these "
            "names, or with Jinja source."
        )
    return named["default"] or None


def _named_templates(tokenizer: Any) -> Mapping[str, str]:
    """Return the templates of a tokenizer that has several."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, Mapping) else {}


def freeze_date(template: str, date: datetime.date) -> str:
    """Return the template with its own `strftime_now`, which always formats the given date."""
    codes = [*(f"-{code}" for code in "dmHIMS"), *"aAwdbBhmyYCHkIlpMSsfjuUWVgGcxXDFTReztZnrE", "%"]
    replacements = "".join(f" | replace('%{code}', '{date.strftime(f'%{code}')}')" for code in codes)
    frozen = f"{{% macro strftime_now(format) %}}{{{{ format{replacements} }}}}{{% endmacro %}}\n{template}"
    warn_once(
        f"the chat template writes today's date, so scores would change from day to day; the fixed date {date} is "
        "used instead. Pass a chat_template= that contains another date to change it."
    )
    return frozen
