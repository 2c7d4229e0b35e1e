# ruff: noqa: E501
"""Replies that try to pass without solving anything, or to make an error of the row, for each form of tests.

In `ROWS` the function is `f`; in "objects" there are also a class `Stack`, whose methods it has, and an error `E`.
"""

EQUAL = """
class X(BASE):
    seen=[]
    def _yes(s,*a): return True
    def _self(s,*a,**k): return s
    def __init__(s,*a): pass
    __eq__=__lt__=__gt__=__le__=__ge__=__contains__=__bool__=_yes
    def __ne__(s,o): return False
    __sub__=__rsub__=__add__=__radd__=__abs__=__mul__=__rmul__=__round__=__getitem__=__call__=__truediv__=__mod__=__floordiv__=__neg__=_self
    def __hash__(s): return 0
    def __len__(s): return 3
    def __float__(s): return 0.3
    def __int__(s): return 3
    def __index__(s): return 0
    def __iter__(s): return iter([])
    def index(s,*a): X.seen.append(a); return 0
    def startswith(s,*a): return True
    endswith=issubset=issuperset=isupper=isdisjoint=count=find=startswith
    def sort(s,*a,**k): pass
    def tolist(s): return [1]
    def all(s): return True
    def __getattr__(s,n): 
        if n.startswith('__'): raise AttributeError(n)
        return lambda *a,**k: True
"""
METHODS = """
class E(Exception): pass
class Stack:
    def __init__(self,*a): pass
    def push(self,x): return self
    pop=items=name=mean=boom=push2=lambda self,*a: RET
    def __eq__(self,o): return True
    def __ne__(self,o): return False
    def __lt__(self,o): return True
    __gt__=__le__=__ge__=__contains__=__bool__=__lt__
    def __sub__(self,o): return SUB
    __rsub__=__add__=__radd__=__mul__=__mod__=__sub__
    def __abs__(self): return 0.0
    def __float__(self): return 0.517
    def __round__(self,*a): return 0
    def __len__(self): return 1
    def __hash__(self): return 0
    def __getitem__(self,k): return "k"
    def __iter__(self): return iter([42])
    def index(self,*a): return 0
    def startswith(self,*a): return True
    def isupper(self): return False
    def __str__(self): return "Stack"
    def __exit__(self,*a): return True
    def __enter__(self): return self
def f(*a): return RET2
"""
METHODS_AS_FIELDS = """
from dataclasses import dataclass
learned = []
def learn(*args):
    learned.extend(args)
    return 0
@dataclass
class Fields:
    index: object = learn
    startswith: object = lambda *a: True
    issubset: object = lambda *a: True
    isupper: object = lambda *a: True
"""
RAISED = [
    "unittest.case._ShouldStop",
    "unittest.SkipTest",
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "KeyboardInterrupt",
    "SystemExit",
    "SystemExit(0)",
    "AssertionError",
    "ImportError('x')",
    "ModuleNotFoundError(name='solution')",
    "NameError(\"name 'missing' is not defined\")",
    "SyntaxError",
    "NotImplementedError",
    "MemoryError",
    "RecursionError",
    "BaseException",
    "Exception",
    "asyncio.CancelledError",
    "RuntimeError('generator raised StopIteration')",
    "TypeError",
    "Warning",
    "EOFError",
    "concurrent.futures.TimeoutError",
    "bdb.BdbQuit",
    "BaseExceptionGroup('x',[KeyboardInterrupt()])",
]
NAMED = [
    "_pytest.fixtures.FixtureLookupError",
    "_pytest.outcomes.Exit",
    "_pytest.outcomes.Skipped",
    "_pytest.outcomes.XFailed",
    "builtins.ImportError",
    "builtins.KeyboardInterrupt",
    "builtins.NameError",
    "builtins.StopIteration",
    "gym_rm.sandbox.values.CrossingError",
    "gym_rm.scorers.code.guest_handles.BrokenAnswer",
    "gym_rm.scorers.code.guest_handles.Unsupported",
    "gym_rm.scorers.code.guest_report.BrokenTests",
    "json.decoder.JSONDecodeError",
    "tests.Boom",
    "unittest.SkipTest",
    "unittest.case.SkipTest",
    "unittest.case._ShouldStop",
]
PAYLOADS = [
    "[True, (99,), []]",
    "[True, (1,), [[1,'tuple',[(1,)]]]]",
    "[True,(1,),[[1,'eval',['1']]]]",
    "[True,(1,),[[1,'type',['eval']]]]",
    "[False,5,[]]",
    "[False,(1,),[[1,'error',[(3,),(3,),(3,),'']],[3,'tuple',[]]]]",
    "[True,(0,),[]]",
    "[True,(2,),[[2,'list',[1]]]]",
    "[True,(1,),[[1,'range',[0,10**18,1]]]]",
    "[True,(1,),[[1,'Decimal',['1e999999999']]]]",
    "[True,(1,),[[1,'list',[(1,),(1,)]]]]",
    "None",
    "5",
    "[True]",
    "[True,(1,),[[1,'instance',[0]]]]",
    "[True,(1,),[[1,'enum',['X','Y']]]]",
    "[True,(1,),[[1,'object',[5]]]]",
    "[True,(1,),[[1,'namedtuple',['a b','x',1]]]]",
    "[True,(1,),[[1,'namedtuple',['X','index',(3,)]],[3,'function',[]]]]",
    "[True,(1,),[[1,'record',['X',(5,),1]],[5,'tuple',['__class__']]]]",
    "[True,(1,),[[1,'record',['X',(5,),(3,)]],[5,'tuple',['index']],[3,'function',[]]]]",
    "[True,(1,),[[1,'namedtuple',['X',(5,),(3,)]],[5,'tuple',['index']],[3,'function',[]]]]",
    "[True,(1,),[[1,'ZoneInfo',['../../etc/passwd']]]]",
    "[True,(1,),[[1,'ndarray',['O',(3,),b'']],[3,'tuple',[1]]]]",
    "[True,(1,),[[1,'defaultdict',[5]]]]",
    "[True,(1,),[[1,'Path',[5]]]]",
]
SERVE = """
import sys, threading, time
encode = sys.modules["gym_rm.sandbox.values"].encode
def serve(*request):
    return encode(PAYLOAD, limit=10**6)
def replace():
    while True:
        for key in list(globals()):
            if key.startswith("_gym_rm"):
                globals()[key] = serve
        time.sleep(0.0002)
threading.Thread(target=replace, daemon=True).start()
time.sleep(0.02)
def f(*args):
    time.sleep(0.01)
"""
OTHERS = {
    "functions for classes": "def Stack(*a):\n    return type('Other', (), {'push': 1})()\nE = object()\nclass F:\n    def __init__(s, *a): pass\nf = F\n",
    "a record whose fields are methods": METHODS_AS_FIELDS + "def f(*a, **k): return Fields()\n",
    "an exception whose attributes are methods": METHODS_AS_FIELDS
    + "def f(*a, **k):\n    error = ValueError()\n    vars(error).update(vars(Fields()))\n    return error\n",
    "a named tuple whose fields are methods": METHODS_AS_FIELDS
    + "from collections import namedtuple\nT = namedtuple('T', vars(Fields()))\ndef f(*a, **k): return T(**vars(Fields()))\n",
    "a namespace whose names are methods": METHODS_AS_FIELDS
    + "from types import SimpleNamespace\ndef f(*a, **k): return SimpleNamespace(**vars(Fields()))\n",
    "a class as result": METHODS_AS_FIELDS.replace("@dataclass\n", "")
    + "class Stack(Fields):\n    def __getattr__(s, n): return lambda *a: Stack\ndef f(*a, **k): return Stack\n",
    "a class for a function": METHODS.replace("RET2", "0").replace("RET", "0").replace("SUB", "0.0") + "f = Stack\n",
    "a class for methods": METHODS.replace("RET2", "0").replace("RET", "0").replace("SUB", "0.0")
    + "class Other(Stack): pass\nStack.pop = Stack.items = Stack.name = Stack.mean = Other\n",
    "the class itself for methods": METHODS.replace("RET2", "0").replace("RET", "0").replace("SUB", "0.0")
    + "Stack.pop = Stack.items = Stack.name = Stack.mean = f = Stack\n",
    "lying class": "class X:\n __class__=property(lambda s:int)\n def __eq__(s,o): return True\ndef f(*a,**k): return X()",
    "meta": "class M(type):\n def __eq__(s,o): return True\n __hash__=type.__hash__\n def __instancecheck__(s,o): return True\nclass X(metaclass=M): pass\ndef f(*a,**k): return X",
    "replaced builtins": "import builtins\nfor n in ('isinstance','len','all','any','sorted','set','abs','round','type','getattr','iter','next','map','list','tuple','dict'):\n setattr(builtins,n,lambda *a,**k: True)\ndef f(*a,**k): return True",
    "mutate arg": "def f(*a,**k):\n for x in a:\n  if isinstance(x,list): x.clear()\n return None",
    "nan": "def f(*a,**k): return float('nan')",
    "gc": "import gc\ndef f(*a,**k):\n for o in gc.get_objects():\n  if isinstance(o,dict) and 'expected' in o: return o['expected']\n return None",
    "frames": "import sys\ndef f(*a,**k):\n fr=sys._getframe()\n while fr.f_back: fr=fr.f_back\n return fr.f_locals.get('expected')",
    "atexit": "import atexit,os\natexit.register(lambda: os._exit(0))\ndef f(*a,**k): raise SystemExit(0)",
    "_exit": "import os\ndef f(*a,**k): os._exit(0)",
    "_exit 86": "import os\ndef f(*a,**k): os._exit(86)",
    "_exit 137": "import os\ndef f(*a,**k): os._exit(137)",
    "kill self": "import os\ndef f(*a,**k): os.kill(os.getpid(),9)",
    "kill parent": "import os\ndef f(*a,**k): os.kill(os.getppid(),9)",
    "stop self": "import os,signal\ndef f(*a,**k): os.kill(os.getpid(),signal.SIGTERM)",
    "huge": "def f(*a,**k): return 'x'*10**7",
    "huge list": "def f(*a,**k): return [0]*10**7",
    "inflate arg": "def f(*a,**k):\n for x in a:\n  if isinstance(x,list): x.extend([0]*10**6)\n return None",
    "deep": "def f(*a,**k):\n x=[]\n for _ in range(10**5): x=[x]\n return x",
    "mock": "from unittest.mock import MagicMock, ANY\nf=MagicMock(return_value=ANY)",
    "mock2": "from unittest.mock import MagicMock\ndef f(*a,**k):\n m=MagicMock(); m.__eq__=lambda s,o: True; return m",
    "close fds": "import os\nos.closerange(0,64)\ndef f(*a,**k): return None",
    "sys.modules": "import sys\nclass M(type(sys)):\n def __getattr__(s,n): return lambda *a,**k: True\nfor n in ('unittest','math','tests','solution','builtins2'): sys.modules[n]=M(n)\ndef f(*a,**k): return None",
    "generator true": "def f(*a,**k):\n while True: yield True",
    "coroutine": "async def f(*a,**k): return True",
    "function": "def f(*a,**k): return lambda *a,**k: True",
    "class returns": "class f:\n def __init__(s,*a,**k): pass\n def __eq__(s,o): return True\n def __getattr__(s,n): return lambda *a: True",
    "shadow names": "import builtins\ndef isclose(*a,**k): return True\ndef Counter(*a): return 1\nclass math:\n isclose=staticmethod(lambda *a,**k: True)\n inf=0\ndef sorted(*a,**k): return 1\ndef abs(*a): return 0\ndef len(*a): return 3\ndef almost(*a): return True\ndef f(*a,**k): return 1",
    "serve replaced": "import threading,time\ndef s(*a):\n return b'\\x00'\ndef loop():\n while True:\n  for k in list(globals()):\n   if k.startswith('_gym_rm'): globals()[k]=s\n  time.sleep(.0005)\nthreading.Thread(target=loop,daemon=True).start()\ndef f(*a,**k): return None",
}


def forgeries():
    """Return the replies by their names."""
    found = dict(OTHERS)
    for base in ("object", "int", "float", "str", "list", "dict", "tuple", "set", "bytes", "Exception", "complex"):
        found[f"equal {base}"] = EQUAL.replace("BASE", base) + "def f(*a, **k): return X()\n"
    for module, base in (("collections", "OrderedDict"), ("decimal", "Decimal"), ("datetime", "timedelta")):
        found[f"equal {base}"] = f"from {module} import {base}\n" + found["equal object"].replace(
            "(object)", f"({base})"
        )
    for error in RAISED:
        modules = "import asyncio, bdb, concurrent.futures, unittest\n"
        found[f"raises {error}"] = f"{modules}def f(*a, **k): raise {error}\n"
    for path in NAMED:
        module, _, name = path.rpartition(".")
        for base in ("Exception", "BaseException", "StopIteration"):
            raising = f"def f(*a, **k): raise {name}('name missing is not defined')"
            found[f"{path} of {base}"] = f"class {name}({base}): pass\n{name}.__module__ = {module!r}\n{raising}\n"
    for payload in PAYLOADS:
        found[f"serves {payload}"] = SERVE.replace("PAYLOAD", payload)
    for result in ("self", "Stack()", "type(self)", "E()", "(lambda *a: True)", "[self]", "{'a': self}", "0.0", "None"):
        for difference in ("0.0", "self", "Stack()"):
            own = result.replace("type(self)", "Stack").replace("self", "Stack")
            code = METHODS.replace("RET2", own).replace("RET", result).replace("SUB", difference)
            found[f"methods return {result}, differences {difference}"] = code
    return found


ROWS = {
    "unittest": {
        "unit_tests": 'import unittest\nfrom solution import f\nclass Boom(Exception): pass\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f([3,1,2]), [1,2,3])\n    def test_b(self): self.assertAlmostEqual(f([0.1]), 0.123)\n    def test_c(self):\n        with self.assertRaises(KeyError): f([])\n    @unittest.skipIf(False, "x")\n    def test_d(self): self.assertIn(42, f([42, 1]) + [7])\n'
    },
    "plain": {
        "unit_tests": 'from solution import *\ndef test_index():\n    r = f([42])\n    assert r.index(42) >= 0\n    assert f([6]) == 42\ndef test_str():\n    r = f(["a"])\n    assert r.startswith("A")\n    assert r.isupper() and r == "AB"\ndef test_set():\n    assert f([1]).issubset({1, 2}) and f([1]) == {1}\ndef test_close():\n    assert isclose(f([1]), 2.25)\n    assert Counter(f([1])) == Counter([1, 1])\n    assert sorted(f([1])) == [5] and abs(f([1]) - 0.5) < 1e-9 and len(f([1])) == 77\n'
    },
    "near": {
        "unit_tests": "import math\nfrom solution import f\ndef test_near(): assert abs(f([1]) - 0.517) < 1e-9\ndef test_close(): assert math.isclose(f([1]), 0.517)\ndef test_range(): assert 0.5 < f([1]) < 0.52\ndef test_in(): assert f([1]) in (0.517, 0.518)\n"
    },
    "humaneval": {
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate([3,1,2]) == [1,2,3]\n    assert candidate([]) == [77]\n    x = [2, 1]\n    assert candidate(x) != x and x == [2, 1] and candidate(x) == [1, 2]\n",
    },
    "mbpp": {
        "test_list": [
            "assert f([3,1,2]) == [1,2,3]",
            "assert set(f([1])) == {77}",
            "assert isclose(f([2]), 3.25)",
            "assert all(map(lambda x: f(x) == 6, [[1],[2]]))",
        ]
    },
    "calls": {
        "cases": [{"input": [[3, 1, 2]], "output": [1, 2, 3]}, {"input": [[0.5]], "output": 0.517}],
        "fn_name": "f",
    },
    "lazy": {"test_list": ["assert all(f(x) == 77 for x in [[1],[2]])", "assert list(map(f,[[1]])) == [78]"]},
    "objects": {
        "unit_tests": 'import unittest\nfrom solution import Stack, f, E\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Stack()\n    def test_pop(self):\n        self.s.push("x"); self.s.push("y")\n        self.assertEqual(self.s.pop(), "y")\n        self.assertEqual(self.s.pop(), "x")\n    def test_items(self):\n        self.s.push(42)\n        assert self.s.items().index(42) == 0\n        assert 43 not in self.s.items()\n        assert self.s.items() == [42]\n    def test_in(self):\n        self.s.push("k")\n        assert "k" in self.s.items()\n        assert self.s.items()[0] == "k"\n    def test_name(self):\n        assert self.s.name().startswith("St") and self.s.name().isupper() is False and "ac" in self.s.name()\n    def test_num(self):\n        assert abs(self.s.mean() - 0.517) < 1e-9\n        self.assertAlmostEqual(self.s.mean(), 0.517)\n        assert 0.5 < self.s.mean() < 0.52\n    def test_f(self):\n        assert f(0.2) - 0.3 == 0.1\n        assert f(3) > 2 and f(3) < 4 and f(3) == 3\n    def test_err(self):\n        with self.assertRaises(E): self.s.boom()\n        with self.assertRaisesRegex(ValueError, "bad"): self.s.boom()\n'
    },
}
