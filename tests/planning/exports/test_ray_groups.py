"""Placement groups of a plan in a real Ray, on nodes with GPUs that are only counted."""

import contextlib

import pytest

from gym_rm.planning.exports import ray_bundles
from tests.planning.plans import component, plan_of, pool

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with 4 GPUs each."""
    node = {"num_cpus": 4, "num_gpus": 4}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@contextlib.contextmanager
def groups_of(plan):
    groups = [placement_group(**arguments) for arguments in ray_bundles(plan)]
    yield groups
    for group in groups:
        remove_placement_group(group)


def test_ray_makes_the_groups_of_a_plan_each_on_one_node(cluster):
    generation = component("generation", "generation", tensor_parallel_size=2, num_replicas=2)
    plan = plan_of(
        [4, 4],
        pool((component("rm", "reward_model", num_replicas=2),), [(1, 0), (1, 1)]),  # small groups, which come last
        pool((component("policy", "policy", fsdp_size=4), generation), [(0, i) for i in range(4)]),
        pool((component("large", "reward_model", tensor_parallel_size=2),), [(1, 2), (1, 3)]),
    )
    with groups_of(plan) as groups:
        ready = [group.wait(10) for group in groups]
        table = ray.util.placement_group_table()
    assert ready == [True] * 5
    states = [table[group.id.hex()] for group in groups]
    assert sorted(state["name"] for state in states) == sorted(group["name"] for group in ray_bundles(plan))
    assert [len(set(state["bundles_to_node_id"].values())) for state in states] == [1] * 5
    assert sum(len(state["bundles"]) for state in states) == plan.used_gpus == 8


def test_a_tensor_parallel_group_larger_than_a_node_never_gets_ready(cluster):
    plan = plan_of([8], pool((component("rm", "reward_model", tensor_parallel_size=8),), [(0, i) for i in range(8)]))
    with groups_of(plan) as groups:
        ready = [group.wait(1) for group in groups]
    assert ready == [False]
