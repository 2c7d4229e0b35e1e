"""The model's code as its tests see it: plain data, and handles of the objects that the tests make. Runs beside them.

A result is data of the tests' own process. What is no data is an `Opaque`, which can do nothing. Only an object of a
class that the tests import is a `Handle`, whose uses are requests; it never decides what a plain value is equal to.
"""

from __future__ import annotations

import opcode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gym_rm.scorers.code.guest_connection import Connection

# fmt: off
ARITHMETIC = ("add", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "matmul")
OPERATORS = (
    "str", "repr", "hash", "len", "bool", "int", "float", "abs", "round", "neg", "pos", "invert", "iter", "reversed",
    "getitem", "setitem", "delitem", "contains", "lt", "le", "gt", "ge", "sub", "iadd", "isub", "imul", *ARITHMETIC,
)
# What would tell an object that the model's code chose to return what the tests expect, and let it agree.
TELLING = {"contains", "lt", "le", "gt", "ge", "sub", "isub", "mod", "floordiv", "xor", "and_", "int", "float", "round"}
QUERIES = {
    "index", "count", "find", "rfind", "rindex", "startswith", "endswith", "issubset", "issuperset", "isdisjoint",
    "removeprefix", "removesuffix", "is_integer", "match", "compare", "equals",
}
# fmt: on
FILE = "<tests>"
HARNESS = ("unittest", "_pytest", "pytest", "pluggy", "bdb", "doctest", "gym_rm")


class BrokenAnswer(Exception):
    """The model's process answered something that this side cannot read."""


class Unsupported(Exception):
    """The tests need an object of the model's code, or give it one of theirs."""


class SolutionError(Exception):
    """An exception of the model's code of a class that the tests do not know. Its message is that of this code."""

    __module__ = "solution"

    def __str__(self) -> str:
        return str(self.__dict__.get("_gym_rm_text", super().__str__()))


class Opaque:
    """An object of the model's code that is no data: it is equal to nothing else."""

    def __init__(self, connection: Connection, kind: str) -> None:
        self.__dict__.update(_gym_rm=connection, _gym_rm_kind=kind)

    def __getattr__(self, name: str) -> Any:
        return self._gym_rm.refuse_attribute(name, self._gym_rm_kind)

    def __setattr__(self, name: str, value: Any) -> None:
        self._gym_rm.refuse_attribute(name, self._gym_rm_kind)

    def __enter__(self) -> Any:
        self._gym_rm.refuse_attribute("with", self._gym_rm_kind)

    def __exit__(self, *error: Any) -> None:
        pass

    def __aiter__(self) -> Any:
        return self._gym_rm.refuse_attribute("async for", self._gym_rm_kind)


def is_class_name(name: str) -> bool:
    """Return whether tests expect a class by this name. What the model's code makes of it is no fault of theirs."""
    return name[:1].isupper()


class Function:
    """A function of the model's code, or another object that can be called."""

    def __init__(self, connection: Connection, name: str = "") -> None:
        self._gym_rm = connection
        self.__name__ = self.__qualname__ = name
        self._gym_rm_kind = "" if is_class_name(name) else "function"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        value = self._gym_rm.request("call", None if self.__name__ else self, self.__name__, args, kwargs)
        if isinstance(value, (Opaque, Function)) and is_class_name(self.__name__):
            value.__dict__["_gym_rm_kind"] = ""
        return value

    def __getattr__(self, name: str) -> Any:
        return self._gym_rm.refuse_attribute(name, self._gym_rm_kind)


class HandleClass(type):
    """A class of the model's code that the tests import."""

    _gym_rm: Connection

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the class."""
        made = cls._gym_rm.request("call", cls, "", args, kwargs)
        if cls._gym_rm.is_made(cls):
            cls._gym_rm.made |= {id(made)} & cls._gym_rm.new
        return made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return without_queries(cls, name, cls._gym_rm.ask("get", cls, name))


class Handle:
    """An object of a class that the tests import. Its attributes, methods and operators are requests."""

    _gym_rm: Connection

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_gym_rm_number" not in cls.__dict__:
            cls._gym_rm.refuse(f"the tests derive a class from {cls.__mro__[1].__name__}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return without_queries(self, name, self._gym_rm.ask("get", self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._gym_rm.ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle) and other is not self:
            return self._gym_rm.ask("operate", self, "eq", other) is True
        if other is None or other is self:
            return self is other
        is_made = self._gym_rm.is_made(self)
        data = self._gym_rm.ask("data", self, "")
        if isinstance(data, Handle) and is_made:
            self._gym_rm.refuse(f"the tests compare a {type(self).__name__} with a {type(other).__name__}")
        return not isinstance(data, (Handle, Opaque)) and data == other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object."""
        return self._gym_rm.request("call", self, "", args, kwargs)

    def __next__(self) -> Any:
        there, item = self._gym_rm.ask("next", self, "", None)
        if not there:
            raise StopIteration
        return item

    def __enter__(self) -> Any:
        return self._gym_rm.ask("operate", self, "__enter__")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        answer = self._gym_rm.ask("operate", self, "__exit__", error)
        is_failed = error is None or isinstance(error, AssertionError) or is_of_harness(kind)
        return answer is True and not is_failed and last_instruction(trace) == "RAISE_VARARGS"


def without_queries(target: Any, name: str, function: Any) -> Any:
    """Return an attribute; of an object that the model's code chose, a query gives no arguments to this code."""
    if not callable(function) or name not in QUERIES or target._gym_rm.is_made(target):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise TypeError("an object of the solution as a result does not learn what the tests look for")
        return function()

    return call


def last_instruction(trace: Any) -> str:
    """Return the name of the instruction of the tests that led to an exception."""
    name = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        name = opcode.opname[code.co_code[trace.tb_lasti]] if code.co_filename == FILE else name
        trace = trace.tb_next
    return name


def is_of_harness(kind: type) -> bool:
    """Return whether an exception means something to what runs the tests."""
    return any(base.__module__.partition(".")[0] in HARNESS for base in kind.__mro__)


def operator_of(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Return the method of an operator, which the model's code does not decide if it chose the object."""

    def operate(self: Any, *others: Any) -> Any:
        connection: Connection = self._gym_rm
        has_plain = not all(isinstance(other, Handle) for other in others) or name in ("int", "float", "round")
        is_free = connection.is_made(self) or not has_plain
        if not is_free and name in TELLING:
            return refused(name) if name in ("contains", "int", "float", "round") else NotImplemented
        value = connection.ask("operate", *((others[0], name, self) if reflected else (self, name, *others)))
        if not is_free and name in ARITHMETIC and not isinstance(value, Handle):
            refused(name)
        return value is True if name in ("lt", "le", "gt", "ge", "contains", "bool") else value

    return operate


def refused(name: str) -> Any:
    """Raise the error of an operator that a result does not have."""
    raise TypeError(f"an object of the solution as a result has no operator {name!r} with data")


for each in OPERATORS:
    setattr(Handle, f"__{each.rstrip('_')}__", operator_of(each))
for each in ("sub", *ARITHMETIC):
    setattr(Handle, f"__r{each.rstrip('_')}__", operator_of(each, reflected=True))
