import functools
import itertools
import math
import time
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies

from gym_rm.planning.component_options import PHASES, choices, phase_clocks, places, step_seconds
from gym_rm.planning.gpu_memory import component_memory
from gym_rm.planning.placement import Need, partitions, place
from gym_rm.planning.plan import Role
from gym_rm.planning.refusals import broken_rules
from gym_rm.planning.search import search
from gym_rm.planning.step_times import wake_times
from tests.planning.requests import NETWORK, cluster, component, device, grpo, scoring, workload

MEMORIES = strategies.sampled_from([6, 9, 14, 20, 30, 45, 80])
SMALL = strategies.sampled_from([(1,), (2,), (3,), (1, 1), (2, 2)])


def brute_force(request):
    """Return the shortest step of all partitions, places and choices, one after the other without any bound."""
    parts = {each.name: each for each in request.components}
    gpus = request.cluster.num_gpus
    best = math.inf
    for groups in partitions(list(parts)):
        for sizes in itertools.product(range(1, gpus + 1), repeat=len(groups)):
            if sum(sizes) > gpus:
                continue
            for wheres in itertools.product(*(places(size, request.cluster.node_gpus) for size in sizes)):
                best = min(best, fastest_choices(request, parts, groups, wheres))
    return best


@functools.cache
def takes(request, part, choice, where, together):
    """Return the bytes that stay, those of its own work, and the seconds of each phase, waking too."""
    device = request.cluster.device
    memory = component_memory(part, choice, request.workload, device)
    resident = sum(item.bytes for item in memory.resident)
    clocks = phase_clocks(part, choice, request, where.of(part).site(request.cluster), together=together)
    seconds = [clocks[phase].total if phase in clocks else 0.0 for phase in PHASES]
    if choice.sleeps:
        seconds[0] += wake_times(part, resident, device).total
        return 0.0, memory.peak, tuple(seconds)
    return resident, memory.peak - resident, tuple(seconds)


def every_choice(request, part, where, alone):
    """Yield all choices with all sizes that are worth a try: of batches some more than the longest conversation."""
    share = request.workload.conversations
    for choice in choices(part, where, request):
        for sleeps in (False,) if alone else (False, True):
            if part.role is Role.GENERATION:
                seqs = range(1, math.ceil(share / choice.num_replicas) + 1, 7)
                yield from (replace(choice, sleeps=sleeps, max_num_seqs=count) for count in seqs)
            else:
                longest = request.workload.longest
                tokens = (longest, 2 * longest, 3000, 10_000, 40_000)
                yield from (replace(choice, sleeps=sleeps, max_num_batched_tokens=count) for count in tokens)


def fastest_choices(request, parts, groups, wheres):
    """Return the shortest step of these pools; memory is checked from the definition."""
    kind = request.cluster.device
    capacity = kind.memory.value - kind.reserved.value
    pools = []
    for group, where in zip(groups, wheres, strict=True):
        together = {"policy", "generation"} <= set(group)
        lists = []
        for name in group:
            tried = every_choice(request, parts[name], where, len(group) == 1)
            near = together and name == "policy"
            lists.append([(choice, *takes(request, parts[name], choice, where, near)) for choice in tried])
        found = {}
        for chosen in itertools.product(*lists):
            if sum(each[1] for each in chosen) + max(each[2] for each in chosen) <= capacity:
                unit = math.lcm(where.per_node, *(each[0].unit for each in chosen))
                seconds = tuple(map(sum, zip(*(each[3] for each in chosen), strict=True)))
                found[unit, seconds] = None
        pools.append([(Need(where.num_gpus, unit), seconds) for unit, seconds in found])
    best = math.inf
    for chosen in itertools.product(*pools):
        for slower in ways_to_place(request, parts, groups, [need for need, _ in chosen]):
            vectors = slower([seconds for _, seconds in chosen])
            best = min(best, step_seconds(vectors, asynchronous=request.workload.asynchronous))
    return best


def ways_to_place(request, parts, groups, needs):
    """Yield functions that add what new weights take longer to other nodes, for every way that there is room."""
    if place(request.cluster.nodes, needs) is None:
        return
    policy, generation = (
        next(i for i, group in enumerate(groups) if role in group) for role in ("policy", "generation")
    )
    ends = [needs[policy], needs[generation]]
    others = [need for index, need in enumerate(needs) if index not in (policy, generation)]
    size = sum(need.num_gpus for need in ends)
    in_one_node = all(need.unit == need.num_gpus for need in ends)
    if policy == generation or (in_one_node and place(request.cluster.nodes, [Need(size, size), *others]) is not None):
        yield lambda vectors: vectors
        return
    weights = parts["policy"].shape.parameters * parts["policy"].bytes_per_parameter
    link, network = request.cluster.device.link.value, request.cluster.network.value
    longer = weights / min(link, network) - weights / link
    yield lambda vectors: [
        (*vector[:-1], vector[-1] + longer) if index == policy else vector for index, vector in enumerate(vectors)
    ]


@pytest.mark.parametrize("gpus", [(1,), (2,), (1, 1)])
@pytest.mark.parametrize(("memory", "asynchronous"), [(9, False), (14, True), (20, False), (80, True)])
def test_search_finds_what_trying_everything_finds(gpus, memory, asynchronous):
    parts = (
        component(Role.POLICY, size=0.5, gradient_checkpointing=True),
        component(Role.GENERATION, size=0.5),
        component(Role.REWARD_MODEL, name="rm", size=1.0),
    )
    request = replace(grpo(cluster(*gpus, memory=memory)), components=parts)
    request = replace(request, workload=replace(request.workload, asynchronous=asynchronous))
    found = search(request)
    expected = brute_force(request)
    if found is None:
        assert math.isinf(expected)
    else:
        assert found.step_seconds <= expected * (1 + 1e-12)
        assert found.exact


@hypothesis.given(
    gpus=strategies.sampled_from([(1,), (4,), (8,), (2, 2), (8, 8)]),
    memory=MEMORIES,
    critic=strategies.booleans(),
    reference=strategies.booleans(),
)
@hypothesis.settings(max_examples=4, deadline=None)
def test_no_gpu_is_given_twice_and_memory_is_never_over(gpus, memory, critic, reference):
    request = grpo(cluster(*gpus, memory=memory), critic=critic, reference=reference)
    found = search(request)
    if found is None:
        return
    used = [address for addresses in found.gpus for address in addresses]
    assert len(used) == len(set(used))
    assert all(address.gpu < gpus[address.node] for address in used)
    for pool, addresses in zip(found.pools, found.gpus, strict=True):
        assert len(addresses) == pool.place.num_gpus
        assert pool.place.spans or len({address.node for address in addresses}) == 1
        for choice in (option.choice for option in pool.options):
            tp = choice.tensor_parallel_size
            assert tp * choice.fsdp_size * choice.num_replicas == len(addresses)
            groups = [addresses[start : start + tp] for start in range(0, len(addresses), tp)]
            assert all(len({address.node for address in group}) == 1 for group in groups)


def value(request) -> float:
    found = search(request)
    return math.inf if found is None else found.step_seconds


@hypothesis.given(
    gpus=strategies.sampled_from([(1,), (2,), (3,), (4,), (7,), (2, 2), (4, 4), (3, 3)]),
    memory=strategies.integers(5, 40),
    critic=strategies.booleans(),
    asynchronous=strategies.booleans(),
    pools=strategies.sampled_from([None, "apart"]),
)
@hypothesis.settings(max_examples=3, deadline=None)
def test_better_hardware_or_shorter_texts_never_make_a_plan_worse(gpus, memory, critic, asynchronous, pools):
    request = grpo(cluster(*gpus, memory=memory), critic=critic)
    request = replace(request, workload=workload(asynchronous=asynchronous))
    if pools is not None:
        request = replace(request, pools=tuple((part.name,) for part in request.components))
    hardware, work = request.cluster, request.workload
    replies = replace(work.replies, values=tuple(length - 20 for length in work.replies.values))
    faster = {"link": replace(hardware.device.link, value=2 * hardware.device.link.value)}
    better = (
        cluster(*gpus, gpus[0], memory=memory),
        cluster(*(number + 1 for number in gpus), memory=memory),
        cluster(*gpus, memory=memory + 3),
        replace(hardware, network=replace(NETWORK, value=3 * NETWORK.value)),
        replace(hardware, device=hardware.device.with_quantities(faster)),
    )
    now = value(request) * (1 + 1e-9)
    assert all(value(replace(request, cluster=each)) <= now for each in better)
    assert value(replace(request, workload=replace(work, replies=replies))) <= now


def test_new_weights_stay_in_a_node_where_there_is_another_that_is_idle():
    request = replace(grpo(cluster(8)), pools=(("policy",), ("generation",), ("rm",)))
    assert value(replace(request, cluster=cluster(8, 8))) <= value(request)
    apart = replace(request, components=tuple(replace(each, num_gpus=8) for each in request.components))
    found = search(replace(apart, cluster=cluster(8, 8, 8)))
    (policy,) = (pool for pool in found.pools if pool.crosses)
    assert policy.seconds[-1] == pytest.approx(2 * request.components[0].shape.parameters / NETWORK.value)


@pytest.mark.parametrize("gpus", [64])
def test_a_large_cluster_is_not_worse_than_a_smaller_one(gpus):
    nodes = (8,) * (gpus // 8)
    assert value(scoring(cluster(*nodes, 8))) <= value(scoring(cluster(*nodes)))


def test_smallest_takes_the_fewest_gpus_that_are_fast_enough():
    request = grpo(cluster(8))
    limit = search(replace(request, cluster=cluster(3))).step_seconds
    found = search(replace(request, step_seconds=limit))
    assert sum(map(len, found.gpus)) == 3
    assert found.step_seconds <= limit


def test_weights_are_divided_over_a_part_of_the_pool_where_links_are_slow():
    training = component(Role.REWARD_TRAINING, size=2.0, gradient_checkpointing=True)
    slow = device(memory=44, kind="l40s")
    hardware = cluster(8)
    hardware = replace(hardware, device=slow)
    request = replace(grpo(hardware), components=(training,), workload=workload(num_prompts=128))
    found = search(request)
    steps = {
        size: search(replace(request, components=(replace(training, fsdp_size=size),))).step_seconds
        for size in (1, 2, 4, 8)
    }
    assert found.pools[0].options[0].choice.fsdp_size == min(steps, key=steps.get)
    assert 1 < found.pools[0].options[0].choice.fsdp_size < 8


@pytest.mark.parametrize("numbers", [{"num_gpus": 57}, {"num_gpus": 100}, {"num_replicas": 17}])
def test_fixed_numbers_are_kept_on_clusters_that_are_not_searched_exactly(numbers):
    found = search(scoring(cluster(*(8,) * 16), **numbers))
    assert found is not None
    (pool,) = found.pools
    assert numbers.get("num_gpus", pool.place.num_gpus) == pool.place.num_gpus
    assert numbers.get("num_replicas", pool.options[0].choice.num_replicas) == pool.options[0].choice.num_replicas
    assert not found.exact


def test_two_pools_of_13_gpus_need_four_nodes_of_8():
    request = scoring(cluster(8, 8, 8), models=2, num_gpus=13)
    request = replace(request, pools=(("rm0",), ("rm1",)))
    assert search(request) is None
    assert search(replace(request, cluster=cluster(8, 8, 8, 8))) is not None


FIXES = {
    "policy": {
        "max_num_batched_tokens": [600, 850, 1700, 2600, 5000, 20_000, 10**6],
        "gradient_checkpointing": [False, True],
        "sleeps": [False, True],
        "fsdp_size": [1, 2, 3, 4],
        "tensor_parallel_size": [1, 2],
        "num_gpus": [1, 2, 3, 4],
    },
    "generation": {"max_num_seqs": [1, 5, 16, 23, 48, 64], "tensor_parallel_size": [1, 2], "sleeps": [False, True]},
    "rm": {
        "max_num_batched_tokens": [600, 1000, 3000, 8192, 50_000],
        "fsdp_size": [1, 2, 3],
        "tensor_parallel_size": [1, 2],
        "sleeps": [False, True],
        "num_replicas": [1, 2, 3],
    },
}


@hypothesis.given(strategies.data())
@hypothesis.settings(max_examples=12, deadline=None)
def test_no_number_that_may_be_fixed_is_faster_than_one_left_to_the_search(data):
    gpus = data.draw(strategies.sampled_from([(1,), (2,), (3,), (4,), (6,), (2, 2), (3, 3)]))
    request = grpo(cluster(*gpus, memory=data.draw(strategies.integers(9, 40))))
    work = workload(
        num_prompts=data.draw(strategies.integers(3, 20)),
        updates_per_step=data.draw(strategies.integers(1, 3)),
        asynchronous=data.draw(strategies.booleans()),
    )
    request = replace(request, workload=work)
    auto, parts = search(request), []
    for part in request.components:
        names = data.draw(strategies.lists(strategies.sampled_from(sorted(FIXES[part.name])), max_size=2, unique=True))
        fixed = {name: data.draw(strategies.sampled_from(FIXES[part.name][name])) for name in names}
        parts.append(replace(part, **fixed))
    groups = data.draw(strategies.sampled_from([None, *partitions([part.name for part in parts])]))
    fixed = replace(request, components=tuple(parts), pools=groups)
    if next(broken_rules(fixed), None) is not None or (found := search(fixed)) is None:
        return
    assert auto is not None
    assert auto.exact
    assert auto.step_seconds <= found.step_seconds * (1 + 1e-9)


@hypothesis.given(gpus=strategies.integers(1, 7), more=strategies.integers(1, 6), memory=strategies.integers(9, 40))
@hypothesis.settings(max_examples=4, deadline=None)
def test_the_same_gpus_have_one_price_in_nodes_of_any_size(gpus, more, memory):
    request = grpo(cluster(gpus, memory=memory))
    fixed = tuple(replace(part, num_gpus=gpus) for part in request.components)
    exactly = replace(request, components=fixed, pools=(tuple(part.name for part in fixed),))
    assert value(replace(exactly, cluster=cluster(gpus + more, memory=memory))) == pytest.approx(value(exactly))


@pytest.mark.slow
def test_ten_thousand_gpus_are_planned_in_seconds():
    started = time.process_time()
    small, large = (value(grpo(cluster(*(8,) * nodes), size=8.0)) for nodes in (16, 1250))
    assert time.process_time() - started < 20
    assert large <= small
