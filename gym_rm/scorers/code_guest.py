"""What runs inside beside the model's code and beside the tests, to pass calls, objects and exceptions between them.

The source of these functions is executed in the sandboxed interpreters: `solver` after the model's code, `tester`
before the tests. Values cross as plain data: `["v", value]`, or tagged lists for what is not plain. An object of the
model's code stays with it, and the tests hold a proxy. Nothing here decides about a reward except the tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def _gym_rm_codec(
    write_object: Callable[[Any], list[Any]], read_object: Callable[[list[Any]], Any], own: Any = ()
) -> Any:
    """Return functions that turn values into plain data and back; values of the classes `own` are objects."""
    import builtins
    import sys

    atoms = (type(None), bool, int, float, complex, str, bytes)
    groups: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    parts: dict[str, Any] = {
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

    def kind_of(path: str) -> Any:
        module, _, name = path.partition(".")
        return getattr(sys.modules.get(module), name, None)

    def is_plain(value: Any) -> bool:
        if type(value) in own:
            return False
        if isinstance(value, dict):
            return all(is_plain(key) and is_plain(each) for key, each in value.items())
        return isinstance(value, atoms) or (
            isinstance(value, (list, tuple, set, frozenset)) and all(is_plain(each) for each in value)
        )

    def write(value: Any) -> list[Any]:
        if is_plain(value):
            return ["v", value]
        if type(value) in own:
            return write_object(value)
        if isinstance(value, dict):
            return ["d", [[write(key), write(each)] for key, each in value.items()]]
        for name, kind in groups.items():
            if isinstance(value, kind):
                return [name, [write(each) for each in value]]
        name = value.__name__ if isinstance(value, type) else ""
        if name and getattr(builtins, name, None) is value:
            return ["t", name]
        found = next((path for path in parts if type(value) is kind_of(path)), None)
        if found is not None and getattr(value, "tzinfo", None) is None:
            return ["x", found, parts[found](value)]
        return write_object(value)

    def read(data: list[Any]) -> Any:
        tag = data[0]
        if tag == "v":
            return data[1]
        if tag == "d":
            return {read(key): read(each) for key, each in data[1]}
        if tag in groups:
            return groups[tag](read(each) for each in data[1])
        if tag == "t":
            kind = getattr(builtins, data[1])
            if not isinstance(kind, type):
                raise TypeError(f"{data[1]} is no type")
            return kind
        if tag != "x" or data[1] not in parts:
            return read_object(data)
        __import__(data[1].partition(".")[0])
        return kind_of(data[1])(*data[2])

    return write, read


def _gym_rm_solver(names: dict[str, Any]) -> Callable[..., list[Any]]:
    """Return the function that serves the tests: calls, attributes and operators of the model's objects."""
    import builtins
    import operator

    objects: list[Any] = []
    named: set[Any] = set()  # classes that the tests name: a dict of such a class is more than a dict

    def write_object(value: Any) -> list[Any]:
        number = next((k for k, known in enumerate(objects) if known is value), len(objects))
        if number == len(objects):
            objects.append(value)
        return ["r", number, [each.__name__ for each in type(value).__mro__]]

    def read_object(data: list[Any]) -> Any:
        return names[data[1]] if data[0] == "c" else objects[data[1]]

    write, read = _gym_rm_codec(write_object, read_object, named)

    bases: Any = (int, float, str, bytes, list, tuple, dict, set, frozenset)

    def find(name: str) -> Any:
        if name not in names and isinstance(names.get("Solution"), type):
            return getattr(names["Solution"](), name)
        if name not in names:
            raise NameError(f"name {name!r} is not defined")
        return names[name]

    def describe(name: str) -> Any:
        if name not in names:
            return ["missing"]
        value = names[name]
        if isinstance(value, type):
            named.add(value)
            return ["class", [each.__name__ for each in value.__mro__]]
        return ["function"] if callable(value) else ["value", value]

    def run(action: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if action == "call":
            return find(name)(*args, **kwargs)
        if action == "describe":
            return describe(name)
        if action == "apply":
            return getattr(operator if hasattr(operator, name) else builtins, name)(*args)
        if action == "plain":
            return next((kind(args[0]) for kind in bases if isinstance(args[0], kind)), args[0])
        if action == "next":
            for value in args[0]:
                return [value]
            return []
        target = find(name.partition(".")[0]) if action.startswith("class ") else args.pop(0)
        name = name.partition(".")[2] or name
        if action == "set":
            return setattr(target, name, args[0])
        value = getattr(target, name)
        if action.endswith("get"):
            return [True, None] if callable(value) else [False, value]
        return value(*args, **kwargs)

    def serve(action: str, name: str, args: list[Any], kwargs: list[Any]) -> list[Any]:
        try:
            given = list(read(args))
            value = run(action, name, list(given), read(kwargs))
            if value is None and action in ("call", "method", "class call"):
                after = [each if type(each) in (list, dict, set, bytearray) else None for each in given]
                return [True, ["v", None], write(after)]
            return [True, write(value)]
        except MemoryError:
            raise
        except Exception as error:
            kinds = [each.__name__ for each in type(error).__mro__]
            of_key = isinstance(error, KeyError) and [type(each) for each in error.args] == [str]
            return [False, kinds, error.args[0] if of_key else str(error), write(error)]

    return serve


def _gym_rm_tester(ask: Callable[..., list[Any]], log: Callable[[], dict[str, Any]]) -> Any:
    """Return a function that makes a proxy of a function by its name, and the module `solution`."""
    import builtins
    import numbers
    import sys
    import types

    class BrokenAnswer(Exception):
        """The model's process answered something that this side cannot read."""

    class Unsupported(Exception):
        """The tests give the model's code something that cannot cross."""

    class Proxy:
        """An object of the model's code. It equals nothing. It can be called and has a truth and attributes."""

        _gym_rm_id = -1
        _gym_rm_kinds: Any = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            is_callable, value = do("get", name, [self], {})
            return (lambda *args, **kwargs: do("method", name, [self, *args], kwargs)) if is_callable else value

        def __setattr__(self, name: str, value: Any) -> None:
            do("set", name, [self, value], {})

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

        def __bool__(self) -> bool:
            return do("apply", "truth", [self], {}) is True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return do("method", "__call__", [self, *args], kwargs)

        def __iter__(self) -> Any:
            iterator = do("apply", "iter", [self], {})
            if not isinstance(iterator, Proxy):  # the iterator of a plain value
                yield from iterator
                return
            while found := do("next", "", [iterator], {}):
                yield found[0]

        def __next__(self) -> Any:
            found = do("next", "", [self], {})
            if not found:
                raise StopIteration
            return found[0]

    def operators() -> dict[str, Any]:
        """Return the operators of classes that the tests name themselves."""

        def unary(name: str) -> Any:
            return lambda self, *args: do("apply", name, [self, *args], {})

        def compared(name: str, otherwise: bool) -> Any:
            def compare(self: Any, other: Any) -> Any:
                if isinstance(other, Proxy):
                    return do("apply", name, [self, other], {}) is True
                value = plain(self)
                return otherwise if isinstance(value, Proxy) else (value == other) is not otherwise

            return compare

        def no_number(name: str) -> Any:
            """Return an operator that the model's code does not decide for numbers: it would be near to any number."""

            def operate(self: Any, other: Any) -> Any:
                if not isinstance(other, numbers.Number):
                    return found[f"_{name}"](self, other)
                value = plain(self)
                return NotImplemented if isinstance(value, Proxy) else getattr(value, name)(other)

            return operate

        found: dict[str, Any] = {f"__{name}__": unary(name) for name in (
            *("len", "str", "repr", "bool", "hash", "int", "float", "abs", "round", "neg", "pos", "invert"),
            *("contains", "getitem", "setitem", "delitem", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv"),
            *("floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "matmul"),
        )}  # fmt: skip
        found |= {"__and__": found.pop("__and___"), "__or__": found.pop("__or___")}
        found |= {"__eq__": compared("eq", False), "__ne__": compared("ne", True)}
        for name in ("enter", "exit", "call"):
            found[f"__{name}__"] = lambda self, *args, _name=f"__{name}__", **kwargs: do(
                "method", _name, [self, *args], kwargs
            )
        found |= {"__iadd__": unary("iadd"), "__isub__": unary("isub")}
        for name in ("radd", "rsub", "rmul", "rtruediv"):
            found[f"__{name}__"] = lambda self, *args, _name=f"__{name}__": do("method", _name, [self, *args], {})
        for name in ("__lt__", "__le__", "__gt__", "__ge__", "__sub__", "__rsub__"):
            found[f"_{name}"] = found[name]
            found[name] = no_number(name)
        return found

    def plain(value: Any) -> Any:
        """Return a copy of an object of a class that extends a builtin one, which compares as the language says.

        The first answer stays if it cannot change: one that changes could be on both sides of a number.
        """
        if "_gym_rm_plain" not in value.__dict__:
            answer = do("plain", "", [value], {})
            if isinstance(answer, (Proxy, list, dict, set)):
                return answer
            value.__dict__["_gym_rm_plain"] = answer
        return value.__dict__["_gym_rm_plain"]

    class ClassProxy(type):
        """A class of the model's code."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return do("call", cls.__name__, list(args), kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return cls.__name__ in type(value)._gym_rm_kinds if isinstance(value, Proxy) else False

        def __subclasscheck__(cls, kind: Any) -> bool:
            return cls.__name__ in getattr(kind, "_gym_rm_kinds", ())

        def __bool__(cls) -> bool:
            return True

        def __iter__(cls) -> Any:
            return Proxy.__iter__(cls)  # type: ignore[arg-type]

        def __len__(cls) -> Any:
            return do("apply", "len", [cls], {})

        def __contains__(cls, value: Any) -> Any:
            return do("apply", "contains", [cls, value], {})

        def __getitem__(cls, key: Any) -> Any:
            return do("apply", "getitem", [cls, key], {})

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            path = f"{cls.__name__}.{name}"
            is_callable, value = do("class get", path, [], {})
            return (lambda *args, **kwargs: do("class call", path, list(args), kwargs)) if is_callable else value

    library = {"FrozenInstanceError": "dataclasses", "JSONDecodeError": "json", "StatisticsError": "statistics"}
    library |= {"InvalidOperation": "decimal", "DivisionByZero": "decimal", "Empty": "queue", "Full": "queue"}
    proxies: dict[int, Any] = {}
    classes: dict[str, Any] = {}

    def class_of(kinds: list[str]) -> Any:
        """Return the class that the tests name among these, most special first."""
        return next((classes[name] for name in kinds if name in classes), Proxy)

    def exception_of(kinds: list[str]) -> Any:
        for k, name in enumerate(kinds):
            module = sys.modules.get(library.get(name, ""))  # if the tests name it, they have imported it
            found = classes.get(name) or getattr(builtins, name, None) or getattr(module, name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                base = RuntimeError if issubclass(found, StopIteration) else found
                return base if k == 0 else type(kinds[0], (base,), {})
        return Exception

    def write_object(value: Any) -> list[Any]:
        if isinstance(value, Proxy):
            return ["r", object.__getattribute__(value, "_gym_rm_id")]
        name = str(getattr(value, "__name__", ""))
        if isinstance(value, type) and classes.get(name) is value:
            return ["c", name]
        held = getattr(value, "_gym_rm_held", None)
        if held is not None:
            return ["r", held]
        log()["unsupported"] = f"the tests give the model's code an object of the type {type(value).__name__}"
        raise Unsupported(log()["unsupported"])

    def read_object(data: list[Any]) -> Any:
        if data[1] not in proxies:
            kind = class_of(data[2])
            proxies[data[1]] = object.__new__(kind if issubclass(kind, Proxy) else Proxy)
            object.__setattr__(proxies[data[1]], "_gym_rm_id", data[1])
        return proxies[data[1]]

    write, read = _gym_rm_codec(write_object, read_object)

    def changed(value: Any, after: Any) -> None:
        """Change an argument as a function without a result did, which is how it says what it has done."""
        if type(value) is not type(after) or value == after:
            return
        if isinstance(value, (list, bytearray)):
            value[:] = after
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(after)

    def do(action: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        reply = ask(action, name, write(args), write(kwargs))
        try:
            if reply[0]:
                value = read(reply[1])
                for one, after in zip(args, read(reply[2]), strict=False) if len(reply) > 2 else ():
                    changed(one, after)
                if action == "describe" and (type(value) is not list or not value or type(value[0]) is not str):
                    raise BrokenAnswer(f"no description: {value!r:.100}")
                return value
            kind = exception_of(reply[1])
            try:
                error = kind(reply[2])
            except TypeError:  # of more arguments
                error = kind.__new__(kind, reply[2])
        except Exception as broken:
            raise BrokenAnswer(f"{type(broken).__name__}: {broken}") from None
        if reply[3] and reply[3][0] == "r":
            held = object.__new__(Proxy)
            object.__setattr__(held, "_gym_rm_id", reply[3][1])
            for name in ("code", "value", "errors", "reason", "details"):
                if kind.__name__ in classes:
                    try:
                        setattr(error, name, getattr(held, name))
                    except Exception:
                        continue
            error._gym_rm_held = reply[3][1]
        raise error

    def function(name: str) -> Any:
        def proxy(*args: Any, **kwargs: Any) -> Any:
            return do("call", name, list(args), kwargs)

        proxy.__name__ = name
        return proxy

    def named_class(name: str, kinds: list[str]) -> Any:
        if name not in classes:
            if "BaseException" in kinds[1:]:
                base = exception_of(kinds[1:]) if hasattr(builtins, kinds[1]) else named_class(kinds[1], kinds[1:])
                classes[name] = type(name, (base,), {})
            else:
                classes[name] = ClassProxy(name, (class_of(kinds[1:]),), operators() | {"_gym_rm_kinds": kinds})
        return classes[name]

    class Solution(types.ModuleType):
        """The module of the model's code."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            described = do("describe", name, [], {})
            if described[0] == "missing":
                raise AttributeError(f"module 'solution' has no attribute {name!r}")
            if described[0] == "class":
                return named_class(name, described[1])
            return function(name) if described[0] == "function" else described[1]

    return function, Solution("solution")


CODEC = f"from __future__ import annotations\n{inspect.getsource(_gym_rm_codec)}"
SOLVER = f"{CODEC}\n{inspect.getsource(_gym_rm_solver)}\n_gym_rm_serve = _gym_rm_solver(globals())\n"
TESTER = f"{CODEC}\n{inspect.getsource(_gym_rm_tester)}\n"
BIND = """
_gym_rm_log = {}
_gym_rm_function, __import__("sys").modules["solution"] = _gym_rm_tester(
    lambda *request: __host__("serve", request), lambda: _gym_rm_log
)
"""
