"""The layout trial refuses trees where rounding would hide a wrong value."""

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from gym_rm.engine.backbones import batch_invariance, invariant_products
from gym_rm.engine.backbones.invariant_products import LADDER, GemmRows
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead
from gym_rm.engine.loading.trial import (
    PLAIN,
    Candidate,
    Forward,
    check_invariance,
    choose_forward,
    other_sequences,
    trial_sequences,
)
from gym_rm.errors import ConfigError

HEAD = ModuleHead("score")

precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def layout_of(model):
    return LocalExecutor().load(LoadSpec(model, ModuleHead("score"))).layout


@precisions
@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [("rwkv", {"attention_hidden_size": 32}), ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4})],
)
def test_a_backbone_that_ignores_the_tree_is_refused(architecture, config, initializer_range, dtype):
    sizes = {**tiny_models.SMALL, "vocab_size": 400, **config, "initializer_range": initializer_range}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).to(dtype).eval()
    model.score = nn.Linear(32, 1, dtype=dtype)
    assert layout_of(model) == "padded"


@precisions
def test_a_backbone_that_mixes_neighbouring_tokens_is_refused(dtype):
    """As a causal convolution does; every layer attends to the tree, and the difference is below the rounding."""
    model = tiny_models.reward_model("qwen3", initializer_range=0.02).to(dtype)

    def mix(module, inputs, output):
        return output + 1e-2 * torch.roll(output, 1, dims=1) * (torch.arange(output.shape[1]) > 0)[None, :, None]

    model.base_model.layers[0].mlp.register_forward_hook(mix)
    assert layout_of(model) == "padded"


@precisions
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_a_backbone_that_computes_its_own_positions_is_refused(architecture, dtype):
    model = tiny_models.reward_model(architecture, initializer_range=0.02).to(dtype)
    backbone = model.base_model

    def forward(input_ids, position_ids=None, **options):
        positions = torch.arange(input_ids.shape[1])[None]
        return type(backbone).forward(backbone, input_ids, position_ids=positions, **options)

    backbone.forward = forward
    assert layout_of(model) == "padded", "and the fused forward does not replace that of the user"


@precisions
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_correct_trees_are_accepted(architecture, dtype):
    assert layout_of(tiny_models.reward_model(architecture, initializer_range=0.02).to(dtype)) == "tree"


def forward_of(model, readout=HEAD, **options):
    """Return the result of the check at load, and the numbers of rows of each product."""
    executor = LocalExecutor()
    info = executor.load(LoadSpec(model, readout, **options))
    assert info.rows == str(executor._model.rows.rows)
    return info.batch_invariance, executor._model.rows.rows


def constant_rows(model):
    """Return the rows of each product where no multiple suffices."""
    return LADDER[next(model.parameters()).device.type][-1]


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "mixtral", "llama"])
def test_a_decoder_is_bit_equal(architecture):
    assert forward_of(tiny_models.reward_model(architecture)) == ("bit-equal", LADDER["cpu"][0])


@pytest.mark.parametrize("architecture", ["bert", "deberta_v2", "bloom", "xlnet"])
def test_encoders_and_other_padded_models_are_bit_equal(architecture):
    assert forward_of(tiny_models.reward_model(architecture), ClassifierLogits()) == ("bit-equal", LADDER["cpu"][0])


def rows_change(amount, rows=None):
    """Return a hook that adds an amount that depends on the number of rows, unless products have `rows` rows."""

    def hook(module, inputs, output):
        got = inputs[0].shape[:-1].numel()
        return output if got == rows else output * (1 + amount * got)

    return hook


@pytest.mark.parametrize(("architecture", "module"), [("qwen3", "layers.0.mlp"), ("bert", "encoder.layer.0.output")])
def test_a_model_whose_forward_depends_on_the_size_of_the_batch_is_not_bit_equal(architecture, module):
    model = tiny_models.reward_model(architecture)
    model.base_model.get_submodule(module).register_forward_hook(rows_change(3e-8))
    result, rows = forward_of(model, ClassifierLogits() if architecture == "bert" else HEAD)
    assert result.startswith("within ")
    assert 1e-8 < float(result.removeprefix("within ")) < 1e-2
    assert rows == LADDER["cpu"][0], "the fastest products"


def test_products_get_a_constant_number_of_rows_if_the_hardware_needs_it(monkeypatch):
    model = tiny_models.reward_model("qwen3")
    monkeypatch.setattr(batch_invariance, "same_products", lambda *args: False)
    assert forward_of(model) == ("bit-equal", constant_rows(model))


def test_products_get_a_constant_number_of_rows_if_the_check_at_load_fails_without(monkeypatch):
    """Products whose bits depend on the number of rows, in a way that the test of the hardware does not find."""
    model = tiny_models.reward_model("qwen3")
    constant = constant_rows(model)
    plain = invariant_products._product

    def product(rows, func, x, weight, *args, **kwargs):
        changed = func if rows == constant else lambda x, *rest, **named: func(x, *rest, **named) * (1 + 1e-7 * len(x))
        return plain(rows, changed, x, weight, *args, **kwargs)

    monkeypatch.setitem(LADDER, "cpu", LADDER["cpu"][-2:])
    monkeypatch.setattr(batch_invariance, "RULES", {**batch_invariance.RULES, torch.nn.functional.linear: product})
    assert forward_of(model) == ("bit-equal", constant)


@pytest.mark.parametrize("works", ["padded", "one_by_one", "plain"])
def test_a_forward_that_fails_is_not_chosen(works):
    """A model may fail in batches, or with the products that `BatchInvariant` runs instead of its own."""
    config = tiny_models.reward_model("qwen3").config
    candidate = Candidate("Model", config, "float32", can_take_trees=False, can_fuse=False)

    def run(plan, forward):
        if (forward.layout if forward.invariant else "plain") not in (works, "plain"):
            raise RuntimeError("not supported")
        return np.ones((sum(batch.num_reads for batch in plan.batches), 1), dtype=np.float32)

    expected = PLAIN if works == "plain" else Forward(works, fuse=False, batch_invariance="bit-equal")
    assert choose_forward(candidate, run) == expected


def test_a_plain_forward_that_fails_is_an_error_by_name():
    model = tiny_models.reward_model("bert")
    model.bert.embeddings.forward = lambda **inputs: None
    with pytest.raises(ConfigError, match="the forward of BertForSequenceClassification fails for short texts: "):
        LocalExecutor().load(LoadSpec(model, ClassifierLogits()))


def checked(sequence_value, ladder=LADDER["cpu"], budget=2048):
    """Return the result of `check_invariance` for a model whose values are those of a function."""
    config = tiny_models.reward_model("qwen3").config
    candidate = Candidate("Model", config, "float32", can_take_trees=False, can_fuse=False)

    def run(plan, forward):
        values = [sequence_value(batch, *read, forward.rows) for batch in plan.batches for read in batch.read_positions]
        return np.array(values, dtype=np.float32)[:, None]

    return check_invariance(candidate, Forward("padded", fuse=False), run, ladder, max_num_batched_tokens=budget)


def own_sum(batch, row, position):
    return float(batch.input_ids[row, : position + 1].sum())


def test_a_value_that_depends_on_its_row_is_not_bit_equal():
    found = checked(lambda batch, row, position, rows: own_sum(batch, row, position) * (1 + 1e-6 * row))
    assert found.batch_invariance.startswith("within ")
    assert found.rows == LADDER["cpu"][0]


def test_the_first_rows_that_keep_the_bits_are_used():
    found = checked(
        lambda batch, row, position, rows: (
            own_sum(batch, row, position) * (1 if rows == GemmRows(64) else 1 + 0.25 * row)
        ),
        ladder=(GemmRows(), GemmRows(64), GemmRows(256)),
    )
    assert (found.batch_invariance, found.rows) == ("bit-equal", GemmRows(64))


@pytest.mark.parametrize("rows", [GemmRows(1024), GemmRows(4096, in_chunks=True)], ids=str)
def test_more_rows_than_two_chunks_are_compared(rows):
    counts = []

    def value(batch, *_):
        counts.append(batch.input_ids.size)
        return 1.0

    assert checked(value, (rows,), budget=32_768).rows == rows
    assert max(counts) > 2 * rows.multiple


def test_rows_that_no_batch_has_are_not_tried():
    found = checked(lambda *_: 1.0, ladder=(GemmRows(4096, in_chunks=True), GemmRows(1024, in_chunks=True)))
    assert found.rows == GemmRows(1024, in_chunks=True)


@pytest.mark.parametrize("length", [24, 113])
def test_other_texts_are_between_those_of_the_trial(length):
    """So that every chunk of products has some whose values are known."""
    config = tiny_models.reward_model("qwen3").config
    candidate = Candidate("Model", config, "float32", can_take_trees=True, can_fuse=True, max_width=length + 1)
    trial, others = trial_sequences(config, length), other_sequences(candidate, 500)
    texts = sorted([*trial, *others], key=lambda each: each.input_ids.tolist())
    assert not any(text is other for text in (texts[0], texts[-1]) for other in others)
    assert len({each.input_ids.tobytes() for each in trial}) == len(trial)


def test_a_forward_that_changes_the_model_is_refused_and_undone():
    """A BigBird gives up its sparse attention for good when it reads a short text."""
    sizes = {**tiny_models.SMALL, "vocab_size": 400, "block_size": 16, "num_labels": 1}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("big_bird", **sizes)).eval()
    attention = model.bert.encoder.layer[0].attention.self
    with pytest.raises(ConfigError, match=r"changes \['BigBird.*attention_type='original_full'"):
        LocalExecutor().load(LoadSpec(model, ClassifierLogits()))
    assert model.bert.attention_type == model.bert.encoder.layer[0].attention_type == "block_sparse"
    assert model.bert.encoder.layer[0].attention.self is attention
    full = AutoConfig.for_model("big_bird", attention_type="original_full", **sizes)
    model = AutoModelForSequenceClassification.from_config(full).eval()
    assert forward_of(model, ClassifierLogits())[0] == "bit-equal"
