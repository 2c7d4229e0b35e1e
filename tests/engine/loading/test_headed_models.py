"""Heads built from the shapes of a checkpoint's tensors."""

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.backbones.heads import width
from gym_rm.engine.loading.headed_models import headed_model, outputs_of_heads, outputs_of_modules
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


def test_missing_indices_are_activations_after_linear_layers_and_identities_elsewhere():
    model = built({"head.1.weight": (4, 64), "head.1.bias": (4,), "head.4.weight": (1, 4)})
    assert [type(layer).__name__ for layer in model.head] == ["Identity", "Linear", "ReLU", "Identity", "Linear"]


def test_a_loaded_model_with_a_head_of_any_name_is_scored():
    """As for a model that needs its own code, which the user has loaded."""
    scorer = gym_rm.RewardModelScorer(
        built({"v_head.weight": (1, 32)}), tiny_models.tokenizer("llama3"), head="v_head", kind="decoder"
    )
    assert np.isfinite(scorer.score(CONVERSATIONS[:2]).rewards).all()


def test_a_tensor_of_an_unknown_layer_is_refused():
    with pytest.raises(ConfigError, match="must belong to linear layers; got"):
        built({"score.alpha": (7,)})


@pytest.mark.parametrize(
    ("shapes", "outputs"),
    [
        ({"score.weight": (1, 32)}, {"score": 1}),
        ({"score.0.weight": (16, 32), "score.0.bias": (16,), "score.2.weight": (3, 16)}, {"score": 3}),
        ({f"score.{layer}.weight": (layer + 1, 32) for layer in (0, 2, 10)}, {"score": 11}),
    ],
)
def test_a_checkpoint_and_its_model_have_heads_of_the_same_outputs(shapes, outputs):
    """Before loading, outputs come from tensor shapes; of a loaded model, from its modules. Both must agree."""
    assert outputs_of_heads(shapes) == outputs
    assert outputs_of_modules(built(shapes)) == outputs
