"""The policy: what can be opened, and gradients over batches that equal those of the plain forward."""

import json
import shutil

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from gym_rm.checks import model_source
from gym_rm.errors import ConfigError
from gym_rm.lora_settings import LoRASettings
from gym_rm.policy.trained_policy import StartPolicy, TrainedPolicy, open_policy, save_policy
from gym_rm.policy.turn_batches import policy_batches
from gym_rm.training.layouts import choose_layout, enable_checkpointing
from tests.policy.turns import batched_loss, difference, gradients, gsm8k_turns, plain, plain_loss, random_turns, turn

TOLERANCE = 1e-5  # relative to the largest gradient
TEMPERATURE = 0.8
MODELS = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_dropout": 0.5}),
    "window": ("mistral", {"sliding_window": 5}),
    "soft caps": ("gemma2", {"sliding_window": 7, "final_logit_softcapping": 5.0}),
    "scale": ("granite", {"logits_scaling": 4.0}),
    "dropout": ("gpt2", {}),
    "experts": ("mixtral", {}),
    "bias of positions": ("bloom", {}),
}


@pytest.fixture(scope="module")
def policies():
    """Function that returns a policy of an architecture and its layout, made once."""
    made = {}

    def of(name, *, tree=True):
        if (name, tree) not in made:
            architecture, options = MODELS[name]
            start = StartPolicy(tiny_models.policy(architecture, initializer_range=0.1, **options), None, None, name)
            policy = TrainedPolicy(start, temperature=TEMPERATURE, chunk_tokens=7)
            made[name, tree] = policy, choose_layout(policy, start.model, tree=tree, fuse=True)
        return made[name, tree]

    return of


def test_layouts_and_options_of_the_architectures(policies):
    layouts = {name: policies(name)[1].layout for name in MODELS}
    assert [name for name, layout in layouts.items() if layout != "tree"] == ["bias of positions"]
    assert [name for name in MODELS if policies(name)[1].fuse] == ["qwen2", "qwen3", "window"]
    assert policies("soft caps")[0].options.softcap == 5.0
    assert policies("scale")[0].options.scale == 0.25


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3)
@given(made=random_turns())
def test_gradients_equal_the_plain_ones_on_random_trees(name, policies, made):
    policy, layout = policies(name)
    model, (turns, groups) = policy.start.model, made
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=60)
    expected = gradients(plain_loss(model, turns, TEMPERATURE), model)
    assert difference(gradients(batched_loss(policy, batches, turns), model), expected) < TOLERANCE


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "padded"])
def test_gradients_equal_the_plain_ones_on_real_groups(tree):
    start = open_policy(None)
    policy = TrainedPolicy(start)
    layout = choose_layout(policy, start.model, tree=tree, fuse=True)
    assert layout.layout == ("tree" if tree else "padded")
    turns, groups = gsm8k_turns(start.tokenizer, problems=2, length=12)
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=2000)
    expected = gradients(plain_loss(start.model, turns), start.model)
    assert difference(gradients(batched_loss(policy, batches, turns), start.model), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "soft caps"])
@settings(max_examples=3)
@given(made=random_turns())
def test_checkpointing_changes_no_gradient(name, policies, made):
    policy, layout = policies(name)
    model, (turns, groups) = policy.start.model, made
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=60)
    expected = gradients(batched_loss(policy, batches, turns), model)
    enable_checkpointing(policy, policy.start.model, layout)
    try:
        policy.train()
        got = gradients(batched_loss(policy, batches, turns), model)
    finally:
        model.gradient_checkpointing_disable()
        policy.decoders[0].checkpointing = False
        policy.train(False)
    assert difference(got, expected) < 1e-6


def small_example():
    return [turn([5, 6, 7], [8, 9]), turn([5, 6, 7], [8, 10, 11])], [0, 0]


def test_an_output_layer_of_another_kind_is_refused():
    model = tiny_models.policy("qwen3")

    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    model.set_output_embeddings(Doubled(32, model.config.vocab_size, bias=False))
    with pytest.raises(ConfigError, match="output layer cannot run apart from the model: it is a Doubled"):
        TrainedPolicy(StartPolicy(model, None, None, "doubled"))


def test_adapters_are_trained_alone_and_can_be_switched_off():
    pytest.importorskip("peft")
    start = open_policy(None, lora=LoRASettings(rank=4), seed=3)
    policy = TrainedPolicy(start)
    layout = choose_layout(policy, start.model, tree=True, fuse=True)
    assert (layout.layout, layout.fuse) == ("tree", True)
    with torch.no_grad():
        for name, parameter in start.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    turns, groups = small_example()
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=1000)
    expected = gradients(plain_loss(start.model, turns), start.model)
    assert expected
    assert all("lora" in name for name in expected)
    assert difference(gradients(batched_loss(policy, batches, turns), start.model), expected) < TOLERANCE
    with start.peft.disable_adapter(), torch.no_grad():
        got = policy(batches[0])[0][:2]
    torch.testing.assert_close(got, plain(open_policy(None).model, turns[0])[0].detach())


def test_bfloat16_weights_keep_to_the_plain_forward():
    start = open_policy(None, dtype=torch.bfloat16)
    assert {each.dtype for each in start.model.parameters()} == {torch.bfloat16}
    policy = TrainedPolicy(start)
    layout = choose_layout(policy, start.model, tree=True, fuse=True)
    assert layout.layout == "tree"
    turns, groups = small_example()
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=1000)
    expected = gradients(plain_loss(start.model, turns), start.model)
    assert difference(gradients(batched_loss(policy, batches, turns), start.model), expected) < 0.05


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(model_source("path", "embedded:policy"), tmp_path / "policy")


def refused(path, *parts, **options):
    with pytest.raises(ConfigError) as error:
        open_policy(str(path), **options)
    message = str(error.value)
    assert all(part in message for part in (str(path), *parts)), message
    assert "\n" not in message


def test_the_embedded_policy_opens():
    start = open_policy(None)
    assert start.name == open_policy("embedded:policy").name == "embedded"
    assert start.tokenizer.padding_side == "left"
    assert start.trained is start.model
    assert not start.model.training


def test_folders_that_cannot_be_trained_are_refused(folder, tmp_path):
    refused(folder.parent / "polcy", "policy.model", "policy")
    refused(folder / "config.json", "policy.model", "is a file")
    tiny_models.save_reward_model(tmp_path / "classifier")
    refused(tmp_path / "classifier", "Qwen3ForSequenceClassification", "ForCausalLM", "env.reward_model")
    tiny_models.save_policy(tmp_path / "headless", tie_word_embeddings=False)
    weights = load_file(tmp_path / "headless" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "headless" / "model.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "headless", "lm_head.weight", "Qwen3ForCausalLM")
    with pytest.raises(ConfigError, match=r"dropout=0\.1"):
        open_policy(None, lora=LoRASettings(dropout=0.1))


def test_a_missing_padding_token_is_filled_but_not_a_missing_template_or_base(folder):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("pad_token")
    file.write_text(json.dumps(config))
    assert open_policy(str(folder)).tokenizer.pad_token_id is not None
    (folder / "chat_template.jinja").rename(folder / "other.jinja")
    refused(folder, "no chat template")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    refused(folder, "adapter")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)])
def test_a_shared_weight_is_written_once_for_people_and_under_each_name_for_servers(lora, tied, tmp_path):
    if lora:
        pytest.importorskip("peft")
    start = open_policy(str(tiny_models.save_policy(tmp_path / "start", "llama", tie_word_embeddings=tied)), lora=lora)
    weights = {name: each.detach() + 0.5 for name, each in start.trained.named_parameters() if each.requires_grad}
    written, loaded = {}, []
    for once in (True, False):
        folder = tmp_path / f"once-{once}"
        save_policy(start, folder, weights, tied_once=once)
        written[once] = load_file(folder / "model.safetensors")
        loaded.append(open_policy(str(folder)).model.get_output_embeddings().weight)
    name, head = "model.embed_tokens.weight", written[False]["lm_head.weight"]
    assert all(head.equal(each) for each in loaded)
    assert ("lm_head.weight" in written[True]) == (not tied)
    assert head.equal(written[False][name]) == tied
    assert head.equal(start.model.get_output_embeddings().weight) == bool(lora), "adapters leave the output layer"
