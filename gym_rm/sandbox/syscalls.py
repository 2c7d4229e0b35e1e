"""Which system calls may be made?

An allow-list as a BPF program of seccomp, for x86_64 and aarch64. What is not listed fails with EPERM: there are no
other processes, sockets of the network, io_uring, new files in memory, shared memory, ptrace, mounts or namespaces.
"""

from __future__ import annotations

import struct

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, EINVAL, ENOSYS = 1, 22, 38
SIGKILL, SIGSTOP = 9, 19
# A guest that ends with this code would look killed from outside behind bubblewrap, and get another try.
CODE_OF_SIGKILL = 128 + SIGKILL
THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # of pthread_create in glibc and in musl


def numbers(table: str) -> dict[str, tuple[int, int]]:
    """Read names with the numbers of x86_64 and aarch64, -1 where there is none."""
    words = table.split()
    return dict(zip(words[::3], zip(map(int, words[1::3]), map(int, words[2::3]))))  # noqa: B905 (Python 3.9)


PLAIN = numbers("""
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 preadv 295 69 pwritev 296 70 close 3 57
close_range 436 436 fstat 5 80 newfstatat 262 79 stat 4 -1 lstat 6 -1 statx 332 291 lseek 8 62 mmap 9 222
mprotect 10 226 munmap 11 215 brk 12 214 mremap 25 216 madvise 28 233 rt_sigaction 13 134 rt_sigprocmask 14 135
rt_sigreturn 15 139 rt_sigpending 127 136 rt_sigsuspend 130 133 rt_sigtimedwait 128 137 sigaltstack 131 132 access 21 -1
faccessat 269 48 faccessat2 439 439 pipe 22 -1 pipe2 293 59 select 23 -1 pselect6 270 72 poll 7 -1 ppoll 271 73
epoll_create 213 -1 epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 -1 epoll_pwait 281 22 eventfd2 290 19 dup 32 23
dup2 33 -1 dup3 292 24 sched_yield 24 124 sched_getaffinity 204 123 getpid 39 172 gettid 186 178 getppid 110 173
getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getresuid 118 148 getresgid 120 150
getpgrp 111 -1 getpgid 121 155 getsid 124 156 nanosleep 35 101 clock_nanosleep 230 115 clock_gettime 228 113
clock_getres 229 114 gettimeofday 96 169 time 201 -1 times 100 153 getrusage 98 165 getitimer 36 102 setitimer 38 103
alarm 37 -1 pause 34 -1 wait4 61 260 waitid 247 95 uname 63 160 ftruncate 77 46 getcwd 79 17 chdir 80 49 fchdir 81 50
getdents64 217 61 set_tid_address 218 96
set_robust_list 273 99 get_robust_list 274 100 futex 202 98 rseq 334 293 membarrier 324 283 getrandom 318 278
sysinfo 99 179 getrlimit 97 163 arch_prctl 158 -1 restart_syscall 219 128 fstatfs 138 44 statfs 137 43
getpriority 140 141 getcpu 309 168 recvfrom 45 207 shutdown 48 210 getsockname 51 204
""")
CHECKED = numbers("""
open 2 -1 openat 257 56 exit 60 93 exit_group 231 94 kill 62 129 tgkill 234 131 clone 56 220 clone3 435 435 fcntl 72 25
ioctl 16 29 prctl 157 167 prlimit64 302 261 sendto 44 206 readlink 89 -1 readlinkat 267 78 socketpair 53 199
""")
# F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_SETPIPE_SZ, F_GETPIPE_SZ: none that sends signals.
FCNTL = (*range(8), 1030, 1031, 1032)
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
PRCTL = (3, 15, 16, 23, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, SET_VMA
RLIMIT_STACK = 3
O_TRUNC = 0x200  # cuts a file that is opened for reading; Landlock stops it since ABI 3 only

Instructions = list[tuple[int, int, int, int]]


def program(machine: str, pid: int) -> bytes:
    """Return the filter for this machine. Raises OSError on others than x86_64 and aarch64."""
    if machine not in ("x86_64", "aarch64"):
        raise OSError(f"seccomp is not set up for {machine}")
    column = ("x86_64", "aarch64").index(machine)
    deny = returns(ERRNO | EPERM)
    code: Instructions = [load(4), equal((X86_64, AARCH64)[column], 1, 0), *returns(KILL), load(0)]
    if column == 0:
        code += [(0x35, 0, 1, 0x40000000), *deny]  # numbers of x32
    bodies = [(PLAIN[name], returns(ALLOW)) for name in PLAIN]
    bodies += [(CHECKED[name], body) for name, body in checks(pid).items()]
    for known, body in bodies:
        if known[column] >= 0:
            code += [equal(known[column], 0, len(body)), *body]
    return b"".join(struct.pack("HBBI", *each) for each in [*code, *deny])


def checks(pid: int) -> dict[str, Instructions]:
    """Return what decides about system calls by their arguments."""
    deny, allow = returns(ERRNO | EPERM), returns(ALLOW)
    leave = [argument(0), (0x54, 0, 0, 0xFF), equal(CODE_OF_SIGKILL, 0, 1), *returns(KILL), *allow]
    no_kill = [equal(SIGKILL, 1, 0), equal(SIGSTOP, 0, 1), *deny, *allow]
    own = [argument(0), equal(pid, 1, 0), *deny]

    def opens(flags: int) -> Instructions:
        return [argument(flags), (0x54, 0, 0, 0x203), equal(O_TRUNC, 0, 1), *deny, *allow]

    return {
        "open": opens(1),
        "openat": opens(2),
        "exit": leave,
        "exit_group": leave,
        "kill": [*own, argument(1), *no_kill],
        "tgkill": [*own, argument(2), *no_kill],
        "clone": one_of(0, THREAD_FLAGS),
        "clone3": returns(ERRNO | ENOSYS),  # its flags are in memory; callers fall back to clone
        "fcntl": one_of(1, FCNTL),
        "ioctl": one_of(1, IOCTL),
        "prctl": one_of(0, PRCTL),
        # Of this process: reading, and the stack's limit, which programs raise for recursion.
        "prlimit64": [
            *(argument(0), equal(0, 2, 0), equal(pid, 1, 0), *deny),
            *(argument(1), equal(RLIMIT_STACK, 0, 1), *allow),
            *(argument(2), equal(0, 1, 0), *deny, argument(2, high=True), equal(0, 1, 0), *deny, *allow),
        ],
        # Landlock lets links outside be read; for a program nothing is a link.
        "readlink": returns(ERRNO | EINVAL),
        "readlinkat": returns(ERRNO | EINVAL),
        # Pairs of connected streams, for asyncio; sendto without an address.
        "socketpair": [
            *(argument(0), equal(1, 1, 0), *deny, argument(1), (0x54, 0, 0, 0xF), equal(1, 1, 0), *deny, *allow)
        ],
        "sendto": [*(argument(4), equal(0, 1, 0), *deny, argument(4, high=True), equal(0, 1, 0), *deny, *allow)],
    }


def load(offset: int) -> tuple[int, int, int, int]:
    """Load a word of the description of the call."""
    return (0x20, 0, 0, offset)


def argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
    """Load the low or high word of an argument."""
    return load(16 + 8 * index + 4 * high)  # both machines are little endian


def equal(value: int, then: int, otherwise: int) -> tuple[int, int, int, int]:
    """Skip `then` instructions if the loaded word is `value`, else `otherwise`."""
    return (0x15, then, otherwise, value)


def returns(action: int) -> Instructions:
    """Decide."""
    return [(0x06, 0, 0, action)]


def one_of(index: int, values: tuple[int, ...]) -> Instructions:
    """Allow calls whose argument is one of these values."""
    body = [argument(index)]
    for value in values:
        body += [equal(value, 0, 1), *returns(ALLOW)]
    return [*body, *returns(ERRNO | EPERM)]
