import pytest
import tiny_models
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model():
    return tiny_models.reward_model("qwen3")


@pytest.fixture
def trained():
    """The same architecture with other weights."""
    return tiny_models.reward_model("qwen3", seed=1)


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    """Two causal language models over one vocabulary."""
    folders = [
        tiny_models.save_policy(
            tmp_path_factory.mktemp("policy"), seed=seed, initializer_range=0.3, max_position_embeddings=positions
        )
        for seed, positions in enumerate((1024, 512))
    ]
    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]
