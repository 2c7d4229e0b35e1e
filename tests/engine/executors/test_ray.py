"""Replicas in Ray, on a cluster of three nodes in this machine: what is lost when ranks, nodes and clients die."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.scores import ScoringError
from tests.engine.executors import ranks

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from gym_rm.engine.executors import ray_pool  # noqa: E402
from gym_rm.engine.executors.ray import RayExecutor, RayReplica, connect  # noqa: E402
from gym_rm.engine.executors.replica import ParallelOptions  # noqa: E402
from tests.engine.executors.batches import trees  # noqa: E402
from tests.engine.executors.test_replica_processes import gone, spec_of, tree_with  # noqa: E402
from tests.engine.executors.test_replicas import until  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    """A head without room, and two nodes with room for one rank each."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the ranks, which import the executors of the tests
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def groups_in_use():
    return [each for each in ray.util.placement_group_table().values() if each["state"] not in ("REMOVED",)]


def ids_of(executor):
    return [each for replica in executor.replicas for each in replica.process_ids]


def test_killed_and_stopped_ranks_and_a_lost_node_change_no_bit(cluster, saved_model, real_conversations):
    """The four failures in one test, because starting ranks takes seconds."""
    folder = saved_model("qwen3")
    expected = gym_rm.load_scorer(folder).score(real_conversations).rewards
    scorer = gym_rm.load_scorer(folder, num_replicas=2, lease_seconds=2.0, max_restarts=5)  # "auto" finds Ray
    executor = scorer.executor
    assert isinstance(executor, RayExecutor)
    groups = groups_in_use()
    assert [(each["strategy"], each["bundles"]) for each in groups] == [("STRICT_PACK", {0: {"CPU": 1.0}})] * 2
    seen = set()

    def check(restarts):
        for _ in range(3):
            assert np.array_equal(scorer.score(real_conversations).rewards, expected)
        until(lambda: executor.stats.restarts == restarts, 60)
        seen.update(ids_of(executor))

    check(0)
    os.kill(ids_of(executor)[0], signal.SIGKILL)
    check(1)
    os.kill(ids_of(executor)[1], signal.SIGSTOP)
    check(2)
    cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
    assert np.array_equal(scorer.score(real_conversations).rewards, expected)
    cluster.workers.append(cluster.add_node(num_cpus=1))
    check(3)
    assert (executor.stats.mismatches, executor.stats.poisoned) == (0, 0)
    assert executor.stats.deaths >= 3
    scorer.close()
    assert all(gone(each) for each in seen)
    until(lambda: not groups_in_use())
    assert ray.is_initialized(), "only a Ray that was started for the scorer is shut down"


def test_ranks_of_a_group_meet_and_fail_together(cluster, saved_model):
    cluster.workers.append(cluster.add_node(num_cpus=2))
    replica = RayReplica(make=ranks.failing)
    replica.start(spec_of(saved_model("qwen3"), fsdp_size=2))
    assert len(replica.process_ids) == 2
    assert replica.run(trees()[0], 30).values.shape == (6, 1)
    assert replica.run(tree_with(ranks.BROKEN), 30).error == "ValueError: a broken batch"
    with pytest.raises(ConfigError, match="weights must be tensors by name"):
        replica.call("update_weights", 3, seconds=30)
    with pytest.raises(ranks_failed(), match=r"ranks \[1\] of 2 failed alone"):
        replica.run(tree_with(ranks.SPLIT), 30)
    replica.kill()
    assert not replica.alive()
    cluster.remove_node(cluster.workers.pop())


def ranks_failed():
    from gym_rm.engine.executors.replica import ReplicaFailed

    return ReplicaFailed


def test_more_replicas_than_the_nodes_have_room_for_are_refused(cluster, saved_model):
    with pytest.raises(ConfigError, match=r"num_replicas=3 with 1 ranks each needs .* have room for 2"):
        gym_rm.load_scorer(saved_model("qwen3"), executor="ray", num_replicas=3)
    until(lambda: not groups_in_use())


def test_a_full_object_store_is_out_of_memory_so_that_batches_become_smaller(cluster, monkeypatch):
    def full(*arguments):
        raise ray.exceptions.ObjectStoreFullError("no room")

    replica = RayReplica()
    monkeypatch.setattr(replica, "_ask", full)
    result = replica.run(trees()[0], 1)
    assert result.out_of_memory
    assert "object store is full" in result.error


CLIENT = """
import os, sys, time, gym_rm
scorer = gym_rm.load_scorer({folder!r}, executor="ray", name="shared")
print("scored", scorer.score({conversations!r}).rewards.tolist(), flush=True)
time.sleep(600)
"""


def test_processes_share_a_pool_which_ends_with_the_last(cluster, saved_model, real_conversations, monkeypatch):
    monkeypatch.setattr(ray_pool, "SILENT_SECONDS", 5.0)
    folder, few = saved_model("qwen3"), real_conversations[:3]
    expected = gym_rm.load_scorer(folder).score(few).rewards
    scorer = gym_rm.load_scorer(folder, executor="ray", name="shared")
    with pytest.raises(ConfigError, match=r"the pool of this name has another model or other options \(.*prefix_cache"):
        gym_rm.load_scorer(folder, executor="ray", name="shared", prefix_cache_tokens=64)
    with pytest.raises(ConfigError, match=r"num_replicas: 1 there, 2 here"):
        gym_rm.load_scorer(folder, executor="ray", name="shared", num_replicas=2)
    program = CLIENT.format(folder=folder, conversations=few)
    client = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert np.array_equal(scorer.score(few).rewards, expected)
    copy = pickle.loads(pickle.dumps(scorer))  # a client of its own, as in an env runner
    assert np.array_equal(copy.score(few).rewards, expected)
    assert len(groups_in_use()) == 1
    assert client.stdout.readline() == f"scored {expected.tolist()}\n"
    assert scorer.executor.stats.batches == 3
    copy.close()
    scorer.close()
    time.sleep(2.0)
    assert len(groups_in_use()) == 1, "one client is left"
    client.kill()
    client.wait()
    until(lambda: not groups_in_use(), 30)
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))


def test_a_pool_that_had_new_weights_and_died_is_not_made_again_with_the_old_ones(
    cluster, saved_model, real_conversations
):
    folder, few = saved_model("qwen3"), real_conversations[:3]
    scorer = gym_rm.load_scorer(folder, executor="ray", name="updated")
    other = pickle.loads(pickle.dumps(scorer))
    other.update_weights(saved_model("qwen3", seed=1))
    expected = gym_rm.load_scorer(saved_model("qwen3", seed=1)).score(few).rewards
    np.testing.assert_allclose(scorer.score(few).rewards, expected, atol=1e-5)
    ray.kill(scorer.executor._actor)
    with pytest.raises(ScoringError, match="the pool 'updated' has died"):
        scorer.score(few)
    scorer.close()
    other.close()
    until(lambda: not groups_in_use(), 30)


def test_ray_is_started_only_if_needed_and_ended_only_then(cluster):
    disconnect = connect()  # this process is connected already
    disconnect()
    assert ray.is_initialized()


def test_a_name_needs_ray_and_a_pool_needs_a_model(cluster):
    with pytest.raises(ConfigError, match="name='rm' names replicas in Ray"):
        gym_rm.load_scorer(name="rm", replicas="processes")
    with pytest.raises(ConfigError, match="has no model"):
        RayExecutor(ParallelOptions(), lambda: None).run([])
