"""The world around a sandbox in the tests: a folder, secrets, and a victim process; and what happened to them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from sandbox.attempts import PRELUDE, Attempt

GUEST_USER = 65534
ROOT = os.getuid() == 0
FILES = ["log", "remove", "mode", "fmode", "xattr", "owner"]


class World:
    """A folder in /tmp that the guest's user owns, a victim of that user, and secrets in all places."""

    def __init__(self) -> None:
        self.secret = "secret-" + secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="gym-rm-world-"))
        (self.folder / "secret.txt").write_text(self.secret)
        (self.folder / f"{self.secret}.list").write_text("")
        (self.folder / "pointer").symlink_to(self.secret)
        try:
            os.setxattr(self.folder / "secret.txt", "user.secret", self.secret.encode())
            self.attributes = True
        except OSError:
            self.attributes = False
        self.restore()
        for path in (self.folder, *self.folder.glob("*")):
            self._give(path)
        self.secret_fd = os.open(self.folder / "secret.txt", os.O_RDONLY)
        self.folder_fd = os.open(self.folder, os.O_RDONLY)
        self.leaks = (self.secret_fd, self.folder_fd)
        for fd in self.leaks:
            os.set_inheritable(fd, True)
        os.environ["GYM_RM_TEST_SECRET"] = self.secret
        self.events: list[Any] = []
        self.victim = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("victim.py"), self.folder, self.secret, str(self.secret_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self.secret_fd],
        )
        assert self.victim.stdout is not None
        self.places = json.loads(self.victim.stdout.readline())[1]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.handler = signal.signal(signal.SIGURG, lambda *_: self.events.append(["parent", int(signal.SIGURG)]))

    def close(self) -> None:
        """End the victim and remove what it and the folder hold."""
        signal.signal(signal.SIGURG, self.handler)
        del os.environ["GYM_RM_TEST_SECRET"]
        assert self.victim.stdin is not None
        self.victim.stdin.close()
        self.victim.wait(10)
        self.reader.join(10)
        for fd in self.leaks:
            os.close(fd)
        shutil.rmtree(self.folder)

    def restore(self) -> None:
        """Make DIR/open as new."""
        place = self.folder / "open"
        shutil.rmtree(place, ignore_errors=True)
        (place / "folder").mkdir(parents=True)
        for name in FILES:
            (place / name).write_text(name)
        for path in (place, *place.glob("*")):
            self._give(path)
        self.before = self.snapshot()

    def snapshot(self) -> dict[str, Any]:
        """What the guest may have changed: every file of the folder, and properties of the victim's process."""
        found: dict[str, Any] = {}
        for path in sorted(self.folder.rglob("*")):
            stat = path.lstat()
            attributes = os.listxattr(path, follow_symlinks=False)
            changed = 0 if path.is_dir() else stat.st_mtime_ns
            found[path.name] = (stat.st_mode, stat.st_ino, stat.st_size * path.is_file(), changed, attributes)
        return found

    def changed(self) -> set[str]:
        """Names of the files that are new, gone or different."""
        now = self.snapshot()
        return {name for name in now.keys() | self.before.keys() if now.get(name) != self.before.get(name)}

    def properties(self) -> list[Any]:
        """SandboxLimits, priority and scheduling of the victim."""
        pid = self.victim.pid
        limits = Path(f"/proc/{pid}/limits").read_text()
        settings = [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)]
        return [limits, *settings]

    def source(self, attempt: Attempt) -> str:
        """The program with its constants before it."""
        index = zlib.crc32(attempt.name.encode())
        constants = {
            **self.places,
            "TOKEN": self.token(attempt),
            "SIGNAL": int(signal.SIGURG) if attempt.shows == "parent" else 35 + index % 29,
            "DIR": str(self.folder),
            "SECRET_FILE": str(self.folder / "secret.txt"),
            "REPOSITORY_FILE": str(Path(__file__).with_name("attempts.py")),
            "PARENT": os.getpid(),
            "SESSION_ID": os.getsid(0),
            "CWD": os.getcwd(),
        }
        return "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + PRELUDE + attempt.source

    def token(self, attempt: Attempt) -> str:
        return f"t{zlib.crc32((self.secret + attempt.name).encode()):08x}{self.secret[-8:]}"

    def worked(self, attempt: Attempt, output: str, *, wait: float = 0.0) -> str | None:
        """What shows that the attempt worked, or None."""
        until = time.monotonic() + wait
        while True:
            shown = self._worked(attempt, output)
            if shown or time.monotonic() >= until:
                return shown
            time.sleep(0.01)

    def _worked(self, attempt: Attempt, output: str) -> str | None:
        token = self.token(attempt)
        events = list(self.events)
        if attempt.shows in ("secret", "says") and self.secret in output:
            return f"the secret is in the reply: {output[:300]!r}"
        if attempt.name == "repository" and "the control" in output:
            return "a file of the repository is in the reply"
        if attempt.shows == "says" and token.upper() in output:
            return f"the program says so: {output[:300]!r}"
        if attempt.shows == "reached" and any(kind == "received" and token in text for kind, text in events):
            return "the victim received it"
        number = int(signal.SIGURG) if attempt.shows == "parent" else 35 + zlib.crc32(attempt.name.encode()) % 29
        if attempt.shows in ("signal", "parent") and any(
            event in (["signal", number], ["parent", number]) for event in events
        ):
            return f"a process received the signal {number}"
        if attempt.shows == "file":
            mine = {name for name in self.changed() if token in name or f"/open/{name}" in attempt.source}
            if attempt.name == "core_dump":
                mine |= {name for name in self.changed() if name.startswith("core")}
            if mine:
                return f"{sorted(mine)} changed"
        return None

    def _read(self) -> None:
        assert self.victim.stdout is not None
        for line in self.victim.stdout:
            self.events.append(json.loads(line))

    def _give(self, path: Path) -> None:
        if ROOT:
            os.chown(path, GUEST_USER, GUEST_USER, follow_symlinks=False)
        if not path.is_symlink():
            os.chmod(path, 0o755 if path.is_dir() else 0o644)


class Naked:
    """A plain process of the guest's user that forks for each program: the control, without any sandbox."""

    def __init__(self, leaks: tuple[int, ...]) -> None:
        python, options = sys.executable, {}
        if ROOT and os.path.exists("/usr/bin/python3"):
            python = "/usr/bin/python3"
            options = {"user": GUEST_USER, "group": GUEST_USER, "extra_groups": []}
        self.process = subprocess.Popen(
            [python, "-c", NAKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", close_fds=False, **options
        )

    def run(self, source: str) -> str:
        """Run a program, and return what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(source).encode() + b"\n")
        self.process.stdin.flush()
        return str(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


NAKED = """
import json, os, select, signal, sys, time
for line in sys.stdin:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        names = {"__name__": "__main__"}
        exec(json.loads(line), names)
        names.get("attack", int)()
        break
    os.close(write)
    output, until = b"", time.monotonic() + 5
    while select.select([read], [], [], max(until - time.monotonic(), 0))[0]:
        part = os.read(read, 65536)
        output += part
        if not part:
            break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    print(json.dumps(output.decode("utf-8", "replace")), flush=True)
"""
