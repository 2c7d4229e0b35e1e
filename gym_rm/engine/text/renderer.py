"""Convert conversations to token ids with the reward model's chat template, for training and for scoring.

If no message contains a control token, the ids are equal to those of `tokenizer.apply_chat_template`. A control token
in a message is encoded as plain text, so a message cannot forge a turn.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import jinja2
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
    """Options for converting conversations to text and tokens."""

    chat_template: str | None = None
    """Jinja source of the chat template; None for the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the chat template (`enable_thinking=False`, ...)."""
    add_bos: Flag | None = None
    """Whether to add a BOS token if the template wrote none. None adds one if the tokenizer itself does, True always,
    False never. A second BOS is never added."""
    max_length: PositiveInt | None = None
    """Maximum number of tokens of a conversation; None for the number of positions of the model."""
    overlong: Overlong = "error"
    """What to do with a conversation longer than `max_length`. `"error"` reports an error, because the score of a
    shortened conversation may be misleading. `"drop_turns"` removes the oldest turns and keeps the system message, the
    last user message and the reply. `"truncate_left"` removes the oldest tokens, except BOS or [CLS]. The number of
    removed tokens is in `Scores.truncated_tokens`."""
    date: Annotated[datetime.date, pydantic.BeforeValidator(parse_date)] = DATE
    """Date for templates that write today's date: a date, or ISO text such as `"2024-07-26"`."""


class Renderer:
    """Convert conversations to token ids with a tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        input_format: text that the kind of reward model reads in addition to the messages.
        **options: the fields of `TextOptions`.

    Raises:
        ConfigError: the tokenizer of a decoder has no chat template, or an option is unknown or invalid.
    """

    def __init__(self, tokenizer: Any, *, input_format: InputFormat | None = None, **options: Any) -> None:
        settings = parse_settings(TextOptions, options)
        if settings.add_bos and tokenizer.bos_token_id is None:
            raise ConfigError("add_bos=True, but the tokenizer has no BOS token; leave add_bos unset.")
        input_format = input_format or InputFormat()
        template = settings.chat_template or own_template(tokenizer)
        if template is None and not input_format.encoder:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so conversations cannot be "
                "written in the format that the model was trained on; pass chat_template= (Jinja source)."
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
        # These examples end with a user message: tokens that a template writes only into the last reply, such as an
        # empty `<think></think>`, must not count as control tokens, because replies may contain them.
        turns = ([SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT, TOOL, USER])
        tokens = (*input_format.control_tokens, input_format.step_token or "")
        self._control = ControlTokens(tokenizer, "".join((self._skeleton(), *map(self._try_to_write, turns), *tokens)))
        self._written_for: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._step_id = token_of(tokenizer, input_format.step_token) if input_format.step_token else None

    def encode(self, conversations: Sequence[Conversation]) -> list[Rendered | ConversationError]:
        """Render N conversations. The result for an invalid conversation is a ConversationError."""
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

        The last entry is equal to the result of `encode`. If the text of an earlier turn is a prefix of the whole text
        and ends directly before a control token, its ids are taken from the ids of the whole text. Otherwise, the turn
        is tokenised separately.

        Raises:
            ConversationError: a turn cannot be rendered.
        """
        self._check(conversation)
        turns = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        if not turns or turns[-1] != len(conversation):
            turns.append(len(conversation))
        # If the kind adds text to the last turn (a question, step tokens), earlier turns are not prefixes of the whole.
        prefixes = self.input_format == InputFormat(self.input_format.encoder) and self.tokenizer.is_fast
        text = self._plain_text(conversation) if prefixes else None
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
        """Return the number of tokens of the prompt, which are the tokens before the last message."""
        prompt = self._encode(conversation[:-1], add_generation_prompt=True)
        limit = min(len(prompt), len(rendered.input_ids))
        different = np.flatnonzero(prompt[:limit] != rendered.input_ids[:limit])
        return int(different[0]) if len(different) else limit

    def _check(self, conversation: Conversation) -> None:
        """Raise ConversationError if the conversation is invalid."""
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise ConversationError(
                f"a conversation must be a list of {{'role', 'content'}} messages; got {type(conversation).__name__}."
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
                    f"message {index} has the fields {extra} besides 'role' and 'content', which would not be scored; "
                    "write them into the content or remove them."
                )
            check_text(message["content"], f"the content of message {index}")
            check_text(message["role"], f"the role of message {index}")
            if message["role"] not in COMMON_ROLES and not ROLE.fullmatch(message["role"]):
                raise ConversationError(
                    f"message {index} has the role {message['role']!r}; expected a word such as 'user'."
                )

    def _plain_text(self, conversation: Conversation) -> str | None:
        """Return the text that the template writes, or None if messages contain or form a control token."""
        if self.chat_template is None or any(self._control.find(message["content"]) for message in conversation):
            return None
        text = self._write(conversation)
        return text if self._control.find(text) == self._find_written(conversation) else None

    def _find_written(self, conversation: Conversation) -> tuple[str, ...]:
        """Return the control tokens that the template writes for a conversation with these roles and steps."""
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
        """Render one conversation, whether or not its messages contain control tokens."""
        if self.chat_template is None:
            first, second = joined(conversation[:-1]), conversation[-1]["content"]
            encoding = self._control.encode_pair(first, second)
            types = encoding.sequence_ids
            segment = types.index(1) if 1 in types and "token_type_ids" in self.tokenizer.model_input_names else None
            return Rendered(np.array(encoding.ids, dtype=np.int32), second_segment=segment)
        return self._annotate(conversation, self._encode(conversation))

    def _encode(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> TokenIds:
        """Return token ids under the template, whether or not messages contain control tokens."""
        write = functools.partial(self._write, add_generation_prompt=add_generation_prompt)
        text = self._plain_text(conversation)
        if text is None:
            encoding = self._control.encode(conversation, write)
            return self._surround(np.array(encoding.ids, dtype=np.int32))
        return self._tokenize([write(conversation) if add_generation_prompt else text])[0]

    def _annotate(self, conversation: Conversation, ids: TokenIds) -> Rendered:
        """Check the number of step tokens, and set `reply_start` if the kind needs it."""
        if self._step_id is not None:
            found, expected = int((ids == self._step_id).sum()), len(self.input_format.steps(conversation))
            if found != expected:
                raise ConversationError(
                    f"expected the step token {self.input_format.step_token!r} {expected} times, once per step, but "
                    f"the text contains it {found} times; neither a message nor the template may contain it."
                )
        rendered = Rendered(ids)
        if not self.input_format.mark_reply:
            return rendered
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise ConversationError("the conversation must end with a reply of the assistant to a prompt.")
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
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat_template is not valid Jinja: {error.message} (line {error.lineno}).") from error
        except Exception as error:  # a template can raise any exception
            roles = [message["role"] for message in conversation[:8]]
            raise ConversationError(
                f"the chat template cannot write this conversation (roles {roles}...): {error}"
            ) from error
        for message in conversation:
            if message["role"] not in COMMON_ROLES and message["content"].strip() not in text:
                raise ConversationError(
                    f"the chat template does not write messages with the role {message['role']!r}; use another role."
                )
        return text

    def _tokenize(self, texts: list[str]) -> list[TokenIds]:
        if not texts:
            return []
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        encoded = self.tokenizer(texts, add_special_tokens=False, **options)["input_ids"]
        return [self._surround(np.array(ids, dtype=np.int32)) for ids in encoded]

    def _surround(self, ids: TokenIds) -> TokenIds:
        """Add the tokenizer's own special tokens at the start and the end, if the template did not write them."""
        if not len(ids):
            return ids
        parts = [ids]
        if len(self._prefix) and ids[0] != self._prefix[0]:
            parts.insert(0, self._prefix)
        if len(self._suffix) and ids[-1] != self._suffix[-1]:
            parts.append(self._suffix)
        return np.concatenate(parts) if len(parts) > 1 else ids

    def _head(self, ids: TokenIds) -> int:
        """Return the number of special tokens before the conversation: a BOS, or the prefix of an encoder."""
        if len(self._prefix) and np.array_equal(ids[: len(self._prefix)], self._prefix):
            return len(self._prefix)
        return int(ids[0] == self.tokenizer.bos_token_id)

    def _fit(self, conversation: Conversation, rendered: Rendered) -> Rendered:
        """Apply the options `max_length` and `overlong`."""
        if not len(rendered.input_ids):
            raise ConversationError("the conversation has no tokens, because the chat template wrote nothing.")
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
        """Return the special tokens that belong before and after the template's ids."""
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
                    f"the chat template of {self.tokenizer.name_or_path!r} writes no BOS, but its tokenizer adds "
                    "one, so a BOS is added. Pass add_bos=False to score conversations without a BOS."
                )
            return prefix, nothing
        return nothing, nothing

    def _skeleton(self) -> str:
        """Return a short conversation as the template writes it; empty if the template rejects all examples."""
        shapes = ([USER, ASSISTANT, USER], [USER, ASSISTANT], [USER])
        return next(filter(None, map(self._try_to_write, shapes)), "")

    def _try_to_write(self, conversation: Conversation) -> str:
        try:
            return "" if self.chat_template is None else self._write(conversation)
        except ConversationError:
            return ""
