"""How is a process shut in?

Runs in the new interpreter before any code of the model: limits, another user, Landlock, seccomp. The process gives all
of it up for good by itself, so no second program has to be started, and `execve` can be forbidden afterwards.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from gym_rm.sandbox.syscalls import program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
M_ARENA_MAX = -8
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on all architectures
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3


def restrict(settings: dict[str, Any]) -> None:
    """Apply the limits and layers of `settings` to this process. Raises OSError if one cannot be applied."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)  # each thread would take 64 MiB of address space
    set_limits(settings)
    if settings["user"]:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    if settings["shut"]:
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        # Of the thread that started this process, and lost when the user changed.
        check(libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0))
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
        if settings["parent"] and os.getppid() != settings["parent"]:
            os._exit(0)
        abi = max(0, int(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))  # 0: this kernel has none
        if abi:
            landlock(libc, abi, settings)
        elif settings["landlock"]:
            raise OSError("Landlock is not available")
        filters = program(os.uname().machine, os.getpid())
        buffer = ctypes.create_string_buffer(filters, len(filters))
        header = struct.pack("HP", len(filters) // 8, ctypes.addressof(buffer))
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0))


def check(result: Any) -> int:
    """Raise OSError for the -1 of a system call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def set_limits(settings: dict[str, Any]) -> None:
    """Set soft and hard limits of this process; a lower hard limit that is already there stays."""
    cpu, tasks = settings["cpu_seconds"], settings["tasks"]
    wanted = [
        (resource.RLIMIT_CPU, cpu, cpu + 1),  # SIGXCPU first, which names the cause
        (resource.RLIMIT_AS, settings["memory_bytes"], settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["reply_bytes"], settings["reply_bytes"]),  # of stdin, which is a file
        (resource.RLIMIT_NOFILE, settings["open_files"], settings["open_files"]),
        (resource.RLIMIT_STACK, settings["stack_bytes"], settings["stack_bytes"]),
        (resource.RLIMIT_CORE, 0, 0),
        *([(resource.RLIMIT_NPROC, tasks, tasks)] if tasks else []),
    ]
    for which, soft, hard in wanted:
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(which, (soft, hard))


def landlock(libc: Any, abi: int, settings: dict[str, Any]) -> None:
    """Allow reading of the listed paths only, no TCP, and no signals or abstract sockets to the outside."""
    handled = (1 << 13) - 1  # every right of ABI 1
    handled |= (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15  # REFER, TRUNCATE, IOCTL_DEV
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0))
    paths = [(path, READ_FILE | READ_DIR) for path in settings["read"]] + [("/dev/null", READ_FILE | WRITE_FILE)]
    for path, rights in paths:
        try:
            target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # what cannot be opened is not allowed
        if not os.path.isdir(path):
            rights &= ~READ_DIR
        rule = struct.pack("=Qi", rights & handled, target)
        check(libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(target)
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
