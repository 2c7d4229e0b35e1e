"""Sizes of models: against the models of transformers, the adapters of peft, real caches, and mistakes."""

import contextlib
import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gym_rm.errors import ConfigError
from gym_rm.planning.model import known_models as lookup
from gym_rm.planning.model.config_sizes import ALIASES, ConfigSizes, shape_from_config
from gym_rm.planning.model.counted_layers import counted_shape
from gym_rm.planning.model.known_models import known_models, load_shape
from gym_rm.planning.model.model_types import TYPES

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 500,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
OWN = {
    "qwen3_moe": SIZES | EXPERTS | GROUPED | {"moe_intermediate_size": 32, "mlp_only_layers": [0]},
    **dict.fromkeys(("mixtral", "gpt_oss"), SIZES | EXPERTS | GROUPED),
}
# Published numbers of parameters, from the models' pages.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "google/gemma-3-27b-it": 27_432_406_640,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
}


def config_of(model_type, **overrides):
    sizes = {"vocab_size": 500, "pad_token_id": 0} | OWN.get(model_type, SIZES | GROUPED) | overrides
    return transformers.AutoConfig.for_model(model_type, **sizes)


def count(config, class_name):
    """Return the parameters of an empty model; shared ones count once."""
    with torch.device("meta"):
        model = getattr(transformers, class_name).from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def plain(config):
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", TYPES)
def test_parameters_are_those_of_the_model_of_transformers(model_type):
    config = config_of(model_type)
    assert shape_from_config(plain(config), name="a").parameters == count(config, "AutoModelForCausalLM")
    config.num_labels = 3
    found = shape_from_config(plain(config), name="a", num_labels=3)
    assert found.parameters == count(config, "AutoModelForSequenceClassification")
    assert found.notes == ()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"])
def test_biases_and_tied_embeddings_are_read(model_type, tied):
    config = config_of(model_type, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    assert shape_from_config(plain(config), name="a").parameters == count(config, "AutoModelForCausalLM")


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3", "mistral", "mixtral", "gpt_oss"])
def test_settings_that_a_configuration_leaves_out_have_the_types_own_values(model_type):
    sizes = SIZES | {"num_attention_heads": 64, "hidden_size": 256}
    config = transformers.AutoConfig.for_model(model_type, **sizes, pad_token_id=0)
    found = shape_from_config({"model_type": model_type, **sizes}, name="a")
    assert found.parameters == count(config, "AutoModelForCausalLM")


EXACT = ["llama", "qwen3", "gemma2"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*EXACT, "phi3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_lora_has_at_least_the_parameters_of_peft(model_type):
    """peft has fewer where matrices are one, such as `qkv`, and for experts that it leaves out."""
    peft = pytest.importorskip("peft")
    config = config_of(model_type)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    found = shape_from_config(plain(config), name="a").lora_parameters(4)
    assert found == trained if model_type in EXACT else found >= trained


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "gpt_oss", "mistral"])
def test_cached_numbers_are_those_of_a_real_cache(model_type):
    windows, length = {"gemma2": 3, "gemma3_text": 5, "gpt_oss": 3, "mistral": 6}, 40
    config = config_of(model_type, **({"sliding_window": 16} if model_type in windows else {}))
    model = transformers.AutoModel.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(length)[None], past_key_values=cache, use_cache=True)
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    shape = shape_from_config(plain(config), name="a")
    # A full window keeps one token less between two forwards, and all of them during one.
    spared = sum(layer.cached * n for layer, n in shape.layers if layer.window)
    assert shape.cached_numbers(length) == stored + spared
    assert sum(n for layer, n in shape.layers if layer.window) == windows.get(model_type, 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_parameters(name):
    assert load_shape(name, None, num_labels=None, name="policy").parameters == PUBLISHED[name]


def test_every_known_model_has_a_source_and_exact_layers():
    assert len(known_models()) >= 60
    for name, config in known_models().items():
        assert config["source"]
        assert set(config) <= {*ConfigSizes.model_fields, *ALIASES, "source", "model_type"}
        assert load_shape(name, None, num_labels=1, name="rm").max_length


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("Skywork/Skywork-Reward-V2-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("nvidia/Llama-3.3-Nemotron-70B-Reward", "meta-llama/Llama-3.1-70B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
    ],
)
def test_variants_have_the_sizes_of_the_known_model(model, known):
    found = load_shape(model, None, num_labels=1, name="rm")
    assert found.layers == load_shape(known, None, num_labels=1, name="rm").layers
    assert known in found.source


def test_a_name_that_is_not_known_and_not_on_the_hub_gets_the_nearest_names(monkeypatch):
    def offline(model):
        raise OSError("no network")

    monkeypatch.setattr(lookup, "_download_config", offline)
    with pytest.raises(ConfigError, match=r"policy: 'Qwen/Qwen3-7B' .* no network.* Nearest known: .*Qwen/Qwen3-8B"):
        load_shape("Qwen/Qwen3-7B", None, num_labels=None, name="policy")


def test_the_configuration_of_a_hub_id_is_used(monkeypatch):
    monkeypatch.setattr(lookup, "_download_config", lambda model: SMALL)
    found = load_shape("someone/small", None, num_labels=None, name="policy")
    assert found.parameters == shape_from_config(SMALL, name="a").parameters
    assert "someone/small" in found.source


def test_a_folder_has_the_sizes_of_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"rope_theta": 1e4, "anything": 1}))
    for model in (tmp_path, tmp_path / "config.json"):
        found = load_shape(str(model), None, num_labels=1, name="rm")
        assert found.parameters == shape_from_config(SMALL, name="a", num_labels=1).parameters


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_a_folder_without_a_configuration_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json|cannot read the configuration"):
        load_shape(str(tmp_path), None, num_labels=1, name="rm")


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"vocab_size": "100"}, "got str '100'|got '100'"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"hidden_size": 66}, "hidden_size 66 is not divisible by 4 attention heads"),
        ({"num_key_value_heads": 3}, "4 attention heads are not divisible by num_key_value_heads 3"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts 8 needs num_experts_per_tok from 1 to it"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has linear_attention; known are full_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"attention_bias": 1}, "attention_bias must be"),
        ({"model_type": 3}, "no formula for model_type 3"),
        ({"model_type": "deepseek_v3"}, "layer 0 of deepseek_v3 is of a kind without a formula: DeepseekV3Attention"),
        ({"model_type": "made_up"}, "no formula for model_type 'made_up' is known here; known are llama"),
        ({"mamba_d_state": 8}, "no formula for model_type 'llama' with mamba_d_state=8"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2},
            "with num_experts=8, num_experts_per_tok=2 is .* such as a mixtral",
        ),
        ({"text_config": 5}, "with text_config=5"),
        ({"hiden_size": 64}, "hiden_size.* Did you mean 'hidden_size'"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
    ],
    ids=str,
)
def test_a_mistake_in_inline_sizes_is_named(change, message):
    config = {key: value for key, value in (SMALL | change).items() if value is not None}
    with pytest.raises(ConfigError, match=f"(?s)policy: .*({message})"):
        load_shape(None, config, num_labels=None, name="policy")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 130), st.just(10**12), st.floats(), st.lists(st.integers())
)


@given(
    changes=st.dictionaries(st.sampled_from(sorted(ConfigSizes.model_fields)), VALUES, max_size=4),
    model_type=st.sampled_from(sorted(TYPES)),
    num_labels=st.sampled_from([None, 1, 5]),
)
def test_any_sizes_are_read_or_refused_with_an_error_of_the_package(changes, model_type, num_labels):
    config = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "model_type": model_type} | changes
    try:
        shape = load_shape(None, config, num_labels=num_labels, name="rm")
    except ConfigError:
        return
    assert min(shape.parameters, shape.hidden, shape.heads, shape.kv_heads, shape.lora_parameters(1)) > 0
    assert shape.cached_numbers(9) <= shape.cached_numbers(10)
    assert shape.active_parameters <= shape.parameters


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        load_shape(None, {"hidden_size": -1, "num_attention_heads": "4"}, num_labels=None, name="policy")
    assert all(name in str(error.value) for name in (
        "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"))  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (None, None, "got neither"),
        ("Qwen/Qwen3-8B", SMALL, "got both"),
        (" ", None, "neither a folder nor"),
        ("./missing", None, "does not exist"),
        ("a b", None, "neither a folder nor"),
    ],
    ids=str,
)
def test_a_mistake_in_the_model_is_named(model, config, message):
    with pytest.raises(ConfigError, match=f"policy: .*{message}"):
        load_shape(model, config, num_labels=None, name="policy")


def test_sizes_without_a_type_are_taken_for_llama_and_say_so():
    sizes = {key: value for key, value in SMALL.items() if key != "model_type"}
    found = load_shape(None, sizes, num_labels=None, name="policy")
    assert found.parameters == shape_from_config(SMALL, name="a").parameters
    assert "taken for a model like Llama" in found.notes[0]


def test_a_whole_configuration_may_be_pasted():
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "made_up": 1, "rope_theta": 1e4, "torch_dtype": "bfloat16"}
    assert load_shape(None, config, num_labels=None, name="policy").notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_type_of_transformers_is_exact_or_refused_by_name(model_type):
    try:
        config = transformers.AutoConfig.for_model(model_type)
        values = plain(config)
    except Exception:  # a type without defaults
        pytest.skip("this type has no configuration of its own")
    anonymous = {key: value for key, value in values.items() if key != "model_type"}
    with pytest.raises(ConfigError, match="model: no formula for model_type None"):
        shape_from_config({**anonymous, "architectures": ["Some"]}, name="model")
    with contextlib.suppress(ConfigError):
        found = shape_from_config(values, name="model")
        assert found.parameters == count(config, "AutoModelForCausalLM")
        assert found.active_parameters <= found.parameters
        return
    assert config.model_type not in {*TYPES, *COUNTED} - {"dots1"}  # whose defaults have no number of experts
    with pytest.raises(ConfigError, match=r"model: (no formula for|layer \d+ of|transformers makes no|the layers of) "):
        shape_from_config(values, name="model")


# Types without a formula, with layers that some have and a Llama has not: norms, biases, experts and windows.
COUNTED = {
    "cohere2": {"sliding_window": 8},
    "olmo3": {"sliding_window": 8},
    "glm4": {},
    "seed_oss": {},
    "granite": {},
    "exaone4": {"sliding_window": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("model_type", COUNTED)
def test_a_type_without_a_formula_is_counted_in_transformers(model_type):
    config = config_of(model_type, **COUNTED[model_type])
    found = shape_from_config(plain(config), name="a")
    assert found.parameters == count(config, "AutoModelForCausalLM")
    assert "of transformers" in found.notes[0]
    rewards = shape_from_config(plain(config), name="a", num_labels=1)
    assert rewards.head == rewards.hidden
    experts = max(layer.experts for layer, _ in found.layers)
    assert (found.active_parameters < sum((layer.attention + layer.mlp) * n for layer, n in found.layers)) == (
        experts > 0
    )


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss"]
)
def test_counted_layers_are_those_of_the_formulas(model_type):
    config = config_of(model_type)
    values, same = plain(config), {"name": "a", "num_labels": None, "source": ""}
    known = shape_from_config(values, name="a")
    counted = counted_shape(values, by_hand=False, **same)
    names = (
        "attention",
        "mlp",
        "active_mlp",
        "norms",
        "heads",
        "kv_heads",
        "head_dim",
        "window",
        "intermediate",
        "experts",
    )
    for (left, count_left), (right, count_right) in zip(known.layers, counted.layers, strict=True):
        assert {name: getattr(left, name) for name in names} == {name: getattr(right, name) for name in names}
        assert count_left == count_right
    assert (known.embedding, known.head, known.other) == (counted.embedding, counted.head, counted.other)


def test_a_mistake_in_the_sizes_of_a_counted_type_is_named():
    with pytest.raises(ConfigError, match=r"policy: hiden_size: unknown setting of glm4.*Did you mean 'hidden_size'"):
        load_shape(None, {"model_type": "glm4", "hiden_size": 64}, num_labels=None, name="policy")


@pytest.mark.parametrize(
    "setting",
    ["kv_lora_rank", "moe_num_experts", "n_shared_experts", "num_local_experts", "num_nextn_predict_layers"],
)
def test_layers_of_another_kind_are_refused_in_a_type_that_does_not_have_them(setting):
    config = SMALL | GROUPED | {setting: 2, "model_type": "llama", "architectures": ["A"]}
    with pytest.raises(ConfigError, match=f"no formula for model_type 'llama' with {setting}"):
        shape_from_config(config, name="a")


def test_one_expert_is_a_mixture_of_one():
    config = config_of("mixtral", num_local_experts=1, num_experts_per_tok=1)
    values = {key: value for key, value in plain(config).items() if key != "num_experts"}
    assert shape_from_config(values, name="a").parameters == count(config, "AutoModelForCausalLM")


def test_a_token_meets_few_experts():
    shape = load_shape("mistralai/Mixtral-8x7B-v0.1", None, num_labels=None, name="policy")
    assert shape.active_parameters + 2 * shape.head == pytest.approx(12.9e9, rel=0.01)


def test_a_window_bounds_the_attended_pairs():
    sizes = SMALL | {"model_type": "mistral", "num_key_value_heads": 2}
    windowed, full = (shape_from_config(sizes | {"sliding_window": size}, name="a") for size in (8, None))
    assert windowed.pairs_attended(50) == sum(min(k + 1, 8) for k in range(50)) * 4 * 16 * 2
    assert full.pairs_attended(50) == 50 * 51 / 2 * 4 * 16 * 2
