"""Attempts to get out of the sandbox, as data: hostile programs, and what shows from outside that one worked.

The test writes constants before each program: TOKEN and SIGNAL (different for each attempt), DIR (a folder that the
guest's user may read and write), SECRET_FILE, REPOSITORY_FILE, VICTIM (a process of the guest's user), PORT, UNIX,
ABSTRACT and SHM (where the victim listens), PARENT (the test's process), SESSION_ID and CWD.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """A hostile program.

    Attributes:
        name: name of the test.
        shows: what is checked after it ran: `secret` (a secret text is in the reply), `file` (something in DIR
            changed), `reached` (the victim received TOKEN), `signal` (a process received SIGNAL), `says` (the program
            printed its TOKEN in upper case, after it did what it tries), `limits` (a property of the victim changed).
        source: the program. A function `attack` in it is called after it ran.
        control: whether the attempt is also run without a sandbox, where it must succeed.
    """

    name: str
    shows: str
    source: str
    control: bool = True


PRELUDE = """
def done():
    print(TOKEN.upper())

def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)

def syscall(x86_64, aarch64, *args):
    import ctypes, os
    number = x86_64 if os.uname().machine == "x86_64" else aarch64
    call = libc().syscall
    call.restype = ctypes.c_long
    result = call(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


def _attempts(shows: str, programs: dict[str, str], *, control: bool = True) -> tuple[Attempt, ...]:
    return tuple(Attempt(name, shows, source, control) for name, source in programs.items())


NETWORK = _attempts(
    "reached",
    {
        "tcp": """
import socket
socket.create_connection(("127.0.0.1", PORT), 1).sendall(TOKEN.encode())
""",
        "udp": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(TOKEN.encode(), ("127.0.0.1", PORT))
""",
        "tcp_fast_open": """
import socket
socket.socket().sendto(TOKEN.encode(), 0x20000000, ("127.0.0.1", PORT))
""",
        "unix_socket": """
import socket
one = socket.socket(socket.AF_UNIX)
one.connect(UNIX)
one.sendall(TOKEN.encode())
""",
        "abstract_socket": """
import socket
one = socket.socket(socket.AF_UNIX)
one.connect(ABSTRACT)
one.sendall(TOKEN.encode())
""",
        "fifo": """
import os
fd = os.open(DIR + "/fifo", os.O_WRONLY | os.O_NONBLOCK)
os.write(fd, TOKEN.encode())
""",
        "posix_shared_memory": """
import _posixshmem, mmap, os
fd = _posixshmem.shm_open(SHM, os.O_RDWR, mode=0o666)
memory = mmap.mmap(fd, 4096)
at = 64 * (SIGNAL - 33)
memory[at:at + len(TOKEN)] = TOKEN.encode()
""",
        "sysv_shared_memory": """
import ctypes
c = libc()
c.shmat.restype = ctypes.c_void_p
at = c.shmat(SYSV, None, 0)
assert at not in (None, ctypes.c_void_p(-1).value)
ctypes.memmove(at + 64 * (SIGNAL - 33), TOKEN.encode(), len(TOKEN))
""",
        "memory_of_the_victim_written": """
import ctypes
text = ctypes.create_string_buffer(TOKEN.encode())
local = (ctypes.c_size_t * 2)(ctypes.addressof(text), len(TOKEN))
remote = (ctypes.c_size_t * 2)(VICTIM_BUFFER + 64 * (SIGNAL - 33), len(TOKEN))
syscall(311, 271, VICTIM, local, 1, remote, 1, 0)
""",
    },
) + _attempts(
    "says",
    {
        "listen": "import socket\none = socket.socket()\none.bind(('127.0.0.1', 0))\none.listen()\ndone()",
        "socket_pair": "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\ndone()",
        "netlink_socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\ndone()",
        "raw_socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)\ndone()",
        "io_uring_setup": """
import ctypes
syscall(425, 425, 8, ctypes.create_string_buffer(120))
done()
""",
    },
    control=False,
)

READS = _attempts(
    "secret",
    {
        "open": "print(open(SECRET_FILE).read())",
        "openat2": """
import ctypes, os
how = (ctypes.c_uint64 * 3)(0, 0, 0)
print(os.read(syscall(437, 437, -100, ctypes.c_char_p(SECRET_FILE.encode()), how, 24), 100))
""",
        "through_own_root": "print(open('/proc/self/root' + SECRET_FILE).read())",
        "through_victim_root": "print(open(f'/proc/{VICTIM}/root' + SECRET_FILE).read())",
        "list_folder": "import os\nprint(os.listdir(DIR))",
        "exec_cat": "import os\nos.execv('/bin/cat', ['cat', SECRET_FILE])",
        "loader": """
import glob, os
loader = (glob.glob("/lib64/ld-linux-*") + glob.glob("/lib/ld-linux-*"))[0]
os.execv(loader, [loader, "/bin/cat", SECRET_FILE])
""",
        "symlink_in_tmp": """
import os
link = f"/tmp/{TOKEN}"
os.symlink(SECRET_FILE, link)
try:
    print(open(link).read())
finally:
    os.unlink(link)
""",
        "extended_attribute": "import os\nprint(os.getxattr(SECRET_FILE, 'user.secret'))",
        "link_target": "import os\nprint(os.readlink(DIR + '/pointer'))",
        "victim_environment": "print(open(f'/proc/{VICTIM}/environ').read())",
        "victim_descriptor": "print(open(f'/proc/{VICTIM}/fd/{VICTIM_FD}').read())",
        "victim_memory_file": """
with open(f"/proc/{VICTIM}/mem", "rb", buffering=0) as file:
    file.seek(VICTIM_SECRET)
    print(file.read(64))
""",
        "victim_memory_by_system_call": """
import ctypes
buffer = ctypes.create_string_buffer(64)
local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
remote = (ctypes.c_size_t * 2)(VICTIM_SECRET, 64)
syscall(310, 270, VICTIM, local, 1, remote, 1, 0)
print(buffer.raw)
""",
        "ptrace_of_the_victim": """
import ctypes, os, time
syscall(101, 117, 0x4206, VICTIM, 0, 0)
try:
    word = ctypes.create_string_buffer(80)
    for k in range(0, 64, 8):
        syscall(101, 117, 1, VICTIM, VICTIM_SECRET + k, ctypes.byref(word, k))
    print(word.raw)
except OSError:
    syscall(101, 117, 0x4207, VICTIM, 0, 0)
    time.sleep(0.1)
    for k in range(0, 64, 8):
        syscall(101, 117, 1, VICTIM, VICTIM_SECRET + k, ctypes.byref(word, k))
    print(word.raw)
""",
        "descriptor_taken_from_the_victim": """
import os
print(os.pread(syscall(438, 438, syscall(434, 434, VICTIM, 0), VICTIM_FD, 0), 100, 0))
""",
        "own_environment": "import os\nprint(dict(os.environ), open('/proc/self/environ').read())",
        "open_descriptors": """
import os
for fd in range(1024):
    try:
        os.lseek(fd, 0, 0)
        print(os.read(fd, 1000))
    except OSError:
        pass
""",
    },
) + _attempts(
    "secret",
    {
        "repository": "print(open(REPOSITORY_FILE).read())",
        "environment_of_the_parents": """
import os
pid = os.getppid()
while pid > 1:
    print(open(f"/proc/{pid}/environ").read())
    pid = int(open(f"/proc/{pid}/stat").read().rsplit(")")[-1].split()[1])
""",
    },
    control=False,
)

WRITES = _attempts(
    "file",
    {
        "write_file": "open(f'{DIR}/open/{TOKEN}', 'w').write('here')",
        "append_to_file": "open(DIR + '/open/log', 'a').write(TOKEN)",
        "unnamed_file_linked": """
import ctypes, os
fd = os.open(DIR + "/open", os.O_TMPFILE | os.O_RDWR, 0o600)
names = [ctypes.c_char_p(name.encode()) for name in (f"/proc/self/fd/{fd}", f"{DIR}/open/{TOKEN}")]
syscall(265, 37, -100, names[0], -100, names[1], 0x400)
""",
        "make_folder": "import os\nos.mkdir(f'{DIR}/open/{TOKEN}')",
        "remove": "import os\nos.unlink(DIR + '/open/remove')",
        "change_mode": "import os\nos.chmod(DIR + '/open/mode', 0o777)",
        "change_mode_of_descriptor": "import os\nos.fchmod(os.open(DIR + '/open/fmode', os.O_RDONLY), 0o777)",
        "change_extended_attribute": "import os\nos.setxattr(DIR + '/open/xattr', 'user.new', b'1')",
        "change_owner": """
import os
os.chown(DIR + '/open/owner', -1, os.getgid())
os.chmod(DIR + '/open/owner', 0o6755)
""",
        "symlink": "import os\nos.symlink('/etc/passwd', f'{DIR}/open/{TOKEN}')",
        "hard_link": "import os\nos.link(DIR + '/open/log', f'{DIR}/open/{TOKEN}')",
        "make_fifo": "import os\nos.mkfifo(f'{DIR}/open/{TOKEN}')",
        "bind_unix_socket": "import socket\nsocket.socket(socket.AF_UNIX).bind(f'{DIR}/open/{TOKEN}')",
        "core_dump": """
import os, resource
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
os.chdir(DIR + "/open")
libc().prctl(4, 1, 0, 0, 0)
os.abort()
""",
        "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        open(f"{DIR}/open/{TOKEN}", "w").write("late")
    os._exit(0)
os.wait()
""",
    },
) + _attempts(
    "says",
    {
        "write_in_tmp": """
import os
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/", ".", CWD, os.path.expanduser("~"), "/usr", "/etc"):
    try:
        name = f"{folder}/gym-rm-{TOKEN}"
        open(name, "w").write("here")
        os.unlink(name)
    except OSError:
        continue
    done()
""",
        "lock_a_file": "import fcntl\nfcntl.flock(open(DIR + '/open/log'), fcntl.LOCK_SH | fcntl.LOCK_NB)\ndone()",
        "memory_file": "import os\nos.write(os.memfd_create('x'), b'x')\ndone()",
        "sysv_segment": "fd = syscall(29, 194, 0, 4096, 0o1600)\nsyscall(31, 195, fd, 0, 0)\ndone()",
    },
)

SIGNALS = (
    _attempts(
        "signal",
        {
            "kill": "import os\nos.kill(VICTIM, SIGNAL)",
            "tgkill": "syscall(234, 131, VICTIM, VICTIM, SIGNAL)",
            "tkill": "syscall(200, 130, VICTIM, SIGNAL)",
            "signal_by_descriptor": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(VICTIM), SIGNAL)",
            "signal_of_a_pipe": """
import fcntl, os
read, write = os.pipe()
fcntl.fcntl(read, 8, VICTIM)
fcntl.fcntl(read, 10, SIGNAL)
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
os.write(write, b"x")
""",
        },
    )
    + _attempts(
        "parent",
        {
            "signal_of_a_timer": """
import ctypes, struct, time
event = ctypes.create_string_buffer(struct.pack("<qiii", 0, SIGNAL, 4, VICTIM) + bytes(44))
timer = ctypes.c_int()
syscall(222, 107, 0, event, ctypes.byref(timer))
""",
            "kill_all": "import os\nos.kill(-1, SIGNAL)",
            "kill_parent": "import os\nos.kill(PARENT, SIGNAL)",
            "kill_launcher": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('survived')",
            "stop_launcher": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nprint('survived')",
            "kill_init": "import os, signal\nos.kill(1, signal.SIGKILL)\nprint('survived')",
        },
        control=False,
    )
    + _attempts(
        "limits",
        {
            "limit_of_the_victim": """
import resource
resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (20 + SIGNAL, 20 + SIGNAL))
""",
            "priority_of_the_victim": "import os\nos.setpriority(os.PRIO_PROCESS, VICTIM, 7)",
            "cores_of_the_victim": "import os\nos.sched_setaffinity(VICTIM, {max(os.sched_getaffinity(0))})",
            "io_priority_of_the_victim": "syscall(251, 30, 1, VICTIM, (3 << 13))",
        },
        control=False,
    )
)

PROCESSES = _attempts(
    "says",
    {
        "fork": "import os\nif os.fork() == 0:\n    done()\n    os._exit(0)\nos.wait()\ndone()",
        "vfork": "import os\nif syscall(56, 220, 0x4000 | 17, 0, 0, 0, 0) == 0:\n    os._exit(0)\ndone()",
        "clone_into_the_parent": """
import os
pid = syscall(56, 220, 0x8000 | 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
done()
""",
        "clone3": """
import ctypes, os
pid = syscall(435, 435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17, 0, 0, 0), 64)
if pid == 0:
    os._exit(0)
done()
""",
        "exec": "import os\nos.execv('/bin/echo', ['echo', TOKEN.upper()])",
    },
) + _attempts(
    "says",
    {
        "thread_bomb": """
import threading, time
threading.stack_size(32768)
started = 0
try:
    for started in range(2000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
except RuntimeError:
    pass
if started > 1000:
    done()
""",
        "write_in_packages": """
import os, sys
for folder in [*sys.path, os.path.dirname(os.__file__), os.path.dirname(sys.executable), sys.prefix]:
    try:
        name = f"{folder}/gym_rm_{TOKEN}.pth"
        open(name, "w").write("")
        os.unlink(name)
    except OSError:
        continue
    done()
""",
        "fork_of_32_bits": """
import ctypes, mmap, os
assert os.uname().machine == "x86_64"
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("53b802000000cd80 5bc3"))
run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
pid = run()
if pid == 0:
    os._exit(0)
if pid > 0:
    done()
""",
        "set_clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\ndone()",
        "load_module": "syscall(313, 273, 0, 0, 0)\ndone()",
        "lock_memory": "syscall(151, 230, 3)\ndone()",
        "real_time_priority": "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\ndone()",
        "user_namespace": "syscall(272, 97, 0x10000000)\ndone()",
        "clone_with_namespaces": """
import os
if syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0) == 0:
    os._exit(0)
done()
""",
        "enter_namespace": "import os\nsyscall(308, 268, os.open('/proc/1/ns/mnt', 0), 0)\ndone()",
        "chroot": "import os\nos.chroot('/proc/self/root')\ndone()",
        "become_root": "import os\nos.setuid(0)\ndone()",
        "gain_capability": """
import ctypes
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
syscall(125, 90, header, data)
if any(data[:2]):
    done()
""",
        "set_user_program": "import os\nos.execv('/bin/su', ['su', '-c', 'echo ' + TOKEN.upper()])",
        "bpf": "import ctypes\nsyscall(321, 280, 0, (ctypes.c_uint32 * 18)(2, 4, 4, 1), 72)\ndone()",
        "userfaultfd": "syscall(323, 282, 1)\ndone()",
        "debug_self": "syscall(101, 117, 0, 0, 0, 0)\ndone()",
        "outlive_the_parent": "assert libc().prctl(1, 0, 0, 0, 0) == 0\ndone()",
        "raise_own_limits": """
import resource
for name in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
    try:
        resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        continue
    done()
""",
        # The number is 0 if the session is of another namespace; test_session.py looks from outside.
        "same_session": "import os\nassert os.getsid(0) == SESSION_ID != 0\ndone()",
        "terminal": "import os\nos.open('/dev/tty', os.O_RDWR)\ndone()",
        "kernel_log": "assert libc().klogctl(3, b' ' * 100, 100) >= 0\ndone()",
        "host_name": "import socket\nsocket.sethostname('escaped')\ndone()",
        "device_files": """
import os
for name in ("mem", "kmem", "kmsg", "vda", "sda", "kvm", "fuse", "loop-control", "net/tun", "ptmx"):
    try:
        os.open("/dev/" + name, os.O_RDWR)
    except OSError:
        continue
    done()
""",
        "kernel_settings": """
for name in ("/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj", "/proc/self/uid_map", "/sys/power/state"):
    try:
        open(name, "r+")
    except OSError:
        continue
    done()
""",
    },
    control=False,
)

ESCAPES = NETWORK + READS + WRITES + SIGNALS + PROCESSES
