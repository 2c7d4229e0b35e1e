"""A pool of replicas: nothing is lost when replicas die or hang."""

import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import gym_rm
from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.executors.executor import BatchResult, ModelInfo
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replica import ReplicaFailed
from gym_rm.engine.executors.replicas import ReplicatedExecutor
from gym_rm.engine.schedule import Scheduler
from gym_rm.errors import ConfigError, RemoteError
from tests.engine.executors import ranks
from tests.engine.executors.batches import sequences, spec_of, until

INFO = ModelInfo("tree", True, 1, "float32", "cpu", 2048, batch_invariance="bit-equal")


class FakeReplica:
    """A replica in this process: `plan(batch, number of the call)` returns what happens, None for the sum of the ids.

    Happens: an exception, a BatchResult, or a number of seconds to hang.
    """

    def __init__(self, plan=lambda batch, call: None, info=INFO, starts=()):
        self.plan, self.info, self.starts = plan, info, list(starts)
        self.calls, self.batches, self.started = [], [], 0
        self.stopped = threading.Event()

    def start(self, spec, seconds):
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
        return BatchResult(np.full((batch.num_reads, 1), batch.input_ids.sum(), dtype=np.float32))

    def call(self, method, *arguments, seconds):
        self.calls.append((method, *arguments))
        if arguments == ("does not fit",):
            raise ConfigError("does not fit")

    def alive(self):
        return not self.stopped.is_set()

    def kill(self):
        self.stopped.set()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("gym_rm.engine.executors.replicas.PAUSE_SECONDS", 0.001)


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


def batches(count=8, seed=0):
    return [plan_trees([each], max_num_batched_tokens=500).batches[0] for each in sequences(count, seed)]


def sums(given):
    return [float(batch.input_ids.sum()) for batch in given]


def fetched(results):
    assert [each.error for each in results] == [None] * len(results)
    return [float(each.values[0, 0]) for each in results]


def dies(*calls):
    return lambda batch, call: ReplicaFailed("rank 0 was killed") if call in calls else None


# --- batches, with replicas in this process


def scheduled(executor, given):
    """Return the result of the scheduler, which runs the rows of a failed batch again."""
    return Scheduler(executor.info, layout="tree").run([given], executor)


def test_results_have_the_order_of_the_batches_and_all_replicas_work(pool):
    together = threading.Barrier(3)  # every replica waits in its first batch for the others
    replicas = [FakeReplica(lambda batch, call: together.wait(10) and None if call == 1 else None) for _ in range(3)]
    executor = pool(replicas)
    given = batches(15)
    assert executor.info.num_replicas == 3
    results = executor.run(given)
    assert fetched(results) == sums(given)
    assert {each.replica for each in results} == {0, 1, 2}
    assert executor.run([]) == []


@pytest.mark.parametrize(
    ("plan", "options"),
    [(dies(1), {}), (lambda batch, call: 100 if call == 1 else None, {"batch_timeout": 0.2})],
    ids=["dead", "silent"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_rows_whose_replica_failed_run_again_and_lose_nothing(plan, options, count, pool):
    replicas = [FakeReplica(plan), *(FakeReplica() for _ in range(count - 1))]
    executor = pool(replicas, **options)
    given = sequences(8)
    results = [scheduled(executor, given)]
    until(lambda: replicas[0].batches or results.append(scheduled(executor, given)))  # the other one may be faster
    result = results[-1]
    assert not result.failures
    assert np.isfinite(result.values).all()
    assert result.workload.num_retries > 0
    scheduled(executor, given)
    until(lambda: replicas[0].started == 2)


def test_an_idle_replica_that_died_is_started_again_by_the_next_call(pool):
    replica = FakeReplica()
    executor = pool([replica])
    replica.kill()
    given = batches(2)
    assert fetched(executor.run(given)) == sums(given)
    assert replica.started == 2


def poisonous(batch, call):
    return ReplicaFailed("rank 0 ended with exit code 7") if ranks.POISON in batch.input_ids else None


@pytest.mark.parametrize("count", [1, 2])
def test_a_conversation_that_kills_every_replica_is_named_and_the_others_are_scored(count, pool):
    executor = pool([FakeReplica(poisonous) for _ in range(count)])
    given = sequences(8)
    given[0].input_ids[-1] = ranks.POISON
    for _ in range(2):
        result = scheduled(executor, given)
        assert list(result.failures) == [0]
        assert "failed: rank 0 ended with exit code 7" in result.failures[0]
        assert np.isfinite(result.values[1:]).all()


def test_replicas_that_cannot_start_again_leave_an_error_for_every_batch(pool):
    starts = [None, *[ReplicaFailed("no GPU")] * 99]
    replicas = [FakeReplica(starts=list(starts)) for _ in range(2)]
    executor = pool(replicas)
    for each in replicas:
        each.kill()
    results = executor.run(batches(40))
    assert {each.values is None for each in results} == {True}
    assert "all 2 replicas have failed (replica 0: no GPU; replica 1: no GPU" in results[-1].error
    assert "load a new scorer" in executor.run(batches(1))[0].error
    with pytest.raises(RemoteError, match="all 2 replicas have failed"):
        executor.update_weights({})
    assert max(each.started for each in replicas) <= 4, "each call tries once"


def test_the_other_replicas_continue_when_one_cannot_start_again(pool):
    broken = FakeReplica(starts=[None, *[ReplicaFailed("no GPU")] * 99])
    executor = pool([broken, FakeReplica()])
    broken.kill()
    given = batches(20)
    for _ in range(2):
        assert fetched(executor.run(given)) == sums(given)
    until(lambda: broken.started >= 2)


def test_an_error_of_one_rank_alone_is_the_error_of_the_batch(pool):
    alone = BatchResult(error="out of memory", out_of_memory=True)
    executor = pool([FakeReplica(lambda batch, call: ReplicaFailed("alone", alone))])
    assert executor.run(batches(3)) == [alone] * 3


def test_an_interrupt_leaves_the_executor_usable(pool):
    interrupted = threading.Event()

    def interrupt(batch, call):
        if call == 1:
            for _ in range(60):  # a signal just before the main thread waits for a lock does not wake it
                os.kill(os.getpid(), signal.SIGINT)
                if interrupted.wait(0.5):
                    break

    replica = FakeReplica(interrupt)
    executor = pool([replica])
    with pytest.raises(KeyboardInterrupt):
        executor.run(batches(5))
    interrupted.set()
    given = batches(5, seed=1)
    assert fetched(executor.run(given)) == sums(given)
    assert len(replica.batches) == 6, "batches that nobody waits for are not run"


# --- weights and sleep


def test_weights_are_given_to_all_replicas_and_to_those_that_start_later(pool):
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas)
    weights = {"a": torch.ones(2)}
    executor.update_weights(weights)
    weights["a"] += 1
    assert [len(each.calls) for each in replicas] == [1, 1]
    for each in replicas:
        each.kill()
    executor.run(batches(4))
    until(lambda: [len(each.calls) for each in replicas] == [2, 2])
    assert {method for each in replicas for method, _ in each.calls} == {"update_weights"}
    assert [each.calls[-1][1]["a"].tolist() for each in replicas] == [[1, 1]] * 2


def test_weights_that_do_not_fit_change_nothing(pool):
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas)
    with pytest.raises(ConfigError, match="does not fit"):
        executor.update_weights("does not fit")
    replicas[0].kill()
    executor.run(batches(4))
    until(lambda: replicas[0].started == 2)
    assert len(replicas[0].calls) + len(replicas[1].calls) == 1


def test_sleep_wake_and_clear_cache_reach_the_replicas_that_run(pool):
    replicas = [FakeReplica(), FakeReplica()]
    executor = pool(replicas)
    replicas[1].kill()
    executor.sleep()
    executor.wake()
    executor.clear_cache()
    assert [each.calls for each in replicas] == [[("sleep",), ("wake",), ("clear_cache",)], []]


def test_a_replica_that_fails_with_weights_that_another_has_taken_starts_again_with_them(pool):
    class Failing(FakeReplica):
        def call(self, method, *arguments, seconds):
            super().call(method, *arguments, seconds=seconds)
            if len(self.calls) == 1:
                raise ReplicaFailed("killed by SIGKILL")

    replica = Failing()
    executor = pool([FakeReplica(), replica])
    executor.update_weights({"a": torch.ones(2)})
    assert not replica.alive()
    executor.run(batches(4))
    until(lambda: len(replica.calls) == 2 and replica.alive())


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


def test_a_replica_that_does_not_start_is_an_error(pool):
    with pytest.raises(RemoteError, match="replica 0: no memory"):
        pool([FakeReplica(starts=[ReplicaFailed("no memory")])])


def test_close_ends_everything_and_refuses_more(pool):
    before = threading.active_count()
    replicas = [FakeReplica(lambda batch, call: 100) for _ in range(2)]
    executor = pool(replicas)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(executor.run, batches(1))
        until(lambda: any(each.batches for each in replicas))
        executor.close()
        executor.close()
        assert "was closed" in waiting.result(10)[0].error
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
    with pytest.raises(pickle.PicklingError, match="a scorer with replicas cannot be copied"):
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
    executor = processes(batch_timeout=2.0)
    load = [sequences(12, seed) for seed in range(6)]
    expected = [Scheduler(executor.info, layout="tree").run([each], local).values for each in load]
    wrong, rounds, stop = [], [0], threading.Event()

    def score(k):
        while not stop.is_set():
            for given, values in zip(load, expected, strict=True):
                if not np.array_equal(scheduled(executor, given).values, values):
                    wrong.append(k)
            rounds[0] += 1

    threads = [threading.Thread(target=score, args=(k,)) for k in range(2)]
    for each in threads:
        each.start()
    for index, number in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        (before,) = executor.replicas[index].process_ids
        os.kill(before, number)
        until(lambda index=index, before=before: executor.replicas[index].process_ids not in ((), (before,)), 60)
        finished = rounds[0]
        until(lambda finished=finished: rounds[0] > finished + 1, 60)  # with both replicas
    poisoned = sequences(6)
    poisoned[2].input_ids[-1] = ranks.POISON
    result = scheduled(executor, poisoned)
    stop.set()
    for each in threads:
        each.join()
    assert list(result.failures) == [2]
    assert not wrong
    ids = [each for replica in executor.replicas for each in replica.process_ids]
    executor.close()
    assert not [each for each in ids if os.path.exists(f"/proc/{each}")]


@pytest.mark.slow
def test_new_weights_and_sleep_reach_processes_also_those_that_start_again(saved_model, tmp_path, real_conversations):
    import tiny_models

    other = str(tiny_models.save_reward_model(tmp_path, "qwen3", seed=1))
    scorer = gym_rm.load_scorer(saved_model("qwen3"), num_replicas=2)
    try:
        expected = gym_rm.load_scorer(other).score(real_conversations).rewards
        scorer.update_weights(other)
        scorer.sleep()
        (before,) = scorer.executor.replicas[0].process_ids
        os.kill(before, signal.SIGKILL)
        assert np.array_equal(scorer.score(real_conversations).rewards, expected)
        until(lambda: scorer.executor.replicas[0].process_ids not in ((), (before,)), 60)
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
