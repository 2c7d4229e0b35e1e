"""A row has the same bits beside any other rows: each function that `BatchInvariant` changes, and the check of them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

from gym_rm.engine.backbones.batch_invariance import BatchInvariant, current_rows, same_products, with_padding
from gym_rm.engine.backbones.invariant_products import ROWS, RULES, GemmRows
from gym_rm.engine.backbones.low_precision import Float8Linear, Int8Linear
from tests.engine.threads import threads

CPU = torch.device("cpu")
INPUTS, OUTPUTS, MOST = 64, 48, 300
GENERATOR = torch.Generator().manual_seed(0)
X = 3 * torch.randn(MOST, INPUTS, generator=GENERATOR)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=GENERATOR)
BIAS = torch.randn(OUTPUTS, generator=GENERATOR)
EXPERTS = torch.randn(4, INPUTS, OUTPUTS, generator=GENERATOR)
ROW_COUNTS = (1, 15, 17, 65, 299)
CHUNKS = GemmRows(64, in_chunks=True)


def weight(x):
    return WEIGHT.to(x)


def added(x):
    return x[:, :OUTPUTS]


def by_experts(x):
    """Return the products of rows with the weight of the expert that their first number decides."""
    expert = (x[:, 0].float() * 10).long() % len(EXPERTS)
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=len(EXPERTS))
    output = torch._grouped_mm(x[order], EXPERTS.to(x), offs=counts.cumsum(0).to(torch.int32))
    return output[torch.argsort(order)]


# Functions of rows [T, INPUTS], by name; every function of RULES is called by at least one of them.
PRODUCTS = {
    "linear with bias": lambda x: functional.linear(x, weight(x), BIAS.to(x)),
    "linear with names": lambda x: functional.linear(bias=BIAS.to(x), weight=weight(x), input=x),
    "linear [1, T, K]": lambda x: functional.linear(x[None], weight(x))[0],
    "linear with one output": lambda x: functional.linear(x, weight(x)[:1]),
    "torch.matmul with names": lambda x: torch.matmul(x, other=weight(x).T),
    "Tensor.matmul": lambda x: x.matmul(weight(x).T),
    "torch.mm": lambda x: torch.mm(x, weight(x).T),
    "Tensor.mm": lambda x: x.mm(weight(x).T),
    "torch.addmm with names": lambda x: torch.addmm(BIAS.to(x), mat2=weight(x).T, mat1=x),
    "torch.addmm of rows": lambda x: torch.addmm(added(x), x, weight(x).T, beta=0.5, alpha=2),
    "Tensor.addmm": lambda x: added(x).addmm(x, weight(x).T),
    "Tensor.addmm_": lambda x: added(x).clone().addmm_(x, weight(x).T),
    "grouped": by_experts,
}
ACTIVATIONS = {
    "silu in place": lambda x: functional.silu(x.clone(), inplace=True),
    "gelu of tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus with a slope": lambda x: functional.softplus(x, beta=2, threshold=10),
    "mish": functional.mish,
    "selu": functional.selu,
    "torch.selu": torch.selu,
    "elu": lambda x: functional.elu(x, alpha=0.5),
    "celu": functional.celu,
    "logsigmoid": functional.logsigmoid,
    "torch.sigmoid with names": lambda x: torch.sigmoid(input=x),
    "torch.sigmoid_": lambda x: torch.sigmoid_(x.clone()),
    "Tensor.sigmoid": lambda x: x.sigmoid(),
    "Tensor.sigmoid_": lambda x: x.clone().sigmoid_(),
    "expit": torch.special.expit,
    "torch.rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "torch.rsqrt_": lambda x: torch.rsqrt_(x.abs() + 0.1),
    "Tensor.rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "Tensor.rsqrt_": lambda x: (x.abs() + 0.1).rsqrt_(),
    "torch.exp2": torch.exp2,
    "torch.special.exp2": torch.special.exp2,
    "Tensor.exp2": lambda x: x.exp2(),
}
FUNCTIONS = PRODUCTS | ACTIVATIONS
needs_same_products = pytest.mark.skipif(
    not all(same_products(GemmRows(), nn.Linear, (rows, INPUTS), torch.float32, CPU, 1) for rows in (1, OUTPUTS)),
    reason="products of a multiple of 16 rows do not suffice on this CPU",
)


def invariant(function, x, rows=None):
    with torch.inference_mode(), BatchInvariant(rows):
        return function(x)


class Recording(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.add(func)
        return func(*args, **(kwargs or {}))


def test_every_rule_is_tested_here():
    with Recording() as mode:
        for function in FUNCTIONS.values():
            function(X)
    batched = {torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}  # see the tests of 8 bits and of attention
    assert set(RULES) - mode.called == {torch._scaled_mm, *batched}


@pytest.mark.parametrize("rows", [pytest.param(GemmRows(), marks=needs_same_products), CHUNKS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_at_any_place_in_any_number_of_rows(dtype, rows):
    """And its values are those without the context, but for rounding."""
    rng, x = np.random.default_rng(0), X.to(dtype)
    for name, function in FUNCTIONS.items():
        plain, expected = function(x), invariant(function, x, rows)
        assert (expected.shape, expected.dtype) == (plain.shape, plain.dtype), name
        rounding = 4 * torch.finfo(dtype).eps * max(1.0, float(plain.float().abs().max()))
        torch.testing.assert_close(expected, plain, rtol=0, atol=rounding)
        for count, number in itertools.product(ROW_COUNTS, (1, 2)):
            chosen = torch.from_numpy(rng.permutation(len(expected))[:count])
            with threads(number):
                assert torch.equal(invariant(function, x[chosen], rows), expected[chosen]), (name, count)


@pytest.mark.parametrize("name", ["silu in place", "gelu of tanh", "softplus with a slope", "Tensor.sigmoid_"])
def test_activations_of_rows_that_several_threads_share(name):
    """Torch divides more than 32,768 elements among its threads, and gelu more than 16,384, also within a row."""
    x = 3 * torch.randn(900, 77, generator=torch.Generator().manual_seed(1))
    with threads(1):
        expected = invariant(ACTIVATIONS[name], x)
    for count, number in itertools.product((1, 212, 213, 426, 427, 900), (1, 2, 3)):
        with threads(number):
            assert torch.equal(invariant(ACTIVATIONS[name], x[:count]), expected[:count])


@pytest.mark.parametrize("name", ["linear with bias", "Tensor.matmul", "torch.addmm of rows", "Tensor.addmm_", "mish"])
def test_strided_inputs_have_the_bits_of_contiguous_ones(name):
    """Such as one half of a projection that computes gate and values, or a transposed tensor."""
    function = FUNCTIONS[name]
    for count, dtype in itertools.product((1, 63, 64), (torch.float32, torch.bfloat16)):
        x = X[:count, :INPUTS].to(dtype)
        expected = invariant(function, x, CHUNKS)
        for strided in (torch.cat([x, x], dim=1)[:, :INPUTS], x.repeat(1, 3).T[INPUTS : 2 * INPUTS].T):
            assert torch.equal(invariant(function, strided, CHUNKS), expected)


def test_every_activation_of_transformers_keeps_the_bits_of_a_row():
    for name, dtype in itertools.product(sorted(ACT2FN), (torch.float32, torch.bfloat16)):
        x, function = X[:, :33].to(dtype), ACT2FN[name].to(dtype)
        expected = invariant(function, x)
        for count, number in itertools.product((1, 7, 31, 64), (1, 2)):
            with threads(number):
                assert torch.equal(invariant(function, x[-count:]), expected[-count:]), name


@pytest.mark.parametrize("make", [Int8Linear, Float8Linear])
@pytest.mark.parametrize("rows", [GemmRows(), CHUNKS], ids=str)
def test_layers_in_8_bits_keep_the_bits_of_a_row(make, rows):
    layer = make(nn.Linear(INPUTS, OUTPUTS).requires_grad_(False))
    try:
        expected = layer(X)
    except RuntimeError:
        pytest.skip("this torch has no such products on a CPU")
    for count in ROW_COUNTS:
        torch.testing.assert_close(invariant(layer, X[-count:], rows), expected[-count:], rtol=0, atol=0)


def heads(x):
    """Return the states of 4 attention heads `[B, 4, T, 16]`, which do not follow each other in memory."""
    return x.view(*x.shape[:2], 4, 16).transpose(1, 2)


def as_one_batch(x):
    return heads(x).reshape(-1, x.shape[1], 16)


SCORES = {
    "torch.matmul": lambda x: torch.matmul(heads(x).transpose(-1, -2), other=heads(x)),
    "torch.bmm": lambda x: torch.bmm(as_one_batch(x), as_one_batch(x).transpose(-1, -2)),
    "Tensor.bmm": lambda x: as_one_batch(x).bmm(mat2=as_one_batch(x).transpose(-1, -2)),
    "torch.baddbmm": lambda x: torch.baddbmm(
        as_one_batch(x), batch1=as_one_batch(x), batch2=torch.eye(16).to(x).expand(4 * len(x), 16, 16), beta=0.5
    ),
    "Tensor.baddbmm": lambda x: (
        torch.zeros(len(x) * 4, 16, 16).to(x).baddbmm(as_one_batch(x).transpose(-1, -2), as_one_batch(x), alpha=0.5)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_products_in_attention_keep_the_bits_of_a_sequence(dtype):
    """Torch copies the heads of several sequences, but not those of one, and half precision then rounds differently."""
    x = X[:288].view(3, 96, INPUTS).to(dtype)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype, 1e-4)
    for name, scores in SCORES.items():
        together = invariant(scores, x)
        torch.testing.assert_close(together, scores(x), rtol=tolerance, atol=tolerance * 20)
        for k, expected in enumerate(together.view(3, -1)):
            assert torch.equal(invariant(scores, x[k : k + 1].clone()).view(-1), expected), name


def test_functions_in_place_change_and_return_their_input():
    for function in (
        lambda x: functional.silu(x, inplace=True),
        Tensor.sigmoid_,
        torch.sigmoid_,
        lambda x: x.addmm_(x, torch.eye(33)),
    ):
        x = X[:7, :33].clone()
        expected = function(x.clone())
        assert invariant(function, x) is x
        torch.testing.assert_close(x, expected)


def test_nothing_is_active_after_the_context():
    with pytest.raises(KeyError), BatchInvariant():
        raise KeyError
    with BatchInvariant():
        X @ WEIGHT.T
    assert torch._C._len_torch_function_stack() == 0
    with Recording() as outer:
        functional.linear(X, WEIGHT)
    assert outer.called == {functional.linear}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=70), st.booleans())
def test_padding_repeats_the_first_token_up_to_whole_groups_of_rows(ids, two_rows):
    tokens = np.array([ids, ids[::-1]]) if two_rows else np.array(ids)
    padded = with_padding(tokens)
    assert padded.shape[-1] % ROWS == 0
    assert 0 <= padded.shape[-1] - tokens.shape[-1] < ROWS
    assert np.array_equal(padded[..., : tokens.shape[-1]], tokens)
    assert (padded[..., tokens.shape[-1] :] == tokens[..., :1]).all()


def test_tokens_are_padded_for_the_products_of_the_context():
    assert current_rows() == GemmRows(16)
    with BatchInvariant(CHUNKS):
        assert current_rows() is CHUNKS
        assert len(with_padding(np.arange(70))) == 128
    assert len(with_padding(np.arange(70), 75)) == 75


class Copies(TorchDispatchMode):
    """Counts the operations that copy numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func._overloadpacket in (aten.cat, aten.copy_, aten.clone, aten.constant_pad_nd)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [GemmRows(64), CHUNKS], ids=str)
def test_whole_groups_of_rows_are_not_copied(rows):
    x, into = X[:128], torch.zeros(128, OUTPUTS)
    with torch.inference_mode(), BatchInvariant(rows), Copies() as copies:
        functional.linear(x, WEIGHT, BIAS)
        x @ WEIGHT.T
        into.addmm_(x, WEIGHT.T)
    assert copies.count == 0
