"""Heads built from the shapes of a checkpoint's tensors."""

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.backbones.heads import width
from gym_rm.engine.loading.headed_models import headed_model, outputs_of_heads, outputs_of_modules, require_heads
from tests import tiny_models
from tests.checkpoints import CONVERSATIONS

CONFIG = tiny_models._config("llama", tiny_models.tokenizer("llama3"))


def built(shapes):
    return headed_model(CONFIG, shapes)(CONFIG)


def test_names_and_shapes_become_modules():
    model = built(
        {
            "v_head.summary.weight": (1, 32),
            "v_head.summary.bias": (1,),
            "score.0.weight": (16, 32),
            "score.2.weight": (3, 16),
        }
    )
    names = {name for name, _ in model.named_parameters() if not name.startswith("model.")}
    assert names == {"v_head.summary.weight", "v_head.summary.bias", "score.0.weight", "score.2.weight"}
    assert width(model.score) == 3
    assert [type(layer).__name__ for layer in model.score] == ["Linear", "ReLU", "Linear"]


def test_missing_indices_between_linear_layers_are_one_relu():
    model = built({"head.1.weight": (4, 64), "head.1.bias": (4,), "head.4.weight": (1, 4)})
    assert [type(layer).__name__ for layer in model.head] == ["Linear", "ReLU", "Linear"]


def test_a_loaded_model_with_a_head_of_any_name_is_scored():
    """As for a model that needs its own code, which the user has loaded."""
    scorer = gym_rm.RewardModelScorer(
        built({"v_head.weight": (1, 32)}), tiny_models.tokenizer("llama3"), head="v_head", kind="decoder"
    )
    assert np.isfinite(scorer.score(CONVERSATIONS[:2]).rewards).all()


UNKNOWN = {
    "dense, out_proj": {"dense.weight": (32, 32), "out_proj.weight": (1, 32)},
    "fc1, fc2": {"fc1.weight": (8, 32), "fc1.bias": (8,), "fc2.weight": (1, 8)},
    "numbers without a place between them": {"0.weight": (32, 32), "1.weight": (1, 32)},
    "a list of layers": {"layers.0.weight": (32, 32), "layers.1.weight": (1, 32)},
    "a block and a layer": {"mlp.0.weight": (32, 32), "mlp.2.weight": (32, 32), "out.weight": (1, 32)},
    "two copies": {"modules_to_save.weight": (1, 32), "original_module.weight": (1, 32)},
    "an adapter": {"base_layer.weight": (1, 32), "lora_A.weight": (4, 32), "lora_B.weight": (1, 4)},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_layers_whose_function_is_not_known_are_refused_by_name(case):
    first = next(iter(UNKNOWN[case])).split(".")[0]
    with pytest.raises(ConfigError, match=rf"the head 'score.*{first}.*do not say which function is between them"):
        built({f"score.{name}": shape for name, shape in UNKNOWN[case].items()})


DAMAGED = {
    "only a bias": ({"bias": (1,)}, "must belong to linear layers; got 'score'"),
    "no layer": ({"alpha": (7,)}, "must belong to linear layers; got 'score'"),
    "a flat weight": ({"weight": (32,)}, "must belong to linear layers; got 'score'"),
    "a norm": ({"0.weight": (32, 32), "1.weight": (32,), "3.weight": (1, 32)}, "linear layers; got 'score.1'"),
    "transposed": ({"weight": (32, 1)}, "'score' reads 1 numbers, not 32"),
    "of another backbone": ({"0.weight": (16, 64), "2.weight": (1, 16)}, "'score' reads 64 numbers, not 32"),
    "layers that do not fit": ({"0.weight": (16, 32), "2.weight": (1, 32)}, "layers '0' and '2' of the head 'score'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_heads_are_refused(case):
    shapes, reason = DAMAGED[case]
    with pytest.raises(ConfigError, match=reason):
        require_heads(CONFIG, {f"score.{name}": shape for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("shapes", "outputs"),
    [
        ({"score.weight": (1, 32)}, {"score": 1}),
        ({"score.0.weight": (16, 32), "score.0.bias": (16,), "score.2.weight": (3, 16)}, {"score": 3}),
        ({f"score.{layer}.weight": (layer + 1, {0: 32, 2: 1, 10: 3}[layer]) for layer in (10, 0, 2)}, {"score": 11}),
    ],
)
def test_a_checkpoint_and_its_model_have_heads_of_the_same_outputs(shapes, outputs):
    """Before loading, outputs come from tensor shapes; of a loaded model, from its modules. Both must agree."""
    assert outputs_of_heads(shapes) == outputs
    assert outputs_of_modules(built(shapes)) == outputs
