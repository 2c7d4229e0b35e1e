"""Heads built from the shapes of a checkpoint's tensors."""

import pytest
import torch

from gym_rm import ConfigError
from gym_rm.engine.backbones.heads import width
from gym_rm.engine.loading.headed_models import GatingNetwork, headed_model, outputs_of_heads, outputs_of_modules
from tests import tiny_models

CONFIG = tiny_models._config("llama", tiny_models.tokenizer("llama3"))


def built(shapes, **options):
    return headed_model(CONFIG, shapes, **options)(CONFIG)


def test_names_and_shapes_become_modules():
    model = built(
        {
            "v_head.summary.weight": (1, 32),
            "v_head.summary.bias": (1,),
            "score.0.weight": (16, 32),
            "score.2.weight": (3, 16),
            "matrix": (3, 3),
        }
    )
    names = {name for name, _ in model.named_parameters() if not name.startswith("model.")}
    assert names == {"v_head.summary.weight", "v_head.summary.bias", "score.0.weight", "score.2.weight", "matrix"}
    assert width(model.score) == 3
    assert [type(layer).__name__ for layer in model.score] == ["Linear", "ReLU", "Linear"]


def test_missing_indices_are_activations_after_linear_layers_and_identities_elsewhere():
    model = built({"head.1.weight": (4, 64), "head.1.bias": (4,), "head.4.weight": (1, 4)}, activation="tanh")
    assert [type(layer).__name__ for layer in model.head] == ["Identity", "Linear", "Tanh", "Identity", "Linear"]


def test_a_tensor_of_an_unknown_layer_is_refused():
    with pytest.raises(ConfigError, match="must belong to linear layers or batch norms; got"):
        built({"score.alpha": (7,)})


def test_gating_networks_have_relu_between_adjacent_linear_layers():
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    gate = GatingNetwork(layers, temperature=2.0)
    x = torch.tensor([[0.3, -0.7]])
    expected = torch.softmax(layers[1](torch.relu(layers[0](x))) / 2.0, dim=1)
    torch.testing.assert_close(gate(x), expected)


@pytest.mark.parametrize(
    ("shapes", "outputs"),
    [
        ({"score.weight": (1, 32)}, {"score": 1}),
        ({"score.0.weight": (16, 32), "score.0.bias": (16,), "score.2.weight": (3, 16)}, {"score": 3}),
        ({f"score.{layer}.weight": (layer + 1, 32) for layer in (0, 2, 10)}, {"score": 11}),
        ({"score.weight": (19, 32), "gate.weight": (5, 32), "matrix": (19, 19)}, {"score": 19, "gate": 5}),
    ],
)
def test_a_checkpoint_and_its_model_have_heads_of_the_same_outputs(shapes, outputs):
    """Before loading, outputs come from tensor shapes; of a loaded model, from its modules. Both must agree."""
    assert outputs_of_heads(shapes) == outputs
    assert outputs_of_modules(built(shapes)) == outputs
