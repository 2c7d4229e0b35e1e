"""What runs inside?

Loaded by the sandboxed interpreter, beside `values` and `restrict`. The model's code shares this process and may change
everything here: whatever is said over the pipe is a claim of that code, and the parent treats it so.
"""

from __future__ import annotations

import _ast
import _thread
import io
import os
import sys

from gym_rm.sandbox.restrict import restrict
from gym_rm.sandbox.values import CrossingError, decode, encode

TYPE_CHECKING = False  # the import of typing would take a third of the start
if TYPE_CHECKING:
    from typing import Any

NONCE_BYTES = 16
SETTINGS_LIMIT = 1 << 20
MEMORY_EXIT = 86
MAX_MESSAGE = 2000
FILE = "<code>"
INPUT = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
THREAD_STACK = 8 << 20  # as usual on Linux; by default a thread would take as much as the first one
AST_ONLY = 0x400  # ast.PyCF_ONLY_AST, without the import of ast
FORBIDDEN_ERRNOS = (1, 13, 30)  # EPERM, EACCES, EROFS


class HostError(Exception):
    """Failure of a call of the host."""


class Guest:
    """Namespace of one session, and the loop that answers its requests."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self.nonce = b""
        self.limit = SETTINGS_LIMIT
        self.input = -1
        self.module = type(sys)("__main__")
        self.module.__dict__["__builtins__"] = __builtins__
        sys.modules["builtins"].open = io.open = open_file  # type: ignore[attr-defined]
        vars(sys.modules["builtins"]).update(exit=sys.exit, quit=sys.exit)  # as the module site does
        self.recursion = sys.getrecursionlimit()
        _thread.stack_size(THREAD_STACK)
        getattr(sys, "set_int_max_str_digits", int)(0)
        self.stdout, self.stderr = sys.stdout, sys.stderr

    def serve(self, paths: list[str], imports: list[str]) -> None:
        """Import packages from these paths, and answer requests until the pipe is closed.

        The interpreter never ends in another way than `os._exit`.
        """
        try:
            if any(paths):
                sys.path += paths
                os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # each takes address space
            for name in imports:
                __import__(name)
            settings = self.receive()
            # A file in memory that holds the text of stdin, made before new ones are forbidden.
            self.input = os.memfd_create("stdin", 0) if hasattr(os, "memfd_create") else -1
            restrict(settings)
            self.limit = settings["reply_bytes"]
            sys.modules["__main__"] = self.module
            self.send(("ready",))
            while True:
                self.answer(*self.receive())
        except EOFError:
            os._exit(0)
        except MemoryError:
            os._exit(MEMORY_EXIT)
        except BaseException as error:
            if not self.nonce or self.limit == SETTINGS_LIMIT:  # before the model's code: a fault of ours
                os.write(2, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:MAX_MESSAGE])
            os._exit(87)

    def receive(self) -> Any:
        """Return the value of the next frame; its nonce is the one to answer with."""
        size = int.from_bytes(self.read(4), "big")
        self.nonce = self.read(NONCE_BYTES)
        return decode(self.read(size - NONCE_BYTES))

    def read(self, size: int) -> bytes:
        """Return this many bytes of the pipe. Raises EOFError at its end."""
        pieces = []
        while size:
            piece = os.read(self.requests, min(size, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def send(self, message: object) -> None:
        """Write a frame: length, nonce, value."""
        data = self.nonce + encode(message, limit=self.limit)
        data = len(data).to_bytes(4, "big") + data
        while data:
            data = data[os.write(self.replies, data) :]

    def answer(self, name: str, arguments: dict[str, Any]) -> None:
        """Do what a request asks for and send a reply of (status, value, error_type, message)."""
        if "stdin" in arguments:
            self.set_input(arguments.pop("stdin"))
        try:
            reply = ("ok", getattr(self, "do_" + name)(**arguments), "", "")
        except BaseException as error:
            reply = self.failure(error)
        sys.setrecursionlimit(max(self.recursion, sys.getrecursionlimit()))
        self.flush()
        try:
            self.send(reply)
        except MemoryError:
            self.module.__dict__.clear()
            self.send(("memory", None, "MemoryError", ""))
        except BaseException as error:  # a value that cannot cross
            self.send(self.failure(error))

    def failure(self, error: BaseException) -> tuple[str, object, str, str]:
        """Return the reply that tells of an exception."""
        status, value = "exception", None
        if isinstance(error, NotCompiled):
            status, error = "syntax_error", error.args[0]
        elif isinstance(error, MemoryError):
            status = "memory"
        elif isinstance(error, SystemExit):
            code = error.code
            status, value = "exit", 0 if code is None else code & 255 if type(code) is int else 1
        elif isinstance(error, CrossingError):
            status = "output"
        elif isinstance(error, OSError) and error.errno in FORBIDDEN_ERRNOS:
            status = "forbidden"
        try:
            message = str(error)[:MAX_MESSAGE]
        except BaseException:
            message = ""
        return (status, value, type(error).__name__[:200], message)

    def set_input(self, text: str) -> None:
        """Make text the contents of file descriptor 0 and of sys.stdin."""
        data = text.encode("utf-8", "surrogatepass")
        stdin: io.BufferedReader | io.BytesIO = io.BytesIO(data)
        if self.input >= 0:
            os.ftruncate(self.input, 0)
            os.lseek(self.input, 0, 0)
            while data:
                data = data[os.write(self.input, data) :]
            os.lseek(self.input, 0, 0)
            os.dup2(self.input, 0)
            stdin = io.BufferedReader(io.FileIO(0, closefd=False))
        sys.stdin = io.TextIOWrapper(stdin, encoding="utf-8", errors="surrogateescape")
        sys.stdin.mode = "r"  # type: ignore[misc]  # as the interpreter does, which programs read

    def flush(self) -> None:
        """Write out what was printed, before the reply that follows it."""
        for stream in {id(each): each for each in (sys.stdout, sys.stderr, self.stdout, self.stderr)}.values():
            try:  # noqa: SIM105 (the import of contextlib takes time)
                stream.flush()
            except BaseException:
                pass  # closed or replaced by the code

    def do_execute(self, source: str, main: bool, result: bool, host: bool) -> object:
        """Run source; return the text of the value of its last expression if `result` asks for it."""
        space = self.module.__dict__
        space["__name__"] = "__main__" if main else "solution"
        if host:
            space["__host__"] = self.call_host
        try:
            tree: Any = compile(source, FILE, "exec", AST_ONLY, dont_inherit=True)
            last = None
            if result and tree.body and isinstance(tree.body[-1], _ast.Expr):
                expression = _ast.Expression(tree.body.pop().value)
                last = compile(expression, FILE, "eval", dont_inherit=True)
            code = compile(tree, FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
            raise NotCompiled(error) from None
        try:
            exec(code, space)
            value = None if last is None else eval(last, space)
            return None if value is None else str(value)
        finally:
            if main:
                finish_program()

    def do_call(self, name: str, args: list[Any]) -> object:
        """Call a function of the namespace."""
        space = self.module.__dict__
        if name not in space:
            raise NameError(f"name {name!r} is not defined")
        return space[name](*args)

    def call_host(self, *args: Any) -> Any:
        """Call the host in the parent. Raises HostError if the call failed."""
        self.send(("host", list(args)))
        status, value, error_type, message = self.receive()
        if status != "ok":
            raise HostError(f"{status} {error_type}: {message}")
        return value


class NotCompiled(Exception):
    """The source is no Python: its only argument is the error of the compiler."""


def finish_program() -> None:
    """Wait for threads and run atexit functions, as an interpreter does at the end of a program."""
    threading = sys.modules.get("threading")
    if threading is not None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()


def open_file(file: Any, *args: Any, _open: Any = open, **kwargs: Any) -> Any:
    """Open a file; the names of standard input are its descriptor, because there may be no /proc."""
    is_input = isinstance(file, (str, os.PathLike)) and os.fspath(file) in INPUT
    return _open(os.dup(0) if is_input else file, *args, **kwargs)
