"""What serves the tests beside the model's code: calls, attributes and operators. Runs in the sandbox.

The model's code shares this process and may change everything here, so that an answer is a claim of that code.
"""

from __future__ import annotations

import builtins
import operator

from gym_rm.sandbox.values import decode, encode
from gym_rm.scorers.code.guest_values import ATOMS, GROUPS, Codec, path_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SolutionServer(Codec):
    """Answers requests for the names of a namespace, and for the objects that it has given out.

    An answer has at most `limit` bytes.
    """

    def __init__(self, names: dict[str, Any], limit: int) -> None:
        super().__init__()
        self.names = names
        self.limit = limit
        self.objects: list[Any] = []

    def write_object(self, value: Any) -> list[Any]:
        """Return the handle of an object."""
        number = next((k for k, known in enumerate(self.objects) if known is value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return ["r", number, [path_of(kind) for kind in type(value).__mro__]]

    def read_object(self, data: list[Any]) -> Any:
        """Return the object of a handle."""
        value = self.find(data[1]) if data[0] == "c" else self.objects[data[1]]
        for name in data[2:]:
            value = getattr(value, name)
        return value

    def serve(self, request: bytes) -> bytes:
        """Answer a request. Raises CrossingError if the answer is too large."""
        return encode(self.result(*decode(request, most_items=len(request))), limit=self.limit)

    def result(self, action: str, name: str, args: list[Any], kwargs: list[Any]) -> list[Any]:
        """Return `[True, value]`, with the changed arguments of a call without a result, or `[False, error]`."""
        try:
            given = list(self.read(args))
            value = self.answer(action, name, list(given), self.read(kwargs))
            if value is None and action in ("call", "method", "class call"):
                after = [item if type(item) in (list, dict, set, bytearray) else None for item in given]
                return [True, ["v", None], self.write(after)]
            return [True, self.write(value)]
        except MemoryError:
            raise
        except BaseException as error:
            kinds = [path_of(kind) for kind in type(error).__mro__]
            has_plain_args = type(error).__module__ == "builtins" and self.is_plain(error.args)
            return [False, kinds, list(error.args) if has_plain_args else [str(error)], self.write(error)]

    def answer(self, action: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do what a request asks for, and return the result."""
        if action == "call":
            return self.find(name)(*args, **kwargs)
        if action == "describe":
            return self.describe(name)
        if action == "apply":
            return getattr(operator if hasattr(operator, name) else builtins, name)(*args)
        if action == "plain":  # of a class that extends a builtin one: the builtin value
            bases: Any = [kind for kind in (*ATOMS[1:], *GROUPS.values(), dict) if isinstance(args[0], kind)]
            return bases[0](args[0]) if bases else args[0]
        if action == "next":
            return next(([value] for value in args[0]), [])
        target = self.find(name.partition(".")[0]) if action.startswith("class ") else args.pop(0)
        name = name.partition(".")[2] or name
        if action == "set":
            return setattr(target, name, args[0])
        value = getattr(target, name)
        if action.endswith("get"):
            return [True, None] if callable(value) else [False, value]
        return value(*args, **kwargs)

    def find(self, name: str) -> Any:
        """Return the value of a name, or the method of a class `Solution`."""
        kind = self.names.get("Solution")
        if isinstance(kind, type) and hasattr(kind, name):
            return getattr(kind(), name)
        if name not in self.names:
            raise NameError(f"name {name!r} is not defined")
        return self.names[name]

    def describe(self, name: str) -> list[Any]:
        """Return what a name stands for."""
        if name not in self.names:
            return ["missing"]
        value = self.names[name]
        if isinstance(value, type):
            self.named.add(value)
            return ["class", [path_of(kind) for kind in value.__mro__]]
        return ["function"] if callable(value) else ["value", value]
