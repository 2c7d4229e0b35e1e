import pytest

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.clusters import kind_from_name, kind_from_ray, read_cluster, read_device
from gym_rm.planning.hardware.devices import KINDS
from gym_rm.planning.quantities import GIB, Basis
from gym_rm.planning.settings import ClusterSettings, NodeSettings


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100_sxm"),
        ("NVIDIA H100 PCIe", 79.1, "h100_pcie"),
        ("NVIDIA H200", 139.7, "h200_sxm"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100_sxm"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100_sxm_40gb"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx_4090"),
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx_3090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "rtx_pro_6000_server"),
    ],
)
def test_names_of_drivers_are_known_with_the_memory_that_the_driver_says(name, gib, kind):
    device = kind_from_name(name, gib * GIB)
    assert device.name == kind
    assert device.memory.value == gib * GIB
    assert device.memory.basis is Basis.MEASURED


def test_an_unknown_driver_name_says_what_to_do():
    with pytest.raises(ConfigError, match=r"Radeon.*cluster\.gpu"):
        kind_from_name("AMD Radeon 7900", 20 * GIB)


def test_names_of_ray_are_known():
    assert [kind_from_ray(name).name for name in ("H100", "A100-40G", "A100-80G", "L4", "H200")] == [
        "h100_sxm",
        "a100_sxm_40gb",
        "a100_sxm",
        "l4",
        "h200_sxm",
    ]


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
    device = read_device({"name": "mine", "memory": "48 GiB", "flops": 180e12, "bandwidth": "768e9"})
    assert (device.name, device.bandwidth.value) == ("mine", 768e9)
    assert device.matmul.basis is Basis.ASSUMPTION


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("h1000", "Did you mean"),
        ({"memory": "40 GiB"}, "no flops"),
        ({"like": "h100", "memory": -1}, "more than 0"),
        ({"like": "h100", "memory": "40 apples"}, "such as '80 GiB'"),
        ({"like": "h100", "flop": 1}, "Did you mean 'flops'"),
        ({"like": "h100", "flops": "many"}, "must be a number"),
        ({"like": "h100", "flops": float("nan")}, "flops"),
        ({"like": "h100", "matmul": 79}, "a share of the peak"),
        ({"like": "h100", "name": ["a"]}, "must be a text"),
    ],
)
def test_a_wrong_gpu_is_refused(gpu, message):
    with pytest.raises(ConfigError, match=message):
        read_device(gpu)


def test_groups_of_nodes_make_a_mixed_cluster():
    settings = ClusterSettings(groups=(NodeSettings(nodes=2, gpu="h100"), NodeSettings(gpus_per_node=4, gpu="a100")))
    cluster = read_cluster(settings)
    assert cluster.num_gpus == 20
    assert cluster.text == "1 x 4 a100_sxm + 2 x 8 h100_sxm"
    assert cluster.network.value == 25e9  # the slower of the two


def test_a_price_for_each_kind_must_have_every_kind():
    with pytest.raises(ConfigError, match="no price for 'h100_sxm'"):
        read_cluster(ClusterSettings(price_per_gpu_hour={"a100_sxm": 2.0}))


def test_a_cluster_can_be_in_a_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 3\ngpus_per_node: 2\ngpu: l40s\n")
    assert read_cluster(str(file)).num_gpus == 6


def test_torch_gives_this_machine():
    assert read_cluster("torch").num_gpus >= 1


def test_a_mistyped_source_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'ray'"):
        read_cluster("rai")
