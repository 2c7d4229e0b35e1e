"""Conversations to token ids: the only place where a chat template is applied, for training and scoring alike.

Two promises. The ids are those of `tokenizer.apply_chat_template` for every conversation whose messages spell no
control token. And a message that does spell one gets it as plain text: it cannot forge a turn.
"""

from __future__ import annotations

import bisect
import datetime
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.control_tokens import ControlTokens, check_text, joined
from gym_rm.errors import ConfigError, RenderError, warn_once
from gym_rm.types import Conversation, Message

Overlong: TypeAlias = Literal["error", "drop_turns", "truncate_left"]
Turns: TypeAlias = Literal["last", "all"]
TokenIds: TypeAlias = NDArray[np.int32]

ROLE = re.compile(r"\w[\w.-]*( [\w.-]+)*")
COMMON_ROLES = frozenset({"system", "user", "assistant"})
DATE = datetime.date(2024, 7, 26)
USER: Message = {"role": "user", "content": "question"}
ASSISTANT: Message = {"role": "assistant", "content": "reply"}
SYSTEM: Message = {"role": "system", "content": "rule"}
TOOL: Message = {"role": "tool", "content": "result"}
REMEMBERED_SHAPES, REMEMBERED_TURNS = 4096, 64


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation, up to one of its turns, as the model will see it.

    Attributes:
        input_ids: int32 `[L]`.
        truncated_tokens: how many tokens were cut to fit `max_length`.
        second_segment: where the reply of a text pair starts (encoders without a chat template), or None.
        reply_start: where the last message starts, for kinds that ask (`Presentation.mark_reply`), or None.
    """

    input_ids: TokenIds
    truncated_tokens: int = 0
    second_segment: int | None = None
    reply_start: int | None = None


@dataclass(frozen=True, slots=True)
class Presentation:
    """What a kind of reward model wants written beside the messages of a conversation.

    What is named here is written by the renderer, after the messages' own spellings of control tokens were put aside,
    so a message cannot write it.

    Attributes:
        encoder: the model is an encoder. The tokenizer's `[CLS]` and `[SEP]` are added, and without a chat template
            (everything before the reply, reply) is encoded as a text pair.
        question: asked by the user after the conversation.
        generation_prompt: end where the template starts the model's own turn.
        step_token: written after every step of the last assistant message.
        step_separator: what stands between two steps in that message; it is not written.
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


class Renderer:
    """Applies a tokenizer and its chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja source instead of the tokenizer's own template.
        chat_template_kwargs: extra variables for the template (`enable_thinking=False`, ...).
        add_bos: None adds the BOS that the tokenizer itself would add where the template wrote none, and never a
            second one; True asks for a BOS; False leaves the template's text alone.
        max_length: longest input in tokens; None for no limit.
        overlong: what to do with a longer one. `"error"` refuses it. `"drop_turns"` drops the oldest turns and keeps
            the system message, the last user message and the reply. `"truncate_left"` drops the oldest tokens, BOS
            or [CLS] kept. What is cut is counted in `Scores.truncated_tokens`. Refusing is the default: a cut
            conversation is another question, and only its owner knows whether that one's score still means anything.
        presentation: what the kind of reward model wants written beside the messages.
        date: what a template that asks for today's date is told (ISO: `"2024-07-26"`), so that a score does not depend
            on the day.

    Raises:
        ConfigError: a decoder without a chat template, or a setting that cannot be.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_bos: bool | None = None,
        max_length: int | None = None,
        overlong: Overlong = "error",
        presentation: Presentation | None = None,
        date: datetime.date | str = DATE,
    ) -> None:
        if overlong not in ("error", "drop_turns", "truncate_left"):
            raise ConfigError(f"overlong must be 'error', 'drop_turns' or 'truncate_left'; got {overlong!r}.")
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length must be at least 1 token; got {max_length}.")
        if add_bos and tokenizer.bos_token_id is None:
            raise ConfigError("add_bos=True, but the tokenizer has no BOS token; leave add_bos unset.")
        presentation = presentation or Presentation()
        template = chat_template or own_template(tokenizer)
        if template is None and not presentation.encoder:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so a conversation cannot be "
                "written as the model was trained to read it; pass chat_template= (Jinja source)."
            )
        self.tokenizer = tokenizer
        date = _parse_date(date)
        self.chat_template, self.date = template, None
        if template is not None and "strftime_now" in template:
            self.chat_template, self.date = _freeze_date(template, date), date
        self.template_hash = None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16]
        self.max_length = max_length
        self.overlong = overlong
        self._variables = dict(chat_template_kwargs or {})
        self.presentation = presentation
        self._prefix, self._suffix = self._surroundings(add_bos)
        # None of these ends with the assistant: what a template writes into a last reply, such as an empty
        # `<think></think>`, replies may write too.
        turns = ([SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT, TOOL, USER])
        tokens = (*presentation.control_tokens, presentation.step_token or "")
        self._control = ControlTokens(tokenizer, "".join((self._skeleton(), *map(self._try_to_write, turns), *tokens)))
        self._written_for: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._step_id = token_of(tokenizer, presentation.step_token) if presentation.step_token else None

    def encode(self, conversations: Sequence[Conversation]) -> list[Rendered | RenderError]:
        """Render N conversations; one that cannot be rendered gets its reason instead."""
        results: dict[int, Rendered | RenderError] = {}
        texts: dict[int, str] = {}
        for row, conversation in enumerate(conversations):
            try:
                self._check(conversation)
                text = self._plain_text(conversation)
                if text is None:
                    results[row] = self._fit(conversation, self._render(conversation))
                else:
                    texts[row] = text
            except RenderError as error:
                results[row] = error
        for row, ids in zip(texts, self._tokenize(list(texts.values())), strict=True):
            try:
                results[row] = self._fit(conversations[row], self._annotate(conversations[row], ids))
            except RenderError as error:
                results[row] = error
        return [results[row] for row in range(len(conversations))]

    def encode_turns(self, conversation: Conversation) -> list[Rendered]:
        """Render a conversation up to each of its assistant turns, and up to its end.

        The last entry is what `encode` gives. Where the text of an earlier turn is a prefix of the whole text that
        ends before a control token, its ids are a prefix of the whole ids; anything else is tokenised by itself.

        Raises:
            RenderError: some turn cannot be rendered.
        """
        self._check(conversation)
        turns = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        if not turns or turns[-1] != len(conversation):
            turns.append(len(conversation))
        # Only the last turn carries what a kind writes beside it, so earlier turns are no prefixes of the whole.
        alike = self.presentation == Presentation(self.presentation.encoder) and self.tokenizer.is_fast
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
        """Raise `RenderError` unless this is a conversation."""
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise RenderError(
                f"a conversation is a list of {{'role', 'content'}} messages; got {type(conversation).__name__}."
            )
        if not conversation:
            raise RenderError("the conversation is empty; expected at least one message.")
        for place, message in enumerate(conversation):
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise RenderError(f"message {place} must be {{'role': ..., 'content': ...}}; got {message!r:.200}.")
            extra = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
            if extra:
                raise RenderError(
                    f"message {place} has fields {extra} besides 'role' and 'content'; they would not be scored: "
                    "write them into the content or leave them out."
                )
            check_text(message["content"], f"the content of message {place}")
            check_text(message["role"], f"the role of message {place}")
            if message["role"] not in COMMON_ROLES and not ROLE.fullmatch(message["role"]):
                raise RenderError(f"message {place} has the role {message['role']!r}; expected a plain word.")

    def _plain_text(self, conversation: Conversation) -> str | None:
        """The conversation as the template writes it; None where something in it only looks like a control token."""
        if self.chat_template is None or any(self._control.find(message["content"]) for message in conversation):
            return None
        text = self._write(conversation)
        return text if self._control.find(text) == self._find_written(conversation) else None

    def _find_written(self, conversation: Conversation) -> tuple[str, ...]:
        """The control tokens that the template writes for a conversation of these roles and steps."""
        neutral = [Message(role=m["role"], content="text" if m["content"].strip() else "") for m in conversation]
        steps = len(self.presentation.steps(conversation))
        if steps:
            neutral[-1]["content"] = self.presentation.step_separator.join(["text"] * steps)
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
            found, expected = int((ids == self._step_id).sum()), len(self.presentation.steps(conversation))
            if found != expected:
                raise RenderError(
                    f"the text holds the step token {self.presentation.step_token!r} {found} times for {expected} "
                    "steps: a message or the chat template writes it too, and those could not be told apart."
                )
        rendered = Rendered(ids)
        if not self.presentation.mark_reply:
            return rendered
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise RenderError("the conversation must end with a reply of the assistant's to some prompt.")
        return replace(rendered, reply_start=self.prompt_length(conversation, rendered))

    def _write(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.presentation.arrange(conversation),
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt or self.presentation.generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program: besides `raise_exception` it can fail in any way
            roles = [message["role"] for message in conversation[:8]]
            raise RenderError(f"the chat template refuses this conversation (roles {roles}...): {error}") from error
        for message in conversation:
            if message["role"] not in COMMON_ROLES and message["content"].strip() not in text:
                raise RenderError(f"the chat template does not write messages of the role {message['role']!r}.")
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
        length = len(rendered.input_ids)
        if not length:
            raise RenderError("the conversation has no tokens: the chat template wrote nothing.")
        if self.max_length is None or length <= self.max_length:
            return rendered
        head = self._head(rendered.input_ids)
        if self.overlong == "truncate_left" and self.max_length > head:
            cut = length - self.max_length
            segment, reply = rendered.second_segment, rendered.reply_start
            return Rendered(
                np.delete(rendered.input_ids, slice(head, head + cut)),
                truncated_tokens=cut,
                second_segment=None if segment is None else max(head, segment - cut),
                reply_start=None if reply is None else max(head, reply - cut),
            )
        if self.overlong == "drop_turns":
            shorter = self._drop_turns(conversation)
            if shorter is not None:
                return replace(shorter, truncated_tokens=length - len(shorter.input_ids))
        kept_note = " even with only the system message, the last user message and the reply"
        raise RenderError(
            f"the conversation has {length} tokens, over max_length={self.max_length}"
            + (kept_note if self.overlong == "drop_turns" else "")
            + "; raise max_length, or pass overlong='drop_turns' or 'truncate_left'."
        )

    def _drop_turns(self, conversation: Conversation) -> Rendered | None:
        """The render with the fewest oldest turns dropped that fits, if any does."""
        first = next((k for k, message in enumerate(conversation) if message["role"] != "system"), 0)
        users = [k for k in range(first, len(conversation)) if conversation[k]["role"] == "user"]
        starts = users[1:] if users[:1] == [first] else users or list(range(first + 1, len(conversation)))[-1:]
        tried: dict[int, Rendered] = {}

        def fits(start: int) -> bool:
            tried[start] = self._render([*conversation[:first], *conversation[start:]])
            assert self.max_length is not None
            return len(tried[start].input_ids) <= self.max_length

        place = bisect.bisect_left(starts, True, key=fits)
        return tried[starts[place]] if place < len(starts) else None

    def _surroundings(self, add_bos: bool | None) -> tuple[TokenIds, TokenIds]:
        """What goes before and after the template's ids where it is not there yet."""
        nothing = np.empty(0, dtype=np.int32)
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        place = next((k for k in range(len(whole)) if whole[k : k + len(bare)] == bare), 0)
        prefix = np.array(whole[:place], dtype=np.int32)
        suffix = np.array(whole[place + len(bare) :], dtype=np.int32)
        if self.presentation.encoder:
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
        except RenderError:
            return ""


def token_of(tokenizer: Any, text: str) -> int:
    """The one token that a text is.

    Raises:
        ConfigError: it is none or several.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and text != tokenizer.unk_token):
        raise ConfigError(f"{text!r} is not one token of {tokenizer.name_or_path!r}: it becomes {ids}.")
    return int(ids[0])


def own_template(tokenizer: Any) -> str | None:
    """The chat template that a tokenizer came with, if any."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            names = sorted(template)
            raise ConfigError(f"the tokenizer has chat templates {names} and no default; pass chat_template=.")
        template = template["default"]
    return template or None


def _parse_date(date: datetime.date | str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(date) if isinstance(date, str) else date
    except ValueError as error:
        raise ConfigError(f"date must be a date or its ISO form, as in {str(DATE)!r}; got {date!r}.") from error


def _freeze_date(template: str, date: datetime.date) -> str:
    """The template with a `strftime_now` of its own, which knows the fixed date alone."""
    codes = [*(f"-{code}" for code in "dmHIMS"), *"aAwdbBmyYHIpMSfjUWcxX", "%"]
    told = "".join(f" | replace('%{code}', '{date.strftime(f'%{code}')}')" for code in codes)
    frozen = f"{{% macro strftime_now(format) %}}{{{{ format{told} }}}}{{% endmacro %}}\n{template}"
    warn_once(
        f"the chat template writes today's date, which would change scores from day to day: it is told {date} instead "
        "(date=... sets another one)."
    )
    return frozen
