"""A process that waits to be attacked: it listens, holds secrets, and writes what it receives as lines to stdout.

Arguments: folder, secret, file descriptor of the secret file. Started by `world.py`, as the user of the guests.
"""

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time


def serve(listener):
    while True:
        one, _ = listener.accept()
        threading.Thread(target=receive, args=(one,), daemon=True).start()


def receive(one):
    one.settimeout(1)
    with contextlib.suppress(OSError):
        tell("received", one.recv(400).decode("utf-8", "replace"))
    one.close()


def receive_datagrams(one):
    while True:
        tell("received", one.recv(400).decode("utf-8", "replace"))


def read_fifo(fd):
    while True:
        tell("received", os.read(fd, 400).decode("utf-8", "replace"))


def tell(what, value):
    os.write(1, (json.dumps([what, value]) + "\n").encode())


def main():
    folder, secret, fd = sys.argv[1:]
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: the same user may trace it, as if it had always been this user
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER_ANY
    os.chdir(folder)
    for number in (signal.SIGURG, *range(34, 65)):
        signal.signal(number, lambda number, _: tell("signal", number))
    held = ctypes.create_string_buffer(secret.encode(), 64)
    buffer = ctypes.create_string_buffer(4096)
    posix = f"/gym-rm-{os.getpid()}"
    memory_fd = os.open("/dev/shm" + posix, os.O_CREAT | os.O_RDWR, 0o666)
    os.fchmod(memory_fd, 0o666)
    os.ftruncate(memory_fd, 4096)
    shared = mmap.mmap(memory_fd, 4096)
    sysv = libc.shmget(0, 4096, 0o1666)
    attached = libc.shmat(sysv, None, 0)
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(tcp.getsockname())
    abstract = f"gym-rm-{os.getpid()}"
    listeners = [tcp]
    for address in ("\0" + abstract, folder + "/socket"):
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(address)
        listeners[-1].listen()
    os.chmod(folder + "/socket", 0o777)
    os.mkfifo(folder + "/fifo")
    os.chmod(folder + "/fifo", 0o666)
    for one in listeners:
        threading.Thread(target=serve, args=(one,), daemon=True).start()
    threading.Thread(target=receive_datagrams, args=(udp,), daemon=True).start()
    threading.Thread(target=read_fifo, args=(os.open(folder + "/fifo", os.O_RDWR),), daemon=True).start()
    places = {
        "VICTIM": os.getpid(),
        "VICTIM_FD": int(fd),
        "VICTIM_SECRET": ctypes.addressof(held),
        "VICTIM_BUFFER": ctypes.addressof(buffer),
        "PORT": tcp.getsockname()[1],
        "UNIX": folder + "/socket",
        "ABSTRACT": "\0" + abstract,
        "SHM": posix,
        "SYSV": sysv,
    }
    tell("places", places)
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    before = None
    while True:  # the main thread stays in Python, so that its signal handlers run
        time.sleep(0.02)
        memory = shared[:] + ctypes.string_at(attached, 4096) + buffer.raw
        if memory != before:
            before = memory
            tell("received", memory.replace(b"\0", b"").decode("latin1"))


def wait_for_the_end():
    sys.stdin.read()
    os.unlink(f"/dev/shm/gym-rm-{os.getpid()}")
    ctypes.CDLL(None).shmctl(-1, 0, None)
    os._exit(0)


main()
