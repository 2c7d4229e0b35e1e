"""Control tokens spelled in the text of a message: found, and encoded as the plain text they are.

A tokenizer parses `<|im_end|>` anywhere in a string, also inside a reply, where it would end the turn. Here the
template writes its own control tokens under secret names, made anew in every process, which a copy of the tokenizer
knows; what a message spells stays ordinary characters, encoded together with the text around it.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from gym_rm.errors import RenderError
from gym_rm.types import Conversation, Message

PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ControlTokens:
    """The tokens of a tokenizer that text must not be able to write.

    Args:
        tokenizer: a Hugging Face tokenizer.
        written: conversations as the template writes them. Added tokens in them count as control tokens even where
            the tokenizer does not flag them as special; others, such as `<think>`, are left to the text.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special} | set(tokenizer.all_special_tokens)
        self.names = _longest_first(special | {text for text in added if text in written})
        # Unknown text gets the unknown token's id too, so that id says nothing about control.
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(list(self.names))) - {tokenizer.unk_token_id}
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._spelled = _any_of(self.names)
        # Text that a template moves or cuts can only become a control token with one of these in it.
        self._ends = _any_of(_longest_first({end for name in self.names for end in (name[0], name[-1])}))
        # A normaliser makes more spellings: `<|IM_END|>` where it lower-cases, wide letters where it makes them plain.
        # They count for tokens that are looked for after it, and for those that the model has among its pieces.
        self._normalize: Callable[[str], str] | None = None
        if self._backend is not None and self._backend.normalizer is not None:
            normalize = self._backend.normalizer.normalize_str
            pieces = self._backend.get_vocab(with_added_tokens=False)
            spelled = {name for name in self.names if name in pieces}
            spelled |= {normalize(name) for name in self.names if name in added and added[name].normalized}
            if spelled - {""}:
                self._normalize, self._spelled_normalized = normalize, _any_of(_longest_first(spelled))

    def count(self, text: str) -> int:
        """How many control tokens the tokenizer would find in this text."""
        found = len(self._spelled.findall(text))
        if self._normalize is not None:
            found += len(self._spelled_normalized.findall(self._normalize(text)))
        return found

    def encode(self, conversation: Conversation, write: Callable[[Conversation], str]) -> Encoding:
        """Encode `write(conversation)`; what the messages spell is text, what the template writes is control."""
        hidden = _Hidden(self._spelled)
        text = write(hidden.conversation(conversation))
        # A template that cuts or joins messages can put together what none of them spells.
        tight = _Hidden(self._ends)
        text_of_template = write(tight.conversation(conversation))
        if self.count(text) != self.count(text_of_template):
            hidden, text = tight, text_of_template
        text = self._spelled.sub(lambda match: self._secret_names[match[0]], text)
        return self._tokenizer.encode(hidden.reveal(text), add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Encode a pair of texts with the tokenizer's own special tokens around them and none inside."""
        return self._tokenizer.encode(first, second, add_special_tokens=True)

    @functools.cached_property
    def _secret_names(self) -> dict[str, str]:
        return {name: _secret() for name in self.names}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer with every control token under its secret name, in the vocabulary too."""
        if self._backend is None:
            raise RenderError(
                "a message spells a control token of the reward model, and this tokenizer (not a fast one) cannot "
                "encode it as plain text; remove the token from the message or convert the tokenizer to a fast one."
            )
        state = json.loads(self._backend.to_str())
        state["truncation"] = state["padding"] = None
        for token in state["added_tokens"]:
            if token["content"] in self._secret_names:
                token["content"] = self._secret_names[token["content"]]
                token["normalized"] = False
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._secret_names.get(piece, piece): index for piece, index in model["vocab"].items()}
        else:
            model["vocab"] = [[self._secret_names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if self._keeps(pair, model)]
        if model.get("unk_token") in self._secret_names:
            model["unk_token"] = self._secret_names[model["unk_token"]]
        copy = Tokenizer.from_str(json.dumps(state))
        moved = [name for name, hidden in self._secret_names.items() if copy.token_to_id(hidden) != self._id(name)]
        if moved:
            raise RenderError(f"control tokens {moved} changed their ids in the guarded copy of the tokenizer.")
        return copy

    def _keeps(self, pair: Sequence[str] | str, model: dict[str, Any]) -> bool:
        """Whether a merge of BPE still has its pieces: text must not be merged into a control token either."""
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        merged = left + right.removeprefix(model.get("continuing_subword_prefix") or "")
        return not {left, right, merged} & self._secret_names.keys()

    def _id(self, name: str) -> int | None:
        assert self._backend is not None
        index: int | None = self._backend.token_to_id(name)
        return index


class _Hidden:
    """Messages in which every match of a pattern stands as a secret word, which `reveal` turns back."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._words: dict[str, str] = {}

    def conversation(self, conversation: Conversation) -> list[Message]:
        return [
            Message(role=message["role"], content=self._pattern.sub(self._word, message["content"]))
            for message in conversation
        ]

    def reveal(self, text: str) -> str:
        for spelling, word in self._words.items():
            text = text.replace(word, spelling)
        return text

    def _word(self, match: re.Match[str]) -> str:
        if match[0] not in self._words:
            self._words[match[0]] = _secret()
        return self._words[match[0]]


def _secret() -> str:
    """A word of private characters that nobody has seen."""
    return "".join(chr(PRIVATE_USE.start + secrets.randbelow(len(PRIVATE_USE))) for _ in range(8))


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts) - {""}, key=lambda text: (-len(text), text)))


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def check_text(text: Any, where: str) -> None:
    """Raise `RenderError` unless this is text that has a UTF-8 form."""
    if not isinstance(text, str):
        raise RenderError(f"{where} must be a string; got {type(text).__name__}: {text!r:.100}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(
            f"{where} holds a lone surrogate, {text[error.start]!r} at character {error.start}, which no tokenizer "
            "can encode; decode the bytes with errors='replace'."
        ) from None


def joined(messages: Sequence[Message]) -> str:
    """The messages of a conversation without a template: their texts, a line each."""
    return "\n".join(message["content"] for message in messages)
