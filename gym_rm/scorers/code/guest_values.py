"""Values between the model's code and its tests. Runs in the sandbox, in the interpreters of both.

The parent passes the bytes of requests and answers on, and reads none of them. A value crosses as a tagged list:
`["v", value]` if it is plain, the parts of what the library can make again, or a handle of an object that stays with
the model's code.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False  # the import of typing would take a third of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ATOMS = (type(None), bool, int, float, complex, str, bytes)
GROUPS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "decimal.Decimal": lambda x: (str(x),),
    "fractions.Fraction": lambda x: (x.numerator, x.denominator),
    "datetime.datetime": lambda x: (x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond),
    "datetime.date": lambda x: (x.year, x.month, x.day),
    "datetime.time": lambda x: (x.hour, x.minute, x.second, x.microsecond),
    "datetime.timedelta": lambda x: (x.days, x.seconds, x.microseconds),
    "collections.deque": lambda x: (list(x),),
    "builtins.range": lambda x: (x.start, x.stop, x.step),
    "builtins.bytearray": lambda x: (bytes(x),),
}


class Codec:
    """Turns values into plain data and back. Subclasses say how other objects cross."""

    def __init__(self) -> None:
        self.named: set[type] = set()  # classes that the tests name: a dict of such a class is more than a dict

    def write_object(self, value: Any) -> list[Any]:
        """Return the data of an object that is not plain."""
        raise NotImplementedError

    def read_object(self, data: list[Any]) -> Any:
        """Return the object of data that `write_object` of the other side made."""
        raise NotImplementedError

    def write(self, value: Any) -> list[Any]:
        """Return a value as plain data."""
        if self.is_plain(value):
            return ["v", value]
        if type(value) in self.named:
            return self.write_object(value)
        if isinstance(value, dict):
            return ["d", [[self.write(key), self.write(item)] for key, item in value.items()]]
        for name, kind in GROUPS.items():
            if isinstance(value, kind):
                return [name, [self.write(item) for item in value]]
        name = value.__name__ if isinstance(value, type) else ""
        if name and getattr(builtins, name, None) is value:
            return ["t", name]
        path = f"{type(value).__module__}.{type(value).__name__}"
        if path in PARTS and type(value) is type_at(path) and getattr(value, "tzinfo", None) is None:
            return ["x", path, PARTS[path](value)]
        return self.write_object(value)

    def read(self, data: list[Any]) -> Any:
        """Return the value of plain data."""
        tag = data[0]
        if tag == "v":
            return data[1]
        if tag == "d":
            return {self.read(key): self.read(item) for key, item in data[1]}
        if tag in GROUPS:
            return GROUPS[tag](self.read(item) for item in data[1])
        if tag == "t":
            kind = getattr(builtins, data[1])
            if not isinstance(kind, type):
                raise TypeError(f"{data[1]} is no type")
            return kind
        if tag != "x" or data[1] not in PARTS:
            return self.read_object(data)
        __import__(data[1].partition(".")[0])
        return type_at(data[1])(*data[2])

    def is_plain(self, value: Any) -> bool:
        """Return whether a value has only builtin types and their subclasses, but none that the tests name."""
        if type(value) in self.named:
            return False
        if isinstance(value, dict):
            return all(self.is_plain(key) and self.is_plain(item) for key, item in value.items())
        return isinstance(value, ATOMS) or (
            isinstance(value, (list, tuple, set, frozenset)) and all(self.is_plain(item) for item in value)
        )


def type_at(path: str) -> Any:
    """Return the type `module.name`, None if its module is not imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def path_of(kind: type) -> str:
    """Return the module and the name of a class."""
    return f"{kind.__module__}.{kind.__name__}"
