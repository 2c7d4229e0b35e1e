import itertools

import hypothesis
from hypothesis import strategies

from gym_rm.planning.placement import EXACT_UNITS, Need, fill, fits, place


def fits_somehow(sizes, gpus, nodes):
    """Return whether sizes fit into nodes, by trying every assignment."""
    return any(
        all(sum(size for size, at in zip(sizes, where, strict=True) if at == index) <= gpus for index in range(nodes))
        for where in itertools.product(range(nodes), repeat=len(sizes))
    )


@hypothesis.given(
    sizes=strategies.lists(strategies.integers(1, 6), min_size=1, max_size=6),
    gpus=strategies.integers(1, 10),
    nodes=strategies.integers(1, 4),
)
@hypothesis.example([4, 4, 3, 3, 2, 2, 2], 10, 2)  # largest first alone would not be enough
def test_units_are_packed_whenever_they_can_be(sizes, gpus, nodes):
    sizes = sorted(sizes, reverse=True)
    units = tuple((size, sizes.count(size)) for size in dict.fromkeys(sizes))
    found = fill(units, gpus, nodes)
    assert (found is not None) == fits_somehow(sizes, gpus, nodes)
    if found is not None:
        assert sorted(itertools.chain(*found), reverse=True) == sizes
        assert all(sum(node) <= gpus for node in found)


def test_tensor_parallel_groups_stay_in_a_node():
    (addresses,) = place((6, 6), [Need(8, 4)])
    assert [address.node for address in addresses] == [0] * 4 + [1] * 4
    assert place((6, 6), [Need(12, 4)]) is None


@hypothesis.given(
    nodes=strategies.integers(1, 20),
    gpus=strategies.integers(1, 8),
    needs=strategies.lists(
        strategies.tuples(strategies.integers(1, 60), strategies.integers(1, 4)), min_size=1, max_size=3
    ),
    together=strategies.sampled_from([(), (0,)]),
)
def test_what_fits_has_a_place_on_gpus_of_its_own(nodes, gpus, needs, together):
    needs = [Need(count * unit, unit) for count, unit in needs]
    found = place((gpus,) * nodes, needs, together=together)
    assert fits((gpus,) * nodes, needs, together=together) == (found is not None)
    if found is None:
        return
    used = [address for addresses in found for address in addresses]
    assert len(used) == len(set(used)) == sum(need.num_gpus for need in needs)
    assert all(address.gpu < gpus and address.node < nodes for address in used)
    assert not together or len({address.node for address in found[0]}) == 1


def test_thousands_of_units_fill_every_node():
    (addresses,) = place((8,) * 1250, [Need(10_000, 4)])
    assert len(set(addresses)) == 10_000 > EXACT_UNITS
