"""Replicas in Ray, on a cluster of three nodes in this machine: what is lost when ranks and nodes die."""

import os
import signal
import sys

import numpy as np
import pytest

import gym_rm
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.executors.replica import ReplicaFailed
from gym_rm.errors import ConfigError, RemoteError
from gym_rm.testing import check_executor
from tests.engine.executors import ranks
from tests.engine.executors.batches import gone, spec_of, tree_with, trees, until

pytestmark = pytest.mark.slow  # the cluster takes 20 seconds; test_replicas.py has the same executor

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from gym_rm.engine.executors.ray import RayExecutor, RayReplica  # noqa: E402


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
    return [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]


def ids_of(executor):
    return [each for replica in executor.replicas for each in replica.process_ids]


def test_killed_and_stopped_ranks_and_a_lost_node_change_no_bit(cluster, saved_model, real_conversations):
    """The four failures in one test, because starting ranks takes seconds."""
    folder = saved_model("qwen3")
    expected = gym_rm.load_scorer(folder).score(real_conversations).rewards
    scorer = gym_rm.load_scorer(folder, executor="ray", num_replicas=2, batch_timeout=4.0)
    executor = scorer.executor
    assert isinstance(executor, RayExecutor)
    groups = groups_in_use()
    assert [(each["strategy"], each["bundles"]) for each in groups] == [("STRICT_PACK", {0: {"CPU": 1.0}})] * 2
    seen = set()

    def check(fail):
        """Score until the replica that fails is missed (the other one may take all batches), and all run again."""
        before = ids_of(executor)
        seen.update(before)
        fail()

        def restarted():
            assert np.array_equal(scorer.score(real_conversations).rewards, expected)
            now = ids_of(executor)
            return len(now) == 2 and now != before

        until(restarted, 90)
        seen.update(ids_of(executor))

    def lose_a_node():
        cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
        cluster.workers.append(cluster.add_node(num_cpus=1))

    check(lambda: os.kill(ids_of(executor)[0], signal.SIGKILL))
    check(lambda: os.kill(ids_of(executor)[1], signal.SIGSTOP))
    check(lose_a_node)
    scorer.close()
    assert all(gone(each) for each in seen)
    until(lambda: not groups_in_use())
    assert ray.is_initialized(), "only a Ray that was started for the scorer is shut down"


def test_ranks_of_a_group_meet_and_fail_together(cluster, saved_model):
    cluster.workers.append(cluster.add_node(num_cpus=2))
    replica = RayReplica(make=ranks.failing)
    replica.start(spec_of(saved_model("qwen3"), tensor_parallel_size=2))
    assert len(replica.process_ids) == 2
    assert replica.run(trees()[0], 30).values.shape == (6, 1)
    assert replica.run(tree_with(ranks.BROKEN), 30).error == "ValueError: a broken batch"
    with pytest.raises(ConfigError, match="weights must be tensors by name"):
        replica.call("update_weights", 3, seconds=30)
    with pytest.raises(ReplicaFailed, match=r"ranks \[1\] of 2 failed alone"):
        replica.run(tree_with(ranks.SPLIT), 30)
    replica.kill()
    assert not replica.alive()
    cluster.remove_node(cluster.workers.pop())


def test_more_replicas_than_the_nodes_have_room_for_are_refused(cluster, saved_model, monkeypatch):
    monkeypatch.setattr("gym_rm.engine.executors.ray.ROOM_SECONDS", 2.0)
    with pytest.raises(RemoteError, match=r"no node had 1 x {'CPU': 1} free for 2 seconds.*pass a smaller num_repl"):
        gym_rm.load_scorer(saved_model("qwen3"), executor="ray", num_replicas=3)
    until(lambda: not groups_in_use())


def test_the_contract_of_executors(cluster, saved_model):
    spec = spec_of(saved_model("qwen3"))
    check_executor(
        lambda: RayExecutor(ParallelOptions(num_replicas=2)), spec, trees(40), weights=saved_model("qwen3", seed=1)
    )
    assert ray.is_initialized()


def test_an_executor_without_a_model_leaves_a_ray_that_was_there(cluster):
    executor = RayExecutor(ParallelOptions())
    with pytest.raises(ConfigError, match="has no model"):
        executor.run([])
    executor.close()
    assert ray.is_initialized()


def test_a_machine_whose_raylet_has_died_is_named_at_once(cluster, saved_model, monkeypatch):
    replica = RayReplica()
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": ray.get_runtime_context().get_node_id(), "Alive": False}])
    with pytest.raises(ReplicaFailed, match="its raylet is dead"):
        replica.start(spec_of(saved_model("qwen3")))
