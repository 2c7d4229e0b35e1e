"""Heads that read hidden states: modules of the model, and logits of single tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gym_rm
from gym_rm import ConfigError
from gym_rm.engine.backbones import heads
from gym_rm.engine.backbones.batch_invariance import BatchInvariant
from gym_rm.engine.backbones.heads import AppliedModule, OutputLayer, in_float32
from gym_rm.errors import warn_once
from tests import tiny_models


def test_heads_compute_in_float32_and_keep_their_weights():
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).bfloat16()
    hidden = torch.randn(5, 8).bfloat16()
    values = in_float32(layer, hidden)
    assert values.dtype is torch.float32
    assert layer[0].weight.dtype is torch.bfloat16
    torch.testing.assert_close(values, layer.float()(hidden.float()))


def test_a_head_is_looked_up_by_name_at_every_call():
    model = tiny_models.reward_model("qwen3")
    head, hidden = AppliedModule(model, "score"), torch.randn(3, 32)
    before = head(hidden)
    model.score = torch.nn.Linear(32, 1)
    assert not torch.allclose(head(hidden), before)
    torch.testing.assert_close(head(hidden), model.score(hidden))


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "bloom"])
def test_token_logits_equal_those_of_the_model(architecture):
    tokenizer = tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
    torch.manual_seed(0)
    config = tiny_models._config(architecture, tokenizer, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        logits = model(ids).logits[0]
        hidden = model.base_model(ids).last_hidden_state[0]
        torch.testing.assert_close(OutputLayer(model, [3, 9])(hidden), logits[:, [3, 9]])
        targets = torch.tensor([6, 7, 8, 9])
        expected = torch.log_softmax(logits, dim=1)[torch.arange(4), targets]
        torch.testing.assert_close(OutputLayer(model).log_probabilities(hidden, targets), expected)


RECURRENT = {"head_dim": 8, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("recurrent_gemma", {**RECURRENT, "logits_soft_cap": 30.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
)
@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
def test_scales_and_soft_caps_are_those_of_the_model(model_type, settings, initializer_range):
    """A cap of 30 changes the logits of a small random model by less than their rounding, and larger ones clearly."""
    torch.manual_seed(0)
    sizes = {**tiny_models.GROUPED, "vocab_size": 400, "initializer_range": initializer_range}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **settings})).float().eval()
    head = OutputLayer(model, list(range(400)))
    large = 300 * torch.randn(1, 4, 32)
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: (large,))
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 7, 8]])).logits[0]
        hook.remove()
        torch.testing.assert_close(head(large[0]), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("change", [lambda logits: 30 * torch.tanh(logits / 30), torch.sinh], ids=["cap", "sinh"])
def test_unsupported_logits_are_refused(change):
    config = tiny_models._config("qwen3", tiny_models.tokenizer("qwen"), initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.register_forward_hook(lambda module, inputs, output: setattr(output, "logits", change(output.logits)))
    with pytest.raises(ConfigError, match="computes its logits in an unsupported way"):
        OutputLayer(model, [1])
    with pytest.raises(ConfigError, match="no output layer"):
        OutputLayer(model.base_model, [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma2"])
def test_a_classifier_that_changes_its_logits_is_refused(architecture, dtype):
    """In a subclass or by a hook: the scorer reads the head, so its scores would differ from the model's."""
    model = tiny_models.reward_model(architecture).to(dtype)
    tokenizer = tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
    gym_rm.RewardModelScorer(model, tokenizer)
    hook = model.register_forward_hook(
        lambda module, inputs, output: setattr(output, "logits", output.logits.sigmoid())
    )
    with pytest.raises(ConfigError, match="its forward does more than apply the head; pass a function"):
        gym_rm.RewardModelScorer(model, tokenizer)
    hook.remove()


def test_a_hook_on_the_whole_model_is_warned_of(caplog):
    model, tokenizer = tiny_models.reward_model("llama"), tiny_models.tokenizer("llama3")
    scorer = gym_rm.RewardModelScorer(model, tokenizer)
    warn_once.cache_clear()
    model.register_forward_hook(lambda module, inputs, output: None)
    scorer.score([[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]])
    assert "the replaced forward of LlamaForSequenceClassification do not run" in caplog.text


@pytest.mark.parametrize("change", ["adapter", "hook"])
def test_the_output_layer_of_a_generative_model_runs_with_its_adapter_and_hooks(change, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models.save_policy(tmp_path, "llama", initializer_range=0.3)
    ).eval()
    head = OutputLayer(model, (3, 5))
    ids = torch.arange(5, 15)[None]
    if change == "adapter":
        peft = pytest.importorskip("peft")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False))
    else:
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0, :, [3, 5]]
        got = head(model.base_model(input_ids=ids).last_hidden_state[0])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 26])
def test_values_of_a_hidden_state_have_the_same_bits_beside_others(at_once, monkeypatch):
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", at_once)
    config = tiny_models._config("qwen3", tiny_models.tokenizer("qwen"), initializer_range=0.3)
    tokens = OutputLayer(AutoModelForCausalLM.from_config(config).float().eval(), (3, 7, 50))
    targets = torch.arange(200)
    mlp = tiny_models.reward_model("qwen3")
    mlp.score = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.SiLU(), torch.nn.Linear(32, 1))
    everything = {
        "module": AppliedModule(tiny_models.reward_model("qwen3"), "score"),
        "layers": AppliedModule(mlp, "score"),
        "logits": tokens,
        "all logits": lambda hidden: torch.cat([*tokens._all_logits(hidden)])[: len(hidden)],
        "log-probabilities": lambda hidden: tokens.log_probabilities(hidden, targets[: len(hidden)]),
    }
    hidden = 3 * torch.randn(200, 32)
    for name, head in everything.items():
        with torch.inference_mode(), BatchInvariant():
            expected = head(hidden)
            for count in (1, 2, 7, 16, 33, 100, 199):
                assert torch.equal(head(hidden[:count]), expected[:count]), name
