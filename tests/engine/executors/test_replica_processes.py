"""Ranks as processes: what they return, how they fail, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gym_rm.engine.batch_planning import plan_trees
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.executors.processes import ProcessReplica
from gym_rm.engine.executors.replica import ReplicaFailed
from gym_rm.errors import ConfigError
from tests.engine.executors import ranks
from tests.engine.executors.batches import gone, sequences, spec_of, tree_with, trees


def replicas_of(spec):
    """A started replica whose executor fails on demand; tests may kill it, the next one gets another."""
    made = []

    def get():
        if not made or not made[-1].alive():
            made.append(ProcessReplica(threads=1, make=ranks.failing))
            made[-1].start(spec)
        return made[-1]

    yield get
    for each in made:
        each.kill()


@pytest.fixture(scope="module")
def replica(saved_model):
    """A replica of one rank."""
    yield from replicas_of(spec_of(saved_model("qwen3")))


def test_a_rank_returns_the_values_of_one_process_bit_for_bit(replica, saved_model):
    local = LocalExecutor()
    local.load(spec_of(saved_model("qwen3")))
    for batch, expected in zip(trees(40), local.run(trees(40)), strict=True):
        assert replica().run(batch, 30).values.tobytes() == expected.values.tobytes()


def test_an_error_of_a_batch_leaves_the_rank_alive(replica):
    result = replica().run(tree_with(ranks.BROKEN), 30)
    assert (result.values, result.error) == (None, "ValueError: a broken batch")
    assert replica().run(trees()[0], 30).error is None


def test_weights_that_do_not_fit_are_refused_with_the_message_of_the_rank(replica):
    with pytest.raises(ConfigError, match="weights must be tensors by name"):
        replica().call("update_weights", 3, seconds=30)
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        replica().call("update_weights", lambda: 1, seconds=30)
    assert replica().alive()


def test_a_rank_does_not_hear_ctrl_c_and_is_not_in_the_world_of_its_driver(replica, saved_model, monkeypatch):
    assert replica().run(trees()[0], 30).error is None
    os.kill(replica().process_ids[0], signal.SIGINT)
    assert replica().run(trees()[0], 30).error is None
    (process_id,) = replica().process_ids
    assert os.getsid(process_id) == process_id
    environment = Path(f"/proc/{process_id}/environ").read_text()
    assert "OMP_NUM_THREADS=1" in environment


def test_a_rank_that_ends_or_is_killed_is_named_with_how(replica):
    with pytest.raises(ReplicaFailed, match=r"rank 0 \(process \d+\) ended with exit code 7"):
        replica().run(tree_with(ranks.POISON), 30)
    os.kill(replica().process_ids[0], signal.SIGKILL)
    with pytest.raises(ReplicaFailed, match=r"was killed by SIGKILL \(as the kernel does when memory is short\)"):
        replica().run(trees()[0], 30)


@pytest.mark.slow
def test_a_stopped_rank_fails_in_time(replica):
    stopped = replica()
    (process_id,) = stopped.process_ids
    os.kill(process_id, signal.SIGSTOP)
    with pytest.raises(ReplicaFailed, match="did not answer in time; raise batch_timeout"):
        stopped.run(trees()[0], 0.5)
    assert not stopped.alive()
    assert gone(process_id)


@pytest.mark.slow
def test_a_stopped_rank_fails_in_time_also_for_a_batch_larger_than_the_buffers(saved_model, monkeypatch):
    monkeypatch.setattr("gym_rm.engine.executors.processes.STALLED_SECONDS", 1)
    stopped = ProcessReplica(threads=1, make=ranks.failing)
    stopped.start(spec_of(saved_model("qwen3")))
    os.kill(stopped.process_ids[0], signal.SIGSTOP)
    huge = plan_trees(
        [type(sequences(1)[0])(np.arange(200_000, dtype=np.int32) % 300, np.array([5]))],
        max_num_batched_tokens=10**6,
    ).batches[0]
    started = time.monotonic()
    with pytest.raises(ReplicaFailed, match="did not answer in time"):
        stopped.run(huge, 60)
    assert time.monotonic() - started < 10
    stopped.kill()


@pytest.mark.slow
def test_kill_from_another_thread_ends_a_running_batch(replica):
    running = replica()
    threading.Timer(0.3, running.kill).start()
    with pytest.raises(ReplicaFailed):
        running.run(tree_with(ranks.SLOW), 60)
    with pytest.raises(ReplicaFailed, match="it was stopped"):
        running.run(trees()[0], 60)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_loads_is_a_failure(saved_model):
    replica = ProcessReplica(threads=1, make=ranks.dying_at_load)
    with pytest.raises(ReplicaFailed, match="ended with exit code 3"):
        replica.start(spec_of(saved_model("qwen3")))
    assert replica.process_ids == ()


@pytest.mark.slow
def test_what_a_rank_refuses_at_load_is_a_config_error(saved_model):
    with pytest.raises(ConfigError, match="prefix_cache_tokens needs"):
        ProcessReplica(threads=1).start(spec_of(saved_model("qwen3"), tree=False, prefix_cache_tokens=64))


# --- groups of several ranks. Each rank holds a whole model here, because these tests are about the group.


@pytest.fixture(scope="module")
def group(saved_model):
    yield from replicas_of(spec_of(saved_model("qwen3"), tensor_parallel_size=2))


@pytest.mark.slow
def test_only_the_first_rank_sends_values_and_an_error_of_all_is_the_batchs(group):
    assert len(group().process_ids) == 2
    assert group().run(trees()[0], 30).values.shape == (6, 1)
    assert group().run(tree_with(ranks.BROKEN), 30).error == "ValueError: a broken batch"
    assert group().alive()


@pytest.mark.slow
def test_an_error_of_one_rank_alone_ends_the_group_and_is_kept(group):
    with pytest.raises(ReplicaFailed, match=r"ranks \[1\] of 2 failed alone: out of memory in one rank") as failure:
        group().run(tree_with(ranks.SPLIT), 30)
    assert failure.value.result.out_of_memory


@pytest.mark.slow
def test_an_error_of_one_rank_beside_a_silent_one_is_kept(group, monkeypatch):
    monkeypatch.setattr("gym_rm.engine.executors.replica.GRACE", 0.5)
    os.kill(group().process_ids[0], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ReplicaFailed, match=r"rank 0 .* did not answer in time") as failure:
        group().run(tree_with(ranks.SPLIT), 60)
    assert time.monotonic() - started < 10
    assert failure.value.result.error == "out of memory in one rank"


# --- programs


PROGRAM = """
import gym_rm, sys
scorer = gym_rm.load_scorer({folder!r}, num_replicas=2)
scores = scorer.score([[{{"role": "user", "content": "Hi"}}, {{"role": "assistant", "content": "Hello"}}]])
print("scored", scores.rewards.shape, *(p for r in scorer.executor.replicas for p in r.process_ids), flush=True)
"""


def start(arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ids_in(line):
    return [int(each) for each in line.split()[2:]]


@pytest.mark.slow
def test_a_script_without_protection_runs_and_leaves_nothing_after_an_exception(saved_model, tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM.format(folder=saved_model("qwen3")) + "1 / 0")
    process = start([tmp_path / "script.py"])
    output, errors = process.communicate(timeout=120)
    assert output.startswith("scored (1,)"), errors
    assert "ZeroDivisionError" in errors
    assert all(gone(each) for each in ids_in(output))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["num_replicas", "tensor_parallel_size"])
def test_a_driver_that_is_killed_leaves_no_process_also_not_a_stopped_one(option, saved_model):
    program = PROGRAM.replace("num_replicas", option).format(folder=saved_model("qwen3"))
    process = start(["-c", f"{program}import time; time.sleep(600)"])
    ids = ids_in(process.stdout.readline())
    assert len(ids) == 2
    os.kill(ids[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    assert all(gone(each) for each in ids)


def test_a_rank_waits_for_the_others_no_longer_than_stated(monkeypatch):
    from gym_rm.engine.executors import ranks as module  # loads torch.distributed

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(module, "JOIN_SECONDS", 1)
    store = module.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = module.Rank(0, 2, f"127.0.0.1:{store.port}")
    started = time.monotonic()
    with pytest.raises(module.dist.DistStoreError, match="rank 1"):
        module._join(rank, module.torch.device("cpu"))
    assert time.monotonic() - started < 10
