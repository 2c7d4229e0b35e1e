import ctypes
import gc
import os
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gym_rm.errors import ConfigError
from gym_rm.sandbox import Sandbox, SandboxError, SandboxLimits
from gym_rm.sandbox.layers import sandbox_user

TWICE = "def twice(x): return 2 * x"


def children():
    """Return the processes below this one."""
    found, todo = set(), [os.getpid()]
    while todo:
        try:
            for task in os.listdir(f"/proc/{todo[-1]}/task"):
                with open(f"/proc/{todo[-1]}/task/{task}/children") as file:
                    new = {int(each) for each in file.read().split()} - found
                found |= new
                todo[:0] = new
        except OSError:
            pass
        todo.pop()
    return found


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.02)
    return not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_after_close(sandbox):
    before, files = children(), open_files()
    with Sandbox(layer=sandbox.layer, num_workers=2) as made:
        kept = made.session()
        for _ in range(3):
            with made.session() as session:
                session.execute(TWICE)
        started = children() - before
        assert started
    assert gone(started)
    assert kept.execute("1").status != "ok"
    assert open_files() == files
    with pytest.raises(SandboxError, match="closed"):
        made.session()


def test_as_many_rows_of_all_calls_as_workers_are_at_work(sandbox):
    both, running, most, lock = threading.Barrier(2), set(), [], threading.Lock()

    def work(row):
        with lock:
            running.add(row)
            most.append(len(running))
        both.wait(timeout=30)
        with lock:
            running.discard(row)
        return row

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(sandbox.map, work, range(start, start + 4)) for start in (0, 4, 8)]
        assert [row for call in calls for row in call.result()] == [*range(12)]
    assert max(most) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_wait_for_the_rows_of_its_parent(sandbox):
    forking = threading.Lock()  # filelock refuses a fork beside another

    def forked(row):
        with forking:
            child = os.fork()
        if child == 0:
            os._exit(0 if sandbox.map(str, range(3)) == ["0", "1", "2"] else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert sandbox.map(forked, range(4)) == [0] * 4


def test_no_orphan_is_left_to_a_first_process_that_reaps_none(sandbox):
    prctl = ctypes.CDLL(None).prctl
    before = children()
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to this process, as in a container to its first one
    try:
        for _ in range(5):
            with Sandbox(layer=sandbox.layer, num_workers=2) as made, made.session() as session:
                session.execute(TWICE)
        assert not children() - before
    finally:
        prctl(36, 0, 0, 0, 0)


def test_nothing_is_left_after_garbage_collection(sandbox):
    gc.collect()  # of other tests
    before, files = children(), open_files()
    made = Sandbox(layer=sandbox.layer, num_workers=1)
    session = made.session()
    started = children() - before
    del made
    gc.collect()
    assert session.execute("1", result=True).value == "1"  # a session keeps its sandbox
    del session
    gc.collect()
    assert gone(started)
    assert open_files() == files


def test_sessions_are_fresh_and_threads_may_take_them(sandbox):
    results = []

    def work(number):
        for _ in range(4):
            with sandbox.session() as session:
                assert session.call("twice", [number]).error_type == "NameError"
                session.execute(TWICE)
                results.append(session.call("twice", [number]).value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([0, 2, 4, 6] * 4)


def test_a_session_outlives_the_thread_that_took_it(sandbox):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(sandbox.session()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with taken[0] as session:
        assert session.execute("1", result=True).value == "1"


def test_the_pool_holds_no_more_than_its_size_and_a_few(sandbox):
    before = children()
    with Sandbox(layer=sandbox.layer, num_workers=2) as made:
        assert children() == before  # none before the first is wanted
        made.session().close()
        time.sleep(0.5)
        layers = 2 if sandbox.layer == "bubblewrap" else 1
        assert len(children() - before) <= 2 * layers


def test_warm_interpreters_that_died_are_replaced(sandbox):
    with Sandbox(layer=sandbox.layer, num_workers=2) as made:
        made.session().close()
        time.sleep(0.3)
        for child in list(made._pool.children):
            os.kill(child.process.pid, 9)
            child.wait(1.0)
        with made.session() as session:
            assert session.execute("1", result=True).value == "1"


def test_a_fork_of_the_parent_has_a_pool_of_its_own(sandbox):
    with sandbox.session() as session:
        session.execute(TWICE)
        pid = os.fork()
        if not pid:
            try:
                with sandbox.session() as own:
                    good = own.execute("3", result=True).value == "3"
                sandbox._pool.close()
                del session
                os._exit(0 if good else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.call("twice", [4]).value == 8


def test_limits_of_a_session_can_differ(sandbox):
    with sandbox.session(SandboxLimits(memory_bytes=1 << 30)) as session:
        assert session.execute("x = bytearray(600 << 20)").status == "ok"
    with sandbox.session() as session:
        assert session.execute("x = bytearray(600 << 20)").status == "memory"


def test_packages_of_an_interpreter_can_be_imported_on_request(sandbox):
    path = sandbox._interpreter.path
    version = subprocess.check_output(
        [path, "-c", "import sysconfig; print(sysconfig.get_python_version())"], text=True
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        if sandbox_user() is not None and not all(os.stat(each).st_mode & 1 for each in Path(folder).resolve().parents):
            pytest.skip("the folder of temporary files is private")
        packages = Path(folder, "lib", f"python{version.strip()}", "site-packages")
        packages.mkdir(parents=True)
        (packages / "steps.py").write_text("def double(x): return 2 * x")
        Path(folder, "pyvenv.cfg").write_text(f"home = {os.path.dirname(path)}")
        own = Path(folder, "bin", "python")
        own.parent.mkdir()
        own.symlink_to(path)
        for names, status in [(["steps"], "ok"), ([], "exception")]:
            with Sandbox(layer=sandbox.layer, num_workers=1, interpreter=str(own), packages=names) as made:
                assert made.session().execute("import steps; steps.double(2)", result=True).status == status
        with pytest.raises(ConfigError, match=r"with steps, missing can be read .*No module named 'missing'"):
            Sandbox(layer=sandbox.layer, interpreter=str(own), packages=["steps", "missing"])


def test_packages_are_a_list_of_names():
    for names in ("numpy", [3], ["num py"]):
        with pytest.raises(ConfigError, match="must be a list of names"):
            Sandbox(packages=names)


@pytest.mark.slow
def test_many_sessions_leave_nothing(sandbox):
    def rss():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    with Sandbox(layer=sandbox.layer, num_workers=2) as made:
        for count in range(200):
            with made.session() as session:
                assert session.execute(TWICE + "\nprint('x' * 1000)").status == "ok"
            if count == 50:
                time.sleep(0.3)
                files, memory = open_files(), rss()
        time.sleep(0.3)
        assert abs(open_files() - files) <= 10
        assert rss() - memory < 4 << 20
