"""A pool of replicas: nothing is lost when replicas die, hang or return other bits."""

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch

import gym_rm
from gym_rm.engine.executors.executor import BatchResult, LoadSpec, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replica import ParallelOptions, ReplicaFailed
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.loading.checkpoint import LoadOptions, open_checkpoint
from gym_rm.engine.schedule import Scheduler
from gym_rm.engine.token_tree import plan_trees
from gym_rm.errors import ConfigError, RemoteError
from tests.engine.executors import ranks
from tests.engine.executors.batches import HEAD, sequences, trees, values_of

INFO = ModelInfo("tree", True, 1, "float32", "cpu", 2048, batch_invariance="bit-equal")


class FakeReplica:
    """A replica in this process: `plan(batch, number of the call)` returns what happens, None for the sum of the ids.

    Happens: an exception, a BatchResult, or a number of seconds to hang.
    """

    def __init__(self, plan=lambda batch, call: None, info=INFO, starts=()):
        self.plan, self.info, self.starts = plan, info, list(starts)
        self.calls, self.batches, self.started = [], [], 0
        self.stopped = threading.Event()

    def start(self, spec, seconds=None):
        self.started += 1
        self.stopped.clear()
        if self.starts and (error := self.starts.pop(0)) is not None:
            raise error
        return self.info

    def run(self, batch, seconds):
        self.batches.append(batch)
        happens = self.plan(batch, len(self.batches))
        if isinstance(happens, Exception):
            raise happens
        if isinstance(happens, BatchResult):
            return happens
        if happens is not None and self.stopped.wait(min(happens, seconds)):
            raise ReplicaFailed("it was stopped")
        if happens is not None and happens > seconds:
            raise ReplicaFailed("rank 0 did not answer in time")
        return BatchResult(np.array([[batch.input_ids.sum()]], dtype=np.float32))

    def call(self, method, *arguments, seconds):
        self.calls.append((method, *arguments))
        if arguments == ("does not fit",):
            raise ConfigError("does not fit")

    def alive(self):
        return not self.stopped.is_set()

    def kill(self):
        self.stopped.set()


@pytest.fixture
def pool(saved_model):
    """Function that returns a loaded executor of these replicas, closed after the test."""
    made = []

    def make(replicas, **options):
        executor = ReplicatedExecutor(
            ParallelOptions(num_replicas=len(replicas), **options), dict(enumerate(replicas)).__getitem__
        )
        made.append(executor)
        executor.info = executor.load(spec_of(saved_model("qwen3")))
        return executor

    yield make
    for each in made:
        each.close()


@pytest.fixture
def processes(pool):
    """The same for real processes; `make` makes the executors of their ranks."""

    def start(make=ranks.failing, num_replicas=2, **options):
        return pool([ProcessReplica(i, threads=1, make=make) for i in range(num_replicas)], **options)

    return start


def spec_of(folder, **options):
    return LoadSpec(open_checkpoint(LoadOptions(path=folder)), HEAD, **options)


def batches(count=8, seed=0):
    return [plan_trees([each], max_num_batched_tokens=500).batches[0] for each in sequences(count, seed)]


def sums(given):
    return [float(batch.input_ids.sum()) for batch in given]


def fetched(results):
    assert [each.error for each in results] == [None] * len(results)
    return [float(each.values[0, 0]) for each in results]


def dies(*calls):
    return lambda batch, call: ReplicaFailed("rank 0 was killed") if call in calls else None


def until(condition, seconds=10):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.02)
    assert condition()


# --- the ledger, with replicas in this process


def test_results_have_the_order_of_the_batches_and_all_replicas_work(pool):
    replicas = [FakeReplica(lambda batch, call: 0.02) for _ in range(3)]
    executor = pool(replicas)
    given = batches(30)
    assert executor.info.num_replicas == 3
    assert fetched(executor.run(given)) == sums(given)
    assert executor.run([]) == []
    assert min(len(each.batches) for each in replicas) >= 5
    assert executor.stats.batches == executor.stats.leases == 30


def test_the_largest_batches_start_first(pool):
    replica = FakeReplica()
    given = batches(8)
    pool([replica]).run(given)
    sizes = [len(each) for each in replica.batches]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1


def test_a_replica_that_dies_is_started_again_and_loses_nothing(pool):
    replicas = [FakeReplica(dies(2)), FakeReplica(lambda batch, call: 0.01)]
    executor = pool(replicas)
    given = batches(20)
    assert fetched(executor.run(given)) == sums(given)
    until(lambda: executor.stats.restarts == 1)
    assert (executor.stats.deaths, executor.stats.poisoned) == (1, 0)
    assert executor.stats.batches == 20
    assert executor.stats.leases == 21


def test_an_idle_replica_that_dies_is_started_again(pool):
    replica = FakeReplica()
    executor = pool([replica])
    replica.kill()
    until(lambda: executor.stats.restarts == 1)
    assert replica.alive()


def test_a_batch_that_takes_too_long_is_also_given_to_another_replica(pool):
    slow = FakeReplica(lambda batch, call: 0.35 if call == 1 else None)
    executor = pool([slow, FakeReplica(lambda batch, call: 0.01)], lease_seconds=0.2)
    given = batches(6)
    assert fetched(executor.run(given)) == sums(given)
    until(lambda: executor.stats.duplicates == 1)  # the slow replica is not killed, and its result is compared
    assert (executor.stats.expired, executor.stats.mismatches, executor.stats.deaths) == (1, 0, 0)


def test_a_second_result_with_other_bits_is_counted_and_the_first_kept(pool, caplog):
    wrong = BatchResult(np.array([[0.5]], dtype=np.float32))
    slow = FakeReplica()
    slow.plan = lambda batch, call: time.sleep(0.3) or wrong
    executor = pool([slow, FakeReplica(lambda batch, call: 0.05)], lease_seconds=0.2)
    given = batches(2)
    assert sorted(fetched(executor.run(given)))[1] == max(sums(given))
    until(lambda: executor.stats.mismatches == 1)
    assert "different bits" in caplog.text


def test_a_silent_replica_is_ended_after_twice_the_lease(pool):
    silent = FakeReplica(lambda batch, call: 100 if call == 1 else None)
    executor = pool([silent], lease_seconds=0.2)
    given = batches(3)
    started = time.monotonic()
    assert fetched(executor.run(given)) == sums(given)
    assert 0.4 <= time.monotonic() - started < 3
    assert (executor.stats.expired, executor.stats.deaths, executor.stats.restarts) == (1, 1, 1)


def poisonous(batch, call):
    return ReplicaFailed("rank 0 ended with exit code 7") if ranks.POISON in batch.input_ids else None


@pytest.mark.parametrize("count", [1, 2])
def test_a_poisoned_sequence_is_named_and_costs_no_restarts(count, pool):
    """Two deaths of its batch, and two when it runs alone: more than `max_restarts`, but the others are scored."""
    executor = pool([FakeReplica(poisonous) for _ in range(count)], max_restarts=2)
    given = sequences(8)
    given[0].input_ids[-1] = ranks.POISON
    for _ in range(3):
        result = Scheduler(executor.info, layout="tree").run(given, executor)
        assert list(result.failures) == [0]
        assert "its replica died, 2 times" in result.failures[0]
        assert np.isfinite(result.values[1:]).all()
    assert executor.stats.poisoned == 6
    until(lambda: executor.stats.deaths == executor.stats.restarts == 12)


def test_a_model_that_always_dies_ends_with_an_error_for_every_batch(pool):
    replicas = [FakeReplica(lambda batch, call: ReplicaFailed("rank 0 was killed by SIGSEGV")) for _ in range(2)]
    executor = pool(replicas, max_restarts=2)
    results = executor.run(batches(40))
    assert {each.values is None for each in results} == {True}
    assert [
        each for each in results if "max_restarts=2 is spent (replica 0: rank 0 was killed by SIGSEGV" in each.error
    ]
    assert "load a new scorer" in executor.run(batches(1))[0].error
    with pytest.raises(RemoteError, match="all 2 replicas have failed"):
        executor.update_weights("folder")
    with pytest.raises(RemoteError, match="all 2 replicas have failed"):
        executor.sleep()
    assert executor.stats.deaths <= 30


def test_the_other_replicas_go_on_when_one_cannot_start_again(pool):
    """It is tried again, less and less often, because the batches of the others restore restarts."""
    broken = FakeReplica(starts=[None, *[ReplicaFailed("no GPU")] * 99])
    broken.plan = dies(1)
    executor = pool([broken, FakeReplica(lambda batch, call: 0.01)], max_restarts=1)
    given = batches(20)
    started = time.monotonic()
    while time.monotonic() < started + 2:
        assert fetched(executor.run(given)) == sums(given)
    assert 2 <= broken.started <= 8


def test_good_batches_restore_restarts(pool):
    replica = FakeReplica(lambda batch, call: ReplicaFailed("killed") if call % 40 == 0 else None)
    executor = pool([replica], max_restarts=1)
    given = batches(20)
    for _ in range(20):
        assert fetched(executor.run(given)) == sums(given)
    assert executor.stats.deaths == 10


def test_an_error_of_one_rank_alone_is_the_error_of_the_batch(pool):
    alone = BatchResult(error="out of memory", out_of_memory=True)
    executor = pool([FakeReplica(lambda batch, call: ReplicaFailed("alone", alone))], max_restarts=0)
    assert executor.run(batches(3)) == [alone] * 3  # running out of memory costs no restart
    assert executor.stats.poisoned == 0


def test_an_interrupt_leaves_the_executor_usable(pool):
    executor = pool([FakeReplica(lambda batch, call: 0.5 if call == 1 else None)])
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(batches(5))
    timer.join()
    given = batches(5, seed=1)
    assert fetched(executor.run(given)) == sums(given)
    assert executor.stats.leases == 6, "batches that nobody waits for are not run"


def test_calls_of_several_threads_share_the_replicas(pool):
    executor = pool([FakeReplica(lambda batch, call: 0.005) for _ in range(2)])
    given = [batches(10, seed) for seed in range(6)]
    results = [None] * 6

    def score(k):
        results[k] = fetched(executor.run(given[k]))

    threads = [threading.Thread(target=score, args=(k,)) for k in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == [sums(each) for each in given]


# --- weights and sleep


def test_weights_are_given_to_all_replicas_and_to_those_that_start_later(pool):
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas)
    weights = {"a": torch.ones(2)}
    version = executor.weights_version()
    executor.update_weights(weights)
    weights["a"] += 1
    assert executor.weights_version() != version
    for each in replicas:
        each.kill()
    until(lambda: executor.stats.restarts == 2)
    for each in replicas:
        assert [method for method, *_ in each.calls] == ["update_weights"] * 2
        assert each.calls[-1][1]["a"].tolist() == [1, 1]


def test_weights_that_do_not_fit_change_nothing(pool):
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas)
    version = executor.weights_version()
    with pytest.raises(ConfigError, match="does not fit"):
        executor.update_weights("does not fit")
    assert executor.weights_version() == version
    assert len(replicas[0].calls) + len(replicas[1].calls) == 1
    replicas[0].kill()
    until(lambda: executor.stats.restarts == 1)
    assert len(replicas[0].calls) + len(replicas[1].calls) == 1


def test_a_replica_does_not_start_again_with_files_that_have_changed(pool, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas, max_restarts=1)
    executor.update_weights(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    replicas[0].kill()
    until(lambda: replicas[0].started >= 2)
    replicas[1].kill()
    until(lambda: "have changed since update_weights" in (executor.run(batches(1))[0].error or ""))


def test_a_replica_that_starts_while_the_others_sleep_sleeps_too(pool):
    replica = FakeReplica()
    executor = pool([replica, FakeReplica()])
    executor.sleep()
    replica.kill()
    until(lambda: executor.stats.restarts == 1)
    assert replica.calls == [("sleep",), ("sleep",)]
    executor.wake()
    assert replica.calls[-1] == ("wake",)
    executor.run(batches(4))
    replica.kill()
    until(lambda: executor.stats.restarts == 2)
    assert replica.calls[-1] == ("wake",)


# --- load and close


def test_a_refusal_at_load_is_raised_and_ends_the_others(pool):
    replicas = [FakeReplica(), FakeReplica(starts=[ConfigError("wrong dtype")])]
    with pytest.raises(ConfigError, match="wrong dtype"):
        pool(replicas)
    assert not replicas[0].alive()


def test_replicas_that_load_different_models_are_refused(pool):
    other = ModelInfo("tree", True, 1, "bfloat16", "cpu", 2048, batch_invariance="bit-equal")
    with pytest.raises(ConfigError, match=r"loaded another model than the others: dtype is '\w+' and '\w+'"):
        pool([FakeReplica(), FakeReplica(info=other)])


def test_a_replica_that_never_starts_is_an_error(pool):
    with pytest.raises(RemoteError, match="replica 0: no memory"):
        pool([FakeReplica(starts=[ReplicaFailed("no memory")] * 9)], max_restarts=1)


def test_a_replica_that_starts_at_the_second_attempt_is_used(pool):
    executor = pool([FakeReplica(starts=[ReplicaFailed("killed"), None])])
    assert fetched(executor.run(batches(2))) == sums(batches(2))


def test_close_ends_everything_and_refuses_more(pool):
    before = threading.active_count()
    replicas = [FakeReplica(lambda batch, call: 100) for _ in range(2)]
    executor = pool(replicas)
    results = []
    waiting = threading.Thread(target=lambda: results.extend(executor.run(batches(1))))
    waiting.start()
    until(lambda: any(each.batches for each in replicas))
    executor.close()
    waiting.join()
    executor.close()
    assert "was closed" in results[0].error
    assert not any(each.alive() for each in replicas)
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="has no model, because it is closed"):
        executor.run(batches(1))


def test_an_executor_that_nobody_holds_ends_its_replicas(saved_model):
    replica = FakeReplica()
    executor = ReplicatedExecutor(ParallelOptions(), lambda index: replica)
    executor.load(spec_of(saved_model("qwen3")))
    del executor
    until(lambda: not replica.alive())


def test_a_forked_process_cannot_use_the_replicas_and_does_not_end_them(pool):
    replica = FakeReplica()
    executor = pool([replica])
    child = os.fork()
    if child == 0:
        try:
            executor.run(batches(1))
        except ConfigError as error:
            executor.close()
            os._exit(0 if "this process was forked" in str(error) and replica.alive() else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert fetched(executor.run(batches(1))) == sums(batches(1))
    with pytest.raises(pickle.PicklingError, match="executor='ray', name="):
        pickle.dumps(executor)


# --- with processes


@pytest.fixture(scope="module")
def local(saved_model):
    executor = LocalExecutor()
    executor.load(spec_of(saved_model("qwen3")))
    return executor


@pytest.mark.slow
def test_killed_stopped_and_poisoned_ranks_under_load_change_no_bit(processes, local):
    """The same pool meets SIGKILL, SIGSTOP and a conversation that ends its rank, while threads score."""
    executor = processes(lease_seconds=1.0, max_restarts=3)
    load = [trees(40) + tuple(batches(12, seed)) for seed in range(6)]
    expected = [values_of(local, each) for each in load]
    wrong, rounds, stop = [], [0], threading.Event()

    def score(k):
        while not stop.is_set():
            for given, values in zip(load, expected, strict=True):
                if not np.array_equal(values_of(executor, given), values):
                    wrong.append(k)
            rounds[0] += 1

    threads = [threading.Thread(target=score, args=(k,)) for k in range(2)]
    for each in threads:
        each.start()
    os.kill(executor.replicas[0].process_ids[0], signal.SIGKILL)
    os.kill(executor.replicas[1].process_ids[0], signal.SIGSTOP)
    until(lambda: executor.stats.restarts >= 2, 60)
    poisoned = sequences(6)
    poisoned[2].input_ids[-1] = ranks.POISON
    result = Scheduler(executor.info, layout="tree").run(poisoned, executor)
    stop.set()
    for each in threads:
        each.join()
    assert list(result.failures) == [2]
    assert not wrong
    assert rounds[0]
    stats = executor.stats
    assert stats.poisoned == 2
    assert stats.mismatches == 0
    assert stats.deaths >= 6
    ids = [each for replica in executor.replicas for each in replica.process_ids]
    executor.close()
    assert not [each for each in ids if os.path.exists(f"/proc/{each}")]


def test_new_weights_and_sleep_reach_processes_also_those_that_start_again(saved_model, tmp_path, real_conversations):
    import tiny_models

    other = str(tiny_models.save_reward_model(tmp_path, "qwen3", seed=1))
    scorer = gym_rm.load_scorer(saved_model("qwen3"), num_replicas=2)
    try:
        expected = gym_rm.load_scorer(other).score(real_conversations).rewards
        scorer.update_weights(other)
        scorer.sleep()
        os.kill(scorer.executor.replicas[0].process_ids[0], signal.SIGKILL)
        until(lambda: scorer.executor.stats.restarts == 1, 60)
        assert np.array_equal(scorer.score(real_conversations).rewards, expected)
        state = dict(torch.nn.Module.state_dict(_model(saved_model("qwen3"))))
        scorer.update_weights(state)
        expected = gym_rm.load_scorer(saved_model("qwen3")).score(real_conversations).rewards
        assert np.array_equal(scorer.score(real_conversations).rewards, expected)
        with pytest.raises(ConfigError, match="weights"):
            scorer.update_weights({"no.such.tensor": torch.ones(2)})
        assert np.array_equal(scorer.score(real_conversations).rewards, expected)
        assert scorer.provenance.settings["num_replicas"] == 2
    finally:
        scorer.close()


def _model(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)
