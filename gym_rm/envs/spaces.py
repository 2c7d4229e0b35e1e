"""Gymnasium spaces for text and conversations.

Gymnasium's `Text` stores a list of its characters, and all of Unicode is too large for that. Its `Sequence` does not
accept lists, which every chat library uses for messages. The functions that Gymnasium dispatches by the type of a
space (batching, shared memory) are registered at the end of the file.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, create_empty_array
from gymnasium.vector.utils.shared_memory import create_shared_memory
from gymnasium.wrappers.utils import create_zero_array
from numpy.typing import NDArray

from gym_rm.data.tools import LONGEST_NAME, is_encodable, json_fault
from gym_rm.types import Conversation, Message, copy_conversation

MAX_LENGTH = 2**20
"""Default maximum characters of a text: about 250,000 tokens."""

MAX_ROLE_LENGTH = 64
LONGEST_SAMPLE = 32

SAMPLED_ROLES = ("system", "user", "assistant", "tool")
# ASCII, accented Latin, Greek, Cyrillic, Chinese and emoji: one to four bytes per character in UTF-8.
_SAMPLED_RANGES = ((0x20, 0x7F), (0xA1, 0x180), (0x3B1, 0x3CA), (0x410, 0x450), (0x4E00, 0x4F00), (0x1F600, 0x1F640))
_SAMPLED_CHARACTERS = np.array([chr(point) for first, end in _SAMPLED_RANGES for point in range(first, end)])

Seed: TypeAlias = "int | np.random.Generator | None"


def plain_text(value: Any) -> Any:
    """Return the characters of a text as an exact `str`, and any other value unchanged.

    Subclasses of str can have methods of their own: `str(value)` of an enum, for example, is not its text.
    """
    return str.__str__(value) if isinstance(value, str) else value


def _sample_text(generator: np.random.Generator, max_length: int) -> str:
    length = generator.integers(min(max_length, LONGEST_SAMPLE) + 1)
    return "".join(generator.choice(_SAMPLED_CHARACTERS, size=length).tolist())


def _refuse_masks(space: spaces.Space[Any], mask: object, probability: object) -> None:
    if mask is not None or probability is not None:
        raise ValueError(
            f"mask and probability must be None for {space}, got mask={mask!r} and probability={probability!r}; "
            "sample without them, or use a Discrete space to choose among given texts."
        )


class UnicodeText(spaces.Space[str]):
    """Strings of Unicode text, at most `max_length` characters long.

    All characters are valid, including NUL and control characters. A lone surrogate is invalid, because UTF-8 cannot
    encode it. Texts cannot be flattened: use the numeric views (`RewardModelTokens-v0`) where numbers are needed.

    Args:
        max_length: maximum number of characters (code points).
        seed: seed or generator of `sample`, which draws at most 32 characters from several alphabets.

    Example:
        >>> space = UnicodeText(max_length=8)
        >>> "héllo" in space, "" in space, "nine chars" in space, chr(0xD800) in space
        (True, True, False, False)
    """

    def __init__(self, max_length: int = MAX_LENGTH, *, seed: Seed = None) -> None:
        self.max_length = int(max_length)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: a text of any length is no array."""
        return False

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Return a random text of up to 32 characters."""
        _refuse_masks(self, mask, probability)
        return _sample_text(self.np_random, self.max_length)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a string of a valid length without lone surrogates."""
        return isinstance(x, str) and len(x) <= self.max_length and is_encodable(x)

    def fault(self, x: object) -> str:
        """Return why `x` is not a member of the space, and how to fix it."""
        if not isinstance(x, str):
            return f"expected a text (str), got {type(x).__name__} {x!r:.100}"
        if len(x) > self.max_length:
            return f"expected a text of at most {self.max_length} characters, got {len(x)}"
        position = next(index for index, character in enumerate(x) if "\ud800" <= character <= "\udfff")
        return (
            f"expected a text without lone surrogates, got {x[position]!r} at character {position}, which UTF-8 cannot "
            "encode; decode the original bytes with errors='replace'"
        )

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length


class ReplySpace(UnicodeText):
    """Replies of a policy: a text, or an assistant message with `content`, `tool_calls` and `reasoning_content`.

    Arguments of calls are mappings, or texts. Ids may be left out.

    Args:
        max_length: maximum characters of the text, and of the JSON of the other fields.
        tools: names of the tools that samples call. Without any, samples are texts.
        seed: seed or generator of `sample`.

    Example:
        >>> call = {"function": {"name": "now", "arguments": {}}}
        >>> "noon" in ReplySpace(), {"role": "assistant", "content": "", "tool_calls": [call]} in ReplySpace()
        (True, True)
    """

    def __init__(self, max_length: int = MAX_LENGTH, *, tools: Sequence[str] = (), seed: Seed = None) -> None:
        self.tools = tuple(tools)
        super().__init__(max_length, seed=seed)

    def sample(self, mask: object = None, probability: object = None) -> Any:
        """Return a random text; with tools, every other sample is a message, with up to two calls."""
        text = super().sample(mask, probability)
        generator = self.np_random
        if not self.tools or generator.random() < 0.5:
            return text
        names = generator.choice(self.tools, size=generator.integers(3)).tolist()
        calls = [{"type": "function", "function": {"name": name, "arguments": {"a": text[:8]}}} for name in names]
        message = Message(role="assistant", content=text, tool_calls=calls)
        return message if message in self else text  # a small space has no room for calls

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a valid text or message."""
        return not self.fault(x)

    def fault(self, x: object) -> str:
        """Return why `x` is not a member of the space, and how to fix it; `""` if it is one."""
        if not isinstance(x, dict):
            wanted = "" if isinstance(x, str) else "; an assistant message is a reply too"
            return "" if super().contains(x) else super().fault(x) + wanted
        if x.get("role") != "assistant":
            return f"expected a message with the role 'assistant', got the role {x.get('role')!r:.100}"
        return message_fault(x, self.max_length)

    def __repr__(self) -> str:
        return f"ReplySpace({self.max_length}, tools={list(self.tools)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplySpace) and (self.max_length, self.tools) == (other.max_length, other.tools)


def message_fault(message: Any, max_length: int) -> str:
    """Return why a value is no message of these lengths with the fields of `gym_rm.types.Message`; `""` if it is."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        return f"expected a message {{'role': ..., 'content': ...}}, got {message!r:.100}"
    for name, most in (("role", MAX_ROLE_LENGTH), ("content", max_length)):
        text = message[name]
        if not isinstance(text, str) or len(text) > most or not is_encodable(text):
            return f"{name!r} of a message: {UnicodeText(most).fault(text)}"
    if not message["role"]:
        return "'role' of a message: expected a word such as 'user', got an empty text"
    if len(message) == 2:
        return ""
    if unknown := message.keys() - Message.__annotations__.keys():
        known = list(Message.__annotations__)
        return f"expected no other fields of a message than {known}, got {sorted(map(str, unknown))!r:.100}"
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    if fault := json_fault(others):
        return f"a message with the fields {sorted(others)} {fault}"
    for name, value in others.items():
        if name != "tool_calls" and not isinstance(value, str):
            return f"{name!r} of a message: expected a text, got {value!r:.100}"
    calls = others.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return (
            "'tool_calls' of a message: expected a list of {'type': 'function', 'id': ..., 'function': {'name': ..., "
            f"'arguments': {{...}}}}}}, got {calls!r:.200}"
        )
    length = len(json.dumps(others, ensure_ascii=False))
    return "" if length <= max_length else f"expected at most {max_length} characters of tool calls, got {length}"


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str(name), "arguments": dict() | str(), **other}, **rest}:
            known = rest.keys() <= {"type", "id"} and rest.get("type", "function") == "function"
            return known and isinstance(rest.get("id", ""), str) and not other and 0 < len(name) <= LONGEST_NAME
    return False


class ConversationSpace(spaces.Sequence):
    """Conversations: lists of `{"role": ..., "content": ...}` messages, which may have the other fields of `Message`.

    A tuple of messages is also a member. Samples are lists.

    Args:
        max_length: maximum characters of the content of a message, and of the JSON of its other fields.
        seed: seed or generator of `sample`.

    Example:
        >>> space = ConversationSpace()
        >>> [{"role": "user", "content": "2+2?"}] in space, [{"role": "user"}] in space, "2+2?" in space
        (True, False, False)
    """

    def __init__(self, max_length: int = MAX_LENGTH, *, seed: Seed = None) -> None:
        self.content_space = UnicodeText(max_length)
        super().__init__(spaces.Dict(role=UnicodeText(MAX_ROLE_LENGTH), content=self.content_space), seed=seed)

    def sample(self, mask: object = None, probability: object = None) -> list[Message]:
        """Return a random conversation of at least one message, four on average."""
        _refuse_masks(self, mask, probability)
        # Use only this space's own generator, because the copies in a batched space share their inner spaces.
        generator = self.np_random
        messages: list[Message] = []
        for _ in range(generator.geometric(0.25)):
            role = SAMPLED_ROLES[generator.integers(len(SAMPLED_ROLES))]
            messages.append(Message(role=role, content=_sample_text(generator, self.content_space.max_length)))
        return messages

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a list or tuple of messages with valid texts and no other fields than `Message`."""
        return isinstance(x, list | tuple) and not any(self.fault(message) for message in x)

    def fault(self, message: Any) -> str:
        """Return why a value cannot be a message in a conversation of the space; `""` if it can."""
        return message_fault(message, self.content_space.max_length)

    def to_jsonable(self, sample_n: Iterable[Conversation]) -> list[list[Any]]:
        """Return copies of the conversations, which are already valid JSON."""
        return [copy_conversation(conversation) for conversation in sample_n]

    def from_jsonable(self, sample_n: list[list[Any]]) -> list[Any]:
        """Return the conversations from the output of `to_jsonable`."""
        return [copy_conversation(conversation) for conversation in sample_n]

    def __repr__(self) -> str:
        return f"ConversationSpace({self.content_space.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConversationSpace) and self.content_space == other.content_space


def _batch(space: UnicodeText | ConversationSpace, n: int = 1) -> spaces.Tuple[Any]:
    """Batch a space with shallow copies; Gymnasium's deep copies are six times slower for 1,024 environments."""
    seeds = copy.deepcopy(space.np_random).integers(0, int(1e8), n).tolist()
    copies = [copy.copy(space) for _ in range(n)]
    for each, seed in zip(copies, seeds, strict=True):
        each._np_random = np.random.Generator(np.random.PCG64(seed))
    return spaces.Tuple(copies, seed=copy.deepcopy(space.np_random))


for _space in (UnicodeText, ReplySpace, ConversationSpace):
    batch_space.register(_space, _batch)

create_empty_array.register(UnicodeText, lambda space, n=1, fn=np.zeros: ("",) * n)
create_empty_array.register(ConversationSpace, lambda space, n=1, fn=np.zeros: tuple([] for _ in range(n)))
create_zero_array.register(UnicodeText, lambda space: "")
create_zero_array.register(ConversationSpace, lambda space: [])
create_shared_memory.register(UnicodeText, create_shared_memory.dispatch(spaces.Sequence))  # which refuses
# `iterate` is not registered: for a Tuple of other spaces it yields one item after another, which is correct here.

if importlib.util.find_spec("array_api_compat") is not None:  # without it, wrappers such as `NumpyToTorch` do not exist
    from gymnasium.wrappers.array_conversion import array_conversion

    _convert_numbers = array_conversion.dispatch(np.ndarray)

    @array_conversion.register(str)
    def _keep_text(value: str, xp: Any, device: Any = None) -> str:
        """Return text as it is; Gymnasium would return the text of a generator object."""
        return value

    @array_conversion.register(np.ndarray)
    def _convert_array(value: NDArray[Any], xp: Any, device: Any = None) -> Any:
        return value if value.dtype.kind in "OUS" else _convert_numbers(value, xp, device)
