"""Measured numbers of this machine: what is measured, and their file."""

import pytest
import torch

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware import calibration
from gym_rm.planning.hardware.calibration import calibrate, calibration_path, stored_device
from gym_rm.planning.quantities import Basis


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_rates_are_measured_stored_and_those_of_a_computer(cache, monkeypatch):
    monkeypatch.setattr(calibration, "SECONDS", 0.01)
    monkeypatch.setattr(calibration, "BLOCKS", 2)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    device = calibrate()
    assert torch.equal(torch.rand(3), expected)  # random numbers of the caller do not change
    assert stored_device() == device
    for name in ("memory", "flops", "flops_float32", "bandwidth", "matmul", "streaming", "launch"):
        assert getattr(device, name).basis is Basis.MEASURED, name
    assert all(number.basis is Basis.ASSUMPTION for number in (device.link, device.all_reduce[0][1], device.reserved))
    assert 1e9 < device.flops_float32.value < 1e15
    assert 1e8 < device.bandwidth.value < 1e14
    assert 1e-8 < device.launch.value < 1e-3
    assert device.matmul_share(1).value < device.matmul_share(2048).value


def test_the_file_is_in_the_cache_folder_of_the_user_and_has_the_threads(cache, monkeypatch):
    path = calibration_path()
    assert path.parent == cache / "gym_rm"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert torch.cuda.is_available() or calibration_path() != path


def test_a_missing_or_broken_file_is_refused(cache):
    with pytest.raises(ConfigError, match="nothing was measured on this machine; run gym-rm plan --calibrate"):
        stored_device()
    calibration_path().parent.mkdir()
    calibration_path().write_text("{}")
    with pytest.raises(ConfigError, match=r"(?s)is not a calibration .*measure again"):
        stored_device()


def test_links_of_gpus_stay_as_in_the_table_as_an_assumption():
    device = calibration._base({"gpu": "NVIDIA H200"})
    assert (device.name, device.link.value, device.link.basis) == ("here", 450e9, Basis.ASSUMPTION)
    assert "not measured on NVIDIA H200; as of h200_sxm" in device.link.source
