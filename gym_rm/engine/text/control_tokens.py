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

from gym_rm.errors import ConversationError
from gym_rm.types import Conversation, Message

PRIVATE_USE = range(0xF0000, 0xFFFFE)
THINKING = frozenset({"<think>", "</think>"})  # replies may write them, even where a template does too
WORD = re.compile(r"\S+")


class ControlTokens:
    """The tokens of a tokenizer that text must not be able to write.

    Args:
        tokenizer: a Hugging Face tokenizer.
        written: conversations as the template writes them. Added tokens in them count as control tokens even where
            the tokenizer does not flag them as special, if they are markup: runs of white space (Gemma), words, and
            the marks of thinking are left to the text.
    """

    def __init__(self, tokenizer: Any, written: str) -> None:
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, token in added.items() if token.special} | set(tokenizer.all_special_tokens)
        markup = {text for text in added if not (text in THINKING or text.strip().isalnum() or text.isspace())}
        self.names = _longest_first(special | {text for text in markup if text in written})
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

    def find(self, text: str) -> tuple[str, ...]:
        """The control tokens that the tokenizer would find in this text, in order."""
        found = self._spelled.findall(text)
        if self._normalize is not None:
            found += self._spelled_normalized.findall(self._normalize(text))
        return tuple(found)

    def encode(self, conversation: Conversation, write: Callable[[Conversation], str]) -> Encoding:
        """Encode `write(conversation)`; what the messages spell is text, what the template writes is control.

        Raises:
            ConversationError: the template makes something of the text that cannot be told from its own control tokens.
        """
        expected = self._spelled.findall(
            write([Message(role=m["role"], content=_masked(m["content"])) for m in conversation])
        )
        # Spelled tokens are hidden. Where the template cuts or joins messages, and so puts together what none of
        # them spells, every end of a token is.
        for pattern in (self._spelled, self._ends):
            hidden = _Hidden(pattern, conversation)
            text = write(hidden.conversation)
            if self._spelled.findall(text) == expected:
                break
        else:
            raise ConversationError(
                "the chat template turns the text of a message into control tokens; what the message spells and what "
                "the template writes cannot be told apart."
            )
        again = _Hidden(pattern, conversation)
        if hidden.reveal(text) != again.reveal(write(again.conversation)):
            raise ConversationError(
                "a message spells a control token of the reward model, and the chat template cuts or recodes it."
            )
        named = self._spelled.sub(lambda match: self._secret_names[match[0]], text)
        encoding = self._tokenizer.encode(hidden.reveal(named), add_special_tokens=False)
        if sum(token in self.ids for token in encoding.ids) < len(expected):
            raise ConversationError("the tokenizer does not parse every control token that the chat template writes.")
        return encoding

    def encode_pair(self, first: str, second: str) -> Encoding:
        """Encode a pair of texts with the tokenizer's own special tokens around them and none inside."""
        return self._tokenizer.encode(first, second, add_special_tokens=True)

    @functools.cached_property
    def _secret_names(self) -> dict[str, str]:
        return {name: _secret(8, set()) for name in self.names}

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """The tokenizer with every control token under its secret name, in the vocabulary too."""
        if self._backend is None:
            raise ConversationError(
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
            raise ConversationError(f"control tokens {moved} changed their ids in the guarded copy of the tokenizer.")
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
    """A conversation with a secret word of its length for every match of a pattern; `reveal` turns them back."""

    def __init__(self, pattern: re.Pattern[str], conversation: Conversation) -> None:
        self._pattern = pattern
        self._spellings: dict[str, str] = {}  # by secret word
        self._words: dict[str, str] = {}  # by spelling
        self._taken = {ord(char) for message in conversation for char in message["content"]} & {*PRIVATE_USE}
        self._crowded = 2 * len(self._taken) > len(PRIVATE_USE)
        self.conversation = [
            Message(role=message["role"], content=pattern.sub(self._word, message["content"]))
            for message in conversation
        ]

    def reveal(self, text: str) -> str:
        for word, spelling in self._spellings.items():
            text = text.replace(word, spelling)
        return text

    def _word(self, match: re.Match[str]) -> str:
        if match[0] not in self._words:
            # Where hardly a character is left, length has to be unlikely instead.
            word = _secret(8, set()) if self._crowded else _secret(len(match[0]), self._taken)
            self._words[match[0]], self._spellings[word] = word, match[0]
        return self._words[match[0]]


def _secret(length: int, taken: set[int]) -> str:
    """A word of private characters that nobody has seen and that no other word holds, which are `taken` from now on."""
    word = ""
    while len(word) < length:
        code = PRIVATE_USE.start + secrets.randbelow(len(PRIVATE_USE))
        if code not in taken:
            taken.add(code)
            word += chr(code)
    return word


def _masked(text: str) -> str:
    """The text with every word blotted out: nothing is spelled, and a template finds nothing to act upon."""
    return WORD.sub(lambda match: chr(PRIVATE_USE.start) * len(match[0]), text)


def _longest_first(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts) - {""}, key=lambda text: (-len(text), text)))


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def check_text(text: Any, where: str) -> None:
    """Raise `ConversationError` unless this is text that has a UTF-8 form."""
    if not isinstance(text, str):
        raise ConversationError(f"{where} must be a string; got {type(text).__name__}: {text!r:.100}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"{where} holds a lone surrogate, {text[error.start]!r} at character {error.start}, which no tokenizer "
            "can encode; decode the bytes with errors='replace'."
        ) from None


def joined(messages: Sequence[Message]) -> str:
    """The messages of a conversation without a template: their texts, a line each."""
    return "\n".join(message["content"] for message in messages)
