"""The model's functions, classes, objects and exceptions as its tests see them. Runs in the sandbox, beside the tests.

Every use is a request to the process of the model's code. An object of that code decides nothing about the tests: it
equals only itself, unless the tests name its class, and then it still is no number that it is not.
"""

from __future__ import annotations

import builtins
import numbers
import types

from gym_rm.sandbox.values import decode, encode
from gym_rm.scorers.code.guest_values import Codec, type_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# fmt: off
OPERATORS = (
    "len", "str", "repr", "bool", "hash", "int", "float", "abs", "round", "neg", "pos", "invert", "contains",
    "getitem", "setitem", "delitem", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow",
    "and_", "or_", "xor", "lshift", "rshift", "matmul", "iadd", "isub",
)
METHODS = ("__enter__", "__exit__", "__call__", "__radd__", "__rsub__", "__rmul__", "__rtruediv__")
NEAR = ("__lt__", "__le__", "__gt__", "__ge__", "__sub__", "__rsub__")
# fmt: on


class BrokenAnswer(Exception):
    """The model's process answered something that this side cannot read."""


class Unsupported(Exception):
    """The tests give the model's code something that cannot cross."""


def iterate(value: Any) -> Any:
    """Yield the items of an object or class of the model's code."""
    iterator = value._gym_rm_connection.ask("apply", "iter", value)
    if not isinstance(iterator, Proxy):  # the iterator of a plain value
        yield from iterator
        return
    while item := value._gym_rm_connection.ask("next", "", iterator):
        yield item[0]


class Proxy:
    """An object of the model's code. It can be called, and has a truth, attributes and items in turn."""

    _gym_rm_connection: Connection
    _gym_rm_id = -1
    _gym_rm_kinds: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_callable, value = self._gym_rm_connection.ask("get", name, self)
        return self._gym_rm_connection.caller("method", name, self) if is_callable else value

    def __setattr__(self, name: str, value: Any) -> None:
        self._gym_rm_connection.ask("set", name, self, value)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return self._gym_rm_connection.ask("apply", "truth", self) is True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._gym_rm_connection.request("method", "__call__", [self, *args], kwargs)

    __iter__ = iterate

    def __next__(self) -> Any:
        item = self._gym_rm_connection.ask("next", "", self)
        if not item:
            raise StopIteration
        return item[0]


class ClassProxy(type):
    """A class of the model's code that the tests name."""

    _gym_rm_connection: Connection

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class."""
        return cls._gym_rm_connection.request("call", cls.__name__, list(args), kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(type(value), ClassProxy) and cls.__subclasscheck__(type(value))

    def __subclasscheck__(cls, kind: Any) -> bool:
        return cls.__name__ in getattr(kind, "_gym_rm_kinds", ())

    def __bool__(cls) -> bool:
        return True

    __iter__ = iterate

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{cls.__name__}.{name}"
        is_callable, value = cls._gym_rm_connection.ask("class get", path)
        return cls._gym_rm_connection.caller("class call", path) if is_callable else value


for each in ("len", "contains", "getitem"):
    operate = lambda cls, *args, name=each: cls._gym_rm_connection.ask("apply", name, cls, *args)  # noqa: E731
    setattr(ClassProxy, f"__{each}__", operate)


def operators(connection: Connection) -> dict[str, Any]:
    """Return the operators of a class that the tests name, which are those of the model's code."""

    def applied(name: str) -> Callable[..., Any]:
        return lambda self, *args: connection.ask("apply", name, self, *args)

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: connection.request("method", name, [self, *args], kwargs)

    def compared(name: str, otherwise: bool) -> Callable[..., Any]:
        def compare(self: Any, other: Any) -> Any:
            if isinstance(other, Proxy):
                return connection.ask("apply", name, self, other) is True
            value = plain(self)
            return otherwise if isinstance(value, Proxy) else (value == other) is not otherwise

        return compare

    def no_number(name: str, operate: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operator that the model's code does not decide for numbers: it would be near to any number."""

        def operate_or_refuse(self: Any, other: Any) -> Any:
            if not isinstance(other, numbers.Number):
                return operate(self, other)
            value = plain(self)
            return NotImplemented if isinstance(value, Proxy) else getattr(value, name)(other)

        return operate_or_refuse

    table = {f"__{name.rstrip('_')}__": applied(name) for name in OPERATORS} | {name: method(name) for name in METHODS}
    table |= {name: no_number(name, table[name]) for name in NEAR}
    return table | {"__eq__": compared("eq", False), "__ne__": compared("ne", True)}


def plain(value: Any) -> Any:
    """Return a copy of an object of a class that extends a builtin one, which compares as the language says.

    The first answer stays if it cannot change: one that changes could be on both sides of a number.
    """
    if "_gym_rm_plain" not in value.__dict__:
        answer = value._gym_rm_connection.ask("plain", "", value)
        if isinstance(answer, (Proxy, list, dict, set)):
            return answer
        value.__dict__["_gym_rm_plain"] = answer
    return value.__dict__["_gym_rm_plain"]


class Connection(Codec):
    """Requests of the tests of one row to the process of the model's code.

    Attributes:
        unsupported: what the tests gave to the model's code that cannot cross.
        requests: number of requests.
        largest: bytes of the largest answer.
    """

    def __init__(self, serve: Callable[[bytes], bytes], limit: int) -> None:
        super().__init__()
        self.serve = serve
        self.limit = limit
        self.unsupported = ""
        self.requests = 0
        self.largest = 0
        self.proxies: dict[int, Proxy] = {}
        self.classes: dict[str, Any] = {}

    def ask(self, action: str, name: str, *args: Any) -> Any:
        """Send a request without keywords, and return its result."""
        return self.request(action, name, list(args), {})

    def caller(self, action: str, name: str, *first: Any) -> Callable[..., Any]:
        """Return a function that sends a request with its arguments. It has a handle, so that it can be an argument."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.request(action, name, [*first, *args], kwargs)

        call.__name__ = name
        handle = [*self.write_object(first[0]), name] if first else ["c", *name.split(".")]
        call._gym_rm_handle = handle  # type: ignore[attr-defined]
        return call

    def request(self, action: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Send a request, and return its result or raise its exception."""
        request = encode([action, name, self.write(args), self.write(kwargs)], limit=self.limit)
        self.requests += 1
        answer = self.serve(request)
        self.largest = max(self.largest, len(answer))
        try:
            reply = decode(answer, most_items=len(answer))
            if reply[0]:
                value = self.read(reply[1])
                for arg, after in zip(args, self.read(reply[2])) if len(reply) > 2 else ():  # noqa: B905
                    change(arg, after)
                if action == "describe" and (type(value) is not list or not value or type(value[0]) is not str):
                    raise BrokenAnswer(f"no description: {value!r:.100}")
                return value
            error = self.read_error(*reply[1:])
        except Exception as broken:
            raise BrokenAnswer(f"{type(broken).__name__}: {broken}") from None
        raise error

    def write_object(self, value: Any) -> list[Any]:
        """Return the handle of an object."""
        if isinstance(value, Proxy):
            return ["r", object.__getattribute__(value, "_gym_rm_id")]
        name = str(getattr(value, "__name__", ""))
        if isinstance(value, type) and self.classes.get(name) is value:
            return ["c", name]
        if isinstance(value, types.FunctionType) and hasattr(value, "_gym_rm_handle"):
            return list(value._gym_rm_handle)
        if isinstance(held := getattr(value, "_gym_rm_held", None), Proxy):  # an exception of the model's code
            return self.write_object(held)
        if isinstance(value, type) and issubclass(value, Proxy):
            raise TypeError("the class of an object of the model's code is not known")
        self.unsupported = f"the tests give the model's code an object of the type {type(value).__name__}"
        raise Unsupported(self.unsupported)

    def read_object(self, data: list[Any]) -> Any:
        """Return the object of a handle."""
        if data[1] not in self.proxies:
            kind = self.class_of(data[2])
            proxy = object.__new__(kind if issubclass(kind, Proxy) else Proxy)
            proxy.__dict__.update(_gym_rm_id=data[1], _gym_rm_connection=self)
            self.proxies[data[1]] = proxy
        return self.proxies[data[1]]

    def read_error(self, kinds: list[str], args: list[Any], held: list[Any]) -> BaseException:
        """Return the exception of an answer, of the class that the tests know."""
        kind = self.exception_of(kinds)
        try:
            error = kind(*args)
        except TypeError:  # of other arguments
            error = kind.__new__(kind, *args)
        error._gym_rm_held = self.read(held)  # type: ignore[attr-defined]
        return error

    def class_of(self, kinds: list[str]) -> Any:
        """Return the class that the tests name among these, most special first."""
        names = [path.rpartition(".")[2] for path in kinds]
        return next((self.classes[name] for name in names if name in self.classes), Proxy)

    def exception_of(self, kinds: list[str]) -> type[BaseException]:
        """Return the exception that the tests name or have imported, or one of this name with such a base."""
        for k, path in enumerate(kinds):
            name = path.rpartition(".")[2]
            kind = self.classes.get(name) or getattr(builtins, name, None) or type_at(path)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                base = RuntimeError if issubclass(kind, StopIteration) else kind
                return base if k == 0 else type(kinds[0].rpartition(".")[2], (base,), {})
        return Exception

    def named_class(self, name: str, kinds: list[str]) -> Any:
        """Return the class of this name, which the tests name."""
        if name not in self.classes:
            names = [path.rpartition(".")[2] for path in kinds]
            if "BaseException" in names[1:]:
                known = hasattr(builtins, names[1])
                base = self.exception_of(kinds[1:]) if known else self.named_class(names[1], kinds[1:])
                self.classes[name] = type(name, (base,), {"__getattr__": attribute_of_error})
            else:
                own = {"_gym_rm_kinds": names, "_gym_rm_connection": self}
                self.classes[name] = ClassProxy(name, (self.class_of(kinds[1:]),), operators(self) | own)
        return self.classes[name]


def attribute_of_error(error: Any, name: str) -> Any:
    """Return an attribute of an exception of the model's code."""
    if name.startswith("_") or "_gym_rm_held" not in error.__dict__:
        raise AttributeError(name)
    return getattr(error._gym_rm_held, name)


def change(value: Any, after: Any) -> None:
    """Change an argument as a function without a result did, which is how it says what it has done."""
    if type(value) is not type(after) or value == after:
        return
    if isinstance(value, (list, bytearray)):
        value[:] = after
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(after)


class SolutionModule(types.ModuleType):
    """The module `solution`, with the names of the model's code."""

    def __init__(self, connection: Connection) -> None:
        super().__init__("solution")
        self.__dict__["_gym_rm_connection"] = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        connection: Connection = self.__dict__["_gym_rm_connection"]
        kind, *value = connection.ask("describe", name)
        if kind == "missing":
            raise AttributeError(f"module 'solution' has no attribute {name!r}")
        if kind == "class":
            return connection.named_class(name, value[0])
        return connection.caller("call", name) if kind == "function" else value[0]
