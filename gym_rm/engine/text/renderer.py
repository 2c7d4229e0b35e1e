"""Convert conversations to token ids with the reward model's chat template, for training and for scoring.

If no message contains a control token, the ids are equal to those of `tokenizer.apply_chat_template`. A control token
in a message is encoded as plain text, so a message cannot forge a turn, unless the template marks turns with plain text
(`Human:`).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from gym_rm.config import parse_settings
from gym_rm.engine.text.control_tokens import ControlTokens, HiddenText
from gym_rm.engine.text.dropped_text import DroppedText
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import (
    check_conversation,
    check_text,
    extra_fields,
    joined,
    texts_of,
    warn_without_reply,
    with_tools,
)
from gym_rm.engine.text.overlong import drop_turns, too_long
from gym_rm.engine.text.rendered import Rendered, TokenIds, common_prefix
from gym_rm.engine.text.special_tokens import SpecialTokens
from gym_rm.engine.text.templates import ChatTemplate
from gym_rm.engine.text.text_options import TextOptions
from gym_rm.engine.text.tokenizers import token_of
from gym_rm.errors import ConversationError, warn_once
from gym_rm.types import Conversation

Turns: TypeAlias = Literal["last", "all"]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
RenderedText: TypeAlias = str | Sequence[int] | tuple[str, str]
"""A text as the model reads it, its token ids, or a pair of texts."""

CHARACTERS_AT_ONCE = 2**18  # a tokenizer needs about 300 bytes of memory for a character


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
        self.tokenizer = tokenizer
        self.input_format = input_format or InputFormat()
        self._template = ChatTemplate(
            tokenizer,
            settings.chat_template,
            input_format=self.input_format,
            variables=settings.chat_template_kwargs or {},
        )
        self.chat_template = self._template.source
        if self.chat_template is None:
            warn_once(
                f"{tokenizer.name_or_path!r} has no chat template: it reads all messages before the reply as one text, "
                "joined by line breaks and without their roles, and the reply as the second text of the pair."
            )
        self.template_hash = self._template.hash
        self.date = self._template.date
        self.max_length = settings.max_length
        self.overlong = settings.overlong
        self.dropped_text = settings.dropped_text
        self.forged_turns = settings.forged_turns
        self._special = SpecialTokens(tokenizer, add_bos=settings.add_bos, encoder=self.input_format.encoder)
        step_token = self.input_format.step_token
        written = (*self._template.examples, self._template.all_sources, step_token or "")
        self._control = ControlTokens(tokenizer, "".join(written))
        self._dropped = DroppedText(
            self._template, self._control, self.input_format, dropped_text=settings.dropped_text
        )
        reads = not self.input_format.policy
        self.plain_turn_marks = self._template.plain_turn_marks(self._control.find, self.forged_turns) if reads else ()
        self._step_id = token_of(tokenizer, step_token) if step_token else None

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the text that change scores or their meaning, for `Provenance.settings`."""
        plain = {"plain_turn_marks": list(self.plain_turn_marks), "forged_turns": self.forged_turns}
        return {"dropped_text": self.dropped_text, **(plain if self.plain_turn_marks else {})}

    def encode(
        self, conversations: Sequence[Conversation], tools: Sequence[Tools] | None = None
    ) -> list[Rendered | ConversationError]:
        """Render N conversations, with the tools of each. The result for an invalid one is a ConversationError."""
        results: dict[int, Rendered | ConversationError] = {}
        written: dict[int, tuple[Conversation, str, HiddenText | None]] = {}
        for row, conversation in enumerate(conversations):
            try:
                checked = self._check(conversation, () if tools is None else tools[row])
                if self.chat_template is None:
                    results[row] = self._fit(checked, self._pair(checked))
                else:
                    written[row] = checked, *self._write(checked)
            except ConversationError as error:
                results[row] = error
        plain = {row: text for row, (_, text, hidden) in written.items() if hidden is None}
        encoded = dict(zip(plain, self._tokenize_parts(list(plain.values())), strict=True))
        for row, (conversation, text, hidden) in written.items():
            try:
                ids = encoded[row] if hidden is None else self._special.add(self._ids(text, hidden))
                results[row] = self._fit(conversation, self._annotate(conversation, text, ids))
            except ConversationError as error:
                results[row] = error
        return [results[row] for row in range(len(conversations))]

    def encode_turns(
        self, conversations: Sequence[Conversation], tools: Sequence[Tools] | None = None, *, turns: Turns = "all"
    ) -> list[list[Rendered] | ConversationError]:
        """Render N conversations up to each of their assistant turns, if `turns` is `"all"`, and up to their ends."""
        rows = [_turns_of(each) if turns == "all" else [each] for each in conversations]
        of_rows = [()] * len(rows) if tools is None else tools
        repeated = [of_row for of_row, row in zip(of_rows, rows, strict=True) for _ in row]
        encoded = iter(self.encode([*itertools.chain.from_iterable(rows)], repeated))
        results = [[next(encoded) for _ in row] for row in rows]
        errors = (next((turn for turn in row if isinstance(turn, ConversationError)), None) for row in results)
        return [error or cast(list[Rendered], row) for row, error in zip(results, errors, strict=True)]

    def encode_text(self, text: RenderedText, add_special_tokens: bool) -> Rendered:
        """Return a text that the caller rendered, its token ids, or a pair, as a sequence to score, without a template.

        Raises:
            ConversationError: the text is empty, not text, or longer than `max_length`, or an id is negative.
        """
        segment = None
        if isinstance(text, str):
            check_text(text, "the text")
            self.refuse_long(text)
            ids = self.tokenize([text], add_special_tokens)[0]
        elif len(text) == 2 and isinstance(text[0], str):
            both = "".join(cast(tuple[str, str], text))
            if self.input_format.joins_pairs:
                return self.encode_text(both, True)
            check_text(both, "the pair")
            self.refuse_long(both)
            encoding = self.tokenizer(*text, verbose=False)
            types = encoding.get("token_type_ids", [])
            ids, segment = np.array(encoding["input_ids"], dtype=np.int32), types.index(1) if 1 in types else None
        else:
            ids = np.array(text, dtype=np.int32)
        if not len(ids):
            raise ConversationError("the text has no tokens.")
        if ids.min() < 0:
            raise ConversationError(f"token ids must not be negative; got {ids.min()}.")
        if self.max_length is not None and len(ids) > self.max_length:
            raise too_long(len(ids), self.max_length)
        return Rendered(ids, second_segment=segment)

    def message_ids(self, messages: Conversation, *, add_generation_prompt: bool) -> TokenIds:
        """Return the token ids of checked messages, of which the last one need not be a reply."""
        write = functools.partial(self._template.write, add_generation_prompt=add_generation_prompt)
        plain = self._write(messages)[1] is None
        ids = self._ids(write(messages)) if plain else self._ids("", self._control.hide(messages, write))
        return self._special.add(ids)

    def text(self, messages: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return what the template writes, for servers that read texts; control tokens in messages stay as they are."""
        return self._template.write(messages, add_generation_prompt=add_generation_prompt)

    def prompt_length(self, conversation: Conversation, rendered: Rendered) -> int:
        """Return the number of tokens of the prompt, which are the tokens before the last message."""
        return common_prefix(self.message_ids(conversation[:-1], add_generation_prompt=True), rendered.input_ids)

    def tokenize(self, texts: list[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """Return the token ids of rendered texts, with the special tokens of the tokenizer that they lack, or as is."""
        if not texts:
            return []
        bare: list[TokenIds] = []
        ends = itertools.accumulate(map(len, texts))
        for _, part in itertools.groupby(zip(ends, texts, strict=True), lambda each: each[0] // CHARACTERS_AT_ONCE):
            bare += [np.array(ids, dtype=np.int32) for ids in self._plain_ids([text for _, text in part])]
        return [self._special.add(ids) for ids in bare] if add_special_tokens else bare

    def _plain_ids(self, texts: list[str]) -> list[list[int]]:
        """Return what a call of the tokenizer returns, in half the time where it needs no offsets of characters."""
        if self._only_calls_backend:
            backend = self.tokenizer.backend_tokenizer
            state = backend.truncation, backend.padding, backend.encode_special_tokens
            if state == (None, None, self.tokenizer.split_special_tokens):  # a call sets them, and leaves them so
                return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
        options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return [*self.tokenizer(texts, add_special_tokens=False, **options)["input_ids"]]

    @functools.cached_property
    def _only_calls_backend(self) -> bool:
        """Whether a call of the tokenizer is the one of transformers, which adds nothing to the ids of the backend."""
        calls = (getattr(type(self.tokenizer), name, None) for name in ("__call__", "_encode_plus"))
        return all(getattr(call, "__module__", "").startswith("transformers.tokenization_utils") for call in calls)

    def _tokenize_parts(self, texts: list[str]) -> list[TokenIds]:
        """Return what `tokenize` returns; what several texts have between two control tokens is tokenised once."""
        parts = [self._control.split(text) for text in texts]
        different = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
        if 2 * sum(map(len, different)) > sum(map(len, texts)) or not self._joins_parts:
            return self.tokenize(texts)
        ids = dict(zip(different, self.tokenize(different, add_special_tokens=False), strict=True))
        return [self._special.add(np.concatenate([ids[part] for part in of_text])) for of_text in parts]

    @functools.cached_property
    def _joins_parts(self) -> bool:
        """Whether the ids of a text are those of its parts, as far as the examples show."""
        whole = self.tokenize(list(self._template.examples), add_special_tokens=False)
        parts = [self.tokenize(self._control.split(text), False) for text in self._template.examples]
        return all(np.array_equal(ids, np.concatenate(of_text)) for ids, of_text in zip(whole, parts, strict=True))

    def _ids(self, text: str, hidden: HiddenText | None = None) -> TokenIds:
        """Return the token ids of what `_write` returned, without more special tokens."""
        if hidden is None:
            return self.tokenize([text], add_special_tokens=False)[0]
        return np.array(self._control.encode(hidden).ids, dtype=np.int32)

    def _check(self, conversation: Conversation, tools: Tools = ()) -> Conversation:
        """Return the conversation after its tools, with text parts joined; raise ConversationError if it is invalid."""
        conversation = check_conversation(conversation)
        for index, message in enumerate(conversation):
            if self.chat_template is None and extra_fields(message):
                raise ConversationError(
                    f"message {index} has the field {extra_fields(message)[0]!r}, but the reward model has no chat "
                    "template that could write it; write it into the content or remove it."
                )
            for mark in self.plain_turn_marks if self.forged_turns == "error" else ():
                if any(mark in text for text in texts_of(message)):
                    raise ConversationError(
                        f"message {index} contains {mark!r}, a turn mark of the chat template, so it could forge a "
                        "turn; change the message, or pass forged_turns='allow' to score it."
                    )
        if not self.input_format.generation_prompt or self.input_format.question is not None:
            warn_without_reply(conversation[-1]["role"])
        if tools and not self.input_format.policy and not re.search(r"\btools\b", self._template.all_sources):
            warn_once(
                f"the chat template of {self.tokenizer.name_or_path!r} does not write tools, so the model reads "
                "conversations without the list of tools that the policy may call."
            )
            tools = ()
        return with_tools(conversation, tools)

    def _write(self, conversation: Conversation) -> tuple[str, HiddenText | None]:
        """Return the text that the template writes, and how to encode it if messages contain or form control tokens."""
        if not any(self._control.find(text) for message in conversation for text in texts_of(message)):
            text = self._template.write(conversation)
            self.refuse_long(text)
            if self._control.find(text) == self._dropped.frame(conversation).control_tokens:
                return text, None
            self._dropped.count(conversation, text)  # a message that is not written explains it better
        hidden = self._control.hide(conversation, self._template.write)
        self.refuse_long(hidden.original)
        return hidden.original, hidden

    def refuse_long(self, text: str) -> None:
        """Raise ConversationError for a long text that is far above `max_length`, before it is tokenised as a whole.

        Its parts are tokenised until there are enough. A cut can only make tokens where it is, so the whole text has
        far more than half of them.
        """
        if self.max_length is None or len(text) <= CHARACTERS_AT_ONCE:
            return
        most, found = self.max_length * (2 if self.overlong == "error" else 16), 0
        for start in range(0, len(text), CHARACTERS_AT_ONCE):
            found += len(self._ids(text[start : start + CHARACTERS_AT_ONCE]))
            if found > most:
                raise too_long(f"more than {most // 2}", self.max_length)

    def _pair(self, conversation: Conversation) -> Rendered:
        """Render a conversation for an encoder without a chat template: the prompt and the reply as a text pair."""
        first, second = joined(conversation[:-1]), conversation[-1]["content"]
        self.refuse_long(f"{first}\n{second}")
        encoding = self._control.encode_pair(first, second)
        types = encoding.sequence_ids
        segment = types.index(1) if 1 in types and "token_type_ids" in self.tokenizer.model_input_names else None
        return Rendered(np.array(encoding.ids, dtype=np.int32), second_segment=segment)

    def _render(self, conversation: Conversation) -> Rendered:
        """Render one checked conversation, whatever its length."""
        if self.chat_template is None:
            return self._pair(conversation)
        text, hidden = self._write(conversation)
        return self._annotate(conversation, text, self._special.add(self._ids(text, hidden)))

    def _annotate(self, conversation: Conversation, text: str, ids: TokenIds) -> Rendered:
        """Check what the text has of the conversation, and set `reply_start` if the kind needs it."""
        rendered = Rendered(ids, dropped_characters=self._dropped.count(conversation, text))
        if self._step_id is not None:
            rendered = replace(rendered, step_ends=tuple(end for _, end in self.input_format.step_spans(conversation)))
            found, expected = int((ids == self._step_id).sum()), len(rendered.step_ends)
            if found != expected:
                raise ConversationError(
                    f"expected the step token {self.input_format.step_token!r} {expected} times, once per step, but "
                    f"the text contains it {found} times; neither a message nor the template may contain it."
                )
        if not self.input_format.mark_reply:
            return rendered
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise ConversationError("the conversation must end with a reply of the assistant to a prompt.")
        return replace(rendered, reply_start=self.prompt_length(conversation, rendered))

    def _fit(self, conversation: Conversation, rendered: Rendered) -> Rendered:
        """Apply the options `max_length` and `overlong`."""
        if not len(rendered.input_ids):
            raise ConversationError("the conversation has no tokens, because the chat template wrote nothing.")
        if self.max_length is None or len(rendered.input_ids) <= self.max_length:
            return rendered
        if self.overlong == "error":
            raise too_long(len(rendered.input_ids), self.max_length)
        return drop_turns(conversation, rendered, self.max_length, self._render)


def _turns_of(conversation: Any) -> list[Conversation]:
    """Return a conversation up to each of its assistant turns, and up to its end, which may be malformed."""
    before = enumerate(conversation[:-1] if isinstance(conversation, Sequence) else ())
    stops = [k + 1 for k, each in before if isinstance(each, Mapping) and each.get("role") == "assistant"]
    return [*(conversation[:stop] for stop in stops), conversation]
