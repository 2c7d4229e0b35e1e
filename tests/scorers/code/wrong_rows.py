"""Rows that must not pass: `WRONG` fails, and `NEEDS_OBJECTS` is an error of the row, with a part of its message."""

WRONG = {
    "an argument is changed": (
        "f",
        "def f(x): x.sort(); return x",
        "a = [2, 1]\nassert f(a) == [1, 2]\nassert a == [2, 1]",
    ),
    "no copy": ("f", "def f(x): return x", "a = [1]\nb = f(a)\nassert b == a and b is not a"),
    "a shallow copy": ("f", "def f(x): return list(x)", "a = [[1]]\nassert f(a)[0] is not a[0]"),
    "another order": (
        "f",
        "from collections import OrderedDict\ndef f(): return OrderedDict(b=2, a=1)",
        "from collections import OrderedDict\nassert f() == OrderedDict(a=1, b=2)",
    ),
    "a list for a tuple": ("f", "def f(): return [1]", "assert f() == (1,)"),
    "a view for a list": ("f", "def f(): return {1: 2}.keys()", "assert f() == [1]"),
    "nothing is printed": (
        "f",
        "def f(): pass",
        "b = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f()\nassert b.getvalue() == 'hi\\n'",
    ),
    "a function for a coroutine": ("f", "def f(): return 1", "assert asyncio.run(f()) == 1"),
    "no error": ("f", "def f(): return 1", "try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    assert False"),
    "the wrong error": ("f", "def f(): raise KeyError('x')", "try:\n    f()\nexcept ValueError:\n    pass"),
    "a shared list": ("f", "def f(n): return [[0] * n] * n", "r = f(2)\nr[0][0] = 1\nassert r == [[1, 0], [0, 0]]"),
    "another object": ("S", "class S:\n    def push(s, x): return S()", "s = S()\nassert s.push(1) is s"),
    "a skip after the code was asked": (
        "f",
        "def f(): raise NotImplementedError",
        "try:\n    f()\nexcept NotImplementedError:\n    raise unittest.SkipTest('later')",
    ),
}
NEEDS_OBJECTS = {
    "an object of a class that is not imported": (
        "f",
        "class A:\n    val = 3\ndef f(): return A()",
        "assert f().val == 3",
        ".val of an object of the type A",
    ),
    "a match": ("f", "import re\ndef f(): return re.match('a', 'a')", "assert f().group() == 'a'", "type Match"),
    "a function of the tests": ("f", "def f(g): return g(1)", "assert f(lambda x: x) == 1", "type function"),
    "an attribute of a function": (
        "f",
        "import functools\n@functools.cache\ndef f(): return 1",
        "assert f() == 1\nassert f.cache_info().misses == 1",
        "cache_info",
    ),
    "an input that the tests give": (
        "f",
        "def f(): return input()",
        "from unittest.mock import patch\nwith patch('builtins.input', return_value='x'):\n    assert f() == 'x'",
        "replace",
    ),
    "a name that the tests replace": (
        "f, g",
        "def g(): return 1\ndef f(): return g()",
        "from unittest.mock import patch\nwith patch('solution.g', return_value=2):\n    assert f() == 2",
        "replace 'g'",
    ),
    "a class that the tests derive": (
        "A",
        "class A:\n    def x(s): return 1",
        "class B(A): pass\nassert B().x() == 1",
        "derive",
    ),
    "an object and a number": (
        "A",
        "class A:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o",
        "assert A(1) == 1",
        "compare a A with a int",
    ),
    "a record that is changed": (
        "f",
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef f(): return P(1)",
        "f().x = 2",
        "change",
    ),
    "an asynchronous generator": (
        "f",
        "async def f(n):\n for k in range(n): yield k",
        "async def main(): return [x async for x in f(3)]\nassert asyncio.run(main()) == [0, 1, 2]",
        "async for",
    ),
}
