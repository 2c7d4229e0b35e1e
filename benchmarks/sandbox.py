"""What does a sandboxed run cost, and does anything stay behind?

    python benchmarks/sandbox.py [--sessions 10000] [--layers bubblewrap landlock unsafe]

Prints milliseconds of wall clock (median) and of CPU of all processes (mean) per run: an interpreter is taken,
a function is defined and called, the interpreter is thrown away. "cold" starts it for the run, "warm" takes it from
the pool.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import results

from gym_rm.sandbox import Sandbox, SandboxLimits
from gym_rm.sandbox.layers import LAYERS, detect, find_interpreter, launch, sandbox_user
from gym_rm.sandbox.session import SandboxSession


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it reaped."""
    usages = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages)


def measure(name: str, run: Callable[[], object], repeats: int = 50) -> dict[str, float]:
    """Print and return the cost of one run."""
    walls, before = [], cpu_seconds()
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        walls.append(time.perf_counter() - start)
    cpu = (cpu_seconds() - before) / repeats
    found = {"wall ms": statistics.median(walls) * 1e3, "CPU ms": cpu * 1e3}
    print(f"{name:30} wall {statistics.median(walls) * 1e3:6.1f} ms   cpu {cpu * 1e3:6.1f} ms")
    return found


def use(session: SandboxSession) -> None:
    """Define a function and call it."""
    with session:
        session.execute("def double(x): return 2 * x")
        assert session.call("double", [21]).value == 42


def left() -> tuple[int, int, int, int]:
    """Return processes of the machine's nobody or ours, open files, mounts, and resident MiB of this process."""
    names = [each for each in os.listdir("/proc") if each.isdigit()]
    parents = []
    for each in names:
        try:
            with open(f"/proc/{each}/stat") as file:
                parents.append(int(file.read().rsplit(")", 1)[1].split()[1]))
        except OSError:
            continue
    with open("/proc/self/mounts") as file:
        mounts = len(file.readlines())
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize() >> 10
    return parents.count(os.getpid()), len(os.listdir("/proc/self/fd")), mounts, resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=0, help="also run this many and look for what is left")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    results.add_argument(parser)
    options = parser.parse_args()
    print(f"python {' '.join(sys.argv)}: {platform.platform()}, {os.cpu_count()} cores, {platform.python_version()}")
    plain = find_interpreter(None, sandbox_user())
    start = [plain.path, "-I", "-S", "-c", "pass"]
    name = "python -I -S -c pass"
    values = {f"`{name}`": measure(name, lambda: subprocess.run(start, env={}, check=True))}
    memory: dict[str, dict[str, float]] = {}
    for layer in options.layers:
        if reason := detect(layer, plain):
            print(f"{layer}: {reason}")
            continue
        limits = SandboxLimits()

        def cold(layer: str = layer, limits: SandboxLimits = limits) -> None:
            session = SandboxSession(launch(layer, plain))
            session.configure(limits)
            use(session)

        values[f"`{layer}`, started for the run"] = measure(f"{layer}, cold", cold)
        with Sandbox(layer=layer, allow_unsafe=True, interpreter=plain.path) as sandbox:
            use(sandbox.session())
            warm = functools.partial(lambda sandbox: use(sandbox.session()), sandbox)
            values[f"`{layer}`, from the pool"] = measure(f"{layer}, warm", warm)
            for count in range(1, options.sessions + 1):
                use(sandbox.session())
                if count in (100, 1000, options.sessions):
                    time.sleep(1)
                    memory.setdefault(layer, {})[f"{count:,}"] = left()[-1] / 1024
                    print(f"  after {count} sessions: processes, files, mounts, resident KiB {left()}", flush=True)
        print(f"  after close: {left()}")
    results.save(options.save, {"runs": values, "MiB after sessions": memory})


if __name__ == "__main__":
    main()
