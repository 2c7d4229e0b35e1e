"""A GPU that computes nothing: fake tensors on `cuda:0`, and a record of what would run there. Not a test.

A fake tensor has a shape, a type and a device, and no numbers. So every path of a GPU runs on a machine without one:
tensors of two devices that meet, shapes and types that do not fit, and operations for which the host waits, are found
here. A number that the host reads is 1, and a condition holds. There is no backward: torch's engine needs a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gym_rm

DEVICE = torch.device("cuda:0")
CODE = (str(Path(gym_rm.__file__).parent), "transformers")  # whose functions are named as those that wait
READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
FUSED = ("_fused_rms_norm",)  # operations of one kernel on CUDA, and of several elsewhere
NO_KERNEL = ("prim.", "empty", "new_empty", "detach", "lift_fresh", "alias", "_unsafe_view", "_local_scalar_dense")
GIB = 2**30


@dataclass
class Record(TorchDispatchMode):
    """What ran in this context.

    Attributes:
        kernels: names of the operations that launch a kernel; views and allocations launch none.
        waits: operations for which the host waits, each as `"function: operation"` of the code that called it.
    """

    supports_higher_order_operators = True
    kernels: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note an operation, and run it."""
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        if isinstance(func, torch._ops.OpOverload) and not name.startswith(("prim.", *FUSED)):
            with self:  # in inference mode, composite operations come here whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        before = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if reason := _wait(func, name, args, kwargs, before):
            self.waits.append(f"{_caller()}: {reason}")
        output = _read(func, before)
        output = func(*args, **kwargs) if output is None else output
        after = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        if any(each.device == DEVICE for each in (*before[:1], *after)) and not _is_view(func, name):
            self.kernels.append(name)
        if kwargs.get("pin_memory"):
            _pin(after[0])
        return output

    def clear(self):
        """Forget what ran so far."""
        self.kernels.clear()
        self.waits.clear()


def _read(func, tensors):
    """Return what the host reads of fake numbers, 1 or True; None for an operation that returns tensors as usual."""
    if func is torch.ops.aten.index.Tensor and any(each.dtype == torch.bool for each in tensors[1:]):
        chosen = [_every(each).unbind(1) if each.dtype == torch.bool else (each,) for each in tensors[1:]]
        return tensors[0][sum(chosen, ())]
    if func is torch.ops.aten.nonzero.default:
        return _every(tensors[0])
    returns = [str(each.type) for each in getattr(func, "_schema", None).returns] if hasattr(func, "_schema") else []
    if returns == ["bool"] and tensors:
        return True
    if func is torch.ops.aten._local_scalar_dense.default:
        return _ONES.get(tensors[0].dtype, 1.0 if tensors[0].is_floating_point() else 1)
    return None


def _every(mask):
    """Return what `nonzero` returns for a mask that holds everywhere."""
    return mask.new_empty(mask.numel(), mask.dim(), dtype=torch.int64)


_ONES = {torch.bool: True}


def _is_view(func, name):
    return name.startswith(NO_KERNEL) or getattr(func, "is_view", False)


def _wait(func, name, args, kwargs, tensors):
    """Return why the host waits for an operation; None if it does not."""
    on_gpu = any(each.device == DEVICE for each in tensors)
    if on_gpu and name.startswith(("index.", "index_put", "_index_put", "_unsafe_index")):
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            return f"{name} with a mask"
        if any(each.device != DEVICE for each in indices):
            return f"{name} with an index on the CPU"
    elif on_gpu and set(READS) & set(getattr(func, "tags", ())):
        return f"{name} reads numbers"
    if name.startswith(("_to_copy", "copy")) and tensors:
        source, target = (tensors[1], tensors[0]) if name.startswith("copy") else (tensors[0], None)
        to = target.device if target is not None else kwargs.get("device") or source.device
        asynchronous = kwargs.get("non_blocking") or (name.startswith("copy") and args[2:3] == (True,))
        if source.device.type != to.type and "meta" not in (source.device.type, to.type):
            host = source if to.type == "cuda" else target
            if not (asynchronous and host is not None and _is_pinned(host)):
                return f"{name} from {source.device.type} to {to.type}"
    return None


def _caller():
    """Return the innermost function of the package or of transformers that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(CODE[0]) or f"/{CODE[1]}/" in file
        if own and frame.f_code.co_name != "__torch_function__":  # through which all functions go
            return frame.f_code.co_name
        frame = frame.f_back
    return "test"


# --- pinned memory ---------------------------------------------------------------------------------------------------

_PINNED: dict[int, Tensor] = {}  # tensors by the address of their storage; they keep it


def _pin(tensor, *args):
    _PINNED[tensor.untyped_storage()._cdata] = tensor
    return tensor


def _is_pinned(tensor):
    return tensor.untyped_storage()._cdata in _PINNED


# --- what torch needs to know of a GPU -------------------------------------------------------------------------------


@contextlib.contextmanager
def _device_guard():
    """Let a torch without CUDA guard the device as it guards `meta`, which is to do nothing."""
    libraries = list((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    try:
        registry = (ctypes.c_void_p * 16).in_dll(ctypes.CDLL(str(libraries[0])), REGISTRY)
    except (IndexError, OSError, ValueError):
        if sys.platform == "linux":
            raise
        pytest.skip("this build of torch has no device guards at the expected place")
    before = registry[1]  # of CUDA
    registry[1] = registry[14]  # of meta
    try:
        yield
    finally:
        registry[1] = before


REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


def _numpy(tensor, *args, **kwargs):
    """Return zeros: a fake tensor has no numbers."""
    if not isinstance(tensor, FakeTensor):
        return _NUMPY(tensor, *args, **kwargs)
    assert tensor.device.type == "cpu", "can't convert a tensor on a GPU to numpy"
    return np.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _stay(tensor, other):
    """Instead of swapping the tensors of a module that moves: one that stays needs no swap."""
    assert (tensor.device, tensor.dtype) == (other.device, other.dtype), "a fake tensor cannot move"


class _Generator(torch.Generator):
    """Generator on the CPU, because a torch without CUDA has no other."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


_NUMPY = Tensor.numpy
PATCHES = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.set_device": lambda device: None,
    "torch.cuda.get_device_capability": lambda device=None: (9, 0),
    "torch.cuda.mem_get_info": lambda device=None: (8 * GIB, 16 * GIB),
    "torch.cuda.empty_cache": lambda: None,
    "torch.cuda.synchronize": lambda device=None: None,
    "torch.cuda.memory_reserved": lambda device=None: GIB,
    "torch.cuda.max_memory_allocated": lambda device=None: GIB,
    "torch.backends.cuda.preferred_blas_library": lambda backend=None: None,
    "torch.cuda.device": lambda device: contextlib.nullcontext(),
    "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": True,
    "torch._subclasses.fake_tensor.init_gpu_context": lambda device: None,  # a build for CUDA would start it
    "torch.Generator": _Generator,
    "torch.Tensor.pin_memory": _pin,
    "torch.Tensor.numpy": _numpy,
    "torch.utils.swap_tensors": _stay,
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    "gym_rm.engine.backbones.flex_attention.COMPILED_ON": (),
}


@contextlib.contextmanager
def fake_gpu(*, recorded=True):
    """Context in which tensors on `cuda:0` are fake; a `Record`, beside which torch compiles nothing."""
    if recorded and torch.__version__ < (2, 11):
        pytest.skip("before torch 2.11, a real tensor cannot be copied to a fake GPU")
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_device_guard())
        for name, value in PATCHES.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.callback(_PINNED.clear)
        yield stack.enter_context(Record()) if recorded else None


def on_gpu(make, *args, dtype=torch.bfloat16, **options):
    """Return the model that `make(*args, **options)` returns on the fake GPU; call this in `fake_gpu()`."""
    with unset_fake_temporarily():
        model = make(*args, **options)
        for parameter in model.parameters():  # as `from_pretrained` does: buffers keep their precision
            parameter.data = parameter.data.to(dtype)
    model.to(DEVICE)
    model.tie_weights()
    record = torch.utils._python_dispatch._get_current_dispatch_mode()
    if isinstance(record, Record):
        record.clear()
    return model
