"""Measured numbers of this machine: their file, its fingerprint, and what they change in an estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware import calibrate as calibration
from gym_rm.planning.hardware import measure
from gym_rm.planning.hardware.calibrate import calibrate, calibration_path, calibration_rows, fingerprint, stored_device
from gym_rm.planning.hardware.devices import CPU, KINDS, Device, device_of_kind
from gym_rm.planning.quantities import Basis, Quantity

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Device, list[str]]:
    """One short calibration without processes; the numbers are rough."""
    file = tmp_path_factory.mktemp("calibration") / "here.json"
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SECONDS", 0.01)
        patch.setattr(measure, "BLOCKS", 2)
        patch.setattr(measure, "all_reduces", lambda bench, sizes: ((), ()))
        device = calibrate(path=file, progress=seen.append)
    return file, device, seen


def changed(file: Path, folder: Path, **values: object) -> Path:
    other = folder / "other.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | values))
    return other


def test_a_stored_calibration_is_the_measured_one(measured: tuple[Path, Device, list[str]]) -> None:
    file, device, _ = measured
    assert stored_device(file) == device


def test_products_attention_and_bandwidths_are_measured(measured: tuple[Path, Device, list[str]]) -> None:
    _, device, seen = measured
    for name in ("memory", "flops", "flops_float32", "bandwidth", "host_link", "matmul", "attention", "streaming"):
        assert getattr(device, name).basis is Basis.MEASURED, name
    assert device.disk is not None
    assert "page cache" in device.disk.source
    assert seen[0] == "matrix products"
    assert seen[-1] == "all-reduce"


def test_what_was_not_measured_says_so(measured: tuple[Path, Device, list[str]]) -> None:
    _, device, _ = measured
    for quantity in (device.link, device.all_reduce[0][1], device.reserved):
        assert quantity.basis is Basis.ASSUMPTION
    assert device.price is None


def test_sources_name_torch_and_its_threads(measured: tuple[Path, Device, list[str]]) -> None:
    _, device, _ = measured
    assert f"torch {torch.__version__}" in device.flops.source
    if not torch.cuda.is_available():
        assert f"{torch.get_num_threads()} threads" in device.flops.source


def test_rates_are_those_of_a_computer(measured: tuple[Path, Device, list[str]]) -> None:
    _, device, _ = measured
    assert 1e9 < device.flops_float32.value < 1e15
    assert 1e8 < device.bandwidth.value < 1e14
    assert 1e-8 < device.launch.value < 1e-3
    assert device.matmul_share(1).value < device.matmul_share(2048).value


def test_random_numbers_of_the_caller_do_not_change() -> None:
    bench = measure.Bench("cpu", torch.float32, 0.001, "here")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with torch.random.fork_rng():
        bench.random(4, 4)
    assert torch.equal(torch.rand(3), expected)


def test_no_file_is_no_device(tmp_path: Path) -> None:
    assert stored_device(tmp_path / "none.json") is None


def test_a_file_of_other_hardware_is_refused(measured: tuple[Path, Device, list[str]], tmp_path: Path) -> None:
    key = next(iter(fingerprint()))
    other = changed(measured[0], tmp_path, fingerprint=fingerprint() | {key: "other"})
    with pytest.raises(ConfigError, match=rf"other hardware: {key} was 'other' and is .*--calibrate"):
        stored_device(other)


def test_a_file_of_another_format_is_refused(measured: tuple[Path, Device, list[str]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has format 0, expected 1; measure again"):
        stored_device(changed(measured[0], tmp_path, format=0))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', "\x00"])
def test_a_broken_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is not a calibration .*measure again"):
        stored_device(file)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast"])
def test_a_number_that_is_none_is_refused(
    value: object, measured: tuple[Path, Device, list[str]], tmp_path: Path
) -> None:
    device = json.loads(measured[0].read_text())["device"]
    device["bandwidth"]["value"] = value
    with pytest.raises(ConfigError, match=r"bandwidth.*measure again"):
        stored_device(changed(measured[0], tmp_path, device=device))


def test_the_file_is_in_the_cache_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibration_path()
    assert path.parent == tmp_path / "gym_rm"
    assert path.name.startswith("calibration-")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # must be ignored, says the specification
    assert calibration_path().parent == Path.home() / ".cache" / "gym_rm"


def test_threads_are_part_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the threads of the host do not matter for GPUs")
    before = calibration_path()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert calibration_path() != before


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the calibration"):
        calibration._write(tmp_path / "file" / "x.json", {})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.json"
    calibration._write(file, {"old": 1})

    def refuse(*args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(calibration.os, "replace", refuse)
    with pytest.raises(ConfigError, match="no space"):
        calibration._write(file, {"new": 1})
    assert json.loads(file.read_text()) == {"old": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_rows_show_every_number_with_its_source() -> None:
    rows = {name: (value, source) for name, value, source in calibration_rows(device_of_kind("h100_sxm"))}
    assert rows["flops"][0] == "989 TFLOP/s"
    assert rows["memory"][0] == "80.0 GiB"
    assert rows["matmul"][0] == "79%"
    assert rows["launch"][0] == "5 us"
    assert rows["all_reduce[2]"][0] == "318 GB/s"
    assert rows["flops"][1].startswith("table: NVIDIA AIConfigurator")


def test_gpus_without_a_measured_link_keep_that_of_the_table_as_an_assumption() -> None:
    device = calibration._base({"gpus": ["NVIDIA H200", "NVIDIA H200"]})
    assert (device.name, device.link.value, device.link.basis) == ("here", 450e9, Basis.ASSUMPTION)
    assert "not measured on 2 x NVIDIA H200; as of h200_sxm" in device.link.source


def test_two_processes_measure_an_all_reduce() -> None:
    large, small = measure.all_reduces(measure.Bench("cpu", torch.float32, 0.01, "here"), (2,))
    assert 1e6 < large[0][1].value < 1e12
    assert 1e-7 < small[0][1].value < 1
    assert large[0][1].basis is Basis.MEASURED


def test_processes_that_fail_leave_the_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.sys, "executable", "/nowhere")
    assert measure.all_reduces(measure.Bench("cpu", torch.float32, 0.01, "here"), (2,)) == ((), ())


# --- rates by size ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(KINDS))
@given(rows=st.floats(0.5, 1e6), more=st.floats(1.0, 100.0))
def test_more_rows_never_take_less_time(name: str, rows: float, more: float) -> None:
    device = KINDS[name]
    before, after = (count / device.matmul_share(count).value for count in (rows, rows * more))
    assert after >= before * (1 - 1e-9)


def test_rates_between_sizes_are_between_their_rates() -> None:
    points = tuple((at, Quantity(value, Basis.MEASURED, "")) for at, value in ((10, 0.1), (1000, 0.9)))
    device = replace(CPU, matmul_rows=points, attention_lengths=points, elementwise=points)
    assert device.matmul_share(100).value == pytest.approx(0.3)
    assert device.matmul_share(5).value == pytest.approx(0.05)  # as long as 10 rows
    assert device.matmul_share(1e9).value == 0.9
    assert device.attention_share(1).value == 0.1
    assert device.elementwise_bandwidth(1e9).value == 0.9


def test_without_tables_one_share_holds_for_all_sizes() -> None:
    assert CPU.matmul_share(1) == CPU.matmul
    assert CPU.attention_share(7) == CPU.attention
    assert CPU.elementwise_bandwidth(8).value == pytest.approx(0.8 * CPU.bandwidth.value)
