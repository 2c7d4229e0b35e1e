"""Attempts to exceed limits, to break the channel of the replies, and to send values that are not plain, as data.

The limits of these runs are small (see `test_escapes.py`). What must hold after each: the reply came in time, its
output and its value are small and plain, its status is not `killed` (nobody killed it from outside), and the next
session works.
"""

from __future__ import annotations

from sandbox.attempts import Attempt, _attempts

TIME = _attempts(
    "time",
    {
        "endless_loop": "while True: pass",
        "endless_sleep": "import time\ntime.sleep(1e6)",
        "loop_that_catches_all": """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
        "signals_ignored": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (ValueError, OSError):
        pass
while True: pass
""",
        "clock_replaced": "import time\ntime.monotonic = time.time = time.perf_counter = lambda: 0.0\nwhile True: pass",
        "timer_flood": """
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)
while True: pass
""",
        "stop_itself": "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1e6)",
        "endless_message": """
class Slow(Exception):
    def __str__(self):
        while True: pass
    __repr__ = __str__
def attack():
    raise Slow()
""",
        "reply_is_dripped": """
import os, time
while True:
    for fd in range(1, 20):
        try:
            os.write(fd, b"\\x00")
        except OSError:
            pass
    time.sleep(0.01)
""",
        "descriptors_closed": """
import os, time
for fd in range(64):
    try:
        os.close(fd)
    except OSError:
        pass
time.sleep(1e6)
""",
    },
)

ENDS = _attempts(
    "ends",
    {
        "exit": "exit(0)",
        "quick_exit": "import os\nos._exit(0)",
        "subclass_of_system_exit": "class Passed(SystemExit): pass\ndef attack():\n    raise Passed(0)",
        "exit_of_the_main_thread": "syscall(60, 93, 0)",
        "abort": "import os\nos.abort()",
        "segmentation_fault": "import ctypes\nctypes.string_at(0)",
        "kill_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "interrupt": "import signal\nsignal.raise_signal(signal.SIGINT)",
        "cpu_limit": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
        "bad_bytecode": """
def f(): pass
f.__code__ = f.__code__.replace(co_code=bytes([255, 255]) * 8 + bytes([100, 200]) * 100)
f()
""",
        "deep_recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        "deep_recursion_in_c": """
import sys
sys.setrecursionlimit(10 ** 9)
x = []
for _ in range(10 ** 6):
    x = [x]
repr(x)
""",
        "exception_whose_text_exits": """
class Exits(Exception):
    def __str__(self):
        import os
        os._exit(0)
    __repr__ = __str__
def attack():
    raise Exits
""",
        "exception_whose_text_is_huge": "def attack():\n    raise ValueError('x' * 10 ** 7)",
        "exception_without_name": """
class Meta(type):
    __name__ = property(lambda self: 1 / 0)
class Odd(Exception, metaclass=Meta): pass
def attack():
    raise Odd
""",
        "exception_groups": """
def attack():
    e = ValueError()
    for _ in range(50000):
        e = ExceptionGroup('x', [e])
    raise e
""",
        "surrogates_in_message": "def attack():\n    raise ValueError('\\ud800\\x00\\x1b[2J')",
        "endless_finalizer": """
class Slow:
    def __del__(self):
        while True: pass
keep = Slow()
""",
        "thread_that_stays": "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()",
        "builtins_replaced": """
import builtins
for name in list(vars(builtins)):
    setattr(builtins, name, lambda *a, **k: True)
""",
        "modules_removed": "import sys\nsys.modules.clear()",
        "standard_streams_replaced": """
import sys
class Stream:
    def __getattr__(self, name):
        raise SystemExit(0)
sys.stdout = sys.stderr = Stream()
""",
        "standard_streams_closed": "import os\nos.close(0)\nos.close(1)\nos.close(2)",
        "invalid_source": "def (:",
        "surrogate_in_source": "x = '\ud800'",
    },
)

MEMORY = _attempts(
    "says",
    {
        "memory_of_bytes": "x = bytearray(BIG)\ndone()",
        "memory_mapped_in_parts": """
import mmap
x = [mmap.mmap(-1, 1 << 20) for _ in range(BIG >> 20)]
for one in x:
    for k in range(0, 1 << 20, 4096):
        one[k] = 1
done()
""",
        "memory_of_pipes": """
import os, fcntl
total = 0
while total < 64 << 20:
    read, write = os.pipe()
    fcntl.fcntl(write, 1031, 1 << 20)
    os.set_blocking(write, False)
    total += os.write(write, bytes(1 << 20))
done()
""",
        "memory_in_shm": """
x = open('/dev/shm/' + TOKEN, 'wb')
for _ in range(BIG >> 20):
    x.write(bytes(1 << 20))
x.flush()
done()
""",
        "disk_in_tmp": """
x = open('/tmp/' + TOKEN, 'wb')
for _ in range(64):
    x.write(bytes(1 << 20))
x.flush()
done()
""",
        "many_descriptors": "import os\nx = [os.pipe() for _ in range(2000)]\ndone()",
        "memory_of_a_pattern": "'%*d' % (BIG, 1)\ndone()",
    },
)

OUTPUT = _attempts(
    "output",
    {
        "endless_output": "while True:\n    print('x' * 1000)",
        "one_long_line": "print('x' * (64 << 20))",
        "output_of_libc": "c = libc()\nwhile True:\n    c.puts(b'x' * 1000)\n    c.fflush(None)",
        "bytes_that_are_not_text": "import os\nos.write(1, bytes(range(256)) * 10)",
        "control_codes": 'print(\'\\x1b[2J\\x00\\x07\\r\\n{"status": "ok"}\\x1e\')',
        "output_of_a_thread": """
import threading
def attack():
    def run():
        while True:
            print("x" * 100)
    threading.Thread(target=run, daemon=True).start()
    return 1
""",
    },
)

VALUES = _attempts(
    "plain",
    {
        "always_equal": """
class Equal:
    __hash__ = object.__hash__
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def attack(): return Equal()
""",
        "lying_class": """
class Liar:
    @property
    def __class__(self): return int
    def __index__(self): return 7
    def __eq__(self, other): return True
def attack(): return Liar()
""",
        "lying_metaclass": """
class Meta(type):
    def __instancecheck__(self, other): return True
    def __eq__(self, other): return True
    def __hash__(self): return hash(int)
    def mro(self): return [self, object]
class Liar(metaclass=Meta): pass
def attack(): return Liar()
""",
        "equal_items": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
class Text(str):
    def __str__(self): return "lie"
    def encode(self, *a): return b"lie"
def attack(): return {Text("a"): [Equal(1), (Equal(2), {Equal(3)})]}
""",
        "lying_list": """
class Liar(list):
    def __iter__(self): return iter([1] * 10 ** 9)
    def __len__(self): return 10 ** 18
    def __getitem__(self, key): return 1
def attack(): return Liar()
""",
        "pickle": """
class Reduced:
    def __reduce__(self):
        return eval, ("open('/tmp/' + TOKEN, 'w')",)
def attack():
    import pickle
    return [pickle.dumps(Reduced()), Reduced()]
""",
        "itself": "def attack():\n    x = []\n    x.append(x)\n    return x",
        "deep_value": "def attack():\n    x = []\n    for _ in range(10 ** 5):\n        x = [x]\n    return x",
        "wide_value": "def attack():\n    x = [0]\n    for _ in range(40):\n        x = [x, x]\n    return x",
        "long_value": "def attack():\n    return 'x' * (32 << 20)",
        "huge_number": "def attack():\n    return 1 << (1 << 24)",
        "not_a_number": "def attack():\n    return [float('nan'), float('inf'), -0.0, complex('nan')]",
        "surrogate": "def attack():\n    return ['\\ud800', {'\\udfff': 1}]",
        "unhashable_set": "class H(int):\n    def __hash__(self): return 1 / 0\ndef attack():\n    return [H(1)]",
        "changing_list": """
import threading
x = list(range(1000))
def change():
    while True:
        x.append(1)
        x.clear()
threading.Thread(target=change, daemon=True).start()
def attack(): return x
""",
        "code_objects": """
def attack():
    import sys
    return [attack.__code__, sys._getframe(), type, open, iter([1]), (x for x in [1])]
""",
        "generator": "def attack():\n    yield from range(10 ** 12)",
        "callable_object": """
class Call:
    def __call__(self, *a, **k): return 1
    def __getattr__(self, name): raise SystemExit(0)
attack = Call()
""",
    },
)

CHANNEL = _attempts(
    "plain",
    {
        "zeros_to_all_descriptors": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, bytes(4096))
    except OSError:
        pass
""",
        "json_to_all_descriptors": """
import os
for fd in range(1, 64):
    try:
        os.write(fd, b'{"status": "ok", "value": "forged"}\\n' * 20)
    except OSError:
        pass
""",
        "process_id_for_the_launcher": """
import os
for fd in range(1, 64):
    try:
        os.write(fd, b'{\\n    "child-pid": %d\\n}\\n' % VICTIM)
    except OSError:
        pass
""",
        "huge_length": """
import os, time
for fd in range(3, 64):
    try:
        os.write(fd, b'\\x7f' + b'\\xff' * 7)
    except OSError:
        pass
time.sleep(1e6)
""",
        "requests_swallowed": """
import os
def attack():
    for fd in range(0, 64):
        try:
            os.set_blocking(fd, False)
            os.read(fd, 1 << 20)
        except OSError:
            pass
""",
        "reply_on_standard_output": """
import os
for fd in range(3, 32):
    try:
        os.dup2(fd, 1)
    except OSError:
        pass
print('x' * 1000, flush=True)
""",
        "pipes_closed_in_attack": "import os\ndef attack():\n    os.closerange(3, 64)\n    return 'forged'",
        "functions_of_the_guest_replaced": """
import sys
def attack():
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_globals.items()):
            if callable(value) and frame.f_globals is not globals():
                frame.f_globals[name] = lambda *a, **k: b"forged"
        frame = frame.f_back
    return "value"
""",
        "reply_after_the_reply": """
import atexit, os
def late():
    for fd in range(1, 64):
        try:
            os.write(fd, b"forged" * 1000)
        except OSError:
            pass
atexit.register(late)
class Late:
    def __del__(self): late()
keep = Late()
""",
        "pipe_made_small": """
import fcntl
def attack():
    for fd in range(0, 64):
        try:
            fcntl.fcntl(fd, 1031, 4096)
            fcntl.fcntl(fd, fcntl.F_SETFL, 0o4000)
        except OSError:
            pass
    return "x" * 20000
""",
    },
)

LIMITS: tuple[Attempt, ...] = TIME + ENDS + MEMORY + OUTPUT + VALUES + CHANNEL
