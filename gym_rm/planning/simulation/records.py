"""Records of a simulated job: its pools, their speeds and failures, and the result. `simulate` runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gym_rm.errors import ConfigError
from gym_rm.planning.workload.lengths import Lengths

LLAMA_3_HOURS = 54 * 24 * 16_384 / 419
"""GPU hours per unexpected interruption in Meta's training of Llama 3 405B: 419 in 54 days on 16,384 H100 GPUs
(arXiv 2407.21783, section 3.3.4)."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{message}.")


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Replicas and batches that are slow.

    Attributes:
        share: probability that a replica is slow, for the whole run.
        factor: times as long as usual that a slow replica takes.
        spread: standard deviation of the logarithm of a factor drawn for each batch; its mean is 1.
    """

    share: float = 0.0
    factor: float = 1.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        _require(0 <= self.share <= 1, f"share must be between 0 and 1, got {self.share}")
        _require(self.factor >= 1, f"factor must be at least 1, got {self.factor}")
        _require(self.spread >= 0, f"spread must be at least 0, got {self.spread}")


@dataclass(frozen=True, slots=True)
class Failures:
    """How often GPUs fail.

    Attributes:
        gpu_hours: mean hours between failures of one GPU, which come at random (exponential); infinite for none. A
            replica of k GPUs fails k times as often. See `LLAMA_3_HOURS`.
        detection_seconds: time until a failure is noticed.
    """

    gpu_hours: float = math.inf
    detection_seconds: float = 30.0

    def __post_init__(self) -> None:
        _require(self.gpu_hours > 0, f"gpu_hours must be more than 0, got {self.gpu_hours}")
        _require(self.detection_seconds >= 0, f"detection_seconds must be at least 0, got {self.detection_seconds}")


@dataclass(frozen=True, slots=True)
class Generation:
    """Seconds of generation on one replica; see the module for the formula.

    Attributes:
        round_seconds: of a round, whatever runs in it: reading the weights.
        token_seconds: of each reply that runs in it.
        context_seconds: of each token that its cache holds.
        prompt_seconds: of each token of a prompt, at the start.
        max_num_seqs: replies that run at the same time.
    """

    round_seconds: float
    token_seconds: float = 0.0
    context_seconds: float = 0.0
    prompt_seconds: float = 0.0
    max_num_seqs: int = 256


@dataclass(frozen=True, slots=True)
class Scoring:
    """Seconds of scoring on one replica: `batch_seconds + token_seconds * unique tokens` for a batch.

    Attributes:
        batch_seconds, token_seconds: as above.
        max_num_batched_tokens: tokens of a batch. Batches have equal shares of the tokens of a step.
    """

    token_seconds: float
    batch_seconds: float = 0.0
    max_num_batched_tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class Training:
    """Seconds of the update on all replicas together, which wait for the slowest.

    Attributes:
        token_seconds: of each token of a step.
        step_seconds: of the update besides.
        checkpoint_every: steps between checkpoints.
        checkpoint_seconds: time that a checkpoint stops training.
        keeps_rollouts: whether conversations are stored until the next checkpoint, so that after a failure only updates
            are done again; otherwise all steps since the last checkpoint are done again from the start.
    """

    token_seconds: float = 0.0
    step_seconds: float = 0.0
    checkpoint_every: int = 1
    checkpoint_seconds: float = 0.0
    keeps_rollouts: bool = False

    def __post_init__(self) -> None:
        _require(self.checkpoint_every >= 1, f"checkpoint_every must be at least 1, got {self.checkpoint_every}")


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Replicas of one model that do the same work.

    Attributes:
        name: name in the result.
        work: what they do.
        num_replicas: replicas.
        gpus_per_replica: GPUs of each.
        gpus: name of the GPUs; pools with the same name share them and take turns. Empty for GPUs of their own.
        load_seconds: time from the detection of a death until the replica works again. In training, all ranks load.
        stragglers: slow replicas and batches.
        cores: replicas that can compute at the same time without slowing each other, such as 1.8 on two cores; with
            more, all get equal shares. None if each has a device.
        others: mean number of other programs that compute on these cores all the time; used if `cores` is given.
        load_computes: whether loading takes a share of the cores; `load_seconds` is then its time alone.
        lease_seconds: time after which a batch is given to an idle replica too; None for never.
        max_restarts: restarts for each replica, which 16 good batches restore; None for any number.
    """

    name: str
    work: Generation | Scoring | Training
    num_replicas: int
    gpus_per_replica: int = 1
    gpus: str = ""
    load_seconds: float = 120.0
    stragglers: Stragglers = Stragglers()
    cores: float | None = None
    others: float = 0.0
    load_computes: bool = False
    lease_seconds: float | None = None
    max_restarts: int | None = None

    def __post_init__(self) -> None:
        sizes = min(self.num_replicas, self.gpus_per_replica)
        _require(sizes >= 1, f"{self.name}: num_replicas and gpus_per_replica must be at least 1, got {sizes}")
        _require(self.load_seconds >= 0, f"{self.name}: load_seconds must be at least 0, got {self.load_seconds}")
        _require(self.cores is None or self.cores > 0, f"{self.name}: cores must be more than 0, got {self.cores}")

    @property
    def num_gpus(self) -> int:
        """GPUs of the pool."""
        return self.num_replicas * self.gpus_per_replica


@dataclass(frozen=True, slots=True)
class Simulation:
    """A job to simulate.

    Attributes:
        pools: the pools; a step generates, scores and updates in this order, with those that are there. Pools with the
            same work run at the same time, unless they share GPUs.
        num_conversations: conversations of the job, rounded up to whole steps.
        conversations_per_step: conversations of a step.
        prompts, replies: lengths.
        group_size: replies to one prompt, which is scored once for all of them.
        asynchronous: False: each step waits for the update of the one before. True: a step begins to generate while the
            one before it is scored and trained on, with the weights of the update before that.
        overhead_seconds: time before each generation: weights go to it, models sleep and wake.
        failures: how often GPUs fail.
        seed: all draws depend on it. Lengths and slowness do not depend on failures.
    """

    pools: tuple[SimulatedPool, ...]
    num_conversations: int
    conversations_per_step: int
    replies: Lengths
    prompts: Lengths
    group_size: int = 1
    asynchronous: bool = False
    overhead_seconds: float = 0.0
    failures: Failures = Failures()
    seed: int = 0

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        _require(bool(names) and len(set(names)) == len(names), f"pools must have different names, got {names}")
        trained = sum(isinstance(pool.work, Training) for pool in self.pools)
        _require(trained <= 1, f"only one pool can train, got {trained}")
        for name in ("num_conversations", "conversations_per_step", "group_size"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        if self.asynchronous:
            for pool in self.pools:
                works = {type(each.work).__name__ for each in self.pools if gpus_of(each) == gpus_of(pool)}
                _require(len(works) == 1, f"asynchronous=True, but {sorted(works)} share the GPUs {gpus_of(pool)!r}")

    @property
    def num_steps(self) -> int:
        """Steps of the job."""
        return -(-self.num_conversations // self.conversations_per_step)

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools; those that are shared count once."""
        return sum(group_sizes(self).values())


@dataclass(frozen=True, slots=True)
class PoolResult:
    """What one pool did. Shares are of the time of all its replicas.

    Attributes:
        name: name of the pool.
        busy_share: computing, lost work included.
        down_share: dead or loading.
        redone_share: computing whose result was lost with its replica, or not needed.
        idle_share: the rest. The GPUs of a shared pool may do other work meanwhile; see `SimulationResult.idle_share`.
        scored: conversations that got a result, those of repeated steps included.
        errors: conversations that got none.
        restarts: replicas that were started again; for training, starts of the whole job.
    """

    name: str
    busy_share: float
    down_share: float
    redone_share: float
    scored: int
    errors: int
    restarts: int

    @property
    def idle_share(self) -> float:
        """Share of the time in which a replica waits."""
        return max(0.0, 1.0 - self.busy_share - self.down_share)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What came of a job.

    Attributes:
        seconds: time of all steps.
        conversations: conversations that were trained on (or scored, without training), each once.
        step_seconds: time between the ends of steps, with repetitions and waits.
        pools: what each pool did.
        idle_share: share of the time of all GPUs in which nobody computes, loads or is dead.
        lost: shares of time lost by cause. Replicas that are down, and work of theirs that is done again, count with
            their share of all GPUs; what stops the whole job counts with its time.
        repeated_steps: steps that were done again because training lost them.
        events: batches, deaths and restarts that were simulated.
    """

    seconds: float
    conversations: int
    step_seconds: tuple[float, ...]
    pools: tuple[PoolResult, ...]
    idle_share: float
    lost: tuple[tuple[str, float], ...]
    repeated_steps: int
    events: int

    @property
    def conversations_per_second(self) -> float:
        """Conversations per second."""
        return self.conversations / self.seconds

    @property
    def restarts(self) -> int:
        """Restarts of all pools."""
        return sum(pool.restarts for pool in self.pools)

    def step_quantile(self, share: float) -> float:
        """Return the time that this share of the steps does not exceed."""
        return float(np.quantile(self.step_seconds, share))

    def pool(self, name: str) -> PoolResult:
        """Return the result of a pool."""
        return next(pool for pool in self.pools if pool.name == name)


def gpus_of(pool: SimulatedPool) -> str:
    """Return the name of the GPUs of a pool."""
    return pool.gpus or pool.name


def group_sizes(simulation: Simulation) -> dict[str, int]:
    """Return the number of GPUs by the name of the group that shares them."""
    sizes: dict[str, int] = {}
    for pool in simulation.pools:
        sizes[gpus_of(pool)] = max(sizes.get(gpus_of(pool), 0), pool.num_gpus)
    return sizes
