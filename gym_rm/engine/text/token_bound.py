"""Lower bound on the number of tokens of a text, to refuse a very long text before it is tokenised.

A token with L characters has at most L characters of the text, so a character that occurs only in tokens of at most L
characters adds at least 1 / L tokens. The bound is 0 for tokenizers that can remove text or encode a whole word as one
unknown token.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

CHUNK = 1 << 20
SPACES = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
Step = dict[str, Any]


class TokenBound:
    """Lower bound on the number of tokens that a tokenizer gives a text.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._composes = False
        self._bytes = False
        self._weights: np.ndarray[Any, np.dtype[np.float64]] | None = None
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return
        normalizers, splitters = list(_steps(backend.normalizer)), list(_steps(backend.pre_tokenizer))
        self._composes = any(step["type"] == "NFC" for step in normalizers)
        self._bytes = any(step["type"] == "ByteLevel" for step in splitters)
        replaced = _replaced_characters(normalizers, splitters)
        if (
            replaced is None
            or (self._bytes and replaced)
            or any(step.get("behavior") == "Removed" for step in splitters)
        ):
            return
        pieces = backend.get_vocab(with_added_tokens=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet() if self._bytes else [f"<0x{byte:02X}>" for byte in range(256)]
        complete = self._bytes or getattr(backend.model, "byte_fallback", False)
        if type(backend.model).__name__ != "BPE" or not complete or not pieces.keys() >= set(alphabet):
            return
        added = list(tokenizer.added_tokens_decoder.values())
        if self._bytes:
            byte_of = {char: byte for byte, char in _byte_characters().items()}
            tokens: Iterable[Iterable[int]] = (
                [byte_of[char] for char in piece] for piece in pieces if byte_of.keys() >= set(piece)
            )
            tokens = itertools.chain(tokens, (str(token).encode() for token in added))
        else:
            tokens = (list(map(ord, text)) for text in (*pieces, *map(str, added)))
        longest = np.ones(256 if self._bytes else 0x110000)
        for codes in map(list, tokens):
            for code in set(codes):
                longest[code] = max(longest[code], len(codes))
        self._weights = 1 / longest
        for character, replacement in replaced.items():
            self._weights[ord(character)] = min(self._weights[ord(each)] for each in replacement)
        if any(token.lstrip or token.rstrip for token in added):  # these remove white space beside them
            self._weights[list(SPACES)] = 0
            self._weights[128:] = 0

    def __call__(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        if self._weights is None:
            return 0
        total = 0.0
        for start in range(0, len(text), CHUNK):
            chunk = text[start : start + CHUNK]
            if self._composes:
                chunk = unicodedata.normalize("NFC", chunk)
                total -= 1  # the first character could be composed with the last one of the chunk before
            encoded = chunk.encode("utf-8" if self._bytes else "utf-32-le")
            counts = np.bincount(np.frombuffer(encoded, np.uint8 if self._bytes else np.dtype("<u4")))
            total += float(counts @ self._weights[: len(counts)])
        return int(max(0.0, total * (1 - 1e-9)))


def _steps(component: Any) -> Iterator[Step]:
    """Yield the settings of a normaliser or pre-tokeniser, and those of the parts of a sequence."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        parts = step.get("normalizers", step.get("pretokenizers"))
        if parts is None:
            yield step
        else:
            waiting = [*parts, *waiting]


def _replaced_characters(normalizers: list[Step], splitters: list[Step]) -> dict[str, str] | None:
    """Return single characters that are replaced, and by what; None if the tokenizer can remove text."""
    replaced = {}
    for step in normalizers:
        if step["type"] == "Replace":
            old, new = step["pattern"].get("String", ""), step["content"]
            if len(old) != 1 or not new:
                return None
            replaced[old] = new
        elif step["type"] not in ("NFC", "Prepend"):
            return None
    for step in splitters:
        if step["type"] == "Metaspace":
            replaced[" "] = step["replacement"]
        elif step["type"] not in ("ByteLevel", "Digits", "Split", "Punctuation"):
            return None
    return replaced


def _byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + k) for k, byte in enumerate(others)}
