# ruff: noqa: E501
"""Honest rows as data: what crosses between the model's code and its tests.

Each passes: names that the tests import, a solution, the body of a test.
"""

RIGHT = {
    "namedtuple": (
        "f",
        "from collections import namedtuple\nP=namedtuple('P','x y')\ndef f(): return P(1,2)",
        "r=f(); assert r.x==1 and r==(1,2); a,b=r; assert r._asdict()=={'x':1,'y':2}",
    ),
    "ordered": (
        "f",
        "from collections import OrderedDict\ndef f(): return OrderedDict([('a',1),('b',2)])",
        "from collections import OrderedDict\nassert f()==OrderedDict([('a',1),('b',2)]); assert f()!=OrderedDict([('b',2),('a',1)]); f().move_to_end('a')",
    ),
    "defaultdict": (
        "f",
        "from collections import defaultdict\ndef f():\n d=defaultdict(list); d['a'].append(1); return d",
        "r=f(); assert r=={'a':[1]}; assert r['z']==[]",
    ),
    "defaultdict lambda": (
        "f",
        "from collections import defaultdict\ndef f():\n d=defaultdict(lambda: 5); return d",
        "assert f()['z']==5",
    ),
    "counter": (
        "f",
        "from collections import Counter\ndef f(): return Counter('aab')",
        "r=f(); assert r['a']==2 and r.most_common(1)==[('a',2)] and r['zz']==0",
    ),
    "deque": (
        "f",
        "from collections import deque\ndef f(): return deque([1,2],maxlen=2)",
        "r=f(); r.appendleft(0); assert list(r)==[0,1]; assert r.maxlen==2",
    ),
    "dataclass": (
        "f",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n x:int\n y:list\ndef f(): return P(1,[2])",
        "r=f(); assert r.x==1 and r.y==[2]; assert f()==f()",
    ),
    "datetime": (
        "f",
        "import datetime\ndef f(): return datetime.datetime(2020,1,2,tzinfo=datetime.timezone.utc)",
        "import datetime\nassert f()==datetime.datetime(2020,1,2,tzinfo=datetime.timezone.utc); assert f().year==2020",
    ),
    "zone": (
        "f",
        "import datetime,zoneinfo\ndef f(): return datetime.datetime(2020,1,2,tzinfo=zoneinfo.ZoneInfo('UTC'))",
        "import datetime\nassert f()==datetime.datetime(2020,1,2,tzinfo=datetime.timezone.utc)",
    ),
    "date delta time": (
        "f",
        "import datetime\ndef f(): return [datetime.date(2020,1,2), datetime.timedelta(days=1), datetime.time(1,2)]",
        "import datetime\nassert f()==[datetime.date(2020,1,2), datetime.timedelta(1), datetime.time(1,2)]",
    ),
    "decimal": (
        "f",
        "from decimal import Decimal\ndef f(): return Decimal('1.10')",
        "from decimal import Decimal\nassert f()==Decimal('1.1') and str(f())=='1.10'",
    ),
    "fraction": (
        "f",
        "from fractions import Fraction\ndef f(): return Fraction(1,3)",
        "from fractions import Fraction\nassert f()*3==1 and f().numerator==1",
    ),
    "uuid": (
        "f",
        "import uuid\ndef f(): return uuid.UUID(int=5)",
        "import uuid\nassert f()==uuid.UUID(int=5) and len(str(f()))==36",
    ),
    "path": (
        "f",
        "from pathlib import Path\ndef f(): return Path('/a')/'b.txt'",
        "from pathlib import Path\nassert f()==Path('/a/b.txt') and f().suffix=='.txt'",
    ),
    "array": (
        "f",
        "import array\ndef f(): return array.array('i',[1,2])",
        "import array\nassert f()==array.array('i',[1,2]) and f()[0]==1",
    ),
    "range": ("f", "def f(): return range(3)", "assert f()==range(3) and list(f())==[0,1,2]"),
    "views": ("f", "def f(): return {'a':1}.keys()", "assert f()=={'a'} and list(f())==['a'] and sorted(f())==['a']"),
    "values view": ("f", "def f(): return {'a':[1]}.values()", "assert list(f())==[[1]]"),
    "items view": ("f", "def f(): return {'a':[1]}.items()", "assert list(f())==[('a',[1])]"),
    "complex bytes": (
        "f",
        "def f(): return [1j, b'x', bytearray(b'y'), frozenset([1]), ...][:4]",
        "assert f()==[1j,b'x',bytearray(b'y'),frozenset([1])]",
    ),
    "bigint": ("f", "def f(): return 10**9000", "assert f()==10**9000; assert len(str(f()))==9001"),
    "subclassed list": (
        "f",
        "class L(list):\n def sort(self): 1/0\ndef f(): return L([2,1])",
        "r=f(); r.sort(); assert r==[1,2]",
    ),
    "str subclass": (
        "f",
        "class S(str): pass\ndef f(): return S('ab')",
        "assert f()=='ab' and f().upper()=='AB' and isinstance(f(),str)",
    ),
    "mutation arg": ("f", "def f(x): x.sort(); return len(x)", "a=[2,1]; assert f(a)==2; assert a==[1,2]"),
    "mutation nested": (
        "f",
        "def f(x): x['k'].append(3); return x['k']",
        "a={'k':[1]}; r=f(a); assert r is a['k'] and a=={'k':[1,3]}",
    ),
    "mutation kwargs": ("f", "def f(*,x): x.append(3); return 1", "a=[]; f(x=a); assert a==[3]"),
    "mutation replaced": (
        "f",
        "def f(g): g[0]=[9]; return g",
        "a=[[1],[2]]; b=a[1]; r=f(a); assert r is a and a[1] is b and a==[[9],[2]]",
    ),
    "mutation and raise": (
        "f",
        "def f(x):\n x.append(1); raise ValueError('no')",
        "a=[]\ntry:\n    f(a)\nexcept ValueError as e:\n    assert str(e)=='no'\nassert a==[1]",
    ),
    "mutation set deque bytearray": (
        "f",
        "def f(s,d,b):\n s.add(1); d.append(2); b.extend(b'x')",
        "from collections import deque\ns,d,b=set(),deque(),bytearray()\nf(s,d,b); assert s=={1} and list(d)==[2] and b==b'x'",
    ),
    "not mutated": ("f", "def f(x): return sorted(x)", "a=[2,1]; b=f(a); assert a==[2,1] and b is not a and b==[1,2]"),
    "copy deep": (
        "f",
        "import copy\ndef f(x): return copy.deepcopy(x)",
        "a=[[1]]; b=f(a); assert b==a and b is not a and b[0] is not a[0]",
    ),
    "copy shallow": ("f", "def f(x): return list(x)", "a=[[1]]; b=f(a); assert b is not a and b[0] is a[0]"),
    "alias in result": ("f", "def f(n): return [[0]*n]*n", "r=f(2); r[0][0]=1; assert r==[[1,0],[1,0]]"),
    "cycle": ("f", "def f():\n a=[]; a.append(a); return a", "r=f(); assert r[0] is r"),
    "tuple identity": ("f", "def f(t): return t", "t=(1,[2]); assert f(t) is t"),
    "print redirected": (
        "f",
        "def f(): print('hi'); return 1",
        "b=io.StringIO()\nwith contextlib.redirect_stdout(b):\n    print('a'); f(); print('z')\nassert b.getvalue()=='a\\nhi\\nz\\n'",
    ),
    "print stderr": (
        "f",
        "import sys\ndef f(): print('hi',file=sys.stderr)",
        "b=io.StringIO()\nwith contextlib.redirect_stderr(b):\n    f()\nassert b.getvalue()=='hi\\n'",
    ),
    "patch stdout": (
        "f",
        "def f(): print('hi')",
        "from unittest.mock import patch\nwith patch('sys.stdout', new_callable=io.StringIO) as b:\n    f()\nassert b.getvalue()=='hi\\n'",
    ),
    "asyncio": (
        "f",
        "import asyncio\nasync def f(x):\n await asyncio.sleep(0.01); return x+1",
        "assert asyncio.run(f(1))==2",
    ),
    "asyncio gather": (
        "f",
        "import asyncio\nasync def f(x):\n await asyncio.sleep(0.01); return x+1",
        "async def main(): return await asyncio.gather(f(1),f(2))\nassert asyncio.run(main())==[2,3]; assert asyncio.iscoroutine(c:=f(1)); c.close()",
    ),
    "async error": (
        "f",
        "async def f(x): raise KeyError(x)",
        "try:\n    asyncio.run(f(1)); assert False\nexcept KeyError as e:\n    assert e.args==(1,)",
    ),
    "generator": (
        "f",
        "def f(n):\n for k in range(n): yield k",
        "import types\nassert isinstance(f(3), types.GeneratorType); assert list(f(3))==[0,1,2]; g=f(2); assert next(g)==0 and next(g)==1; assert next(g,None) is None",
    ),
    "infinite generator": (
        "f",
        "import itertools\ndef f(): return itertools.count(1)",
        "g=f(); assert [next(g) for _ in range(3)]==[1,2,3]",
    ),
    "send": ("f", "def f():\n x=0\n while True: x = (yield x) or 0", "g=f(); next(g); assert g.send(5)==5"),
    "map zip": ("f", "def f(x): return map(str,x)", "assert list(f([1,2]))==['1','2']"),
    "generator arg": ("f, g", "def f(): yield 1\ndef g(x): return list(x)", "assert g(f())==[1]"),
    "closure": (
        "f",
        "def f(n):\n return lambda x: x+n",
        "assert f(2)(3)==5; h=f(1); assert [h(k) for k in range(2)]==[1,2]",
    ),
    "closure counter": (
        "f",
        "def f():\n c=0\n def g():\n  nonlocal c; c+=1; return c\n return g",
        "g=f(); assert g()==1 and g()==2; assert f()()==1",
    ),
    "compose": (
        "f",
        "def f(*fs):\n def g(x):\n  for h in fs: x=h(x)\n  return x\n return g",
        "assert f(abs, str)(-3)=='3'",
    ),
    "exceptions": (
        "f",
        "def f(x):\n if x<0: raise ValueError('neg')\n return x",
        "t=unittest.TestCase()\nwith t.assertRaises(ValueError) as c: f(-1)\nassert str(c.exception)=='neg'\nwith t.assertRaisesRegex(ValueError,'ne'): f(-1)",
    ),
    "custom exc base": (
        "f",
        "class E(ValueError): pass\ndef f(): raise E('x')",
        "try:\n    f(); assert False\nexcept ValueError as e: assert type(e).__name__=='E'",
    ),
    "oserror": (
        "f",
        "def f(): raise FileNotFoundError(2,'no')",
        "try:\n    f()\nexcept OSError as e: assert e.errno==2\nelse: assert False",
    ),
    "zero": ("f", "def f(x): return 1/x", "try:\n    f(0)\nexcept ZeroDivisionError: pass\nelse: assert False"),
    "json error": (
        "f",
        "import json\ndef f(): json.loads('{')",
        "import json\ntry:\n    f()\nexcept json.JSONDecodeError: pass\nelse: assert False",
    ),
    "sysexit": (
        "f",
        "import sys\ndef f(): sys.exit(3)",
        "try:\n    f()\nexcept SystemExit as e: assert e.code==3\nelse: assert False",
    ),
    "match truth": (
        "f",
        "import re\ndef f(s): return re.match('a',s)",
        "assert f('ab'); assert not f('b'); assert f('b') is None; assert f('a') is not None",
    ),
    "type result": ("f", "def f(x): return type(x)", "assert f(1) is int and f('') is str"),
    "types given": ("f", "def f(t,x): return t(x)", "assert f(int,'3')==3"),
    "nan": ("f", "def f(): return float('nan')", "import math\nassert math.isnan(f())"),
    "big list": ("f", "def f(n): return list(range(n))", "assert f(100000)==list(range(100000))"),
    "deep": (
        "f",
        "def f(n):\n r=[]\n for _ in range(n): r=[r]\n return r",
        "r=f(150); d=0\nwhile r: r=r[0]; d+=1\nassert d==150",
    ),
    "exc group": (
        "f",
        "def f(): raise ExceptionGroup('g',[ValueError(1)])",
        "try:\n    f()\nexcept ExceptionGroup as e: assert isinstance(e.exceptions[0],ValueError)\nelse: assert False",
    ),
    "large arg": ("f", "def f(x): return len(x)", "assert f('x'*9_000_000)==9_000_000"),
    "mappingproxy": (
        "f",
        "import types\ndef f(): return types.MappingProxyType({'a':1})",
        "assert f()=={'a':1} and dict(f())=={'a':1}",
    ),
    "operator arg": (
        "f",
        "def f(op,a,b): return op(a,b)",
        "import operator\nassert f(operator.add,1,2)==3; import math\nassert f(math.gcd,4,6)==2",
    ),
    "exception value": (
        "f",
        "def f(): return ValueError('x')",
        "r=f(); assert isinstance(r,ValueError) and str(r)=='x'",
    ),
    "nested containers": (
        "f",
        "def f(): return {(1,2):{'a':{3}}, 'b':[(4,)]}",
        "assert f()=={(1,2):{'a':{3}},'b':[(4,)]}",
    ),
    "class: stack": (
        "Stack",
        "class Stack:\n def __init__(s): s.i=[]\n def push(s,x): s.i.append(x); return s\n def pop(s): return s.i.pop()\n def __len__(s): return len(s.i)\n def __contains__(s,x): return x in s.i\n def __iter__(s): return iter(s.i)\n def __getitem__(s,k): return s.i[k]\n def __bool__(s): return bool(s.i)\n def __repr__(s): return f'Stack({s.i})'",
        "s=Stack(); assert not s; assert s.push(1) is s; s.push(2).push(3); assert len(s)==3; assert list(s)==[1,2,3]; assert s[0]==1; assert s.pop()==3; assert s; assert repr(s)=='Stack([1, 2])'; assert isinstance(s,Stack)\ntry:\n    s[10]; assert False\nexcept IndexError: pass",
    ),
    "class: small letters": (
        "stack",
        "class stack:\n def __init__(s): s.i=[]\n def push(s,x): s.i.append(x)\n def pop(s): return s.i.pop()\n @classmethod\n def of(c,x): r=c(); r.push(x); return r",
        "s=stack(); s.push(1); assert s.pop()==1; assert isinstance(s,stack); assert stack.of(2).pop()==2",
    ),
    "class: contains": (
        "S",
        "class S:\n def __init__(s): s.i=set()\n def add(s,x): s.i.add(x)\n def __contains__(s,x): return x in s.i",
        "s=S(); s.add(1); assert 1 in s; assert 2 not in s",
    ),
    "class: vector": (
        "V",
        "class V:\n def __init__(s,x,y): s.x,s.y=x,y\n def __add__(s,o): return V(s.x+o.x,s.y+o.y)\n def __mul__(s,k): return V(s.x*k,s.y*k)\n __rmul__=__mul__\n def __eq__(s,o): return isinstance(o,V) and (s.x,s.y)==(o.x,o.y)\n def __abs__(s): return (s.x**2+s.y**2)**.5\n def __neg__(s): return V(-s.x,-s.y)\n def __hash__(s): return hash((s.x,s.y))\n def dot(s,o): return s.x*o.x+s.y*o.y",
        "assert V(1,2)+V(3,4)==V(4,6); assert V(1,2)*2==V(2,4); assert 2*V(1,2)==V(2,4); assert abs(V(3,4))==5; assert -V(1,2)==V(-1,-2); assert V(1,2).dot(V(3,4))==11; assert V(1,2)!=V(2,1); assert len({V(1,2),V(1,2)})==1; r=V(1,2)+V(1,1); assert r.x==2; assert (r*2).y==6; assert abs(V(0,3)+V(4,0))==5",
    ),
    "class: temp": (
        "T",
        "class T:\n def __init__(s,x): s._x=x\n @property\n def x(s): return s._x\n @x.setter\n def x(s,v):\n  if v<0: raise ValueError('neg')\n  s._x=v\n def __lt__(s,o): return s._x<o._x",
        "t=T(1); t.x=5; assert t.x==5\ntry:\n    t.x=-1; assert False\nexcept ValueError: pass\nassert T(1)<T(2); assert sorted([T(3),T(1)])[0].x==1; assert max(T(1),T(2)).x==2",
    ),
    "class: node": (
        "Node, insert",
        "class Node:\n def __init__(s,val,left=None,right=None): s.val,s.left,s.right=val,left,right\ndef insert(root,v):\n if root is None: return Node(v)\n if v<root.val: root.left=insert(root.left,v)\n else: root.right=insert(root.right,v)\n return root",
        "r=Node(5); assert insert(r,3) is r; assert r.left.val==3; insert(r,8); assert r.right.val==8; assert r.left.left is None; r.left=None; assert r.left is None",
    ),
    "class: enum": (
        "Color, nxt",
        "from enum import Enum\nclass Color(Enum):\n RED=1\n BLUE=2\ndef nxt(c): return Color.BLUE if c is Color.RED else Color.RED",
        "assert nxt(Color.RED)==Color.BLUE; assert nxt(Color.RED) is Color.BLUE; assert Color(1) is Color.RED; assert Color.RED.name=='RED'; assert [c.value for c in Color]==[1,2]; assert isinstance(nxt(Color.RED),Color)",
    ),
    "class: exceptions": (
        "Bank, Low",
        "class Low(Exception):\n def __init__(s,a): super().__init__(f'low {a}'); s.amount=a\nclass Bank:\n def __init__(s): s.b=0\n def draw(s,a): raise Low(a)",
        "b=Bank()\ntry:\n    b.draw(5); assert False\nexcept Low as e:\n    assert e.amount==5 and str(e)=='low 5'",
    ),
    "class: classmethod": (
        "P",
        "class P:\n n=0\n def __init__(s,x): s.x=x; P.n+=1\n @classmethod\n def of(cls,t): return cls(int(t))\n @staticmethod\n def ok(t): return t.isdigit()",
        "assert P.of('5').x==5; assert P.ok('5'); assert P(1).x==1; assert P.n==2",
    ),
    "class: singleton": (
        "S",
        "class S:\n _i=None\n def __new__(cls):\n  if cls._i is None: cls._i=super().__new__(cls)\n  return cls._i",
        "assert S() is S()",
    ),
    "class: context": (
        "R",
        "class R:\n def __init__(s): s.open=False\n def __enter__(s): s.open=True; return s\n def __exit__(s,*a): s.open=False",
        "r=R()\nwith r as x:\n    assert x is r and r.open\nassert not r.open",
    ),
    "class: suppress": (
        "R",
        "class R:\n def __enter__(s): return s\n def __exit__(s,k,e,t): return k is ValueError",
        "with R(): raise ValueError\ntry:\n    with R(): raise KeyError('x')\n    assert False\nexcept KeyError: pass",
    ),
    "class: iterator": (
        "Down",
        "class Down:\n def __init__(s,n): s.n=n\n def __iter__(s): return s\n def __next__(s):\n  if s.n<=0: raise StopIteration\n  s.n-=1; return s.n+1",
        "assert list(Down(3))==[3,2,1]; d=Down(1); assert next(d)==1\ntry:\n    next(d); assert False\nexcept StopIteration: pass",
    ),
    "class: callable": (
        "Add",
        "class Add:\n def __init__(s,n): s.n=n\n def __call__(s,x): return s.n+x",
        "assert Add(2)(3)==5",
    ),
    "class: abc": (
        "Shape, Sq",
        "from abc import ABC, abstractmethod\nclass Shape(ABC):\n @abstractmethod\n def area(s): ...\nclass Sq(Shape):\n def __init__(s,a): s.a=a\n def area(s): return s.a**2",
        "assert Sq(2).area()==4; assert isinstance(Sq(2),Shape); assert issubclass(Sq,Shape)\ntry:\n    Shape(); assert False\nexcept TypeError: pass",
    ),
    "class: dataclass": (
        "Point, move",
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n x:int\n y:int=0\ndef move(p): return Point(p.x+1,p.y)",
        "assert move(Point(1,2))==Point(2,2); assert Point(1).y==0; assert repr(Point(1,2))=='Point(x=1, y=2)'",
    ),
    "class: namedtuple": (
        "Point, move",
        "from collections import namedtuple\nPoint=namedtuple('Point','x y')\ndef move(p): return Point(p.x+1,p.y)",
        "assert move(Point(1,2))==Point(2,2)==(2,2); assert move(Point(x=1,y=0)).x==2",
    ),
    "class: list attr": (
        "B",
        "class B:\n def __init__(s): s.items=[]\n def add(s,x): s.items.append(x)\n def all(s): return list(s.items)",
        "b=B(); b.add(1); assert b.items==[1]; assert b.all()==[1]; assert len(b.items)==1",
    ),
    "class: factory": (
        "mk, A",
        "class A:\n def v(s): return 3\ndef mk(): return A()",
        "assert isinstance(mk(),A); assert mk().v()==3",
    ),
    "class: async method": ("A", "class A:\n async def get(s): return 4", "assert asyncio.run(A().get())==4"),
    "class: const": ("RATE, f", "RATE=0.5\ndef f(): return RATE", "assert RATE==0.5 and f()==RATE"),
    "class: lru": (
        "Cache",
        "from collections import OrderedDict\nclass Cache(OrderedDict):\n def __init__(s,n): super().__init__(); s.n=n\n def put(s,k,v): s[k]=v",
        "c=Cache(2); c.put(1,5); assert c=={1:5}; assert c.get(1)==5; assert len(c)==1; assert 1 in c",
    ),
    "class: matrix": (
        "M",
        "class M:\n def __init__(s,r): s.r=r\n def __matmul__(s,o): return M([[sum(a*b for a,b in zip(x,y)) for y in zip(*o.r)] for x in s.r])\n def __eq__(s,o): return s.r==o.r\n def rows(s): return s.r",
        "assert (M([[1,2]])@M([[3],[4]]))==M([[11]]); assert (M([[1,2]])@M([[3],[4]])).rows()==[[11]]",
    ),
    "class: observer list": (
        "A",
        "class A:\n def __init__(s): s.log=[]\n def run(s): s.log.append('x'); print('ran'); return s.log",
        "a=A(); assert a.run()==['x']; assert a.run()==['x','x']; assert a.log==['x','x']",
    ),
}
