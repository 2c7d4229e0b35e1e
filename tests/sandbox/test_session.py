import os
import time

import pytest

from gym_rm.sandbox import SandboxLimits, SandboxReply


def test_state_persists_from_request_to_request(session):
    assert session.execute("x = 1\ndef add(y=2):\n    global x\n    x += y\n    return x").status == "ok"
    assert session.call("add").value == 3
    assert session.call("add", [5]).value == 8
    assert session.execute("x", result=True).value == "8"


def test_the_value_of_a_last_expression_is_returned_on_request(session):
    assert session.execute("y = 2\ny * 3", result=True).value == "6"
    assert session.execute("y * 3").value is None


def test_printed_text_comes_with_the_request_that_printed_it(session):
    code = "import os, sys\nprint('é'); os.write(1, b'raw'); print('err', file=sys.stderr)"
    reply = session.execute(code)
    assert (sorted(reply.stdout), reply.stderr) == (sorted("é\nraw"), "err\n")
    assert session.execute("print(2)").stdout == "2\n"


@pytest.mark.parametrize(
    "code",
    [
        "print(input() + input())",
        "import sys; print(sys.stdin.read().replace('\\n', ''))",
        "import sys; print(sys.stdin.buffer.read().decode().replace('\\n', ''))",
        "print(open(0).read().replace('\\n', ''))",
        "print(open('/dev/stdin').read().replace('\\n', ''))",
        "import pathlib; print(pathlib.Path('/dev/stdin').read_text().replace('\\n', ''))",
        "import os; print(os.read(0, 99).decode().replace('\\n', ''))",
    ],
)
def test_stdin_is_read_in_every_way(session, code):
    for _ in range(2):
        assert session.execute(code, stdin="aé\nb\n").stdout == "aéb\n"


def test_the_end_of_stdin_is_an_eof_error(session):
    assert session.execute("input()").error_type == "EOFError"


def test_long_stdin_and_long_values_cross(session):
    text = "0123456789" * 200_000
    assert session.execute("print(len(input()))", stdin=text).stdout == "2000000\n"
    assert session.execute("def f(x): return x").status == "ok"
    assert session.call("f", [text]).value == text


def test_threads_and_atexit_functions_of_a_program_are_waited_for(session):
    code = (
        "import atexit, threading, time\natexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
    )
    assert session.execute(code).stdout == "thread\nbye\n"
    assert session.execute("print(__name__)", main=False).stdout == "solution\n"


@pytest.mark.parametrize(
    ("code", "status", "error_type"),
    [
        ("1 / 0", "exception", "ZeroDivisionError"),
        ("def f(: pass", "syntax_error", "SyntaxError"),
        ("x" + " + x" * 100_000, "syntax_error", "RecursionError"),
        ("eval('1 +')", "exception", "SyntaxError"),
        ("def f(): f()\nf()", "exception", "RecursionError"),
        ("raise KeyboardInterrupt", "exception", "KeyboardInterrupt"),
        ("x = 'a' * 10**10", "memory", "MemoryError"),
        ("raise SystemExit(3)", "exit", "SystemExit"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "exception", "E"),
        ("class E(BaseException): pass\nraise E", "exception", "E"),
        ("import sys; sys.setrecursionlimit(50); 1 / 0", "exception", "ZeroDivisionError"),
    ],
)
def test_failures_of_the_code_are_told_apart_and_the_session_goes_on(session, code, status, error_type):
    reply = session.execute(code)
    assert (reply.status, reply.error_type) == (status, error_type)
    assert session.execute("2", result=True).value == "2"


def test_the_exit_code_of_a_program_is_the_value(session):
    assert session.execute("import sys; sys.exit()").value == 0
    assert session.execute("import sys; sys.exit('no')").value == 1
    assert session.execute("import os; os._exit(4)").value == 4
    assert not session.alive
    assert session.execute("1").status == "exit"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import time; time.sleep(99)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 10**6)", "output"),
        ("import ctypes; ctypes.string_at(0)", "exit"),
        ("import os; os.closerange(3, 64)", "invalid exit"),
        ("import os; os.closerange(0, 64)\nwhile True: pass", "invalid time"),
        ("l = []\nwhile True: l.append(bytearray(1 << 20))", "memory"),
        ("l = {}\nwhile True: l = {1: l, 2: [l] * 10000}", "memory"),
        ("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1) if 0]).start()", "time"),
    ],
)
def test_code_that_does_not_end_well_ends_in_a_failing_status_in_time(sandbox, code, status):
    start = time.monotonic()
    seconds = 0.3 if "time" in status else 5.0
    with sandbox.session(SandboxLimits(wall_seconds=seconds, memory_bytes=64 << 20)) as session:
        reply = session.execute(code)
    assert reply.status in status.split()
    assert time.monotonic() - start < 6.0


def pipe_of_replies():
    """Return code that finds the pipe of replies among the objects of the guest."""
    find = "guest = next(o for o in gc.get_objects() if type(o).__name__ == 'Guest')"
    return f"import os, sys, gc\n{find}\nend = guest.replies\n"


def test_a_writer_of_single_bytes_cannot_extend_the_deadline(sandbox):
    code = "import time\nos.write(end, (1000).to_bytes(4, 'big'))\nwhile True: os.write(end, b'x'); time.sleep(0.01)"
    with sandbox.session(SandboxLimits(wall_seconds=0.4)) as session:
        start = time.monotonic()
        reply = session.execute(pipe_of_replies() + code)
    assert reply.status == "time"
    assert time.monotonic() - start < 4.0


@pytest.mark.parametrize(
    "code",
    [
        "os.write(end, b'\\xff' * 100)",
        "os.write(end, (20).to_bytes(4, 'big') + b'x' * 20)",
        "os.write(end, (17).to_bytes(4, 'big') + guest.nonce + b'?')",
        "os.write(end, (17).to_bytes(4, 'big') + guest.nonce + b'N')",
        "guest.send(('ok',))",
        "guest.send(('killed', None, '', ''))",
        "guest.send(('ok', 1, 2, ''))",
        "guest.send(('host', []))",
        "os.write(end, ((17).to_bytes(4, 'big') + guest.nonce + b'N') * 2)",
        "guest.limit = 1 << 30; guest.send(('ok', b'x' * (1 << 24), '', ''))",
    ],
)
def test_broken_frames_are_invalid(session, code):
    reply = session.execute(pipe_of_replies() + code + "\nimport time; time.sleep(99)")
    assert reply.status == "invalid"
    assert not session.alive


def test_a_reply_written_ahead_answers_no_later_request(session):
    code = "def f(): return 1\nimport threading, time\nnonce = guest.nonce\n"
    ahead = "def later():\n    time.sleep(0.1)\n    guest.nonce = nonce\n    guest.send(('ok', 42, '', ''))\n"
    session.execute(pipe_of_replies() + code + ahead + "threading.Thread(target=later, daemon=True).start()")
    time.sleep(0.3)
    assert session.call("f").status == "invalid"


def test_values_that_are_too_long_or_too_deep_are_output(session):
    session.execute("def long(): return 'x' * 10**7\ndef deep():\n    x = []\n    x.append(x)\n    return x")
    assert session.call("long").status == "output"
    assert session.call("deep").status == "output"
    assert session.call("len", []).error_type == "NameError"


def test_an_object_crosses_as_its_text_or_not_at_all(session):
    session.execute("class Stack:\n    def __repr__(self): return 'a stack'")
    assert session.execute("Stack()", result=True).value == "a stack"
    reply = session.call("Stack")
    assert (reply.status, reply.message) == ("output", "an object of type Stack cannot cross")


def test_trusted_code_calls_functions_of_the_parent(session):
    def host(args):
        if args == ["fail"]:
            return SandboxReply("exception", error_type="KeyError", message="no")
        return SandboxReply("ok", args)

    assert session.execute("__host__('a', [1])", result=True, host=host).value == "['a', [1]]"
    assert session.execute("__host__('fail')", host=host).message == "exception KeyError: no"


def test_a_session_killed_from_outside_says_so(session):
    import threading

    threading.Timer(0.2, lambda: os.kill(inner_pid(session._child.process.pid), 9)).start()
    assert session.execute("import time; time.sleep(20)").status == "killed"


def test_a_process_that_has_ended_is_asleep(session):
    session._child.kill()
    assert session._child.is_asleep()


def test_the_interpreter_does_not_share_the_terminal(session):
    started = session._child.process.pid
    assert os.getsid(inner_pid(started)) == os.getsid(started) == started


def inner_pid(pid):
    """Return the interpreter's process behind the wrappers."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    return inner_pid(int(children[0])) if children else pid
