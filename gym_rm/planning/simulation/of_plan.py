"""A simulation of the job that a plan describes."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from gym_rm.planning.plan import Phase, PhaseTime, Plan
from gym_rm.planning.simulation.records import (
    Failures,
    Generation,
    Scoring,
    SimulatedPool,
    Simulation,
    Stragglers,
    Training,
)
from gym_rm.planning.simulation.work import draw, last_rounds
from gym_rm.planning.workload.lengths import Lengths, constant

ROUND_SHARE = 0.8
"""Share of the time of generation that each round costs whatever runs in it. An assumption: reading the weights takes
most of a round until the batches are large."""
DRAWS = 8  # of the longest replies, to find the number of rounds


def simulation_of(
    plan: Plan,
    *,
    num_conversations: int,
    replies: Lengths | None = None,
    prompts: Lengths | None = None,
    group_size: int = 1,
    asynchronous: bool | None = None,
    failures: Failures | None = None,
    stragglers: Stragglers | None = None,
    checkpoint_every: int = 1,
    checkpoint_seconds: float = 0.0,
    keeps_rollouts: bool = False,
    seed: int = 0,
) -> Simulation:
    """Return a simulation whose phases take the seconds of a plan in the mean, when nothing fails and nobody is slow.

    Args:
        plan: the plan. Components that train are simulated as one job, because they wait for each other.
        num_conversations: conversations of the job.
        replies, prompts: lengths; None for the plan's mean number of tokens, all as replies of one length.
        group_size: replies to a prompt.
        asynchronous: None if the plan's step is shorter than the sum of its phases.
        failures, stragglers: None for none. Stragglers are among the replicas of all components.
        checkpoint_every, checkpoint_seconds, keeps_rollouts: as in `Training`.
        seed: of the draws.
    """
    phases = dict(plan.phase_seconds)
    replies = replies or constant(plan.tokens / plan.conversations, "mean of the plan")
    prompts = prompts or constant(0, "mean of the plan")
    slow = stragglers or Stragglers()
    tokens = plan.conversations * replies.mean + math.ceil(plan.conversations / group_size) * prompts.mean
    uses = Counter(time.component for time in plan.times if time.phase in (Phase.GENERATE, Phase.SCORE))
    pools = []
    for time in plan.times:
        if time.phase not in (Phase.GENERATE, Phase.SCORE) or time.seconds <= 0:
            continue
        component = plan.component(time.component)
        name = time.component if uses[time.component] == 1 else f"{time.component}, {time.phase}"
        work: Generation | Scoring
        if time.phase is Phase.GENERATE:
            slots = component.max_num_seqs or plan.conversations
            work = _generation(time.seconds, plan.conversations, component.num_replicas, slots, replies)
        else:
            seconds = time.seconds * component.num_replicas / tokens
            work = Scoring(seconds, max_num_batched_tokens=component.max_num_batched_tokens)
        size = component.tensor_parallel_size * component.fsdp_size
        pools.append(
            SimulatedPool(
                name,
                work,
                component.num_replicas,
                size,
                gpus=time.pool,
                load_seconds=plan.load_seconds,
                stragglers=slow,
            )
        )
    updates = [time for time in plan.times if time.phase is Phase.UPDATE and time.seconds > 0]
    if updates:
        training = Training(
            step_seconds=phases[Phase.UPDATE],
            checkpoint_every=checkpoint_every,
            checkpoint_seconds=checkpoint_seconds,
            keeps_rollouts=keeps_rollouts,
        )
        pools.append(_trainer(plan, updates, training, slow))
    if asynchronous is None:
        asynchronous = plan.step_seconds < 0.999 * sum(phases.values())
    return Simulation(
        tuple(pools),
        num_conversations,
        plan.conversations,
        replies,
        prompts,
        group_size,
        asynchronous,
        phases.get(Phase.WAKE, 0.0) + phases.get(Phase.SYNC, 0.0),
        failures or Failures(),
        seed,
    )


def _trainer(plan: Plan, updates: list[PhaseTime], training: Training, slow: Stragglers) -> SimulatedPool:
    """Return the pool of everything that trains; its ranks are its GPUs."""
    names = list(dict.fromkeys(time.pool for time in updates))
    gpus = sum(len(pool.gpus) for pool in plan.pools if pool.name in names)
    name = "+".join(dict.fromkeys(time.component for time in updates))
    taken = {time.component for time in plan.times if time.phase in (Phase.GENERATE, Phase.SCORE)}
    return SimulatedPool(
        f"{name}, update" if name in taken else name,
        training,
        gpus,
        gpus="+".join(names),
        load_seconds=plan.load_seconds,
        stragglers=slow,
    )


def _generation(seconds: float, conversations: int, replicas: int, slots: int, replies: Lengths) -> Generation:
    """Return speeds with which a replica takes these seconds for its share of the conversations, in the mean."""
    count = max(1, round(conversations / replicas))
    random = np.random.default_rng(0)
    # The phase ends with the slowest replica, which has the longest of all replies if all of them run at a time.
    rounds = [
        max(float(last_rounds(draw(replies, count, random), slots).max()) for _ in range(min(replicas, 64)))
        for _ in range(DRAWS)
    ]
    return Generation(
        round_seconds=ROUND_SHARE * seconds / max(float(np.mean(rounds)), 1e-9),
        token_seconds=(1 - ROUND_SHARE) * seconds / max(count * replies.mean, 1e-9),
        max_num_seqs=slots,
    )
