"""Attempts to get out of the sandbox fail on each layer, and succeed without one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox.attempts import ESCAPES
from sandbox.attempts_limits import LIMITS, TIME
from sandbox.layers import LAYERS, available
from sandbox.world import Naked, World

from gym_rm.sandbox import Sandbox, SandboxLimits

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")
MEMORY = 128 << 20
OUTPUT_BYTES = 64 << 10
WALL_SECONDS = 0.5
SLACK_SECONDS = 5.0  # of a busy machine
ATTEMPTS = {attempt.name: attempt for attempt in ESCAPES + LIMITS}
PLAIN = (type(None), bool, int, float, complex, str, bytes)
NUM_FAST = 4  # of so many attempts, one runs on each layer in the fast tests


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module")
def naked(world):
    naked = Naked(world.leaks)
    yield naked
    naked.close()


def run(sandbox, world, attempt):
    """Run an attempt in a session, and return what is wrong with the reply, or what shows that it worked."""
    source = f"BIG = {4 * MEMORY}\n" + world.source(attempt)
    start = time.monotonic()
    with sandbox.session() as session:
        first = session.execute(source, stdin="")
        replies = [first]
        if first.status == "ok" and "attack" in attempt.source:
            replies.append(session.call("attack", []))
            replies.append(session.call("attack", []))
    seconds = time.monotonic() - start
    return judge(world, attempt, replies, seconds)


def judge(world, attempt, replies, seconds):
    for reply in replies:
        shown = f"{reply.status} {reply.error_type} {str(reply.message)[:300]}"
        if seconds > 3 * WALL_SECONDS + SLACK_SECONDS:
            return f"took {seconds:.1f} s: {shown}"
        if reply.status == "killed":
            return f"counts as killed from outside: {shown}"
        for text in (reply.stdout, reply.stderr, str(reply.message)):
            if len(text) > OUTPUT_BYTES + 1000:
                return f"{len(text)} characters of output"
            text.encode("utf-8", "strict")
        if not is_plain(reply.value):
            return f"a value that is not plain: {type(reply.value)}"
        shown = world.worked(attempt, f"{reply.stdout}{reply.stderr}{reply.message}{reply.value!r:.10000}")
        if shown:
            return shown
    if attempt in TIME and replies[-1].status == "ok":
        return "expected that it does not end well"
    return None


def is_plain(value, depth=0):
    kind = type(value)
    if kind in PLAIN:
        return True
    if depth > 1000:
        return False
    if kind is dict:
        return all(is_plain(key, depth + 1) and is_plain(one, depth + 1) for key, one in value.items())
    return kind in (list, tuple, set, frozenset) and all(is_plain(one, depth + 1) for one in value)


@pytest.fixture(scope="module")
def ran():
    return {}


@pytest.fixture
def outcomes(request, world, ran, layer):
    """What went wrong in each attempt on a layer: all attempts that were selected, several at a time."""
    if layer not in available():
        pytest.skip(f"this machine has no {layer}")
    if layer not in ran:
        selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
        names = [each["name"] for each in selected if each.get("layer") == layer and "name" in each]
        ran[layer] = run_all(world, layer, names)
    return ran[layer]


def run_all(world, layer, selected):
    world.restore()
    world.events.clear()
    properties = world.properties()
    limits = SandboxLimits(
        wall_seconds=WALL_SECONDS, cpu_seconds=1, memory_bytes=MEMORY, output_bytes=OUTPUT_BYTES, reply_bytes=1 << 20
    )
    with orphans() as left:
        with Sandbox(layer=layer, limits=limits, num_workers=4) as sandbox, ThreadPoolExecutor(4) as pool:
            found = dict(
                zip(selected, pool.map(lambda name: run(sandbox, world, ATTEMPTS[name]), selected), strict=True)
            )
            found["sandbox"] = sandbox.session().execute("print(6 * 7)").stdout.strip()
        time.sleep(0.3)
        found["children"] = left()
    found["changed"] = world.changed()
    found["events"] = list(world.events)
    found["properties"] = world.victim.poll() is None and world.properties() == properties
    found |= {name: world.worked(ATTEMPTS[name], "") for name in selected if found[name] is None}
    return found


@contextlib.contextmanager
def orphans():
    """Give a function that returns the new children of this process, and those that outlived their parents."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: they come to this process
    before = children()
    try:
        yield lambda: children() - before
    finally:
        prctl(36, 0, 0, 0, 0)


def children():
    """Living children of this process and those that came to it; the dead ones that came are reaped."""
    found, dead = set(), set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
            if fields[0] == "Z":
                dead.add(int(stat.parent.name))
    for pid in dead:
        os.waitpid(pid, os.WNOHANG)
    return found - dead


def layered(fast):
    """Each attempt with each layer; all but a part of them are slow."""
    for position, layer in enumerate(LAYERS):
        for k, name in enumerate(ATTEMPTS):
            if (k % NUM_FAST == position) == fast:
                yield pytest.param(layer, name, id=f"{layer}-{name}")


@pytest.mark.parametrize(("layer", "name"), list(layered(fast=True)))
def test_attempt_fails(outcomes, layer, name):
    assert outcomes[name] is None


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "name"), list(layered(fast=False)))
def test_other_attempt_fails(outcomes, layer, name):
    assert outcomes[name] is None


@pytest.mark.parametrize("layer", LAYERS)
def test_sandbox_works_after_all_attempts(outcomes, layer):
    assert outcomes["sandbox"] == "42"


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_around_the_sandbox_has_changed(outcomes, layer):
    assert outcomes["changed"] == set()
    assert outcomes["children"] == set()
    assert outcomes["properties"]
    assert [event for event in outcomes["events"] if event != ["received", ""]] == []


CONTROLS = [one for one in ESCAPES if one.control]


@pytest.mark.parametrize(
    "attempt",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] * (k % NUM_FAST > 0)) for k, one in enumerate(CONTROLS)],
)
def test_attempt_succeeds_without_a_sandbox(world, naked, attempt):
    world.restore()
    output = naked.run(world.source(attempt))
    shown = world.worked(attempt, output, wait=1.0)
    if shown is None and any(each in output for each in ("PermissionError", "[Errno 38]", "[Errno 95]", "[Errno 61]")):
        pytest.skip(f"this machine itself forbids it: {output.splitlines()[-1]}")
    assert shown, output


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_code_that_ignores_the_limit_of_its_cpu_time_is_out_of_time_and_not_killed(layer):
    if layer not in available():
        pytest.skip(f"this machine has no {layer}")
    source = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    limits = SandboxLimits(wall_seconds=60.0, cpu_seconds=1)
    with Sandbox(layer=layer, limits=limits, num_workers=1) as sandbox, sandbox.session() as session:
        assert session.execute(source).status == "time"


STAYING = """
import ctypes, os, signal, threading, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for change in (lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0), os.setsid, os.fork, os.fork):
    try:
        change()
    except Exception:
        pass
for fd in range(64):
    try:
        os.close(fd)
    except OSError:
        pass
while True:
    time.sleep(1)
"""
PARENT = """
import sys, threading, time
from gym_rm.sandbox import SandboxLimits, Sandbox
layer, source, end = sys.argv[1:]
limits = SandboxLimits(wall_seconds=100.0, cpu_seconds=100)
sandbox = Sandbox(layer=layer, num_workers=2, limits=limits)
session = sandbox.session()
threading.Thread(target=session.execute, args=(source,), daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
if end == "killed":
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("exit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_outlives_the_parent(layer, end):
    if layer not in available():
        pytest.skip(f"this machine has no {layer}")
    with orphans() as left:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, layer, STAYING, end], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        if end == "killed":
            parent.kill()
        parent.wait(20)
        until = time.monotonic() + 10
        while left() and time.monotonic() < until:
            time.sleep(0.02)
        assert left() == set()
