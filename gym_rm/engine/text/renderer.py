"""Conversations to token ids: the only place where a chat template is applied, for training and scoring alike.

Two promises. The ids are those of `tokenizer.apply_chat_template` for every conversation whose messages spell no
control token. And a message that does spell one gets it as plain text: it cannot forge a turn.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pydantic

from gym_rm.config import Config, Flag, PositiveInt, parse_settings
from gym_rm.engine.text.control_tokens import ControlTokens, check_text, joined
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.overlong import Overlong, fit
from gym_rm.engine.text.rendered import Rendered, TokenIds
from gym_rm.engine.text.templates import DATE, freeze_date, own_template, parse_date, token_of
from gym_rm.errors import ConfigError, ConversationError, warn_once
from gym_rm.types import Conversation, Message

Turns: TypeAlias = Literal["last", "all"]

ROLE = re.compile(r"\w[\w.-]*( [\w.-]+)*")
COMMON_ROLES = frozenset({"system", "user", "assistant"})
USER: Message = {"role": "user", "content": "question"}
ASSISTANT: Message = {"role": "assistant", "content": "reply"}
SYSTEM: Message = {"role": "system", "content": "rule"}
TOOL: Message = {"role": "tool", "content": "result"}
REMEMBERED_SHAPES, REMEMBERED_TURNS = 4096, 64


class TextOptions(Config):
    """How conversations become text and tokens."""

    chat_template: str | None = None
    """Jinja source to use instead of the tokenizer's own template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the template (`enable_thinking=False`, ...)."""
    add_bos: Flag | None = None
    """None adds the BOS that the tokenizer itself would add where the template wrote none, and never a second one; True
    requires a BOS; False leaves the template's text as it is."""
    max_length: PositiveInt | None = None
    """Longest conversation in tokens; None for what the model's positions allow."""
    overlong: Overlong = "error"
    """What happens to a longer one. `"error"` refuses it: a cut conversation is another question, and only its owner
    knows whether that one's score still means anything. `"drop_turns"` drops the oldest turns and keeps the system
    message, the last user message and the reply. `"truncate_left"` drops the oldest tokens, BOS or [CLS] kept. What is
    cut is counted in `Scores.truncated_tokens`."""
    date: Annotated[datetime.date, pydantic.BeforeValidator(parse_date)] = DATE
    """What a template that asks for today's date is told (a date, or ISO text such as `"2024-07-26"`)."""


class Renderer:
    """Applies a tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        input_format: what the kind of reward model reads besides the messages.
        **options: the fields of `TextOptions`.

    Raises:
        ConfigError: a decoder without a chat template, or an unknown or invalid option.
    """

    def __init__(self, tokenizer: Any, *, input_format: InputFormat | None = None, **options: Any) -> None:
        settings = parse_settings(TextOptions, options)
        if settings.add_bos and tokenizer.bos_token_id is None:
            raise ConfigError("add_bos=True, but the tokenizer has no BOS token; leave add_bos unset.")
        input_format = input_format or InputFormat()
        template = settings.chat_template or own_template(tokenizer)
        if template is None and not input_format.encoder:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so a conversation cannot be "
                "written as the model was trained to read it; pass chat_template= (Jinja source)."
            )
        self.tokenizer = tokenizer
        self.chat_template: str | None = template
        self.date: datetime.date | None = None
        if template is not None and "strftime_now" in template:
            self.chat_template, self.date = freeze_date(template, settings.date), settings.date
        self.template_hash = None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16]
        self.max_length = settings.max_length
        self.overlong = settings.overlong
        self._variables = settings.chat_template_kwargs or {}
        self.input_format = input_format
        self._prefix, self._suffix = self._surroundings(settings.add_bos)
        # None of these ends with the assistant: what a template writes into a last reply, such as an empty
        # `<think></think>`, replies may write too.
        turns = ([SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT, TOOL, USER])
        tokens = (*input_format.control_tokens, input_format.step_token or "")
        self._control = ControlTokens(tokenizer, "".join((self._skeleton(), *map(self._try_to_write, turns), *tokens)))
        self._written_for: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._step_id = token_of(tokenizer, input_format.step_token) if input_format.step_token else None

    def encode(self, conversations: Sequence[Conversation]) -> list[Rendered | ConversationError]:
        """Render N conversations; a conversation that cannot be rendered gets the error instead."""
        results: dict[int, Rendered | ConversationError] = {}
        texts: dict[int, str] = {}
        for row, conversation in enumerate(conversations):
            try:
                self._check(conversation)
                text = self._plain_text(conversation)
                if text is None:
                    results[row] = self._fit(conversation, self._render(conversation))
                else:
                    texts[row] = text
            except ConversationError as error:
                results[row] = error
        for row, ids in zip(texts, self._tokenize(list(texts.values())), strict=True):
            try:
                results[row] = self._fit(conversations[row], self._annotate(conversations[row], ids))
            except ConversationError as error:
                results[row] = error
        return [results[row] for row in range(len(conversations))]

    def encode_turns(self, conversation: Conversation) -> list[Rendered]:
        """Render a conversation up to each of its assistant turns, and up to its end.

        The last entry is what `encode` gives. Where the text of an earlier turn is a prefix of the whole text that
        ends before a control token, its ids are a prefix of the whole ids; anything else is tokenised by itself.

        Raises:
            ConversationError: some turn cannot be rendered.
        """
        self._check(conversation)
        turns = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        if not turns or turns[-1] != len(conversation):
            turns.append(len(conversation))
        # Only the last turn carries what a kind writes beside it, so earlier turns are no prefixes of the whole.
        alike = self.input_format == InputFormat(self.input_format.encoder) and self.tokenizer.is_fast
        text = self._plain_text(conversation) if alike else None
        if text is None:
            return [self._fit(conversation[:stop], self._render(conversation[:stop])) for stop in turns]
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoding["input_ids"], dtype=np.int32)
        starts = np.array([start for start, _ in encoding["offset_mapping"]], dtype=np.int64)
        clean = {int(starts[k]): k for k in np.flatnonzero(np.isin(ids, list(self._control.ids)))}
        results = []
        for stop in turns[:-1]:
            part = self._write(conversation[:stop])
            if text.startswith(part) and len(part) in clean:
                rendered = Rendered(self._surround(ids[: clean[len(part)]]))
            else:
                rendered = self._render(conversation[:stop])
            results.append(self._fit(conversation[:stop], rendered))
        return [*results, self._fit(conversation, Rendered(self._surround(ids)))]

    def prompt_length(self, conversation: Conversation, rendered: Rendered) -> int:
        """Tokens of a render that stand before its last message: what a policy is given to continue."""
        prompt = self._encode(conversation[:-1], add_generation_prompt=True)
        limit = min(len(prompt), len(rendered.input_ids))
        different = np.flatnonzero(prompt[:limit] != rendered.input_ids[:limit])
        return int(different[0]) if len(different) else limit

    def _check(self, conversation: Conversation) -> None:
        """Raise `ConversationError` unless this is a conversation."""
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise ConversationError(
                f"a conversation is a list of {{'role', 'content'}} messages; got {type(conversation).__name__}."
            )
        if not conversation:
            raise ConversationError("the conversation is empty; expected at least one message.")
        for index, message in enumerate(conversation):
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise ConversationError(
                    f"message {index} must be {{'role': ..., 'content': ...}}; got {message!r:.200}."
                )
            extra = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
            if extra:
                raise ConversationError(
                    f"message {index} has fields {extra} besides 'role' and 'content'; they would not be scored: "
                    "write them into the content or leave them out."
                )
            check_text(message["content"], f"the content of message {index}")
            check_text(message["role"], f"the role of message {index}")
            if message["role"] not in COMMON_ROLES and not ROLE.fullmatch(message["role"]):
                raise ConversationError(f"message {index} has the role {message['role']!r}; expected a plain word.")

    def _plain_text(self, conversation: Conversation) -> str | None:
        """The conversation as the template writes it; None where something in it only looks like a control token."""
        if self.chat_template is None or any(self._control.find(message["content"]) for message in conversation):
            return None
        text = self._write(conversation)
        return text if self._control.find(text) == self._find_written(conversation) else None

    def _find_written(self, conversation: Conversation) -> tuple[str, ...]:
        """The control tokens that the template writes for a conversation of these roles and steps."""
        neutral = [Message(role=m["role"], content="text" if m["content"].strip() else "") for m in conversation]
        steps = len(self.input_format.steps(conversation))
        if steps:
            neutral[-1]["content"] = self.input_format.step_separator.join(["text"] * steps)
        if len(conversation) > REMEMBERED_TURNS:
            return self._control.find(self._write(neutral))
        shape = (steps, *((message["role"], bool(message["content"])) for message in neutral))
        written = self._written_for.get(shape)
        if written is None:
            if len(self._written_for) >= REMEMBERED_SHAPES:
                self._written_for.clear()
            written = self._written_for[shape] = self._control.find(self._write(neutral))
        return written

    def _render(self, conversation: Conversation) -> Rendered:
        """Render one conversation whatever its messages spell."""
        if self.chat_template is None:
            first, second = joined(conversation[:-1]), conversation[-1]["content"]
            encoding = self._control.encode_pair(first, second)
            types = encoding.sequence_ids
            segment = types.index(1) if 1 in types and "token_type_ids" in self.tokenizer.model_input_names else None
            return Rendered(np.array(encoding.ids, dtype=np.int32), second_segment=segment)
        return self._annotate(conversation, self._encode(conversation))

    def _encode(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> TokenIds:
        """Token ids of a conversation under the template, whatever its messages spell."""
        write = functools.partial(self._write, add_generation_prompt=add_generation_prompt)
        text = self._plain_text(conversation)
        if text is None:
            encoding = self._control.encode(conversation, write)
            return self._surround(np.array(encoding.ids, dtype=np.int32))
        return self._tokenize([write(conversation) if add_generation_prompt else text])[0]

    def _annotate(self, conversation: Conversation, ids: TokenIds) -> Rendered:
        """Add what the kind asked to know, and see that nothing but the renderer wrote its step tokens."""
        if self._step_id is not None:
            found, expected = int((ids == self._step_id).sum()), len(self.input_format.steps(conversation))
            if found != expected:
                raise ConversationError(
                    f"the text holds the step token {self.input_format.step_token!r} {found} times for {expected} "
                    "steps: a message or the chat template writes it too, and those could not be told apart."
                )
        rendered = Rendered(ids)
        if not self.input_format.mark_reply:
            return rendered
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise ConversationError("the conversation must end with a reply of the assistant's to some prompt.")
        return replace(rendered, reply_start=self.prompt_length(conversation, rendered))

    def _write(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.input_format.arrange(conversation),
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt or self.input_format.generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program: besides `raise_exception` it can fail in any way
            roles = [message["role"] for message in conversation[:8]]
            raise ConversationError(
                f"the chat template refuses this conversation (roles {roles}...): {error}"
            ) from error
        for message in conversation:
            if message["role"] not in COMMON_ROLES and message["content"].strip() not in text:
                raise ConversationError(f"the chat template does not write messages of the role {message['role']!r}.")
        return text

    def _tokenize(self, texts: list[str]) -> list[TokenIds]:
        if not texts:
            return []
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        encoded = self.tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
        return [self._surround(np.array(ids, dtype=np.int32)) for ids in encoded]

    def _surround(self, ids: TokenIds) -> TokenIds:
        """Add the tokenizer's own special tokens where the template did not write them."""
        if not len(ids):
            return ids
        parts = [ids]
        if len(self._prefix) and ids[0] != self._prefix[0]:
            parts.insert(0, self._prefix)
        if len(self._suffix) and ids[-1] != self._suffix[-1]:
            parts.append(self._suffix)
        return np.concatenate(parts) if len(parts) > 1 else ids

    def _head(self, ids: TokenIds) -> int:
        """How many tokens stand before the conversation itself: a BOS, or what an encoder starts with."""
        if len(self._prefix) and np.array_equal(ids[: len(self._prefix)], self._prefix):
            return len(self._prefix)
        return int(ids[0] == self.tokenizer.bos_token_id)

    def _fit(self, conversation: Conversation, rendered: Rendered) -> Rendered:
        """Apply `max_length`."""
        if not len(rendered.input_ids):
            raise ConversationError("the conversation has no tokens: the chat template wrote nothing.")
        if self.max_length is None:
            return rendered
        return fit(
            conversation,
            rendered,
            max_length=self.max_length,
            overlong=self.overlong,
            head=self._head(rendered.input_ids),
            render=self._render,
        )

    def _surroundings(self, add_bos: bool | None) -> tuple[TokenIds, TokenIds]:
        """What goes before and after the template's ids where it is not there yet."""
        nothing = np.empty(0, dtype=np.int32)
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        start = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        prefix = np.array(whole[:start], dtype=np.int32)
        suffix = np.array(whole[start + len(bare) :], dtype=np.int32)
        if self.input_format.encoder:
            return (prefix, suffix) if add_bos is not False else (nothing, nothing)
        if add_bos:
            return np.array([self.tokenizer.bos_token_id], dtype=np.int32), nothing
        if add_bos is None and len(prefix):
            written = self.tokenizer(self._skeleton(), add_special_tokens=False)["input_ids"][:1]
            if written != prefix[:1].tolist():
                warn_once(
                    f"the chat template of {self.tokenizer.name_or_path!r} writes no BOS and its tokenizer adds one: "
                    "one is added, as the tokenizer would. Pass add_bos=False to score the template's text alone."
                )
            return prefix, nothing
        return nothing, nothing

    def _skeleton(self) -> str:
        """A short conversation as the template writes it; empty where it refuses one."""
        shapes = ([USER, ASSISTANT, USER], [USER, ASSISTANT], [USER])
        return next(filter(None, map(self._try_to_write, shapes)), "")

    def _try_to_write(self, conversation: Conversation) -> str:
        try:
            return "" if self.chat_template is None else self._write(conversation)
        except ConversationError:
            return ""
