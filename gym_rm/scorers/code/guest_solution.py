"""What serves the tests beside the model's code: calls, attributes and operators. Runs in the sandbox.

The model's code shares this process and may change everything here, so that an answer is a claim of that code.
"""

from __future__ import annotations

import builtins
import marshal
import operator

from gym_rm.sandbox.values import encode
from gym_rm.scorers.code.guest_values import ATOMS, Codec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SolutionServer(Codec):
    """Answers requests for the names of a namespace, and for the objects that it has given out.

    An answer has at most `limit` bytes.
    """

    def __init__(self, names: dict[str, Any], limit: int) -> None:
        super().__init__(1)
        self.names = names
        self.limit = limit
        self.pieces: list[bytes] = []
        self.loop: Any = None
        self.enums: dict[type, str] = {}  # those that the tests name
        self.classes: dict[type, int] = {}  # those that the tests name, whose instances are objects for them

    def serve(self, piece: bytes, is_last: bool) -> bytes:
        """Take a piece of a request, and answer it after the last. Raises CrossingError if the answer is too large."""
        self.pieces.append(piece)
        if not is_last:
            return b""
        request, self.pieces = b"".join(self.pieces), []
        return encode(self.result(*marshal.loads(request)), limit=self.limit)

    def result(self, action: str, given: Any, nodes: list[Any]) -> list[Any]:
        """Return whether the request succeeded, its result or its exception, and the nodes of both."""
        self.start()
        succeeded = True
        try:
            target, name, args, kwargs = self.read(given, nodes)
            value = getattr(self, f"_do_{action}")(target, name, args, kwargs)
        except MemoryError:
            raise
        except BaseException as error:
            succeeded, value = False, error
        self.learn_kinds()
        item = self.write(value)
        self.write_changes()
        return [succeeded, item, self.written]

    def _do_call(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        return (self.find(name) if target is None else target)(*args, **kwargs)

    def _do_get(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        return getattr(target, name)

    def _do_set(self, target: Any, name: str, args: Any, kwargs: Any) -> None:
        setattr(target, name, *args)

    def _do_operate(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator, a builtin function, or a special method."""
        if name == "__exit__":
            return target.__exit__(None if args[0] is None else type(args[0]), args[0], None)
        if name.startswith("__"):
            return getattr(target, name)(*args)
        return getattr(operator if hasattr(operator, name) else builtins, name)(target, *args)

    def _do_data(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of an object whose class extends one of data, else the object."""
        self.learn_kinds()
        base = next((each for each in type(target).__mro__ if each in self.kinds or each in ATOMS), None)
        return target if base is None else base(target)

    def _do_next(self, target: Any, name: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Return (True, the next item of an iterator), or (False, what its generator returned)."""
        try:
            return True, next(target) if args[0] is None else target.send(args[0])
        except StopIteration as end:
            return False, end.value

    def _do_await(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        import asyncio

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(target)

    def _do_describe(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a name stands for: ("missing",), ("value", value), ("function",) or the parts of a class."""
        value: Any = self.names.get(name)
        solution = self.names.get("Solution")
        if name not in self.names and isinstance(solution, type) and hasattr(solution, name):
            return ("function",)
        if callable(value) and not isinstance(value, type):
            return ("function",)
        if not isinstance(value, type) or value in vars(builtins).values():
            return ("value", value) if name in self.names else ("missing",)
        if issubclass(value, BaseException):
            return "error", tuple(map(_path_of, value.__mro__))
        if members := getattr(value, "__members__", None):
            self.enums[value] = name
            base = next(each.__name__ for each in value.__mro__ if each.__module__ == "enum")
            mixin = next((each.__name__ for each in value.__mro__ if each in ATOMS and base in ("Enum", "Flag")), "")
            return "enum", base, mixin, [(key, each.value) for key, each in members.items()]
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            return "namedtuple", value._fields, tuple(vars(value)["_field_defaults"].values())
        own = [each for each in reversed(value.__mro__) if each.__module__ == value.__module__]
        return "handle", [self.class_parts(each) for each in own]

    def class_parts(self, kind: type) -> tuple[str, int, list[int]]:
        """Return the name, the number and the bases of a class whose instances are objects for the tests."""
        if kind not in self.classes:
            self.next += 2
            self.keep(self.next, "class", kind)
            self.classes[kind] = self.next
        bases = [self.classes[each] for each in kind.__bases__ if each in self.classes]
        return kind.__name__, self.classes[kind], bases

    def other(self, value: Any) -> tuple[str, list[Any]]:
        """Return the kind and the items of an object that is no data."""
        kind: Any = type(value)
        if isinstance(value, BaseException):
            attributes = {name: each for name, each in vars(value).items() if not name.startswith("_")}
            return "error", [tuple(map(_path_of, kind.__mro__)), value.args, attributes, _text_of(value)]
        if isinstance(value, type) and value in vars(builtins).values():
            return "type", [getattr(value, "__name__", "")]
        if callable(value) and not hasattr(kind, "__enter__"):
            return "function", []
        if hasattr(kind, "__next__"):
            return "iterator", []
        return ("coroutine", []) if hasattr(kind, "__await__") else ("object", [kind.__name__])

    def parts(self, value: Any) -> tuple[str, list[Any]]:
        """Return the kind and the items of a value; an instance of a class that the tests name is no data."""
        kind = type(value)
        if not self.enums and not self.classes:
            return super().parts(value)
        if kind in self.enums:
            return "enum", [self.enums[kind], value.name]
        known = next((self.classes[each] for each in kind.__mro__ if each in self.classes), None)
        return super().parts(value) if known is None else ("instance", [known])

    def make(self, kind: str, items: list[Any]) -> Any:
        """Return the object that the tests have given."""
        if kind == "type":
            return getattr(__import__(items[0]), items[1])
        if kind == "enum":
            return self.names[items[0]][items[1]]
        if kind == "error":
            names = [path.rpartition(".")[2] for path in items[0]]
            return next(filter(None, (self.names.get(each) or getattr(builtins, each, None) for each in names)))(
                *items[1]
            )
        own: Any = self.names.get(items[0])
        if kind == "record":
            value = object.__new__(own)
            for name, item in zip(items[1], items[2:]):  # noqa: B905 (Python 3.9)
                object.__setattr__(value, name, item)
            return value
        return tuple(items[2:]) if own is None else own(*items[2:])

    def find(self, name: str) -> Any:
        """Return the value of a name, or the method of a class `Solution`."""
        kind = self.names.get("Solution")
        if isinstance(kind, type) and hasattr(kind, name):
            return getattr(kind(), name)
        if name not in self.names:
            raise NameError(f"name {name!r} is not defined")
        return self.names[name]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"
