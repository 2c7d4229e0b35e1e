"""Sizes of models: against the models of transformers, the adapters of peft, real caches, and mistakes."""

import json
import struct

import pytest
import tiny_models
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.errors import ConfigError
from gym_rm.planning.model import loading as models
from gym_rm.planning.model.loading import known_models, load_shape, shape_from_config
from gym_rm.planning.model.settings import KNOWN, unknown_settings
from gym_rm.planning.model.types import REFUSED, TYPES
from gym_rm.planning.quantities import Basis

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
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OWN = {
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 8},
    "bloom": {"hidden_size": 64, "n_layer": 6, "n_head": 8},
    "opt": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "deepseek_v3": SIZES | EXPERTS | LATENT | {"moe_intermediate_size": 32},
    "qwen2_moe": SIZES
    | EXPERTS
    | {"num_key_value_heads": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": SIZES | EXPERTS | GROUPED | {"moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "glm4_moe": SIZES
    | EXPERTS
    | GROUPED
    | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "use_qk_norm": True},
    "olmoe": SIZES | EXPERTS | {"num_key_value_heads": 2},
    "phimoe": SIZES | EXPERTS | {"num_key_value_heads": 2, "lm_head_bias": True, "attention_bias": True},
    "deberta-v2": SIZES | {"relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
    **dict.fromkeys(("mixtral", "gpt_oss", "minimax_m2"), SIZES | EXPERTS | GROUPED),
    **dict.fromkeys(("gpt_neox", "bert", "roberta", "xlm-roberta", "modernbert"), SIZES),
}
CODE_ELSEWHERE = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "kimi_k2")
ENCODERS = [name for name, kind in TYPES.items() if kind.bidirectional]
# Published numbers of parameters, from the models' pages.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-4": 14_659_507_200,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
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


@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in CODE_ELSEWHERE])
def test_parameters_are_those_of_the_model_of_transformers(model_type):
    config = config_of(model_type)
    if model_type not in ENCODERS:
        found = shape_from_config(plain(config), name="a")
        assert found.parameters == count(config, "AutoModelForCausalLM")
    config.num_labels = 3
    body = shape_from_config(plain(config), name="a", num_labels=3)
    if model_type not in ("granite", "glm4_moe", "minimax_m2", "olmoe"):  # they have no classifier
        assert body.parameters == count(config, "AutoModelForSequenceClassification")
    assert body.notes == ()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gpt2", "deepseek_v3"])
def test_biases_and_tied_embeddings_are_read(model_type, tied):
    config = config_of(model_type, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    assert shape_from_config(plain(config), name="a").parameters == count(config, "AutoModelForCausalLM")


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "qwen3", "mistral", "mixtral", "gpt_oss", "gemma", "deepseek_v3"]
)
def test_settings_that_a_configuration_leaves_out_have_the_types_own_values(model_type):
    config = config_of(model_type)
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_attention_heads",)} | {
        "num_attention_heads": 64
    }
    config = transformers.AutoConfig.for_model(model_type, **(sizes | {"hidden_size": 256, "pad_token_id": 0}))
    found = shape_from_config({"model_type": model_type, **sizes, "hidden_size": 256}, name="a")
    assert found.parameters == count(config, "AutoModelForCausalLM")


ADAPTED = ["llama", "qwen3", "qwen2", "gemma2", "phi3", "glm4", "gpt_neox", "gpt2"]
ADAPTED += ["deepseek_v3", "mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "phimoe"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ADAPTED)
def test_lora_has_the_parameters_of_peft(model_type):
    peft = pytest.importorskip("peft")
    config = config_of(model_type)
    old = tuple(map(int, peft.__version__.split(".")[:2])) < (0, 19)
    if old and model_type in ("deepseek_v3", "mixtral", "qwen3_moe"):
        pytest.skip(f"peft {peft.__version__} does not adapt experts")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    found = shape_from_config(plain(config), name="a").lora_parameters(4)
    # Where peft adapts experts, it leaves out the layers without experts and the shared expert.
    spared = {"deepseek_v3": 1920 + 5 * 1152, "qwen3_moe": 1920}
    assert found == trained + spared.get(model_type, 0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("length", [5, 40])
def test_cached_numbers_are_those_of_a_real_cache(model_type, length):
    windows = {"gemma2": 3, "gemma3_text": 5, "gpt_oss": 3, "mistral": 6}
    config = config_of(model_type, **({"sliding_window": 16} if model_type in windows else {}))
    model = transformers.AutoModel.from_config(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.arange(length)[None], past_key_values=cache, use_cache=True)
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    shape = shape_from_config(plain(config), name="a")
    # A full window keeps one token less between two forwards, and all of them during one.
    spared = sum(layer.cached * n for layer, n in shape.layers if layer.window and length >= layer.window)
    assert shape.cached_numbers(length) == stored + spared
    assert sum(n for layer, n in shape.layers if layer.window) == windows.get(model_type, 0)


def test_an_encoder_caches_nothing_and_generates_nothing():
    config = SMALL | {"model_type": "bert", "max_position_embeddings": 64}
    assert shape_from_config(config, name="a", num_labels=1).cached_numbers(100) == 0
    with pytest.raises(ConfigError, match="is an encoder; it scores"):
        shape_from_config(config, name="a")


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_parameters(name):
    assert load_shape(name, None, num_labels=None, name="policy").parameters == PUBLISHED[name]


def test_every_known_model_has_a_source_and_exact_layers():
    assert len(known_models()) >= 60
    for name, config in known_models().items():
        shape = load_shape(name, None, num_labels=1, name="rm")
        assert config["source"]
        assert config["model_type"] in TYPES
        assert not unknown_settings({key: value for key, value in config.items() if key not in ("source", "note")})
        assert shape.basis is Basis.TABLE
        assert shape.max_length


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("Skywork/Skywork-Reward-V2-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("nvidia/Llama-3.3-Nemotron-70B-Reward", "meta-llama/Llama-3.1-70B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
    ],
)
def test_variants_have_the_sizes_of_the_known_model(model, known):
    found = load_shape(model, None, num_labels=1, name="rm")
    assert found.layers == load_shape(known, None, num_labels=1, name="rm").layers
    assert known in found.source


def test_a_name_that_is_not_known_and_not_on_the_hub_gets_the_nearest_names(monkeypatch):
    def offline(model):
        raise OSError("no network")

    monkeypatch.setattr(models, "_download_config", offline)
    with pytest.raises(ConfigError, match=r"policy: 'Qwen/Qwen3-7B' .* no network.* Nearest known: .*Qwen/Qwen3-8B"):
        load_shape("Qwen/Qwen3-7B", None, num_labels=None, name="policy")


def test_the_configuration_of_a_hub_id_is_used(monkeypatch):
    monkeypatch.setattr(models, "_download_config", lambda model: SMALL)
    found = load_shape("someone/small", None, num_labels=None, name="policy")
    assert found.parameters == shape_from_config(SMALL, name="a").parameters
    assert "someone/small" in found.source


# --- folders ---------------------------------------------------------------------------------------------------------


def folder_with(path, config, tensors, file="model.safetensors"):
    """Write a folder with headers of safetensors: tensors are dtype and shape by name."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (path / file).write_bytes(struct.pack("<Q", len(text)) + text)
    return str(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "deberta_v2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_the_weights_of_a_saved_model_have_the_number_of_the_formula(tmp_path, architecture):
    tiny_models.save_reward_model(tmp_path / "rm", architecture)
    found = load_shape(str(tmp_path / "rm"), None, num_labels=1, name="rm")
    assert found.basis is Basis.MEASURED
    assert found.counted is None
    assert "same number of parameters" in found.source


@pytest.mark.parametrize("architecture", ["t5", "jamba", "doge"])
def test_a_type_without_a_formula_needs_weights_and_then_has_their_number(tmp_path, architecture):
    model = tiny_models.reward_model(architecture)
    with pytest.raises(ConfigError, match="no formula for model_type"):
        shape_from_config(plain(model.config), name="rm", num_labels=1)
    tiny_models.save_reward_model(tmp_path / "rm", architecture)
    found = load_shape(str(tmp_path / "rm"), None, num_labels=1, name="rm")
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.basis is Basis.MEASURED
    assert any("taken for layers like those of Llama" in note for note in found.notes)


def test_other_weights_than_the_formula_are_said(tmp_path):
    folder = folder_with(tmp_path / "m", SMALL, {"a": ("BF16", [1000, 3]), "b.inv_freq": ("F32", [50])})
    found = load_shape(folder, None, num_labels=1, name="rm")
    assert found.parameters == found.counted == 3000
    assert any("its weights have 3,000 parameters, and its sizes give" in note for note in found.notes)


def test_layers_for_several_tokens_ahead_are_not_counted(tmp_path):
    tensors = {"model.layers.1.a": ("BF16", [10]), "model.layers.2.a": ("BF16", [500])}
    folder = folder_with(tmp_path / "m", SMALL, tensors)
    assert load_shape(folder, None, num_labels=1, name="rm").parameters == 10


def test_shards_are_counted_together_and_a_missing_one_is_said(tmp_path):
    folder = folder_with(tmp_path / "m", SMALL, {"a": ("BF16", [7])}, file="one.safetensors")
    folder_with(tmp_path / "m", SMALL, {"b": ("F32", [5])}, file="two.safetensors")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert load_shape(folder, None, num_labels=1, name="rm").counted == 12
    (tmp_path / "m" / "two.safetensors").unlink()
    found = load_shape(folder, None, num_labels=1, name="rm")
    assert found.counted is None
    assert any("1 of 2 safetensors files are not there" in note for note in found.notes)


def test_quantised_weights_are_not_counted(tmp_path):
    folder = folder_with(tmp_path / "m", SMALL, {"a": ("I32", [7])})
    found = load_shape(folder, None, num_labels=1, name="rm")
    assert found.counted is None
    assert any("quantised" in note for note in found.notes)
    with pytest.raises(ConfigError, match="no formula"):
        load_shape(
            folder_with(tmp_path / "t", SMALL | {"model_type": "t5"}, {"a": ("I32", [7])}),
            None,
            num_labels=1,
            name="rm",
        )


@pytest.mark.parametrize("content", [b"", b"\x05", struct.pack("<Q", 10**12), struct.pack("<Q", 4) + b"null"])
def test_a_broken_weight_file_is_an_error(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a whole safetensors file"):
        load_shape(str(tmp_path), None, num_labels=1, name="rm")


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_a_folder_without_a_configuration_is_an_error(tmp_path, text):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_shape(str(tmp_path), None, num_labels=1, name="rm")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json|cannot read"):
        load_shape(str(tmp_path), None, num_labels=1, name="rm")


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"hidden_size": 64.0}, "got 64.0"),
        ({"num_hidden_layers": -2}, "got -2"),
        ({"num_attention_heads": True}, "got bool True"),
        ({"vocab_size": "100"}, "got str '100'"),
        ({"hidden_size": 66}, "hidden size 66 is not divisible by 4 attention heads"),
        ({"num_key_value_heads": 3}, "4 attention heads are not divisible by num_key_value_heads 3"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_experts": 8, "model_type": None}, "needs num_experts_per_tok"),
        (
            {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 3},
            "3 is more than the 2 experts",
        ),
        ({"kv_lora_rank": 8}, "needs qk_rope_head_dim too"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": "full"}, "layer_types must be a list"),
        ({"sliding_window": -1}, "sliding_window must be an integer of at least 0"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"model_type": 3}, "model_type must be a text"),
        ({"model_type": "t5"}, "it has an encoder and a decoder"),
        ({"mamba_d_state": 8}, "unknown setting 'mamba_d_state'|it has mamba_d_state"),
        ({"text_config": 5}, "text_config must be a mapping"),
        ({"hiden_size": 64}, "unknown setting 'hiden_size'.* Did you mean 'hidden_size'"),
        ({"num_kv_heads": 2}, "unknown setting 'num_kv_heads'.* Did you mean 'num_key_value_heads'"),
        ({"quantisation": 2}, "unknown setting 'quantisation'"),
    ],
    ids=str,
)
def test_a_mistake_in_inline_sizes_is_named(change, message):
    config = {key: value for key, value in (SMALL | change).items() if value is not None}
    with pytest.raises(ConfigError, match=f"policy: .*({message})"):
        load_shape(None, config, num_labels=None, name="policy")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 130),
    st.just(10**12),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers()),
)


@given(
    changes=st.dictionaries(st.sampled_from(sorted(KNOWN)), VALUES, max_size=4),
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
    for part in (
        "hidden_size must",
        "num_attention_heads must",
        "num_hidden_layers is missing",
        "vocab_size is missing",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (None, None, "got neither"),
        ("Qwen/Qwen3-8B", SMALL, "got both"),
        (5, None, "model must be a folder"),
        (" ", None, "model must be a folder"),
        ("./missing", None, "does not exist"),
        ("missing/config.json", None, "does not exist"),
        ("a b", None, "neither a folder nor"),
        (None, [1], "config must be a mapping"),
    ],
    ids=str,
)
def test_a_mistake_in_the_model_is_named(model, config, message):
    with pytest.raises(ConfigError, match=f"policy: .*{message}"):
        load_shape(model, config, num_labels=None, name="policy")


def test_an_unknown_type_is_taken_for_llama_and_says_so():
    found = load_shape(None, SMALL | {"model_type": "my_model"}, num_labels=None, name="policy")
    assert found.parameters == shape_from_config(SMALL, name="a").parameters
    assert any("'my_model' are taken for layers like those of Llama" in note for note in found.notes)


@pytest.mark.parametrize("model_type", REFUSED)
def test_types_without_a_formula_are_refused_by_name(model_type):
    with pytest.raises(ConfigError, match=f"no formula for model_type '{model_type}' is known"):
        shape_from_config(SMALL | {"model_type": model_type}, name="a")
    assert model_type not in TYPES


def test_a_whole_configuration_may_be_pasted():
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "made_up": 1, "rope_theta": 1e4, "torch_dtype": "bfloat16"}
    assert load_shape(None, config, num_labels=None, name="policy").notes == ()


def test_a_model_that_sees_says_that_its_vision_part_is_not_counted():
    config = {
        "model_type": "qwen3_vl",
        "vision_config": {"depth": 2},
        "text_config": SMALL | GROUPED | {"model_type": "qwen3_vl_text"},
    }
    found = shape_from_config(config, name="a")
    assert any("vision part" in note for note in found.notes)


def test_experts_are_parameters_but_a_token_meets_few():
    shape = load_shape("mistralai/Mixtral-8x7B-v0.1", None, num_labels=None, name="policy")
    assert shape.parameters == 46_702_792_704
    assert shape.active_parameters + 2 * shape.head == pytest.approx(12.9e9, rel=0.01)


def test_a_window_bounds_the_attended_pairs():
    windowed = shape_from_config(
        SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8}, name="a"
    )
    full = shape_from_config(
        SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}, name="a"
    )
    brute = sum(min(k + 1, 8) for k in range(50)) * 4 * 16 * 2
    assert windowed.pairs_attended(50) == brute
    assert full.pairs_attended(50) == 50 * 51 / 2 * 4 * 16 * 2
