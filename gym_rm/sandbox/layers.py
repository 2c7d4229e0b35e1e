"""What does this machine offer?"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_rm.errors import ConfigError, brief
from gym_rm.sandbox.child import Launch
from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.session import SandboxError, SandboxSession

LAYERS = ("bubblewrap", "landlock", "unsafe")
NOBODY = 65534
FLAGS = ("-I", "-S", "-B", "-X", "utf8")
PROGRAM = ("values", "syscalls", "restrict", "guest")
BOOT = """
import sys, marshal, posix
size, *ends = map(int, sys.argv[1:4])
paths, imports = sys.argv[4].split(":"), sys.argv[5:]
data = b""
while len(data) < size:
    data += posix.read(ends[0], size - len(data)) or sys.exit()
for name, code in marshal.loads(data):
    module = sys.modules["gym_rm.sandbox." + name] = type(sys)("gym_rm.sandbox." + name)
    exec(code, module.__dict__)
sys.argv, sys.orig_argv = [""], [""]
module.Guest(*ends).serve(paths, imports)
"""
# Compiles the program, and imports every extension module so that the map of the process shows all libraries.
DESCRIBE = """
import sys, json, marshal, sysconfig, os
sources, packages = json.load(sys.stdin)
program = [(name, compile(source, "<sandbox>", "exec", 0, True, 2)) for name, source in sources]
folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
paths = [each for each in sys.path if packages and each.endswith(("site-packages", "dist-packages"))]
for name in packages:
    __import__(name)
for name in sorted({file.split(".")[0] for each in sys.path if os.path.isdir(each) and each.endswith("lib-dynload")
                    for file in os.listdir(each)} - {"_tkinter", "nis", "readline"}):
    if not name.startswith(("_test", "_x", "xx")):
        try:
            __import__(name)
        except ImportError:
            pass
files = []
if os.path.exists("/proc/self/maps"):
    with open("/proc/self/maps") as lines:
        files = sorted({line.split(None, 5)[5].strip() for line in lines if line.count("/")})
print(json.dumps({"version": sys.version_info[:2], "executable": os.path.realpath(sys.executable), "folders": folders,
                  "files": [each for each in files if os.path.isfile(each)], "program": marshal.dumps(program).hex(),
                  "paths": paths}))
"""
# Tries what no layer may allow; its value names what succeeded.
PROBE = """
import os, socket, signal
def tries(name, act):
    try:
        act()
    except BaseException:
        return []
    return [name]
", ".join(
   tries("reading /etc/passwd", lambda: open("/etc/passwd").read()) + tries("listing /etc", lambda: os.listdir("/etc"))
 + tries("writing in /tmp", lambda: (open("/tmp/probe", "w"), os.unlink("/tmp/probe")))
 + tries("writing in /dev/shm", lambda: (open("/dev/shm/probe", "w"), os.unlink("/dev/shm/probe")))
 + tries("sockets", lambda: socket.socket()) + tries("new processes", lambda: os.fork() or os._exit(0))
 + tries("signals", lambda: os.kill(os.getppid(), 0)))
"""
SHARED_FILES = ("/dev/urandom", "/dev/zero", "/etc/ld.so.cache", "/usr/share/zoneinfo")
TASKS = 1000


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that `user` can run (0: no change): its folders and libraries, and our program compiled by it.

    `paths` are folders of packages, which code can import.
    """

    path: str
    folders: tuple[str, ...]
    files: tuple[str, ...]
    program: bytes
    user: int
    paths: tuple[str, ...] = ()


def sandbox_user() -> int | None:
    """Return the user that a sandboxed process becomes: nobody if this process is root, else None (no change)."""
    return NOBODY if hasattr(os, "geteuid") and os.geteuid() == 0 else None


@functools.lru_cache(maxsize=16)
def find_interpreter(path: str | None, user: int | None, packages: tuple[str, ...] = ()) -> Interpreter:
    """Return the given interpreter, or the first that `user` can run and that has the packages.

    Raises ConfigError if there is none.
    """
    own = sys.executable if packages else os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    known = [own, "/usr/bin/python3", shutil.which("python3") or "", "/usr/local/bin/python3"]
    reasons = []
    for each in [path] if path is not None else dict.fromkeys(filter(None, known)):
        try:
            return describe(each, user, packages)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reasons.append(f"{each}: {error}")
    who = f" by user {user}" if user is not None else ""
    having = f" with {', '.join(packages)}" if packages else ""
    raise ConfigError(
        f"No Python interpreter of at least 3.9{having} can be read and run{who} ({'; '.join(reasons)}). Install one "
        "outside of home folders, as /usr/bin/python3, or pass interpreter='/path/of/python3'."
    )


def describe(path: str, user: int | None, packages: tuple[str, ...]) -> Interpreter:
    """Start an interpreter as `user`, and return what it says of itself. Raises ValueError if it does not work."""
    here = Path(__file__).parent
    sources = [(name, (here / f"{name}.py").read_text()) for name in PROGRAM]
    flags = [each for each in FLAGS if each != "-S" or not packages]
    given: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    result = subprocess.run(
        [path, *flags, "-c", DESCRIBE],
        input=json.dumps([sources, packages]),
        capture_output=True,
        text=True,
        env={},
        cwd="/",
        timeout=60,
        **given,
    )
    if result.returncode:
        raise ValueError((result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1])
    told = json.loads(result.stdout)
    if tuple(told["version"]) < (3, 9):
        raise ValueError(f"is Python {told['version'][0]}.{told['version'][1]}")
    paths = tuple(os.path.realpath(each) for each in told["paths"])
    folders = tuple(dict.fromkeys([*(os.path.realpath(each) for each in told["folders"]), *paths]))
    program = bytes.fromhex(told["program"])
    return Interpreter(told["executable"], folders, tuple(told["files"]), program, user or 0, paths)


def launch(layer: str, interpreter: Interpreter, packages: Sequence[str] = ()) -> Launch:
    """Return the command and the settings that start a session of this layer, which imports some packages first."""
    ends = (str(len(interpreter.program)), "@requests", "@replies")
    python = (interpreter.path, *FLAGS, "-c", BOOT, *ends, ":".join(interpreter.paths), *packages)
    nested = layer == "bubblewrap"
    settings = {
        "shut": layer != "unsafe",
        "landlock": layer == "landlock",
        "user": 0 if nested else interpreter.user,
        "parent": 0 if nested else os.getpid(),
        "read": [*interpreter.folders, *interpreter.files, *SHARED_FILES] if layer != "unsafe" else [],
        "stack_bytes": 64 << 20,
        # Counted per user: in bubblewrap's namespace those of the session, else those of all sessions.
        "tasks": TASKS if layer != "unsafe" and (nested or sandbox_user() is not None) else 0,
    }
    return Launch((*(bubblewrap(interpreter) if nested else ()), *python), interpreter.program, settings)


@functools.lru_cache(maxsize=16)
def bubblewrap(interpreter: Interpreter) -> tuple[str, ...]:
    """Return the command of bubblewrap with an empty root that holds the interpreter's own files, read-only.

    It is started by nobody: by root it would keep all capabilities. Raises ConfigError if a program is missing.
    """
    program, drop = shutil.which("bwrap"), shutil.which("setpriv")
    if program is None:
        raise ConfigError("bwrap is not installed")
    user = sandbox_user()
    if user is not None and drop is None:
        raise ConfigError("setpriv (util-linux) is not installed, and bubblewrap must not be started by root")
    start = [str(drop), f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user is not None else []
    known = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, env={}).stdout
    # Older versions lack it; seccomp forbids new namespaces too.
    nested_users = ["--disable-userns"] if "--disable-userns" in known else []
    argv = [*start, program, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", *nested_users, "--uid", str(NOBODY), "--gid", str(NOBODY)]
    argv += ["--cap-drop", "ALL", "--die-with-parent", "--as-pid-1", "--info-fd", "@info"]
    libraries = [each for each in interpreter.files if not each.startswith(tuple(f + "/" for f in interpreter.folders))]
    bound = dict.fromkeys([*interpreter.folders, interpreter.path])
    bound |= dict.fromkeys(os.path.dirname(each) for each in libraries if each != interpreter.path)
    for each in sorted(bound):
        argv += ["--ro-bind", each, each]
    for each in ("/lib", "/lib64"):
        if os.path.islink(each):
            argv += ["--symlink", os.readlink(each), each]
    for each in (*glob.glob("/lib/ld-*"), *glob.glob("/lib64/ld-*")):
        place = os.path.join(os.path.realpath(os.path.dirname(each)), os.path.basename(each))
        if os.path.dirname(place) not in bound:
            argv += ["--ro-bind", os.path.realpath(each), place]
    for each in ("/etc/ld.so.cache", "/usr/share/zoneinfo"):
        argv += ["--ro-bind-try", each, each]
    for each in ("/dev/null", "/dev/zero", "/dev/urandom"):
        argv += ["--dev-bind", each, each]
    return (*argv, "--remount-ro", "/", "--chdir", "/", "--")


@functools.lru_cache(maxsize=16)
def detect(layer: str, interpreter: Interpreter) -> str:
    """Return why a layer does not work here, or an empty text. A run and attempts to escape are really tried."""
    if layer == "unsafe":
        return ""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    try:
        with SandboxSession(launch(layer, interpreter)) as session:
            session.configure(SandboxLimits(wall_seconds=30.0))
            reply = session.execute(PROBE, result=True)
    except (ConfigError, SandboxError, OSError) as error:
        return brief(error)
    if reply.status != "ok" or type(reply.value) is not str:
        return f"a first run failed ({reply.status}): {reply.message}"
    return f"it does not stop {reply.value}" if reply.value else ""


def choose(layer: str, allow_unsafe: bool, path: str | None, packages: tuple[str, ...] = ()) -> tuple[str, Interpreter]:
    """Return the layer to use and its interpreter. Raises ConfigError if none is safe and `allow_unsafe` is False."""
    if layer not in (*LAYERS, "auto"):
        raise ConfigError(f"layer must be 'auto', {', '.join(map(repr, LAYERS))}, not {layer!r}.")
    if layer == "unsafe" and not allow_unsafe:
        raise ConfigError("layer='unsafe' limits time and memory only. Pass allow_unsafe=True to run code that way.")
    wanted = LAYERS[: 3 if allow_unsafe else 2] if layer == "auto" else (layer,)
    reasons = []
    try:
        interpreter = find_interpreter(path, sandbox_user(), packages)
    except ConfigError as error:
        if "unsafe" in wanted:  # none for nobody
            return "unsafe", find_interpreter(path, None, packages)
        wanted, reasons = (), [str(error)]
    for each in wanted:
        reason = "" if each == "unsafe" else detect(each, interpreter)
        if not reason:
            return each, interpreter
        reasons.append(f"{each}: {reason}")
    raise ConfigError(
        "This machine offers no safe way to run the code of a model. " + " ".join(reasons) + " Install bubblewrap, or "
        "use Linux of at least 5.13 with Landlock; allow_unsafe=True runs the code with limits of time and memory only."
    )
