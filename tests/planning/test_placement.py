import itertools

import hypothesis
from hypothesis import strategies

from gym_rm.planning.placement import EXACT_UNITS, Need, fits, pack, place


def fits_somehow(sizes, capacities):
    """Return whether sizes fit into bins, by trying every assignment."""
    return any(
        all(
            sum(size for size, at in zip(sizes, where, strict=True) if at == index) <= capacity
            for index, capacity in enumerate(capacities)
        )
        for where in itertools.product(range(len(capacities)), repeat=len(sizes))
    )


@hypothesis.given(
    sizes=strategies.lists(strategies.integers(1, 6), min_size=1, max_size=6),
    capacities=strategies.lists(strategies.integers(1, 8), min_size=1, max_size=4),
)
def test_units_are_packed_whenever_they_can_be(sizes, capacities):
    sizes = tuple(sorted(sizes, reverse=True))
    found = pack(sizes, tuple(capacities))
    assert (found is not None) == fits_somehow(sizes, capacities)
    if found is not None:
        for index, capacity in enumerate(capacities):
            assert sum(size for size, at in zip(sizes, found, strict=True) if at == index) <= capacity


def test_largest_first_alone_would_not_be_enough():
    assert pack((4, 4, 3, 3, 2, 2, 2), (10, 10)) is not None


def test_tensor_parallel_groups_stay_in_a_node():
    (addresses,) = place((6, 6), [Need(8, 4)])
    assert [address.node for address in addresses] == [0] * 4 + [1] * 4
    assert place((6, 6), [Need(12, 4)]) is None


@hypothesis.given(
    nodes=strategies.lists(strategies.integers(1, 8), min_size=1, max_size=20),
    needs=strategies.lists(strategies.tuples(strategies.integers(1, 60), strategies.integers(1, 4)), max_size=3),
)
def test_what_fits_has_a_place_on_gpus_of_its_own(nodes, needs):
    needs = [Need(count * unit, unit) for count, unit in needs]
    found = place(nodes, needs)
    assert fits(nodes, needs) == (found is not None)
    used = [address for addresses in found or () for address in addresses]
    assert len(used) == len(set(used)) == (sum(need.num_gpus for need in needs) if found is not None else 0)
    assert all(address.gpu < nodes[address.node] for address in used)


def test_thousands_of_units_fill_every_node():
    (addresses,) = place((8,) * 1250, [Need(10_000, 4)])
    assert len(set(addresses)) == 10_000 > EXACT_UNITS
