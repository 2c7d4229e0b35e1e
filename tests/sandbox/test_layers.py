import os
import struct

import pytest

from gym_rm.errors import ConfigError
from gym_rm.sandbox import Sandbox, SandboxLimits, TimeLimit, layers, syscalls


def test_unsafe_must_be_permitted():
    with pytest.raises(ConfigError, match="allow_unsafe=True"):
        Sandbox(layer="unsafe")
    with pytest.raises(ConfigError, match="must be 'auto'"):
        Sandbox(layer="docker")


def test_without_a_layer_time_memory_and_output_are_limited():
    with Sandbox(layer="unsafe", allow_unsafe=True, limits=SandboxLimits(wall_seconds=0.3), num_workers=1) as sandbox:
        codes = {
            "1": "ok",
            "while True: pass": "time",
            "bytearray(1 << 30)": "memory",
            "print('x' * 10**6)": "output",
        }
        for code, status in codes.items():
            with sandbox.session() as session:
                assert session.execute(code, limit=None if status == "time" else TimeLimit(60)).status == status


def test_a_machine_without_layers_is_refused_with_reasons(monkeypatch):
    monkeypatch.setattr(layers, "detect", lambda layer, interpreter: f"no {layer}")
    with pytest.raises(ConfigError, match=r"bubblewrap: no bubblewrap landlock: no landlock .*allow_unsafe=True"):
        Sandbox()
    with Sandbox(allow_unsafe=True) as sandbox:
        assert sandbox.layer == "unsafe"


def test_a_layer_that_lets_an_escape_through_does_not_count(monkeypatch):
    interpreter = layers.find_interpreter(None, None)
    unshut = layers.launch("unsafe", interpreter)
    monkeypatch.setattr(layers, "launch", lambda *_: unshut)
    assert "it does not stop reading /etc/passwd" in layers.detect.__wrapped__("landlock", interpreter)


def test_an_interpreter_that_nobody_can_read_is_named(tmp_path):
    missing = tmp_path / "python3"
    with pytest.raises(ConfigError, match=r"No Python interpreter .*python3.*interpreter="):
        layers.find_interpreter(str(missing), None)
    if os.geteuid():
        return
    tmp_path.chmod(0o700)
    missing.symlink_to("/usr/bin/python3")
    with pytest.raises(ConfigError, match=f"by user {layers.NOBODY}.*Permission denied"):
        layers.find_interpreter(str(missing), layers.NOBODY)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_inside_and_every_path_decides(machine):
    data = syscalls.program(machine, 1234)
    code = list(struct.iter_unpack("HBBI", data))
    for at, (kind, then, otherwise, _) in enumerate(code):
        if kind != 0x06:
            ends = {at + 1 + then, at + 1 + otherwise} if kind & 0x07 == 0x05 else {at + 1}
            assert max(ends) < len(code)
    assert code[-1][0] == 0x06
    assert len(code) < 4096


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_the_filter_decides_by_call_and_arguments(machine, architecture):
    column = ("x86_64", "aarch64").index(machine)

    def decide(number, *arguments, arch=architecture):
        data = struct.pack("<IIQ6Q", number, arch, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
        return run(syscalls.program(machine, 1234), data)

    def numbers(name):
        return syscalls.CHECKED[name][column]

    allow, deny = syscalls.ALLOW, syscalls.ERRNO | syscalls.EPERM
    assert decide((0, 63)[column]) == allow  # read
    assert decide((0, 63)[column], arch=0x40000003) == syscalls.KILL
    assert decide((41, 198)[column]) == deny  # socket
    assert decide(425) == deny  # io_uring_setup
    assert decide(numbers("openat"), 3, 0, 0x241) == allow  # O_WRONLY, for /dev/null
    assert decide(numbers("openat"), 3, 0, 0x200) == deny  # O_RDONLY with O_TRUNC
    assert decide((59, 221)[column]) == deny
    assert decide((83, 34)[column]) == deny  # mkdir, mkdirat
    assert decide(numbers("clone"), 0x3D0F00) == allow
    assert decide(numbers("clone"), 17) == deny
    assert decide(numbers("clone3")) == syscalls.ERRNO | syscalls.ENOSYS
    assert decide(numbers("kill"), 1234, 15) == allow
    assert decide(numbers("kill"), 1, 15) == deny
    assert decide(numbers("kill"), 1234, 9) == deny
    assert decide(numbers("fcntl"), 3, 8) == deny  # F_SETOWN
    assert decide(numbers("prctl"), 1) == deny  # PR_SET_PDEATHSIG
    assert decide(numbers("exit_group"), 137) == syscalls.KILL
    assert decide(numbers("exit_group"), 1) == allow
    assert decide(numbers("prlimit64"), 0, 7, 0) == allow
    assert decide(numbers("prlimit64"), 0, 7, 1 << 40) == deny
    assert decide(numbers("prlimit64"), 0, 3, 99) == allow
    assert decide(numbers("prlimit64"), 77, 3, 99) == deny
    assert decide(numbers("socketpair"), 1, 1 | 0o2000000) == allow
    assert decide(numbers("socketpair"), 2, 1) == deny
    assert decide(numbers("sendto"), 3, 0, 0, 0, 0) == allow
    assert decide(numbers("sendto"), 3, 0, 0, 0, 1 << 40) == deny
    if machine == "x86_64":
        assert decide(0x40000000) == deny  # x32


def run(program, data):
    """Interpret a filter, as the kernel does."""
    code = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        kind, then, otherwise, k = code[at]
        at += 1
        if kind == 0x06:
            return k
        if kind == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        elif kind == 0x54:
            value &= k
        else:
            taken = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += then if taken else otherwise
