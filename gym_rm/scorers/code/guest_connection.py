"""Requests of the tests to the process of the model's code, and what its answers become. Runs beside the tests."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import marshal
import sys
import types

from gym_rm.sandbox.values import decode
from gym_rm.scorers.code.guest_handles import (
    BrokenAnswer,
    Function,
    Handle,
    HandleClass,
    Opaque,
    SolutionError,
    Unsupported,
    is_class_name,
    is_of_harness,
)
from gym_rm.scorers.code.guest_values import ITEMS, Codec, imported, type_at

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIBRARY = frozenset(getattr(sys, "stdlib_module_names", ())) | {"builtins"}
FUNCTION_MODULES = ("builtins", "operator", "math")
STOPS = (StopIteration, StopAsyncIteration)
PLAIN = (Exception, types.FunctionType, *map(type, (None, True, 0.5, 1j, "", b"", {}.keys(), {}.items())))
NOT_PLAIN = ("pathlib", "uuid") if "numpy" in sys.modules else ("pathlib", "uuid", "numpy")


class Connection(Codec):
    """Requests of the tests of one row to the process of the model's code.

    Attributes:
        unsupported: what the tests do that needs more than data.
        fault: why an answer was no data.
        requests: number of requests that asked for more than what a name stands for.
    """

    def __init__(self, serve: Callable[[bytes, bool], list[Any]], limit: int, tests: str) -> None:
        super().__init__(0)
        self.serve = serve
        self.tests = tests
        self.limit = limit
        self.unsupported = ""
        self.fault = ""
        self.requests = 0
        self.made: set[int] = set()  # ids of the handles that the tests made, and the model's code did not return
        self.new: set[int] = set()  # ids of the handles of the last answer
        self.classes: dict[str, Any] = {}
        self.named: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.records: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.originals = sys.stdin, builtins.input, builtins.print

    def refuse(self, text: str) -> Any:
        """Raise Unsupported, which is an error of the row whatever the tests do with it."""
        self.unsupported = self.unsupported or text
        raise Unsupported(text)

    def refuse_attribute(self, name: str, kind: str) -> Any:
        """Refuse an attribute that no data has, and raise AttributeError for others, or where a class was expected."""
        if kind and not name.startswith("_") and name not in plain_names():
            self.refuse(f"the tests use .{name} of an object of the type {kind}")
        raise AttributeError(name)

    def is_made(self, value: Any) -> bool:
        """Return whether the tests made an object or imported a class, and the model's code never returned it."""
        return id(value) in self.made

    def ask(self, action: str, target: Any, name: str, *args: Any) -> Any:
        """Send a request without keywords, and return its result."""
        return self.request(action, target, name, args, {})

    def request(self, action: str, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Send a request, and return its result or raise its exception."""
        if (sys.stdin, builtins.input, builtins.print) != self.originals:
            self.refuse("the tests replace sys.stdin, input or print")
        self.start()
        self.new.clear()
        given = self.write((target, name, args, kwargs))
        data = marshal.dumps((action, given, self.written))
        self.requests += action != "describe"
        for k in range(0, len(data), self.limit):
            answer, printed, complained = self.serve(data[k : k + self.limit], k + self.limit >= len(data))
            sys.stdout.write(printed)
            sys.stderr.write(complained)
        try:
            succeeded, item, nodes = decode(answer, most_items=len(answer))
            value = self.read(item, nodes)
            if not succeeded and not isinstance(value, BaseException):
                raise TypeError("no exception")
        except Exception as broken:
            self.break_off(broken)
        if succeeded:
            return value
        value._gym_rm_raised = True
        raise value

    def value(self, item: Any) -> Any:
        """Return the value of an item. A handle in an answer is what the model's code chose to return."""
        value = super().value(item)
        self.made.discard(id(value))
        return value

    def other(self, value: Any) -> Any:
        """Return the kind and the items of an object that the tests give to the model's code."""
        kind: Any = type(value)
        if isinstance(value, (type, types.BuiltinFunctionType)):
            module, name = str(value.__module__).lstrip("_"), str(getattr(value, "__name__", ""))
            if module in FUNCTION_MODULES and getattr(sys.modules.get(module), name, None) is value:
                return "type", [module, name]
        if isinstance(value, BaseException) and not is_of_harness(kind):
            return "error", [tuple(f"{each.__module__}.{each.__name__}" for each in kind.__mro__), value.args]
        name = kind.__name__
        if isinstance(value, enum.Enum) and self.classes.get(name) is kind:
            return "enum", [name, value.name]
        return self.refuse(f"the tests give the model's code an object of the type {name}")

    def parts(self, value: Any) -> tuple[str, list[Any]]:
        """Return the kind and the items of a value."""
        return self.other(value) if isinstance(value, enum.Enum) else super().parts(value)

    def make(self, kind: str, items: list[Any]) -> Any:
        """Return what stands for an object of the model's code."""
        return getattr(self, f"_make_{kind}")(*items)

    def _make_object(self, name: str) -> Opaque:
        return Opaque(self, f"{name:.100}")

    def _make_instance(self, number: int) -> Handle:
        handle: Handle = object.__new__(self.objects[number])
        self.new.add(id(handle))
        return handle

    def _make_function(self) -> Function:
        return Function(self)

    def _make_iterator(self) -> Any:
        def items() -> Any:
            sent = None
            while True:
                there, item = self.ask("next", generator, "", sent)
                if there is not True:
                    return item
                sent = yield item

        generator = items()
        return generator

    def _make_coroutine(self) -> Any:
        async def result() -> Any:
            return self.ask("await", coroutine, "")

        coroutine = result()
        return coroutine

    def _make_type(self, name: str) -> Any:
        return {kind.__name__: kind for kind in vars(builtins).values() if type(kind) is type}[name]

    def _make_enum(self, name: str, member: str) -> Any:
        return self.classes[name][member]

    def _make_namedtuple(self, name: str, fields: tuple[str, ...], *values: Any) -> Any:
        known = self.classes.get(name)
        kind: Any = known if getattr(known, "_fields", None) == fields else self.namedtuple_class(name, fields)
        return kind(*self.without_methods(kind._fields, values))

    def _make_record(self, name: str, fields: tuple[str, ...], *values: Any) -> Any:
        """Return the fields of a dataclass, whose methods are refused."""
        if (name, fields) not in self.records:
            missing = {"__getattr__": lambda _, attribute: self.refuse_attribute(attribute, name)}
            made: Any = dataclasses.make_dataclass(name, fields, frozen=True, namespace=missing)
            made.__setattr__ = lambda *_: self.refuse(f"the tests change an object of the type {name}")
            self.records[name, fields] = made
        return self.records[name, fields](*self.without_methods(fields, values))

    def without_methods(self, fields: tuple[str, ...], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of fields. Raises TypeError for one that would be called as a method of data."""
        if any(callable(value) and field in plain_names() for field, value in zip(fields, values)):  # noqa: B905
            raise TypeError("a field that would be called as a method of data")
        return values

    def _make_error(self, paths: tuple[str, ...], args: tuple[Any, ...], attributes: Any, text: str) -> Any:
        """Return an exception of the most special class that the tests know, or of one that extends it."""
        found = ((k, self.known_exception(path)) for k, path in enumerate(paths))
        k, known = next((each for each in found if each[1] is not None), (1, SolutionError))
        kind: Any = known if k == 0 else derived(paths[0].rpartition(".")[2], known)
        try:
            error = kind(*args)
        except Exception:  # of other arguments
            error = kind.__new__(kind, *args)
        plain = {name: each for name, each in attributes.items() if not name.startswith("_") and not callable(each)}
        error.__dict__.update(plain)
        error._gym_rm_text = text
        return error

    def known_exception(self, path: str) -> Any:
        """Return the class that the tests import from the solution, define, or know from the library, else None.

        None too for a class by which the model's code would end the tests instead of failing them.
        """
        module, _, name = path.rpartition(".")
        own = vars(sys.modules["tests"]).get(name)
        kind = self.classes.get(name) or (own if getattr(own, "__module__", "") == "tests" else None)
        if kind is None and module.partition(".")[0] in LIBRARY:
            kind = type_at(path)
        if not isinstance(kind, type) or issubclass(kind, STOPS) or is_of_harness(kind):
            return None
        is_named = kind in (SystemExit, KeyboardInterrupt) and kind.__name__ in self.tests
        return kind if is_named or issubclass(kind, Exception) else None

    def entry(self, name: str) -> Any:
        """Return the function or the class that the tests call by this name."""
        kind, found = self.described(name)
        return found if kind == "handle" and is_class_name(name) else Function(self, name)

    def describe(self, name: str) -> Any:
        """Return what a name of the model's code stands for. Raises AttributeError if it is not there."""
        kind, found = self.described(name)
        self.requests += kind == "value"
        if kind == "missing":
            error = AttributeError(f"module 'solution' has no attribute {name!r}")
            error._gym_rm_raised = True  # type: ignore[attr-defined]
            raise error
        return found

    def described(self, name: str) -> tuple[str, Any]:
        """Return which kind of thing a name of the model's code stands for, and the thing."""
        answer = self.ask("describe", None, name)
        try:
            kind, *parts = answer
            if kind == "value" and isinstance(parts[0], Opaque) and is_class_name(name):
                return "function", Function(self, name)
            if kind in ("missing", "function", "value"):
                return str(kind), parts[0] if parts else Function(self, name)
            self.classes[name] = self.classes.get(name) or getattr(self, f"{kind}_class")(name, *parts)
        except Exception as broken:
            self.break_off(broken)
        if not is_class_name(name):  # the tests may expect a function, whose results decide nothing
            self.made.discard(id(self.classes[name]))
        return kind, self.classes[name]

    def break_off(self, error: Exception) -> Any:
        """Raise BrokenAnswer, which is the verdict whatever the tests do with it."""
        self.fault = self.fault or f"{type(error).__name__}: {error}"
        raise BrokenAnswer(self.fault) from None

    def handle_class(self, name: str, classes: list[Any]) -> Any:
        """Return a class whose objects are handles, and make those that it extends."""
        for each, number, bases in classes:
            if number not in self.objects:
                own = {"_gym_rm": self, "_gym_rm_number": number}
                made = HandleClass(each, tuple(self.objects[base] for base in bases) or (Handle,), own)
                self.keep(number, "class", made)
                self.made.add(id(made))
        return self.objects[number]

    def error_class(self, name: str, paths: tuple[str, ...]) -> Any:
        """Return an exception, and make those that it extends."""
        kind = self.known_exception(paths[0])
        if kind is None:
            base = self.error_class("", paths[1:]) if len(paths) > 2 else Exception
            kind = derived(paths[0].rpartition(".")[2], base)
        self.classes[name or kind.__name__] = kind
        return kind

    def enum_class(self, name: str, base: str, mixin: str, members: list[Any]) -> Any:
        """Return an enumeration with the same values."""
        made: Any = getattr(enum, base)(name, members, **({"type": getattr(builtins, mixin)} if mixin else {}))
        made.__getattr__ = lambda _, attribute: self.refuse_attribute(attribute, name)
        return made

    def namedtuple_class(self, name: str, fields: tuple[str, ...], defaults: tuple[Any, ...] = ()) -> Any:
        """Return a class of tuples with names; methods of the model's code are refused."""
        if (name, fields) not in self.named:
            missing = {"__getattr__": lambda _, attribute: self.refuse_attribute(attribute, name)}
            bases = (collections.namedtuple(name, fields, defaults=defaults),)
            self.named[name, fields] = type(name, bases, missing)
        return self.named[name, fields]


def plain_names() -> set[str]:
    """Return the names of the attributes of data, without those of paths, which other objects have too."""
    kinds = [imported(kind) for kind, (path, _) in ITEMS.items() if path and not path.startswith(NOT_PLAIN)]
    return {name for kind in [*kinds, *PLAIN] for name in dir(kind)}


def derived(name: str, base: type[BaseException]) -> type[BaseException]:
    """Return an exception of the model's code that extends one that the tests know."""
    own = () if issubclass(base, SolutionError) else (SolutionError,)
    return type(name, own if base is Exception else (*own, base), {"__module__": "solution"})


class SolutionModule(types.ModuleType):
    """The module `solution`, with the names of the model's code."""

    def __init__(self, connection: Connection) -> None:
        super().__init__("solution")
        self.__dict__["_gym_rm"] = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_gym_rm"].describe(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            self.__dict__["_gym_rm"].refuse(f"the tests replace {name!r} of the solution")
        super().__setattr__(name, value)
