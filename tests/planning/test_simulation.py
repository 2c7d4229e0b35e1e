"""The simulation: the plan's times when nothing fails, closed forms, and failures against formulas."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.plan import Phase
from gym_rm.planning.plan_from_search import make_plan
from gym_rm.planning.search import search
from gym_rm.planning.simulation import SimulationSettings, _Pool, simulate
from tests.planning import plans
from tests.planning.requests import cluster, grpo

STEADY = {"gpu_hours": None, "spread": 0.0}


def of(**changes):
    return SimulationSettings(**{"num_steps": 50, "load_seconds": 20.0, "detection_seconds": 5.0, **changes})


def trained(count, **changes):
    """Return a plan whose only work is an update of 2 seconds on so many GPUs."""
    found = plans.plan_of([count], plans.pool((plans.component("policy", "policy", num_replicas=count),),
                                              plans.gpus(0, 0, count)))  # fmt: skip
    return dataclasses.replace(found, phase_seconds=((Phase.UPDATE, 2.0),), step_seconds=2.0, **changes)


def scored(count, size=1):
    found = plans.plan_of([count], plans.pool((plans.reward(count, size),), plans.gpus(0, 0, count)))
    return dataclasses.replace(found, phase_seconds=((Phase.SCORE, 2.0),), step_seconds=2.0)


@pytest.mark.parametrize("pools", ["together", "apart", "one step apart"])
def test_a_simulated_plan_takes_the_time_of_the_plan_when_nothing_fails(pools):
    names = ("policy", "generation", "rm")
    request = grpo(cluster(4), pools=(names,) if pools == "together" else tuple((name,) for name in names))
    if pools == "one step apart":
        request = dataclasses.replace(request, workload=dataclasses.replace(request.workload, asynchronous=True))
    found = make_plan(request, search(request))
    result = simulate(found, of(**STEADY, num_steps=400))
    assert result.seconds / 400 == pytest.approx(found.step_seconds, rel=0.02)
    assert result.conversations_per_second == pytest.approx(found.conversations_per_second, rel=0.02)
    assert result.idle_share == pytest.approx(
        sum(len(pool.gpus) * found.idle_share(pool) for pool in found.pools) / found.used_gpus, abs=0.03
    )


def test_failures_slow_gpus_and_checkpoints_make_a_plan_slower():
    request = grpo(cluster(4))
    found = make_plan(request, search(request))
    slow = {"slow_share": 1.0, "slow_factor": 1.5}
    rates = [
        simulate(found, of(**changes)).conversations_per_second
        for changes in (STEADY, {**STEADY, **slow}, {**STEADY, **slow, "gpu_hours": 0.5, "checkpoint_every": 2})
    ]
    assert rates[0] == pytest.approx(1.5 * rates[1], rel=0.1)
    assert rates[1] > rates[2]


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.integers(1, 4), st.floats(10, 500), st.integers(0, 9))
@settings(max_examples=30)
def test_every_batch_is_computed_once_besides_what_was_lost(batches, replicas, seconds, seed):
    options = of(gpu_hours=seconds / 3600, seed=seed)
    pool = _Pool(scored(2 * replicas, 2).pools[0], options, 3.0, number=0)
    assert pool.run(list(batches), 2, 7.0, math.inf)
    assert pool.busy - pool.redone == pytest.approx(2 * sum(batches))
    assert pool.free >= 7.0 + max(max(batches), sum(batches) / replicas) - 1e-9


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_equal_batches_take_the_work_divided_by_the_replicas_rounded_up(replicas):
    pool = _Pool(scored(replicas).pools[0], of(**STEADY), 0.0, number=0)
    pool.run([2.0] * 10, 1, 0.0, math.inf)
    assert pool.free == pytest.approx(2.0 * math.ceil(10 / replicas))


def test_a_batch_goes_to_the_next_free_replica_when_its_own_fails():
    pool = _Pool(scored(2).pools[0], of(**STEADY), 25.0, number=0)
    pool.next_failure, pool._failed = 1.0, 0
    pool.run([2.0, 2.0], 1, 0.0, math.inf)
    assert pool.free == pytest.approx(4.0)
    assert (pool.redone, pool.down) == (1.0, 25.0)


def test_failures_come_in_proportion_to_gpus():
    failures = [simulate(scored(size), of(gpu_hours=0.03, num_steps=3_000)).failures for size in (1, 4)]
    assert failures[1] == pytest.approx(4 * failures[0], rel=0.35)


@pytest.mark.parametrize("factor", [0.4, 1, 4])
def test_the_cost_of_failures_agrees_with_the_formula_of_daly(factor):
    """J. T. Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 3."""
    save, restart, gpus, mean = 0.5, 5.0, 8, 100.0  # mean seconds between failures of the job
    every = max(1, round(math.sqrt(2 * save * mean) / 2.0 * factor))
    changes = {"gpu_hours": mean * gpus / 3600, "checkpoint_seconds": save, "checkpoint_every": every}
    result = simulate(trained(gpus), of(**{**STEADY, **changes}, num_steps=20_000, load_seconds=0.0))
    interval = every * 2.0 + save
    expected = mean * math.exp(restart / mean) * math.expm1(interval / mean) * 20_000 / every
    assert result.seconds == pytest.approx(expected, rel=0.03)
    assert result.failures > 400


def test_youngs_interval_is_the_default_and_loses_the_least():
    changes = {**STEADY, "gpu_hours": 1.0, "checkpoint_seconds": 1.0, "num_steps": 5000}
    usual = simulate(trained(8), of(**changes))
    others = [simulate(trained(8), of(**changes, checkpoint_every=every)).seconds for every in (2, 200)]
    assert usual.checkpoint_every == round(math.sqrt(2 * 1.0 * 450.0) / 2.0)
    assert usual.seconds < min(others)


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    request = grpo(cluster(4))
    found = make_plan(request, search(request))
    first, again, other = (simulate(found, of(gpu_hours=1.0, seed=seed)) for seed in (4, 4, 5))
    assert first == again != other


def test_training_that_never_reaches_a_checkpoint_is_an_error():
    with pytest.raises(ConfigError, match=r"failed 10000 times .* checkpoint_every"):
        simulate(trained(8), of(gpu_hours=0.01, checkpoint_every=50))
