"""Ray placement groups of a plan."""

from __future__ import annotations

from typing import Any

from gym_rm.planning.plan import Plan, PoolPlan, Role


def ray_bundles(plan: Plan) -> list[dict[str, Any]]:
    """Return the arguments of `ray.util.placement_group` for each group of GPUs that must be on one node.

    A pool gets one group for every tensor-parallel group of its component with the largest tensor parallelism: one
    bundle `{"CPU": 1, "GPU": 1}` for a GPU, `STRICT_PACK`. Components of a pool take turns in the same groups; the name
    of a group is `plan/pool/index`. A group that spans nodes has `PACK`.

    The largest groups are first; create them in this order. Ray chooses the nodes itself, and small groups that come
    first can leave no node with enough GPUs for a large one.
    """
    groups = [group for pool in plan.pools for group in _groups(plan, pool)]
    return sorted(groups, key=lambda group: -len(group["bundles"]))


def _groups(plan: Plan, pool: PoolPlan) -> list[dict[str, Any]]:
    size = max(
        each.tensor_parallel_size * (each.fsdp_size if each.role is Role.REWARD_MODEL else 1)
        for each in pool.components
    )
    bundle = {"CPU": 1} if plan.processor == "CPU" else {"CPU": 1, "GPU": 1}
    found = []
    for start in range(0, len(pool.gpus), size):
        gpus = pool.gpus[start : start + size]
        one_node = len({address.node for address in gpus}) == 1
        found.append(
            {
                "bundles": [dict(bundle) for _ in gpus],
                "strategy": "STRICT_PACK" if one_node else "PACK",
                "name": f"{plan.name}/{pool.name}/{start // size}",
            }
        )
    return found
