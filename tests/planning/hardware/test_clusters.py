from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.clusters import read_cluster, read_device
from gym_rm.planning.hardware.devices import CPU, KINDS
from gym_rm.planning.quantities import GIB, Basis, Quantity
from gym_rm.planning.request_settings import ClusterSettings


def test_every_number_of_the_table_has_a_source():
    for device in KINDS.values():
        for number in (device.memory, device.flops, device.matmul, device.reserved, *dict(device.all_reduce).values()):
            assert number.source
            assert number.value > 0


def test_a_gpu_like_another_keeps_what_is_not_given():
    device = read_device({"like": "h100_sxm", "memory": "40 GiB"})
    assert device.memory.value == 40 * GIB
    assert device.flops == KINDS["h100_sxm"].flops


def test_a_gpu_of_given_numbers_marks_the_others_as_assumptions():
    device = read_device({"name": "mine", "memory": "48 GiB", "flops": 180e12, "bandwidth": 768e9})
    assert (device.name, device.bandwidth.value) == ("mine", 768e9)
    assert device.matmul.basis is Basis.ASSUMPTION


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("h1000", "Did you mean"),
        ({"memory": "40 GiB"}, "no flops"),
        ({"like": "h100", "memory": -1}, "greater than 0"),
        ({"like": "h100", "memory": "40 apples"}, "such as '80 GiB'"),
        ({"like": "h100", "flop": 1}, "Did you mean 'flops'"),
        ({"like": "h100", "flops": "4 GB/s"}, "flops must be a speed such as '989 TFLOPS'.* which is a bandwidth"),
        ({"like": "h100", "memory": "3.35 TB/s"}, "memory must be a size .* which is a bandwidth"),
        ({"like": "h100", "memory": "80 Gb"}, "whose unit is unknown"),
        ({"like": "h100", "link": "900 GB"}, "link must be a bandwidth .* which is a size"),
        ({"like": "h100", "network": "400 gb/s"}, "such as '50 GB/s', '400 Gb/s' .bits.*whose unit is unknown"),
        ({"like": "h100", "launch": "5 GB"}, "launch must be a time .* which is a size"),
        ({"like": "h100", "flops": float("nan")}, "flops"),
        ({"like": "h100", "matmul": 79}, "a share of the peak"),
    ],
)
def test_a_wrong_gpu_is_refused(gpu, message):
    with pytest.raises(ConfigError, match=message):
        read_device(gpu)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("flops", "1 PFLOPS", 1e15),
        ("flops", "989TFLOP/s", 989e12),
        ("flops", "4e14", 4e14),
        ("memory", "80 GB", 80e9),
        ("memory", "80GiB", 80 * GIB),
        ("bandwidth", "3.35TB/s", 3.35e12),
        ("link", "900 GiB/s", 900 * GIB),
        ("network", "400 Gb/s", 50e9),
        ("network", "400Gbps", 50e9),
        ("network", "50 GB/s", 50e9),
        ("host_link", "512 Gbit/s", 64e9),
        ("launch", "5 us", 5e-6),
    ],
)
def test_numbers_of_hardware_have_units(name, text, value):
    assert getattr(read_device({"like": "h100_sxm", name: text}), name).value == pytest.approx(value)


def test_links_of_a_cluster_have_units():
    cluster = read_cluster(ClusterSettings(network="400 Gb/s", disk="7 GB/s"))
    assert (cluster.network.value, cluster.disk.value) == (50e9, 7e9)
    with pytest.raises(ConfigError, match=r"cluster.network must be a bandwidth .* which is a size"):
        read_cluster(ClusterSettings(network="50 GB"))


def test_nodes_have_one_kind_of_gpu_and_its_network():
    cluster = read_cluster(ClusterSettings(nodes=2, gpus_per_node=4, gpu="a100"))
    assert (cluster.text, cluster.network.value) == ("2 x 4 a100_sxm", 25e9)


@pytest.mark.parametrize("name", ["h100_sxm", "l4"])
@given(rows=st.floats(0.5, 1e6), more=st.floats(1.0, 100.0))
def test_more_rows_never_take_less_time(name, rows, more):
    before, after = (count / KINDS[name].matmul_share(count).value for count in (rows, rows * more))
    assert after >= before * (1 - 1e-9)


def test_rates_between_sizes_are_between_their_rates():
    points = tuple((at, Quantity(value, Basis.MEASURED, "")) for at, value in ((10, 0.1), (1000, 0.9)))
    device = replace(CPU, matmul_rows=points, attention_lengths=points)
    assert device.matmul_share(100).value == pytest.approx(0.3)
    assert device.matmul_share(5).value == pytest.approx(0.05)  # as long as 10 rows
    assert device.matmul_share(1e9).value == 0.9
    assert device.attention_share(1).value == 0.1
    assert CPU.attention_share(7) == CPU.attention
