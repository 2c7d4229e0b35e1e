"""The simulation: conservation, closed forms, failures against formulas, and the real pool."""

import dataclasses
import functools
import math
import os
import signal
import statistics
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replica import ParallelOptions
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.engine.token_tree import plan_trees
from gym_rm.errors import ConfigError
from gym_rm.planning.planner import plan_request
from gym_rm.planning.quantities import Basis
from gym_rm.planning.simulate import checkpoint_interval, simulate, simulate_batches, simulation_of
from gym_rm.planning.simulation.batches import Batches, FailureTimes
from gym_rm.planning.simulation.records import (
    Failures,
    Generation,
    Scoring,
    SimulatedPool,
    Simulation,
    Stragglers,
    Training,
)
from gym_rm.planning.simulation.replicas import ReplicaEvents
from gym_rm.planning.simulation.work import (
    Replies,
    StepLengths,
    draw,
    generation_batches,
    last_rounds,
    lengths_of,
    scoring_batches,
)
from gym_rm.planning.workload.lengths import Lengths, constant
from tests.engine.executors import ranks
from tests.engine.executors.batches import HEAD, sequences
from tests.planning.requests import cluster, grpo, workload

SCORING = Scoring(token_seconds=1e-3, max_num_batched_tokens=1000)
AT_ONCE = Failures(detection_seconds=0.0)
SPREAD = Lengths(tuple(float(10 + 7 * i) for i in range(64)), Basis.ASSUMPTION, "test")


def scorer(replicas, **options):
    return SimulatedPool("rm", SCORING, replicas, **{"load_seconds": 3.0, **options})


def job(**options):
    pools = (
        SimulatedPool("generation", Generation(0.01, 1e-4, 1e-7, 1e-5, 8), 6, 2, load_seconds=20.0),
        SimulatedPool("rm", SCORING, 3, load_seconds=10.0),
        SimulatedPool("training", Training(1e-4, 0.5, 4, 1.0), 4, load_seconds=15.0),
    )
    given = {"pools": pools, "num_conversations": 3000, "conversations_per_step": 60, "replies": SPREAD}
    return Simulation(**{**given, "prompts": constant(20), "group_size": 4, **options})


# --- nothing is lost


batches_ = st.lists(st.tuples(st.integers(1, 5), st.floats(0.01, 3)), min_size=1, max_size=25)
kills_ = st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3)), max_size=12)


@given(batches_, kills_, st.integers(1, 4), st.floats(3, 1e4), st.booleans(), st.sampled_from([None, 0.5, 4.0]))
def test_every_conversation_is_scored_exactly_once_whatever_fails(batches, kills, replicas, hours, shared, lease):
    kills = [(at, replica % replicas) for at, replica in kills]
    slow = Stragglers(0.5, 50.0) if lease else Stragglers()  # whose leases expire, so that batches run twice
    cores = 1.5 if shared else None
    pool = scorer(replicas, cores=cores, load_computes=shared, lease_seconds=lease, stragglers=slow)
    # Failures of every few seconds to hours: rows that kill two replicas in a row alone get an error, once.
    result = simulate_batches(pool, batches, kills=kills, failures=Failures(hours / 3600, 0.2), seed=1)
    rows = [row for _, part in result.results for row in part]
    total = sum(count for count, _ in batches)
    assert len(rows) == len(set(rows)) == result.counts.scored
    assert result.counts.scored + result.counts.errors == total


@given(batches_, kills_, st.integers(1, 4), st.integers(0, 2))
def test_with_few_restarts_every_conversation_gets_one_result_or_error(batches, kills, replicas, restarts):
    kills = [(at, replica % replicas) for at, replica in kills]
    result = simulate_batches(scorer(replicas, max_restarts=restarts), batches, kills=kills, failures=AT_ONCE)
    rows = [row for _, part in result.results for row in part]
    assert len(rows) == len(set(rows)) == result.counts.scored
    assert result.counts.scored + result.counts.errors == sum(count for count, _ in batches)
    assert result.counts.restarts <= restarts * replicas


def test_when_all_restarts_are_spent_the_rest_gets_an_error():
    result = simulate_batches(scorer(1, max_restarts=0), [(2, 1.0)] * 3, kills=[(1.5, 0)], failures=AT_ONCE)
    assert (result.counts.scored, result.counts.errors) == (2, 4)


def test_rows_of_a_batch_that_died_twice_run_alone():
    result = simulate_batches(
        scorer(1), [(4, 2.0)], kills=[(1.0, 0), (5.0, 0)], failures=AT_ONCE
    )  # it is back at 4 and at 8
    assert result.counts.split == 1
    assert sorted(rows for _, rows in result.results) == [(0,), (1,), (2,), (3,)]
    assert result.seconds == pytest.approx(10.0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_conversation_of_a_job_is_scored_once_although_replicas_fail(asynchronous):
    pools = [pool for pool in job().pools if pool.name != "training"]
    result = simulate(job(pools=tuple(pools), asynchronous=asynchronous, failures=Failures(0.1, 2.0)))
    assert result.restarts > 5
    assert result.conversations == result.pool("rm").scored == result.pool("generation").scored == 3000


def test_steps_that_training_lost_are_done_again():
    result = simulate(job(failures=Failures(0.2, 2.0)))
    assert result.repeated_steps > 0
    assert result.conversations == 3000
    scored = result.pool("rm").scored
    assert 3000 < scored <= 3000 + 60 * (result.repeated_steps + result.restarts)


def test_stored_rollouts_are_not_scored_again():
    *others, training = job().pools
    kept = dataclasses.replace(training, work=dataclasses.replace(training.work, keeps_rollouts=True))
    result = simulate(job(pools=(*others, kept), failures=Failures(0.2, 2.0)))
    assert result.pool("training").redone_share > 0
    assert result.repeated_steps == 0
    assert result.pool("rm").scored == 3000


# --- closed forms


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_equal_batches_take_the_work_divided_by_the_replicas_rounded_up(replicas):
    assert simulate_batches(scorer(replicas), [(1, 2.0)] * 10).seconds == pytest.approx(2.0 * math.ceil(10 / replicas))


@given(batches_, st.integers(1, 5))
def test_more_replicas_are_never_slower_without_failures(batches, replicas):
    here, more = (simulate_batches(scorer(n), batches).seconds for n in (replicas, replicas + 1))
    assert more <= here + 1e-9


@pytest.mark.parametrize(("replicas", "rate"), [(1, 1.0), (2, 0.9), (3, 0.6), (6, 0.3)])
def test_replicas_that_compute_at_the_same_time_share_the_cores(replicas, rate):
    result = simulate_batches(scorer(replicas, cores=1.8), [(1, 3.0)] * replicas)
    assert result.seconds == pytest.approx(3.0 / rate)


def test_a_replica_has_the_cores_for_itself_when_the_others_are_done():
    result = simulate_batches(scorer(2, cores=1.0), [(1, 1.0), (1, 3.0)])
    assert [round(at, 6) for at, _ in result.results] == [2.0, 4.0]


def test_other_programs_take_their_share_of_the_cores():
    assert simulate_batches(scorer(2, cores=2.0, others=2.0), [(1, 1.0)] * 2).seconds == pytest.approx(2.0)


def test_a_start_shares_the_cores_if_loading_computes():
    kill = [(1.0, 0)]
    result = simulate_batches(scorer(2, cores=1.0, load_computes=True), [(1, 5.0)] * 2, kills=kill, failures=AT_ONCE)
    # Both at half speed until 1, then a start (3 s) beside the other batch, then what is left.
    assert result.seconds == pytest.approx(0.5 + 5 + 5 + 3)


def test_the_step_waits_for_the_slowest_of_the_replicas():
    spread, replicas = 0.3, 20
    pool = scorer(replicas, stragglers=Stragglers(spread=spread))
    work = Simulation((pool,), 20 * 2000, 20, constant(1000), constant(0))
    longest = np.exp(spread * np.random.default_rng(5).standard_normal((20_000, replicas)) - spread**2 / 2).max(1)
    assert statistics.mean(simulate(work).step_seconds) == pytest.approx(longest.mean(), rel=0.02)


def test_slow_replicas_get_fewer_batches():
    pool = scorer(4, stragglers=Stragglers(share=0.5, factor=3.0))
    seconds = {simulate_batches(pool, [(1, 1.0)] * 40, seed=seed).seconds for seed in range(20)}
    rates = {n + (4 - n) / 3 for n in range(5)}  # n usual ones and 4 - n slow ones
    assert len(seconds) > 1
    assert all(min(abs(each - 40 / rate) for rate in rates) <= 3 for each in seconds)


def test_a_lease_gives_the_batch_of_a_slow_replica_to_an_idle_one():
    pool = scorer(2, stragglers=Stragglers(share=0.5, factor=100.0), lease_seconds=5.0)
    seed = next(
        s
        for s in range(50)
        if simulate_batches(scorer(2, stragglers=pool.stragglers), [(1, 1.0)] * 2, seed=s).seconds == 100
    )
    assert simulate_batches(pool, [(1, 1.0)] * 2, seed=seed).seconds == pytest.approx(11.0)  # 10 times 1 s, then 1 s


def test_a_second_result_is_counted_and_not_scored_again():
    never = FailureTimes(math.inf, 2, np.random.default_rng(0))
    events = ReplicaEvents(
        speeds=[1.0, 50.0],
        gpus_per_replica=1,
        failures=never,
        detection_seconds=0.0,
        load_seconds=0.0,
        cores=None,
        load_computes=False,
        lease_seconds=2.0,
        max_restarts=None,
        most_deaths=2,
    )
    assert events.run(Batches(np.arange(3), np.ones(2)))
    assert events.now == pytest.approx(11.0)
    events.wait(100.0)
    assert (events.counts.scored, events.counts.duplicates) == (2, 1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 8))
@settings(max_examples=50)
def test_rounds_of_generation_are_those_of_an_engine_that_counts_tokens(lengths, slots):
    replies = np.array(lengths, dtype=np.float64)
    work = Generation(0.1, 0.01, 0.001, 0.02, slots)
    (seconds,) = generation_batches(work, StepLengths(np.full(len(lengths), 5.0), replies, 1), 1, np.ones(1)).seconds
    waiting, running, total, rounds, ends = list(range(len(lengths))), {}, 5 * 0.02 * len(lengths), 0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            running[waiting.pop(0)] = 0
        # A token is in the cache for half of the round that makes it.
        total += 0.1 + 0.01 * len(running) + 0.001 * sum(5 + made + 0.5 for made in running.values())
        rounds += 1
        running = {i: made + 1 for i, made in running.items()}
        ends |= {i: rounds for i, made in running.items() if made == lengths[i]}
        running = {i: made for i, made in running.items() if made < lengths[i]}
    assert last_rounds(replies, slots).tolist() == [ends[i] for i in range(len(lengths))]
    assert seconds == pytest.approx(total)


def test_replies_that_are_finished_are_kept_when_their_replica_dies():
    replies = np.array([10.0, 20.0, 40.0])
    work = Generation(1.0, 0.0, max_num_seqs=8)
    finished, rest, useful = Replies(work, StepLengths(np.zeros(3), replies, 1), range(3), 40.0).split(25.0)
    assert (finished, rest.rows, rest.seconds) == ([0, 1], [2], 40.0)
    assert useful == pytest.approx(30 / 55)


def test_draws_follow_the_quantile_function():
    drawn = draw(SPREAD, 50_000, np.random.default_rng(0))
    shares = np.linspace(0.02, 0.98, 25)
    assert np.quantile(drawn, shares) == pytest.approx([SPREAD.quantile(share) for share in shares], rel=0.03)


def test_batches_of_a_step_have_all_its_rows_and_tokens():
    lengths = lengths_of(job(), 3)
    batches = scoring_batches(SCORING, lengths, 3, Stragglers(), np.random.default_rng(0))
    assert batches.cuts[0] == 0
    assert batches.cuts[-1] == 60
    assert (np.diff(batches.cuts) > 0).all()
    assert batches.seconds.sum() == pytest.approx(1e-3 * (lengths.replies.sum() + 15 * 20))


# --- jobs


def test_a_synchronous_step_is_the_sum_of_its_phases_and_an_asynchronous_one_the_longest():
    pools = (
        SimulatedPool("generation", Generation(0.01), 1),
        SimulatedPool("rm", Scoring(2e-3), 1),
        SimulatedPool("training", Training(step_seconds=3.0), 1),
    )
    work = Simulation(pools, 2000, 10, constant(100), constant(0))
    assert simulate(work).seconds == pytest.approx(200 * (1 + 2 + 3))
    # One step apart, a generation waits for the update before the last; so two steps take as long as one in a row.
    together = dataclasses.replace(work, asynchronous=True)
    assert simulate(together).seconds == pytest.approx(200 * 3 + 3, rel=0.01)
    assert simulate(together).pool("generation").idle_share == pytest.approx(2 / 3, abs=0.01)


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    slow = tuple(dataclasses.replace(pool, stragglers=Stragglers(0.2, 2.0, 0.2)) for pool in job().pools)
    work = job(pools=slow, failures=Failures(0.5, 2.0), seed=4)
    assert simulate(work) == simulate(work)
    assert simulate(work) != simulate(dataclasses.replace(work, seed=5))


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_what_is_computed_at_once_is_what_events_give(replicas):
    random = np.random.default_rng(2)
    ends = []
    for quick in (True, False):
        events = ReplicaEvents(
            speeds=[1.0 + 0.5 * (i % 3) for i in range(replicas)],
            gpus_per_replica=1,
            failures=FailureTimes(200.0, replicas, np.random.default_rng(3)),
            detection_seconds=1.0,
            load_seconds=5.0,
            cores=None,
            load_computes=False,
            lease_seconds=None,
            max_restarts=None,
            most_deaths=2,
        )
        events.quick = quick
        random = np.random.default_rng(2)
        ends.append([])
        for _ in range(60):
            count = int(random.integers(1, 20))
            events.run(Batches(np.arange(count + 1), random.random(count)), events.now)
            ends[-1].append(events.now)
        assert events.counts.deaths > 2 * (replicas > 1)
    assert ends[0] == pytest.approx(ends[1])


@pytest.mark.parametrize("keeps", [False, True], ids=["steps again", "updates again"])
def test_the_cost_of_failures_agrees_with_the_first_order_formula(keeps):
    step, save, restart, gpus = 20.0, 10.0, 40.0, 64
    mean = 5_000.0  # seconds between failures of the job
    every = round(checkpoint_interval(save, mean) / step)
    losses = {}
    for factor in (0.25, 1, 4):
        steps = max(1, round(every * factor))
        work = Training(step_seconds=step, checkpoint_every=steps, checkpoint_seconds=save, keeps_rollouts=keeps)
        pool = SimulatedPool("training", work, gpus, load_seconds=restart - 10)
        failures = Failures(gpu_hours=mean * gpus / 3600, detection_seconds=10.0)
        result = simulate(Simulation((pool,), 200_000, 1, constant(1), constant(0), failures=failures))
        interval = steps * step + save
        # Time of which a share of (interval / 2 + restart) / mean is lost, for work with checkpoints.
        expected = 200_000 * step * (1 + save / (steps * step)) / (1 - (interval / 2 + restart) / mean)
        assert result.seconds == pytest.approx(expected, rel=0.02)
        losses[factor] = result.seconds / (200_000 * step) - 1
        assert losses[factor] == pytest.approx(expected / (200_000 * step) - 1, rel=0.08)
    assert losses[1] < losses[0.25]
    assert losses[1] < losses[4]


def test_failures_come_in_proportion_to_gpus():
    deaths = []
    for size in (1, 4):
        pool = SimulatedPool("rm", SCORING, 10, size, load_seconds=0.0)
        failures = Failures(0.1, 0.0)
        deaths.append(simulate(Simulation((pool,), 50_000, 100, constant(900), constant(0), failures=failures)))
    hours = [each.seconds / 3600 for each in deaths]
    assert deaths[0].restarts / hours[0] == pytest.approx(10 / 0.1, rel=0.25)
    assert deaths[1].restarts / hours[1] == pytest.approx(40 / 0.1, rel=0.1)


def test_training_that_never_reaches_a_checkpoint_is_an_error():
    pool = SimulatedPool("training", Training(step_seconds=100.0, checkpoint_every=100), 1000)
    with pytest.raises(ConfigError, match=r"failed 10000 times .* checkpoint_every"):
        simulate(Simulation((pool,), 1000, 1, constant(1), constant(0), failures=Failures(10.0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_conversations": 0}, "num_conversations must be at least 1, got 0"),
        ({"pools": ()}, "pools must have different names"),
        ({"asynchronous": True, "pools": "shared"}, "share the GPUs 'all'"),
    ],
    ids=["no conversations", "no pools", "asynchronous on shared GPUs"],
)
def test_jobs_that_cannot_be_are_refused(change, message):
    if change.get("pools") == "shared":
        change = change | {"pools": tuple(dataclasses.replace(pool, gpus="all") for pool in job().pools)}
    with pytest.raises(ConfigError, match=message):
        job(**change)


def test_pools_that_share_gpus_are_idle_together():
    shared = job(pools=tuple(dataclasses.replace(pool, gpus="all") for pool in job().pools))
    assert shared.num_gpus == 12
    assert job().num_gpus == 12 + 3 + 4
    assert simulate(shared).idle_share < simulate(job()).idle_share


# --- plans


@pytest.mark.parametrize("pools", ["together", "apart"])
def test_a_simulated_plan_takes_the_time_of_the_plan_when_nothing_fails(pools):
    names = ("policy", "generation", "rm")
    request = grpo(cluster(4), pools=(names,) if pools == "together" else tuple((name,) for name in names))
    plan = plan_request(request)
    work = workload()
    given = simulation_of(plan, num_conversations=6400, replies=work.replies, prompts=work.prompts, group_size=4)
    assert given.num_gpus == plan.used_gpus
    result = simulate(given)
    assert result.seconds / len(result.step_seconds) == pytest.approx(plan.step_seconds, rel=0.05)
    assert result.conversations_per_second == pytest.approx(plan.conversations_per_second, rel=0.05)


def test_failures_and_stragglers_make_a_plan_slower():
    plan = plan_request(grpo(cluster(4)))
    rates = [
        simulate(simulation_of(plan, num_conversations=20_000, **changes)).conversations_per_second
        for changes in (
            {},
            {"stragglers": Stragglers(1.0, 1.5, 0.1)},
            {"stragglers": Stragglers(1.0, 1.5, 0.1), "failures": Failures(0.02), "checkpoint_every": 2},
        )
    ]
    assert rates[0] > rates[1] > rates[2]


# --- the real pool


def real_seconds(folder, batches, kills):
    """Return how long two replicas take whose batches last a second, and how long a replica takes to start."""
    spec = LoadSpec(open_checkpoint(LoadOptions(path=folder)), HEAD)
    executor = ReplicatedExecutor(
        ParallelOptions(num_replicas=2),
        functools.partial(ProcessReplica, num_replicas=2, threads=1, make=ranks.failing),
    )
    alone = ProcessReplica(threads=1, make=ranks.failing)
    try:
        executor.load(spec)
        started = time.perf_counter()
        alone.start(spec)
        load_seconds = time.perf_counter() - started
        alone.kill()

        def kill(replica):
            os.kill(executor.replicas[replica].process_ids[0], signal.SIGKILL)

        timers = [threading.Timer(at, kill, (replica,)) for at, replica in kills]
        started = time.perf_counter()
        for timer in timers:
            timer.start()
        results = executor.run(batches)
        seconds = time.perf_counter() - started
        assert [each.error for each in results] == [None] * len(batches)
        assert executor.stats.deaths == len(kills)
        return seconds, load_seconds
    finally:
        alone.kill()
        executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(), ((2.5, 0),)], ids=["no kill", "one kill"])
def test_the_real_pool_takes_the_time_of_the_simulated_one(saved_model, kills):
    slow = sequences(24)
    for each in slow:
        each.input_ids[-1] = ranks.SLOW  # a second of sleep, so that other programs of the machine hardly matter
    batches = [plan_trees([each], max_num_batched_tokens=500).batches[0] for each in slow]
    measured, load_seconds = real_seconds(saved_model("qwen3"), batches, kills)
    pool = scorer(2, load_seconds=load_seconds, lease_seconds=120.0, max_restarts=3)
    simulated = simulate_batches(pool, [(1, 1.0)] * len(batches), kills=kills, failures=AT_ONCE)
    assert simulated.counts.deaths == len(kills)
    assert simulated.seconds == pytest.approx(measured, rel=0.2)
