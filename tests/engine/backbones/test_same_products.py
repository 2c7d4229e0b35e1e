"""The test at load of the numbers of rows for which products keep the bits of a row, and the ladder of them."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from gym_rm.engine.backbones import batch_invariance
from gym_rm.engine.backbones.batch_invariance import rows_to_try, same_products
from gym_rm.engine.backbones.invariant_products import LADDER, RULES, GemmRows
from gym_rm.engine.backbones.low_precision import Float8Linear
from tests.engine.threads import threads

CPU = torch.device("cpu")

CUDA_LADDER = LADDER["cuda"]


@pytest.fixture
def products(monkeypatch):
    """Function that changes the products of every layer: it gets x and the result, and returns another result."""

    def change(function):
        rule = RULES[functional.linear]

        def changed(rows, func, x, weight, *args):
            def product(part, *given, out=None):
                result = function(part, func(part, *given))
                return result if out is None else out.copy_(result)

            return rule(rows, product, x, weight, *args)

        same_products.cache_clear()
        monkeypatch.setitem(RULES, functional.linear, changed)

    yield change
    same_products.cache_clear()


def test_products_of_one_thread_need_only_whole_groups_of_rows():
    with threads(1):
        assert same_products(GemmRows(), nn.Linear, (3072, 1024), torch.float32, CPU, 1)


BITS = {  # what the bits of a row depend on, in kernels for so many rows, and the rows that are the fastest
    "nothing": (lambda rows: 0, GemmRows(16)),
    "rows below 128": (lambda rows: min(rows, 128), GemmRows(128)),
    "other rows than multiples of 256": (lambda rows: rows % 256, GemmRows(256)),
    "rows below 1,024": (lambda rows: min(rows, 1024), GemmRows(1024)),
    "other rows than multiples of 1,024": (lambda rows: rows % 1024, GemmRows(1024)),
    "rows below 8,192": (lambda rows: min(rows, 8192), GemmRows(8192)),
    "rows": (lambda rows: rows, GemmRows(8192, in_chunks=True)),
    "rows, and the place from 5,000 rows": (
        lambda rows: torch.arange(rows)[:, None] if rows > 5000 else rows,
        GemmRows(4096, in_chunks=True),
    ),
    "rows, and the place from 2,000 rows": (
        lambda rows: torch.arange(rows)[:, None] if rows > 2000 else rows,
        GemmRows(1024, in_chunks=True),
    ),
}


@pytest.mark.parametrize("of", BITS)
def test_the_fastest_rows_are_taken_that_keep_the_bits(of, products, monkeypatch):
    """On a GPU, whose kernels depend on the number of rows; here kernels are changed to do so."""
    bits, fastest = BITS[of]
    products(lambda x, result: result + 1e-3 * bits(len(x)))
    monkeypatch.setitem(LADDER, "cpu", CUDA_LADDER)
    monkeypatch.setitem(batch_invariance.TESTED_ROWS, "cpu", batch_invariance.TESTED_ROWS["cuda"])
    ladder = list(rows_to_try([nn.Linear(16, 8)]))
    assert (ladder[0], ladder[-1]) == (fastest, GemmRows(1024, in_chunks=True))


@pytest.mark.parametrize("rows", [GemmRows(), GemmRows(128)], ids=str)
def test_on_a_gpu_every_number_of_rows_is_tried(rows, products, monkeypatch):
    tried = []
    products(lambda x, result: tried.append(len(x)) or result)
    monkeypatch.setattr(batch_invariance, "EVERY_MULTIPLE_ON", ("cpu",))
    assert same_products(rows, nn.Linear, (8, 16), torch.float32, CPU, 1)
    assert {*tried} == {*range(rows.multiple, 2064 + 1, rows.multiple)}
    assert len(tried) <= len({*tried}) + 1


@pytest.mark.parametrize("every", [False, True])
def test_other_bits_at_one_number_of_rows_are_found_where_every_one_is_tried(every, products, monkeypatch):
    products(lambda x, result: result + 1e-3 * (len(x) == 1552))
    if every:
        monkeypatch.setattr(batch_invariance, "EVERY_MULTIPLE_ON", ("cpu",))
    assert same_products(GemmRows(), nn.Linear, (8, 16), torch.float32, CPU, 1) is not every


def test_other_bits_at_one_place_are_found(products):
    products(lambda x, result: result.index_add(0, torch.tensor([len(x) - 1]), torch.full((1, 8), 1e-3)))
    assert not same_products(GemmRows(), nn.Linear, (8, 16), torch.float32, CPU, 1)


def test_without_memory_for_many_rows_fewer_are_tried(products):
    tried = []

    def product(x, result):
        tried.append(len(x))
        if len(x) > 600:
            raise torch.OutOfMemoryError
        return result

    products(product)
    assert same_products(GemmRows(), nn.Linear, (8, 16), torch.float32, CPU, 1)
    assert tried[-1] == 512


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="on CPUs, torch 2.9 has no product with a scale for each row")
def test_products_in_8_bits_are_tested_too(monkeypatch):
    layer = Float8Linear(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16))
    rule, changed = RULES[torch._scaled_mm], Mock()
    changed.side_effect = lambda rows, *given, **named: rule(rows, *given, **named) * (1 + changed.call_count % 2)
    monkeypatch.setitem(RULES, torch._scaled_mm, changed)
    same_products.cache_clear()
    assert list(rows_to_try([nn.Sequential(layer, nn.LayerNorm(16))])) == [LADDER["cpu"][-1]]


def test_all_shapes_and_dtypes_must_keep_the_bits(monkeypatch):
    tested = []

    def only_square(rows, layer, shape, dtype, device, threads):
        assert threads == torch.get_num_threads()
        tested.append((rows, layer, shape, dtype, device))
        return shape[0] == shape[1]

    monkeypatch.setattr(batch_invariance, "same_products", only_square)
    square, wide = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 24, dtype=torch.bfloat16))
    assert list(rows_to_try([square])) == [*LADDER["cpu"]]
    assert list(rows_to_try([square, wide])) == [LADDER["cpu"][-1]]
    assert {
        (GemmRows(), nn.Linear, (8, 8), torch.float32, CPU),
        (GemmRows(), nn.Linear, (24, 8), torch.bfloat16, CPU),
    } <= {*tested}
