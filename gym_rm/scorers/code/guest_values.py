"""Values between the model's code and its tests, as plain data. Runs in the sandbox, in the interpreters of both.

The parent passes the bytes of requests and answers on, and reads none of them. An item is an atom, or `(number,)` of a
node; a node is `[number, kind, items]`. The kind is one of this file, so that the other side names no class, and what
both sides know keeps its number, so that aliases, cycles and changes in place cross too.
"""

from __future__ import annotations

import builtins
import operator
import sys

from gym_rm.sandbox.values import decode, encode

TYPE_CHECKING = False  # the import of typing would take a third of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
MUTABLE = ("list", "dict", "set", "deque", "OrderedDict", "Counter", "defaultdict", "bytearray", "array", "ndarray")
STAY = ("object", "instance", "class", "function", "iterator", "coroutine")
PLAIN_DTYPES = "?biufcSUmM"
VIEWS = {"dict_keys": type({}.keys()), "dict_values": type({}.values()), "dict_items": type({}.items())}


def pairs(value: Any, kind: str = "dict") -> list[Any]:
    """Return the keys of a dict, each with its value behind it."""
    return [each for pair in imported(kind).items(value) for each in pair]


def array_items(value: Any) -> list[Any]:
    """Return the type, the shape and the contents of an array of numpy."""
    is_plain = value.dtype.kind in PLAIN_DTYPES
    return [value.dtype.str if is_plain else "O", tuple(value.shape), value.tobytes() if is_plain else [*value.flat]]


# The type of each kind, and the items of a value of it.
ITEMS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "list": ("builtins.list", lambda x: [*list.__iter__(x)]),
    "tuple": ("builtins.tuple", lambda x: [*tuple.__iter__(x)]),
    "set": ("builtins.set", lambda x: [*set.__iter__(x)]),
    "frozenset": ("builtins.frozenset", lambda x: [*frozenset.__iter__(x)]),
    "dict": ("builtins.dict", pairs),
    "mappingproxy": ("types.MappingProxyType", lambda x: pairs(dict(x))),
    "bytearray": ("builtins.bytearray", lambda x: [bytes(x)]),
    "range": ("builtins.range", lambda x: [x.start, x.stop, x.step]),
    "dict_keys": ("", lambda x: pairs(dict.fromkeys(x))),
    "dict_values": ("", lambda x: pairs(dict(enumerate(x)))),
    "dict_items": ("", lambda x: pairs(dict(x))),
    "deque": ("collections.deque", lambda x: [x.maxlen, *x]),
    "OrderedDict": ("collections.OrderedDict", lambda x: pairs(x, "OrderedDict")),
    "Counter": ("collections.Counter", pairs),
    "defaultdict": ("collections.defaultdict", lambda x: [x.default_factory, *pairs(x)]),
    "array": ("array.array", lambda x: [x.typecode, *x]),
    "Decimal": ("decimal.Decimal", lambda x: [str(x)]),
    "Fraction": ("fractions.Fraction", lambda x: [x.numerator, x.denominator]),
    "datetime": ("datetime.datetime", lambda x: [*x.timetuple()[:6], x.microsecond, x.tzinfo]),
    "date": ("datetime.date", lambda x: [x.year, x.month, x.day]),
    "time": ("datetime.time", lambda x: [x.hour, x.minute, x.second, x.microsecond, x.tzinfo]),
    "timedelta": ("datetime.timedelta", lambda x: [x.days, x.seconds, x.microseconds]),
    "timezone": ("datetime.timezone", lambda x: [x.utcoffset(None), x.tzname(None)]),
    "ZoneInfo": ("zoneinfo.ZoneInfo", lambda x: [x.key]),
    "UUID": ("uuid.UUID", lambda x: [x.hex]),
    "Path": ("pathlib.Path", lambda x: [str(x)]),
    "ndarray": ("numpy.ndarray", array_items),
    "number": ("numpy.generic", lambda x: [x.dtype.str, x.tobytes()]),
}


class Codec:
    """Turns values into items and nodes, and back. Subclasses say how other objects cross.

    Numbers of one side are even, those of the other odd. `objects` are those that stay with the model's code, `data`
    are those of one request.
    """

    other: Callable[[Any], tuple[str, list[Any]]]  # the kind and the items of an object that is no data
    make: Callable[[str, list[Any]], Any]  # the object of a node that `other` of the other side made

    def __init__(self, first: int) -> None:
        self.next = first
        self.objects: dict[int, Any] = {}
        self.data: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # by id
        self.written: list[list[Any]] = []
        self.incoming: dict[int, list[Any]] = {}
        self.before: dict[int, tuple[str, list[Any]]] = {}
        self.kinds: dict[type, str] = {}

    def start(self) -> None:
        """Forget the data of the last request."""
        self.written = []
        for value in self.data.values():
            self.numbers.pop(id(value), None)
        self.data.clear()
        self.before.clear()
        self.learn_kinds()

    def learn_kinds(self) -> None:
        """Learn the types that are loaded by now."""
        self.kinds = {VIEWS.get(kind) or type_at(path): kind for kind, (path, _) in ITEMS.items()}

    def write(self, value: Any) -> Any:
        """Return the item of a value. Its new nodes are added to `written`."""
        if type(value) in ATOMS:
            return value
        if id(value) in self.numbers:
            return (self.numbers[id(value)],)
        kind, items = self.parts(value)
        if kind == "atom":
            return decode(encode(value, limit=sys.maxsize))  # of its base
        self.next += 2
        self.keep(self.next, kind, value)
        return self.write_node(self.next, kind, items)

    def write_node(self, number: int, kind: str, items: list[Any]) -> Any:
        """Add a node, and return its item."""
        node = [number, kind, items]
        self.written.append(node)
        if not ATOMS.issuperset(map(type, items)):
            node[2] = [self.write(each) for each in items]
        return (number,)

    def parts(self, value: Any) -> tuple[str, list[Any]]:
        """Return the kind and the items of a value."""
        for base in type(value).__mro__:
            if base in ATOMS:
                return "atom", []
            kind = self.kinds.get(base, "")
            if kind == "tuple" and hasattr(value, "_fields"):
                return "namedtuple", [type(value).__name__, tuple(value._fields), *tuple.__iter__(value)]
            if kind and not is_special(kind, value):
                return kind, ITEMS[kind][1](value)
        if fields := tuple(getattr(type(value), "__dataclass_fields__", ())):
            return "record", [type(value).__name__, fields, *(getattr(value, name) for name in fields)]
        return self.other(value)

    def keep(self, number: int, kind: str, value: Any) -> None:
        """Remember a value by its number."""
        (self.objects if kind in STAY else self.data)[number] = value
        self.numbers[id(value)] = number

    def write_changes(self) -> None:
        """Write the data that came with the request again if it has changed."""
        for number, (kind, before) in list(self.before.items()):
            items = ITEMS[kind][1](self.data[number])
            same = len(items) == len(before) and all(map(operator.is_, items, before))
            if not same and (kind not in ("bytearray", "ndarray") or items != before):
                self.write_node(number, kind, items)

    def read(self, item: Any, nodes: list[list[Any]]) -> Any:
        """Return the value of an item, and change what the nodes say that has changed."""
        self.incoming = {node[0]: node for node in nodes}
        value = self.value(item)
        while self.incoming:
            self.value((next(iter(self.incoming)),))
        return value

    def value(self, item: Any) -> Any:
        """Return the value of an item of the message that is read."""
        if type(item) in ATOMS:
            return item
        (number,) = item
        if number not in self.incoming:
            return self.objects[number] if number in self.objects else self.data[number]
        _, kind, items = self.incoming.pop(number)
        if number in self.data:
            fill(kind, self.data[number], self.values(items))
            return self.data[number]
        if kind not in MUTABLE or kind == "ndarray":
            made = self.values(items)
            value = build(kind, made) if kind in ITEMS else self.make(kind, made)
            self.keep(number, kind, value)
        else:  # it may contain itself
            value = empty(kind, self.values(items[:1]) if kind in ("deque", "array", "defaultdict") else [])
            self.keep(number, kind, value)
            fill(kind, value, self.values(items))
        if kind in MUTABLE:
            self.before[number] = kind, ITEMS[kind][1](value)
        return value

    def values(self, items: list[Any]) -> list[Any]:
        """Return the values of items."""
        return items if ATOMS.issuperset(map(type, items)) else [self.value(each) for each in items]


def is_special(kind: str, value: Any) -> bool:
    """Return whether a value of a known type has parts that cannot cross."""
    if kind in ("datetime", "time"):
        return value.tzinfo is not None and type(value.tzinfo).__name__ not in ("timezone", "ZoneInfo")
    return kind == "number" and value.dtype.kind not in PLAIN_DTYPES


def type_at(path: str) -> Any:
    """Return the type `module.name`, None if its module is not imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def imported(kind: str) -> Any:
    """Return the type of a kind."""
    __import__(ITEMS[kind][0].rpartition(".")[0])
    return type_at(ITEMS[kind][0])


def build(kind: str, items: list[Any]) -> Any:
    """Return a value of a kind that cannot contain itself."""
    if kind in ("tuple", "frozenset"):
        return getattr(builtins, kind)(items)
    if kind in VIEWS or kind == "mappingproxy":
        made = dict(zip(items[::2], items[1::2]))  # noqa: B905 (Python 3.9)
        return getattr(made, kind[len("dict_") :])() if kind in VIEWS else imported(kind)(made)
    if kind in ("number", "ndarray"):
        numpy = __import__("numpy")
        data = numpy.frombuffer(items[-1], items[0]) if items[0] != "O" else numpy.empty(len(items[2]), object)
        if kind == "number":
            return data[0]
        if items[0] == "O":
            data[:] = items[2]
        return data.reshape(items[1]).copy()
    return imported(kind)(*items)


def empty(kind: str, items: list[Any]) -> Any:
    """Return a value that can change, without its contents."""
    made = imported(kind)
    return made((), *items) if kind == "deque" else made(*items)


def fill(kind: str, value: Any, items: list[Any]) -> None:
    """Give a value its contents. Raises an error for a value that cannot change."""
    if isinstance(value, dict):
        items = items[1:] if kind == "defaultdict" else items
        value.clear()
        put = imported(kind).__setitem__
        for key, item in zip(items[::2], items[1::2]):  # noqa: B905 (Python 3.9)
            put(value, key, item)
    elif kind == "set":
        value.clear()
        value.update(items)
    elif kind == "ndarray":
        value[...] = build(kind, items)
    elif kind == "bytearray":
        value[:] = items[0]
    elif kind == "list":
        value[:] = items
    else:
        while value:
            value.pop()
        value.extend(items[1:])
