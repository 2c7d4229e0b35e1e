"""What may cross the pipe?

This file runs on both sides: it is also loaded by the sandboxed interpreter, so it imports little.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_DEPTH = 100
MAX_ITEMS = 250_000
MAX_EQUAL_HASHES = 64  # keys of one hash make a table quadratic: multiples of 2**61 - 1 all have hash 0

_COUNT = struct.Struct(">I")
_FLOAT = struct.Struct(">d")
_COMPLEX = struct.Struct(">dd")
_CONTAINERS: dict[type, bytes] = {list: b"l", tuple: b"t", dict: b"d", set: b"S", frozenset: b"Z"}


class CrossingError(ValueError):
    """Value that cannot cross the pipe, or bytes that are no value."""


def encode(value: object, *, limit: int) -> bytes:
    """Return the bytes of None, bool, int, float, complex, str, bytes, list, tuple, dict, set or frozenset.

    A value of a subclass is written as its base. CrossingError is raised for anything else, for more than `limit` bytes
    and for more than 100 levels.
    """
    out = bytearray()
    _encode(value, out, 0, limit)
    return bytes(out)


def _encode(value: Any, out: bytearray, depth: int, limit: int) -> None:
    kind = type(value)
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif issubclass(kind, int):
        number = int.__pos__(value)
        size = number.bit_length() // 8 + 1
        if size > limit:
            raise CrossingError(f"the value is longer than {limit} bytes")
        out += b"i" + _COUNT.pack(size) + number.to_bytes(size, "big", signed=True)
    elif issubclass(kind, float):
        out += b"f" + _FLOAT.pack(float.__pos__(value))
    elif issubclass(kind, str):
        _append(out, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif issubclass(kind, bytes):
        _append(out, b"b", value)
    elif issubclass(kind, complex):
        out += b"c" + _COMPLEX.pack(complex.__pos__(value).real, complex.__pos__(value).imag)
    elif issubclass(kind, tuple(_CONTAINERS)):
        if depth >= MAX_DEPTH:
            raise CrossingError(f"the value is nested deeper than {MAX_DEPTH} levels")
        base: Any = next(each for each in _CONTAINERS if issubclass(kind, each))
        out += _CONTAINERS[base] + _COUNT.pack(base.__len__(value))
        if base is dict:
            for key, item in dict.items(value):
                _encode(key, out, depth + 1, limit)
                _encode(item, out, depth + 1, limit)
        else:
            for item in base.__iter__(value):
                _encode(item, out, depth + 1, limit)
    else:
        raise CrossingError(f"an object of type {kind.__name__} cannot cross")
    if len(out) > limit:
        raise CrossingError(f"the value is longer than {limit} bytes")


def _append(out: bytearray, tag: bytes, data: bytes) -> None:
    out += tag + _COUNT.pack(len(data))
    out += data


def decode(data: bytes, *, most_items: int = MAX_ITEMS) -> Any:
    """Return the value of these bytes, in linear time.

    Raises CrossingError, and nothing else, for bytes that `encode` does not make: unknown tags, missing or left bytes,
    more than 100 levels or `most_items`, equal keys, keys that cannot be hashed, many keys of one hash.
    """
    try:
        reader = _Reader(data, most_items)
        value = reader.value(0)
    except CrossingError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError, MemoryError, struct.error) as error:
        raise CrossingError(f"bytes that are no value ({type(error).__name__})") from None
    if reader.at != len(data):
        raise CrossingError(f"{len(data) - reader.at} bytes are left after the value")
    return value


class _Reader:
    def __init__(self, data: bytes, most_items: int) -> None:
        self.data = data
        self.at = 0
        self.left = most_items

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise CrossingError("the value is cut short")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def count(self) -> int:
        number: int = _COUNT.unpack_from(self.data, self.at)[0]
        self.at += 4
        if number > len(self.data) - self.at:  # an item has at least one byte
            raise CrossingError("the value is cut short")
        return number

    def value(self, depth: int) -> Any:
        tag = self.data[self.at]
        self.at += 1
        if tag == 105:  # i
            return int.from_bytes(self.take(self.count()), "big", signed=True)
        if tag == 115:  # s
            return self.take(self.count()).decode("utf-8", "surrogatepass")
        if tag == 102:  # f
            return _FLOAT.unpack(self.take(8))[0]
        if tag == 78:  # N
            return None
        if tag in b"TF":
            return tag == 84
        if tag == 98:  # b
            return self.take(self.count())
        if tag == 99:  # c
            return complex(*_COMPLEX.unpack(self.take(16)))
        return self.container(tag, depth)

    def container(self, tag: int, depth: int) -> Any:
        if tag not in b"ltSZd":
            raise CrossingError(f"unknown tag {tag}")
        if depth >= MAX_DEPTH:
            raise CrossingError(f"the value is nested deeper than {MAX_DEPTH} levels")
        count = self.count()
        length = 2 * count if tag == 100 else count
        self.left -= length
        if self.left < 0:
            raise CrossingError("the value has too many items")
        value, below = self.value, depth + 1
        items = [value(below) for _ in range(length)]
        if tag == 108:  # l
            return items
        if tag == 116:  # t
            return tuple(items)
        keys = items[::2] if tag == 100 else items
        _check_hashes(keys)
        made: Any = dict(zip(keys, items[1::2])) if tag == 100 else set(keys) if tag == 83 else frozenset(keys)  # noqa: B905
        if len(made) != count:
            raise CrossingError("equal keys")
        return made


def _check_hashes(keys: list[Any]) -> None:
    if len(keys) <= MAX_EQUAL_HASHES:
        return
    seen: dict[int, int] = {}
    for key in keys:
        number = hash(key)
        seen[number] = seen.get(number, 0) + 1
    if max(seen.values()) > MAX_EQUAL_HASHES:
        raise CrossingError(f"more than {MAX_EQUAL_HASHES} keys of one hash")
