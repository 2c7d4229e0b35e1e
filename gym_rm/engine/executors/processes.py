"""A replica whose ranks are processes of this machine.

Ranks are fresh interpreters with one socket to the driver, not forks and not `multiprocessing` children: so a script
needs no `if __name__ == "__main__":`, notebooks and `python -c` work, and no tracker process stays behind.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gym_rm.engine.executors.executor import Executor, LoadSpec
from gym_rm.engine.executors.ranks import Rank, start_rank
from gym_rm.engine.executors.replica import Replica, ReplicaFailed
from gym_rm.engine.executors.worker import Answer
from gym_rm.errors import ConfigError

STALLED_SECONDS = 30  # in which a rank takes no byte of a message
POLL_SECONDS = 1.0  # between checks of the processes, for a rank whose socket another process keeps open

# Variables of a torch.distributed world in which the driver may be, but its ranks are not.
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
WORLD_PREFIXES = ("TORCHELASTIC_", "ROLE_")

# The driver's own path comes first, before anything that is not built in is imported.
PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from gym_rm.engine.executors.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


class ProcessReplica(Replica):
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
        self._waiting: list[_RankProcess] = []
        self._store: Any = None
        self._starts = 0

    @property
    def process_ids(self) -> tuple[int, ...]:
        """See `Replica.process_ids`."""
        return tuple(rank.process.pid for rank in self._ranks)

    def alive(self) -> bool:
        """See `Replica.alive`."""
        ranks = self._ranks
        return bool(ranks) and all(rank.process.poll() is None for rank in ranks)

    def kill(self) -> None:
        """See `Replica.kill`. Ranks have nothing to save, so they are killed at once."""
        with self._lock:
            ranks, self._ranks, self._store = self._ranks, [], None
            for rank in ranks:
                rank.process.kill()
        for rank in ranks:
            rank.process.wait()

    def _start_ranks(self, spec: LoadSpec) -> None:
        size = spec.num_ranks
        if size > 1:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for i in range(size):
            rank = Rank(
                index=i,
                size=size,
                store=None if size == 1 else f"127.0.0.1:{self._store.port}",
                device_index=self._index * size + i,
                threads=self._threads or max(1, num_cores() // (self._num_replicas * size)),
                quiet=self._index > 0 or i > 0 or self._starts > 0,
            )
            with self._lock:
                try:
                    self._ranks.append(_RankProcess(rank, self._make))
                except OSError as error:  # for example too many processes or open files
                    raise ReplicaFailed(f"rank {i} cannot be started: {error}") from error
        self._starts += 1

    def _send(self, request: bytes) -> None:
        self._waiting = list(self._ranks)
        if len(self._waiting) < self._size:
            raise ReplicaFailed("it was stopped")
        for rank in self._waiting:
            rank.send(request)

    def _receive(self, ends: float) -> dict[int, Answer]:
        by_connection: dict[Any, _RankProcess] = {rank.connection: rank for rank in self._waiting}
        while not (ready := wait(list(by_connection), min(POLL_SECONDS, max(0.0, ends - monotonic())))):
            for rank in self._waiting:
                if rank.process.poll() is not None and not rank.connection.poll():
                    raise rank.dead()
            if monotonic() >= ends:
                raise self._waiting[0].silent()
        answered = [by_connection[connection] for connection in ready]
        self._waiting = [rank for rank in self._waiting if rank not in answered]
        return {rank.index: rank.receive() for rank in answered}


class _RankProcess:
    """The process of a rank, and the driver's end of its socket."""

    def __init__(self, rank: Rank, make: Callable[[Rank], Executor]) -> None:
        if not sys.executable:
            raise ConfigError("sys.executable is not set, so no other Python process can be started.")
        self.index = rank.index
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", STALLED_SECONDS, 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        with theirs:
            paths = [each for each in sys.path if isinstance(each, str)]
            others = (name for name in os.environ if name not in WORLD and not name.startswith(WORLD_PREFIXES))
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(os.getpid()), *paths],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the driver
                env={name: os.environ[name] for name in others} | {"OMP_NUM_THREADS": str(rank.threads)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the driver, also while the rank imports torch
            )
        self.connection = Connection(ours.detach())
        self.send(pickle.dumps((rank, make)))

    def send(self, message: bytes) -> None:
        """Send a message, or raise `ReplicaFailed`."""
        try:
            self.connection.send_bytes(message)
        except BlockingIOError:
            raise self.silent() from None
        except OSError:
            raise self.dead() from None

    def receive(self) -> Answer:
        """Return an answer that has arrived, or raise `ReplicaFailed`."""
        try:
            answer: Answer = pickle.loads(self.connection.recv_bytes())
        except BlockingIOError:
            raise self.silent() from None
        except (EOFError, OSError):
            raise self.dead() from None
        return answer

    def silent(self) -> ReplicaFailed:
        return ReplicaFailed(
            f"rank {self.index} (process {self.process.pid}) did not answer in time; raise batch_timeout if a batch "
            "may take so long"
        )

    def dead(self) -> ReplicaFailed:
        """Return the failure of a rank whose end of the socket is closed."""
        how = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=POLL_SECONDS)
            how = f"ended with exit code {code}"
            if code < 0:
                name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
                memory = " (as the kernel does when memory is short)" if name == "SIGKILL" else ""
                how = f"was killed by {name}{memory}"
        return ReplicaFailed(f"rank {self.index} (process {self.process.pid}) {how}")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
