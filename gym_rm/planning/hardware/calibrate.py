"""A device with the numbers that were measured on this machine, and the file that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from gym_rm.errors import ConfigError
from gym_rm.planning.hardware.devices import CPU, KINDS, TABLES, Device
from gym_rm.planning.quantities import Quantity, assumed, show_bytes, show_seconds

if TYPE_CHECKING:
    from gym_rm.planning.hardware.measure import Bench

FORMAT = 1  # of the file
SECONDS = 0.2  # of one measurement; there are about 50
_ADAPTER = pydantic.TypeAdapter(Device)


def calibrate(*, path: str | Path | None = None, progress: Callable[[str], None] | None = None) -> Device:
    """Measure this machine, store the numbers and return them. It takes less than a minute.

    The GPUs are measured if torch sees any, else the CPU with the threads that torch uses now.

    Args:
        path: file for the numbers; None for one in the user's cache folder, named after the hardware.
        progress: is called with the name of each measurement before it starts.

    Raises:
        ConfigError: torch is missing, or the file cannot be written.
    """
    found = fingerprint()
    device = _measure(found, progress or (lambda name: None))
    _write(calibration_path(path), {"format": FORMAT, "fingerprint": found, "device": _ADAPTER.dump_python(device)})
    return device


def stored_device(path: str | Path | None = None) -> Device | None:
    """Return what `calibrate` measured on this hardware, or None if it was not called yet.

    Raises:
        ConfigError: the file cannot be read, or is of another format or other hardware.
    """
    file = calibration_path(path)
    if not file.exists():
        return None
    again = "measure again with `gym-rm plan --calibrate`"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        stored = values["format"], values["fingerprint"], values["device"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a calibration ({error!r}); {again}.") from error
    if stored[0] != FORMAT:
        raise ConfigError(f"{file} has format {stored[0]!r}, expected {FORMAT}; {again}.")
    found = fingerprint()
    if stored[1] != found:
        known = stored[1] if isinstance(stored[1], dict) else {}
        different = [key for key in found if known.get(key) != found[key]]
        text = ", ".join(f"{key} was {known.get(key)!r} and is {found[key]!r}" for key in different)
        raise ConfigError(f"{file} was measured on other hardware: {text or 'other keys'}; {again}.")
    try:
        device = _ADAPTER.validate_python(stored[2])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} is not a calibration: {place}: {first['msg'].lower()}; {again}.") from error
    if bad := [name for name, each in _quantities(device) if not each.value > 0 or each.value == float("inf")]:
        raise ConfigError(f"{file} is not a calibration: {bad[0]} must be a positive number; {again}.")
    return device


def calibration_path(path: str | Path | None = None) -> Path:
    """Return the file of this hardware in the user's cache folder, or the given one."""
    if path is not None:
        return Path(path)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"  # as the XDG specification says
    digest = hashlib.sha256(json.dumps(fingerprint(), sort_keys=True).encode()).hexdigest()
    return folder / "gym_rm" / f"calibration-{digest[:16]}.json"


def fingerprint() -> dict[str, Any]:
    """Return what the numbers depend on: the hardware, the threads and the version of torch.

    Raises:
        ConfigError: torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise ConfigError("measuring this machine needs torch: pip install 'gym_rm[models]'.") from error
    found: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        memory = torch.cuda.get_device_properties(0).total_memory
        return found | {"gpus": names, "memory": memory, "cuda": torch.version.cuda, "driver": _driver()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found | {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "memory": memory}


def calibration_rows(device: Device) -> list[tuple[str, str, str]]:
    """Return name, value and source of every number, for a table."""
    return [(name, _show(name, each), f"{each.basis}: {each.source}") for name, each in _quantities(device)]


# --- measuring -------------------------------------------------------------------------------------------------------


def _measure(found: dict[str, Any], progress: Callable[[str], None]) -> Device:
    import torch

    from gym_rm.planning.hardware import measure
    from gym_rm.planning.hardware.measure import Bench

    gpu = "gpus" in found
    where = f"torch {found['torch']}, " + (found["gpus"][0] if gpu else f"{found['threads']} threads")
    dtype = torch.bfloat16 if gpu else torch.float32
    bench = Bench("cuda" if gpu else "cpu", dtype, SECONDS, where)
    with torch.inference_mode(), torch.random.fork_rng():  # the caller's random numbers stay as they are
        progress("matrix products")
        flops, flops_float32, rows = measure.products(bench)
        peak = (flops if gpu else flops_float32).value
        progress("attention")
        lengths = measure.attention_by_length(bench, peak)
        progress("memory")
        bandwidth = measure.memory_bandwidth(bench)
        numbers: dict[str, Any] = {
            "memory": bench.measured(float(found["memory"]), "memory of the GPU" if gpu else "memory of the machine"),
            "flops": flops,
            "flops_float32": flops_float32,
            "bandwidth": bandwidth,
            "streaming": measure.weights_bandwidth(bench, bandwidth.value),
            "decoding": measure.cache_bandwidth(bench, bandwidth.value),
            "matmul": rows[-1][1],
            "attention": lengths[-1][1],
        }
        tables: dict[str, Any] = {
            "matmul_rows": rows,
            "attention_lengths": lengths,
            "elementwise": measure.elementwise_bandwidth(bench),
        }
        progress("kernel launches")
        numbers["launch"] = measure.launch_seconds(bench)
        progress("copies from the host")
        numbers["host_link"] = measure.host_bandwidth(bench)
        progress("reading weights")
        numbers["disk"] = measure.read_bandwidth(bench)
    progress("all-reduce")
    if gpu:
        torch.cuda.empty_cache()
    links = _links(bench, len(found["gpus"]) if gpu else None)
    return replace(_base(found), **numbers, **tables, **links)


def _links(bench: Bench, gpus: int | None) -> dict[str, Any]:
    """Return bandwidth and latency of all-reduces over the GPUs, or over two processes of a CPU."""
    from gym_rm.planning.hardware import measure

    sizes = (2,) if gpus is None else tuple(size for size in (2, 4, 8, 16) if size <= gpus)
    large, small = measure.all_reduces(bench, sizes)
    if not large:
        return {}
    link = bench.measured(large[0][1].value, large[0][1].source.split(";")[0])
    return {"all_reduce": large, "latency": small, "link": link}


def _base(found: dict[str, Any]) -> Device:
    """Return the device with what is not measured: numbers of the same kind in the table, as assumptions."""
    names = found.get("gpus")
    if not names:
        return replace(CPU, name="here", link=assumed(CPU.link.value, "not measured: one process"))
    known = next((KINDS[key] for key in KINDS if key.split("_")[0] in names[0].lower().replace(" ", "_")), None)
    base = known or KINDS["a100_sxm"]
    text = f"not measured on {len(names)} x {names[0]}; as of {base.name} in the table"
    weak: dict[str, Any] = {name: assumed(each.value, text) for name, each in _quantities(base) if "[" not in name}
    tables: dict[str, Any] = {
        name: tuple((size, assumed(each.value, text)) for size, each in getattr(base, name))
        for name in ("all_reduce", "latency")
    }
    return replace(base, name="here", **{**weak, **tables, "reserved": base.reserved, "price": None})


def _driver() -> str | None:
    """Return the version of the GPU driver, as the kernel module says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    words = text.splitlines()[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- the file --------------------------------------------------------------------------------------------------------


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write the file in one step: another process reads the old one or the new one."""
    text = json.dumps(values, indent=1, default=str)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the calibration to {str(file)!r}: {error}. Give another `path`.") from error


def _quantities(device: Device) -> Iterable[tuple[str, Quantity]]:
    """Yield all numbers of a device; those of a table as `name[size]`."""
    for field in fields(device):
        value = getattr(device, field.name)
        if field.name in TABLES:
            yield from ((f"{field.name}[{size}]", each) for size, each in value)
        elif isinstance(value, Quantity):
            yield field.name, value


def _show(name: str, quantity: Quantity) -> str:
    value, field = quantity.value, name.split("[")[0]
    if field in ("flops", "flops_float32"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if field in ("memory", "reserved"):
        return show_bytes(value)
    if field in ("bandwidth", "link", "host_link", "all_reduce", "elementwise", "disk"):
        return f"{value / 1e9:.3g} GB/s"
    if field in ("latency", "launch"):
        return f"{value * 1e6:.3g} us" if value < 1e-3 else show_seconds(value)
    return f"{value:.3g}" if field == "price" else f"{100 * value:.3g}%"
