"""What torch compiles for an H100 fits into its registers and its shared memory: see `cuda_compiler`."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gym_rm.engine.backbones import flex_attention
from gym_rm.engine.backbones.low_precision import Float8Linear, _compiled
from gym_rm.engine.backbones.tree_attention import TreeAttention
from tests.engine.backbones import trees
from tests.engine.backbones.trees import sequence, tree_of
from tests.engine.cuda_compiler import H100, compiling_for_h100, kernel_of
from tests.engine.fake_cuda import DEVICE

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs the CUDA build of torch, and no GPU"
)
by_torch = pytest.mark.skipif(torch.__version__ < (2, 11), reason="before torch 2.11, fake tensors are not compiled")


@pytest.fixture
def kernels():
    torch._dynamo.reset()
    flex_attention._compiled_flex_attention.cache_clear()
    _compiled.cache_clear()
    with compiling_for_h100() as kernels:
        yield kernels
    flex_attention._compiled_flex_attention.cache_clear()
    _compiled.cache_clear()


def attend(tree, size, dtype, *, heads=4, **options):
    shapes = [(1, count, len(tree), size) for count in (heads, 2, 2)]
    states = [torch.empty(shape, dtype=dtype, device=DEVICE) for shape in shapes]
    return trees.attend(TreeAttention(tree, DEVICE), *states, **options)


def tree(tokens=400):
    with unset_fake_temporarily():
        return tree_of([sequence(np.arange(tokens))])


def require_shared_memory(kernels):
    assert max(kernel.shared for kernel in kernels) <= H100.shared_memory_per_block_optin


def require_that_they_fit(kernels):
    assert [kernel.name for kernel in kernels if kernel.spilled] == []
    require_shared_memory(kernels)


@by_torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 192, 256])
def test_the_forward_of_attention_is_one_kernel_that_fits(kernels, size, dtype):
    with torch.inference_mode():
        output = attend(tree(), size, dtype)
    assert (output.shape, output.dtype) == ((1, 400, 4, size), dtype)
    assert len(kernels) == 1
    require_that_they_fit(kernels)


@by_torch
def test_attention_with_a_soft_cap_and_sinks_fits(kernels):
    with torch.inference_mode():
        attend(tree(), 64, torch.bfloat16, softcap=30.0, sinks=torch.empty(4, device=DEVICE))
    require_that_they_fit(kernels)


@by_torch
def test_trees_of_one_doubling_share_a_kernel_also_without_padding(kernels):
    with torch.inference_mode():
        for tokens in (520, 900, 1024):
            attend(tree(tokens), 64, torch.bfloat16)
    assert len(kernels) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 128, 192, 256])
def test_attention_along_paths_fits_forward_and_backward(kernels, size, dtype):
    from gym_rm.engine.kernels import path_attention

    query, key = (torch.empty(100, heads, size, dtype=dtype, device="meta") for heads in (8, 2))
    number = torch.int32, torch.float32
    states, logs, of_keys = [dtype] * 3, [torch.float32, dtype, torch.float32], [*[number[0]] * 5]
    for sinks, cap in ((None, 0.0), (dtype, 30.0)):
        settings = path_attention._settings(query, key, key, 0.1, cap, 4096)
        tables = [torch.int32] * 3
        kernels.append(kernel_of(path_attention._forward, *states, dtype, torch.float32, sinks, *tables, **settings))
        given = [*states, dtype, *logs, dtype, *tables]
        kernels.append(kernel_of(path_attention._backward_queries, *given, **settings))
        settings = path_attention._settings(query, key, key, 0.1, cap, 4096, of_keys=True)
        kernels.append(kernel_of(path_attention._backward_keys, *states, *logs, dtype, dtype, *of_keys, **settings))
    require_shared_memory(kernels)
    most = 16 if dtype == torch.float32 and size > 64 else 0  # four numbers of a thread, in the backward
    assert max(kernel.spilled for kernel in kernels) <= most


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(8, 128), (32, 128), (71, 64), (16, 256)])
def test_norm_and_rotation_fit(kernels, heads, size, normed):
    from gym_rm.engine.kernels import elementwise

    weight = torch.bfloat16 if normed else None
    states, rotary = torch.bfloat16, [torch.bfloat16] * 2
    _, sizes = elementwise._grid(torch.empty(100, heads, size, device="meta"), 1)
    given = states, weight, *rotary, states, 1e-6, size
    kernels.append(kernel_of(elementwise._norm_rotate, *given, **sizes))
    given = states, states, weight, *rotary, states, torch.float32 if normed else None, 1e-6, size, 100
    kernels.append(kernel_of(elementwise._norm_rotate_backward, *given, tokens=elementwise.TOKENS, **sizes))
    require_that_they_fit(kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations_fit(kernels, dtype):
    from gym_rm.engine.kernels import elementwise

    for kernel, count in ((elementwise._silu_mul, 3), (elementwise._silu_mul_backward, 5)):
        kernels.append(kernel_of(kernel, *[dtype] * count, 1000, block=elementwise.BLOCK))
    require_that_they_fit(kernels)


@by_torch
@pytest.mark.parametrize("inputs", [1024, 4096, 12_288])
def test_quantisation_is_one_kernel_for_any_number_of_rows(kernels, inputs):
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        for rows in (512, 4096, 6000):
            x, scale = Float8Linear.quantize(torch.empty(rows, inputs, dtype=torch.bfloat16, device=DEVICE))
            assert (x.shape, x.dtype) == ((rows, inputs), torch.float8_e4m3fn)
            assert (scale.shape, scale.dtype) == ((rows, 1), torch.float32)
    assert counters["stats"]["unique_graphs"] - before == 1
    assert len({kernel.name for kernel in kernels}) == 1  # in two sizes, of which torch takes the faster one
    require_that_they_fit(kernels)
