import copy
import weakref

import pytest
import tiny_models
import torch
from torch import nn

from gym_rm.engine.backbones.changes import ChangeCounter


def assign_tensor(model):
    model.score.weight = nn.Parameter(model.score.weight.detach().clone())


def load(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def write_in_inference_mode(model):
    with torch.inference_mode():
        model.score.weight.mul_(2)


def optimizer_step(model):
    model(input_ids=torch.arange(5, 15)[None]).logits.sum().backward()
    torch.optim.AdamW(model.parameters()).step()


CHANGES = {
    "an optimizer": optimizer_step,
    "a write without gradients": lambda model: nn.init.normal_(model.base_model.layers[1].mlp.up_proj.weight),
    "a write through data": lambda model: model.base_model.norm.weight.data.mul_(2),
    "other data": lambda model: setattr(model.score.weight, "data", model.score.weight.data.clone()),
    "a write in inference mode": write_in_inference_mode,
    "another tensor": assign_tensor,
    "a state dict": load,
    "a buffer": lambda model: model.base_model.rotary_emb.inv_freq.mul_(2),
    "a module": lambda model: setattr(model.base_model.layers[0].mlp, "act_fn", nn.GELU()),
    "a hook": lambda model: model.base_model.layers[0].register_forward_hook(lambda *given: None),
    "a hook before": lambda model: model.base_model.layers[0].register_forward_pre_hook(lambda *given: None),
    "a forward": lambda model: setattr(model.base_model.norm, "forward", lambda x: x),
    "a setting of a module": lambda model: setattr(model.base_model.norm, "variance_epsilon", 0.1),
    "a setting of the configuration": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "a layer": lambda model: model.base_model.layers.append(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_counted_once(change):
    model, counter = tiny_models.reward_model("qwen3"), ChangeCounter()
    before = counter.count([model])
    model(input_ids=torch.arange(5, 15)[None])
    assert counter.count([model]) == before
    change(model)
    assert counter.count([model]) == before + 1
    assert counter.count([model]) == before + 1


def test_a_tensor_at_the_address_of_a_freed_one_is_a_change():
    model, counter = nn.Linear(2, 2, bias=False), ChangeCounter()
    before = counter.count([model])
    for _ in range(2):  # the second tensor may get the id and the memory of the original
        weight = model.weight.detach().clone()
        model.weight = None
        model.weight = nn.Parameter(weight)
    assert counter.count([model]) == before + 1


def test_weights_of_any_format_are_compared():
    model = nn.Module()
    for name, dtype in {"a": torch.bfloat16, "b": torch.int8, "c": torch.float8_e4m3fn, "d": torch.float64}.items():
        model.register_buffer(name, torch.ones(4).to(dtype))
    model.register_buffer("empty", torch.ones(0))
    with torch.inference_mode():
        model.register_buffer("inference", torch.ones(2))
    counter = ChangeCounter()
    before = counter.count([model])
    assert counter.count([model]) == before
    model.c.data.view(torch.uint8).zero_()
    assert counter.count([model]) == before + 1
    model.inference.data.zero_()
    assert counter.count([model]) == before + 2


def test_a_counter_keeps_no_tensor_alive():
    model, counter = nn.Linear(2, 2), ChangeCounter()
    counter.count([model])
    old = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert old() is None
