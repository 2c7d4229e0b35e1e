"""Compile for a GPU without one: what torch.compile would run on an H100, with its registers and memory. Not a test.

It needs the CUDA build of torch, in which Triton and the assembler of its kernels are. Tensors are fake, see
`fake_cuda`, and a compiled kernel that is called does nothing.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.engine.fake_cuda import DEVICE, fake_gpu

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its name, bytes of shared memory, and bytes that registers had no place for."""

    name: str
    shared: int
    spilled: int


class Driver:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


def zero(*args, **kwargs):
    return 0


STREAM = torch.Stream(device="cpu")
PATCHES = {
    "torch.cuda.get_device_properties": lambda device=None: H100,
    "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *args: None,
    "torch.cuda.is_current_stream_capturing": lambda: False,
    "torch.cuda._exchange_device": lambda device: 0,  # another function than the next: dynamo has a handler for each
    "torch.cuda._maybe_exchange_device": lambda device: 0,
    "torch.cuda._lazy_init": lambda: None,
    "torch.accelerator.current_stream": lambda device=None: STREAM,
    "torch._C._cuda_getCurrentRawStream": zero,
    "torch._C._dynamo.guards._empty_strided_cuda": lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=DEVICE
    ),
    "torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT": 0,  # small ones would be computed on the device
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": lambda: None,
    "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *args: None,  # patterns that it would trace on the device
    "torch._inductor.fx_passes.post_grad.lazy_init": lambda *args: None,
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": False,
    "gym_rm.engine.backbones.flex_attention.COMPILED_ON": ("cuda",),
    "gym_rm.engine.backbones.low_precision.COMPILED_ON": ("cuda",),
}
INTERFACE = {
    "get_device_properties": lambda device=None: H100,
    "get_compute_capability": lambda device=None: 90,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    **dict.fromkeys(("current_device", "exchange_device", "maybe_exchange_device", "get_raw_stream"), zero),
}


@contextlib.contextmanager
def compiling_for_h100():
    """Context on the fake GPU in which torch compiles for an H100; a list of the kernels that it compiled so far."""
    triton = pytest.importorskip("triton")
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.utils import _triton

    kernels = []
    compile_kernel = triton.compile

    def compile_and_note(source, target=None, options=None, **others):
        compiled = compile_kernel(source, target=Driver().get_current_target(), options=options, **others)
        kernels.append(_kernel(compiled))
        return compiled

    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_gpu(recorded=False))
        for name, value in PATCHES.items():
            stack.enter_context(mock.patch(name, value))
        for name, value in INTERFACE.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
            if hasattr(CudaInterface.Worker, name):
                stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(value)))
        stack.enter_context(mock.patch.object(triton, "compile", compile_and_note))
        for name in ("run", "_make_launchers"):
            stack.enter_context(mock.patch.object(CachingAutotuner, name, return_value=None))
        _forget_answers(_triton)  # without a GPU; and afterwards, those with one
        stack.callback(_forget_answers, _triton)
        options = {"compile_threads": 1, "force_disable_caches": True}
        stack.enter_context(torch._inductor.config.patch(options))
        triton.runtime.driver.set_active(Driver())
        stack.callback(triton.runtime.driver.set_active, None)
        yield kernels


def kernel_of(kernel, *arguments, **settings) -> Kernel:
    """Compile a kernel of Triton for tensors of these types, and numbers."""
    return _kernel(kernel.warmup(*arguments, grid=(1,), **settings))


def _forget_answers(module):
    """Clear the caches of a module's functions, such as whether there is a working Triton."""
    for function in vars(module).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _kernel(compiled) -> Kernel:
    import triton.backends.nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    (stack,) = re.findall(r"STACK:(\d+)", shown.stdout + shown.stderr)
    return Kernel(compiled.metadata.name, compiled.metadata.shared, int(stack))
