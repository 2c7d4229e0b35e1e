"""A replica whose ranks are processes of this machine.

Ranks are fresh interpreters with one socket to the driver, not forks and not `multiprocessing` children: so a script
needs no `if __name__ == "__main__":`, notebooks and `python -c` work, and no tracker process stays behind.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gym_rm.engine.executors.answers import (
    Answer,
    agreed_call,
    agreed_info,
    agreed_result,
    has_error,
    raise_if_refused,
    result_of,
)
from gym_rm.engine.executors.executor import BatchResult, Executor, LoadSpec, ModelInfo
from gym_rm.engine.executors.rank import Rank, start_rank
from gym_rm.engine.executors.rank_worker import RankStart, receive, send
from gym_rm.engine.executors.replica import ReplicaFailed, require_sendable
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError, brief

GRACE = 10.0  # seconds that ranks have to answer after another one has reported an error
POLL = 1.0  # seconds between checks of the processes, for a rank whose socket another process keeps open

# Variables of a torch.distributed world in which the driver may be, but its ranks are not.
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# The driver's own path comes first, before anything that is not built in is imported.
PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from gym_rm.engine.executors.rank_worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


class ProcessReplica:
    """One group of ranks as processes of this machine; see `Replica`.

    Args:
        index: index of the replica, from 0; it decides which GPUs its ranks get.
        num_replicas: number of replicas, which share the cores of the machine.
        threads: number of torch's threads in a rank; None to divide the cores among the ranks of all replicas.
        make: function that returns the executor of a rank; it is called in the rank's process.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        num_replicas: int = 1,
        threads: int | None = None,
        make: Callable[[Rank], Executor] = start_rank,
    ) -> None:
        self._index = index
        self._num_replicas = num_replicas
        self._threads = threads
        self._make = make
        self._lock = threading.Lock()
        self._ranks: list[_RankProcess] = []
        self._folder: str | None = None
        self._starts = 0
        self._killed = False

    def start(self, spec: LoadSpec, seconds: float | None = None) -> ModelInfo:
        """See `Replica.start`."""
        require_sendable(spec)
        size = spec.num_ranks
        require_gpus(spec, self._num_replicas)
        request = dumps("load", spec)
        with self._lock:
            self._killed = False
            self._folder = tempfile.mkdtemp(prefix="gym_rm-") if size > 1 else None
        threads = self._threads or max(1, num_cores() // (self._num_replicas * size))
        try:
            for i in range(size):
                rank = Rank(
                    index=i,
                    size=size,
                    store=None if self._folder is None else f"file:{Path(self._folder) / 'store'}",
                    device_index=self._index * size + i,
                    threads=threads,
                )
                quiet = self._index > 0 or i > 0 or self._starts > 0
                self._add(RankStart(rank, self._make, quiet))
            self._starts += 1
            answers = self._ask(request, seconds)
            raise_if_refused(answers)
            failed = [f"rank {i}: {each.error}" for i, each in enumerate(answers) if each.error is not None]
            if failed:
                raise ReplicaFailed(f"the model did not load; {'; '.join(failed)}")
            return agreed_info([each.value for each in answers])
        except BaseException:
            self.kill()
            raise

    def run(self, batch: Batch, seconds: float) -> BatchResult:
        """See `Replica.run`."""
        return agreed_result(self._ask(dumps("run", batch), seconds))

    def call(self, method: str, *arguments: Any, seconds: float) -> None:
        """See `Replica.call`."""
        agreed_call(method, self._ask(dumps(method, *arguments), seconds))

    def alive(self) -> bool:
        """See `Replica.alive`."""
        with self._lock:
            return not self._killed and all(rank.process.poll() is None for rank in self._ranks)

    def kill(self) -> None:
        """See `Replica.kill`. Ranks have nothing to save, so they are killed at once."""
        with self._lock:
            self._killed = True
            for rank in self._ranks:
                rank.process.kill()
            for rank in self._ranks:
                rank.process.wait()
                rank.connection.close()
            self._ranks = []
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order."""
        with self._lock:
            return tuple(rank.process.pid for rank in self._ranks)

    def _add(self, start: RankStart) -> None:
        with self._lock:
            if self._killed:
                raise ReplicaFailed("it was stopped while it started")
            try:
                first = not self._ranks  # one rank removes the folder if the driver dies
                self._ranks.append(_RankProcess(start, len(self._ranks), (self._folder or "") if first else ""))
            except OSError as error:  # for example too many processes or open files
                raise ReplicaFailed(f"rank {len(self._ranks)} cannot be started: {error}") from error

    def _ask(self, request: bytes, seconds: float | None) -> list[Answer]:
        """Send a request to all ranks and return their answers, in order."""
        with self._lock:
            if self._killed or not self._ranks:
                raise ReplicaFailed("it was stopped")
            # Copies of the sockets, because `kill` in another thread closes the originals.
            ranks = [_RankConnection(each) for each in self._ranks]
        ends = None if seconds is None else time.monotonic() + seconds
        answers: dict[int, Answer] = {}
        try:
            for rank in ranks:
                rank.send(request, ends)
            while len(answers) < len(ranks):
                waiting = [rank for rank in ranks if rank.index not in answers]
                for rank in _readable(waiting, ends):
                    answers[rank.index] = rank.receive(ends)
                    if has_error(answers[rank.index]):
                        in_grace = time.monotonic() + GRACE
                        ends = in_grace if ends is None else min(ends, in_grace)
        except ReplicaFailed as failure:
            first = next((each for each in answers.values() if has_error(each)), None)
            if first is not None:
                self.kill()  # what the silent rank still answers must not be taken for an answer to the next request
                raise_if_refused([first])
                failure.result = result_of(first)
            raise
        finally:
            for rank in ranks:
                rank.connection.close()
        return [answers[i] for i in range(len(ranks))]


class _RankProcess:
    """The process of a rank, and the driver's end of its socket."""

    def __init__(self, start: RankStart, index: int, folder: str) -> None:
        if not sys.executable:
            raise ConfigError("sys.executable is not set, so no other Python process can be started.")
        self.index = index
        first_message = pickle.dumps(start)
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            paths = [each for each in sys.path if isinstance(each, str)]
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(descriptor), str(os.getpid()), folder, *paths],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the driver
                env=_environment(start.rank.threads),
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C in a terminal is for the driver, also while the rank imports torch
            )
        self.connection = ours
        send(ours, first_message)


class _RankConnection:
    """A copy of the driver's end of a rank's socket, for one request."""

    def __init__(self, rank: _RankProcess) -> None:
        self.index, self.process = rank.index, rank.process
        self.connection = rank.connection.dup()

    def send(self, message: bytes, ends: float | None) -> None:
        try:
            self.connection.settimeout(_left(ends))
            send(self.connection, message)
        except TimeoutError:
            raise self.silent() from None
        except OSError:
            raise self.dead() from None

    def receive(self, ends: float | None) -> Answer:
        try:
            self.connection.settimeout(_left(ends))
            answer: Answer = pickle.loads(receive(self.connection))
        except TimeoutError:
            raise self.silent() from None
        except (EOFError, OSError):
            raise self.dead() from None
        return answer

    def silent(self) -> ReplicaFailed:
        return ReplicaFailed(
            f"rank {self.index} (process {self.process.pid}) did not answer in time; raise lease_seconds if a batch "
            "may take so long"
        )

    def dead(self) -> ReplicaFailed:
        """Return the failure of a rank whose end of the socket is closed."""
        try:
            code = self.process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            return ReplicaFailed(f"rank {self.index} (process {self.process.pid}) closed its connection")
        return ReplicaFailed(f"rank {self.index} (process {self.process.pid}) {_ended(code)}")


def _readable(ranks: Sequence[_RankConnection], ends: float | None) -> list[_RankConnection]:
    """Return the ranks that have answered or died, at least one.

    Raises:
        ReplicaFailed: none has within the time.
    """
    poll = select.poll()
    by_descriptor = {rank.connection.fileno(): rank for rank in ranks}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while True:
        left = _left(ends)
        ready = poll.poll(1000 * (POLL if left is None else min(left, POLL)))
        if ready:
            return [by_descriptor[descriptor] for descriptor, _ in ready]
        for rank in ranks:
            if rank.process.poll() is not None and not poll.poll(0):
                raise rank.dead()
        if ends is not None and time.monotonic() >= ends:
            raise ranks[0].silent()


def _left(ends: float | None) -> float | None:
    """Return the seconds that are left; a millisecond at least, because 0 would mean that sockets do not wait."""
    return None if ends is None else max(0.001, ends - time.monotonic())


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    memory = " (as the kernel does when memory is short)" if name == "SIGKILL" else ""
    return f"was killed by {name}{memory}"


def _environment(threads: int | None) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in WORLD and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }
    return kept if threads is None else kept | {"OMP_NUM_THREADS": str(threads)}


def dumps(method: str, *arguments: Any) -> bytes:
    """Return a request as bytes; raise ConfigError if the arguments cannot be pickled."""
    try:
        return pickle.dumps((method, *arguments), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(
            f"the arguments of {method} cannot be sent to other processes: {brief(error)}. Pass paths and plain values."
        ) from error


def require_gpus(spec: LoadSpec, num_replicas: int) -> None:
    """Raise ConfigError if the model goes to GPUs and there are fewer than ranks."""
    import torch

    from gym_rm.engine.loading.checkpoint import Checkpoint, resolve_device

    assert isinstance(spec.model, Checkpoint)
    if resolve_device(spec.model.options.device).type != "cuda":
        return
    needed, visible = num_replicas * spec.num_ranks, torch.cuda.device_count()
    if needed > visible:
        raise ConfigError(
            f"num_replicas={num_replicas} with {spec.num_ranks} ranks each needs {needed} GPUs, but this process sees "
            f"{visible}; pass a smaller num_replicas, or device='cpu'."
        )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
