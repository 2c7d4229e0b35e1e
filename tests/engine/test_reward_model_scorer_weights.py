"""Weights of a scorer: changed by training and `update_weights`, and kept across sleep, pickling and close."""

import pickle

import numpy as np
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm.errors import ConfigError

TOLERANCE = 1e-5


def model_of(architecture, seed):
    """Return a model whose tensors, buffers included, depend on the seed."""
    model = tiny_models.reward_model(architecture, seed=seed)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in parameters:
                tensor.copy_(torch.randn(tensor.shape))
    return model


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory):
    """A function that returns two folders with the same architecture and tokenizer but different weights."""
    folders = {}

    def save(architecture):
        if architecture not in folders:
            tokenizer = tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
            folders[architecture] = [tmp_path_factory.mktemp(f"{architecture}_{seed}") for seed in (0, 1)]
            for seed, folder in enumerate(folders[architecture]):
                model_of(architecture, seed).save_pretrained(folder)
                tokenizer.save_pretrained(folder)
        return folders[architecture]

    return save


def handed_over(folder, **options):
    """Return the model of a folder, its tokenizer, and their scorer."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return model, tokenizer, gym_rm.RewardModelScorer(model, tokenizer, **options)


def bits(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


# --- weights that are trained in place


def test_scores_follow_a_model_in_training(saved_model, real_conversations):
    folder = saved_model("qwen3", attention_dropout=0.5)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.train()
    scorer = gym_rm.RewardModelScorer(model, tokenizer)
    assert scorer.layout == "tree"
    before = scorer.score(real_conversations).rewards
    np.testing.assert_allclose(before, tiny_models.plain_rewards(folder, real_conversations), atol=TOLERANCE)
    assert model.training
    assert all(part.training for part in model.modules())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tiny_models.plain_ids(tokenizer, real_conversations[0])
    model(**ids).logits.sum().backward()
    optimizer.step()
    after = scorer.score(real_conversations).rewards
    assert np.abs(after - before).max() > 1e-3
    model.eval()
    with torch.inference_mode():
        expected = [model(**tiny_models.plain_ids(tokenizer, c)).logits.item() for c in real_conversations]
    np.testing.assert_allclose(after, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "options", "through_data"),
    [("qwen3", {}, True), ("qwen3", {"tree": False}, False), ("bert", {}, True)],
)
def test_changed_weights_count_at_once(architecture, options, through_data, two_folders, real_conversations):
    old, new = two_folders(architecture)
    model, _, scorer = handed_over(old, **options)
    before = scorer.score(real_conversations).rewards
    with torch.no_grad():
        trained = AutoModelForSequenceClassification.from_pretrained(new)
        for parameter, value in zip(model.parameters(), trained.parameters(), strict=True):
            (parameter.data if through_data else parameter).copy_(value)
    expected = handed_over(new, **options)[2].score(real_conversations).rewards
    assert scorer.score(real_conversations).rewards.tolist() == expected.tolist()
    assert np.abs(expected - before).max() > 1e-2


# --- update_weights

INT8 = {"quantization": "int8", "check": False}  # decoders are refused

LOADED = [
    ("qwen3", {"tree": False}, "folder"),
    ("qwen3", {"prefix_cache_tokens": 4000}, "state dict"),
    ("qwen3", INT8, "folder"),
    ("qwen3", INT8, "state dict"),
    ("bert", {}, "state dict"),
    ("bert", INT8, "folder"),
    ("deepseek_v3", {}, "folder"),  # its router has a bias that is a buffer
    ("deepseek_v3", {}, "state dict"),
]


@pytest.mark.parametrize(("architecture", "options", "by"), LOADED)
def test_updated_weights_score_as_if_loaded_from_their_folder(
    architecture, options, by, two_folders, real_conversations
):
    old, new = two_folders(architecture)
    scorer = gym_rm.load_scorer(old, **options)
    before = scorer.score(real_conversations).rewards
    scorer.update_weights(new if by == "folder" else model_of(architecture, 1).state_dict())
    expected = gym_rm.load_scorer(new, **options).score(real_conversations).rewards
    assert scorer.score(real_conversations).rewards.tolist() == expected.tolist()
    assert np.abs(expected - before).max() > 1e-2


@pytest.mark.parametrize("options", [{}, INT8])
def test_a_state_dict_in_half_precision_scores_like_its_folder(options, two_folders, tmp_path, real_conversations):
    old, _ = two_folders("qwen3")
    trained = model_of("qwen3", 1).bfloat16()
    trained.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(old).save_pretrained(tmp_path)
    scorer = gym_rm.load_scorer(old, **options)
    scorer.update_weights(trained.state_dict())
    expected = gym_rm.load_scorer(tmp_path, **options).score(real_conversations).rewards
    assert scorer.score(real_conversations).rewards.tolist() == expected.tolist()


def test_a_state_dict_updates_a_language_model_whose_embeddings_are_tied(tmp_path, real_conversations):
    options = {"kind": "generative", "answers": ("A", "B")}
    old, new = (
        tiny_models.save_policy(tmp_path / str(seed), seed=seed, tie_word_embeddings=True, initializer_range=0.3)
        for seed in (0, 1)
    )
    scorer = gym_rm.load_scorer(old, **options)
    scorer.update_weights(AutoModelForCausalLM.from_pretrained(new).state_dict())
    expected = gym_rm.load_scorer(new, **options).score(real_conversations).rewards
    assert scorer.score(real_conversations).rewards.tolist() == expected.tolist()


def test_a_state_dict_updates_a_model_that_was_passed_in(two_folders, real_conversations):
    old, new = two_folders("qwen3")
    model, _, scorer = handed_over(old)
    parameters = list(map(id, model.parameters()))
    trained, _, expected = handed_over(new)
    scorer.update_weights(trained.state_dict())
    for _ in range(2):
        assert scorer.score(real_conversations).rewards.tolist() == expected.score(real_conversations).rewards.tolist()
        scorer.clear_cache()
    assert_same_bits(bits(model), bits(trained))
    assert list(map(id, model.parameters())) == parameters


def test_a_model_that_was_passed_in_has_no_prefix_cache(two_folders):
    with pytest.raises(ConfigError, match="prefix_cache_tokens needs a model whose weights nobody else changes"):
        handed_over(two_folders("qwen3")[0], prefix_cache_tokens=4000)


def test_a_folder_cannot_update_a_model_that_was_passed_in(two_folders):
    old, new = two_folders("qwen3")
    model, _, scorer = handed_over(old)
    before = bits(model)
    with pytest.raises(ConfigError, match=r"weights must be tensors by name \(a state dict\); got"):
        scorer.update_weights(new)
    assert_same_bits(bits(model), before)


def test_provenance_names_the_folder_of_the_new_weights(two_folders):
    old, new = map(str, two_folders("qwen3"))
    scorer = gym_rm.load_scorer(old)
    scorer.update_weights(model_of("qwen3", 1).state_dict())
    assert scorer.provenance.model == old, "a state dict has no name"
    scorer.update_weights(new)
    assert scorer.provenance.model == new
    assert scorer.score([]).provenance.model == new


# The head is the last tensor: if the check came too late, the tensors before it would already have changed.
LAYER = "model.layers.0.self_attn.q_proj.weight"
WRONG = {
    "a missing tensor": lambda weights: weights.pop("score.weight"),
    "an unknown tensor": lambda weights: weights.update(extra=torch.zeros(1)),
    "a tensor of another shape": lambda weights: weights.update({"score.weight": torch.zeros(2, 32)}),
    "a tensor that would broadcast": lambda weights: weights.update({"score.weight": torch.zeros(1, 1)}),
    "None": lambda weights: weights.update({"score.weight": None}),
    "an array": lambda weights: weights.update({"score.weight": np.zeros((1, 32), dtype=np.float32)}),
    "a sparse tensor": lambda weights: weights.update({"score.weight": torch.zeros(1, 32).to_sparse()}),
    "a complex tensor": lambda weights: weights.update({"score.weight": torch.zeros(1, 32, dtype=torch.complex64)}),
    "int8": lambda weights: weights.update({"score.weight": torch.ones(1, 32, dtype=torch.int8)}),
    "booleans": lambda weights: weights.update({"score.weight": torch.ones(1, 32, dtype=torch.bool)}),
    "fp8": lambda weights: weights.update({"score.weight": torch.ones(1, 32).to(torch.float8_e4m3fn)}),
    "NaN": lambda weights: weights["score.weight"][0, 3].fill_(torch.nan),
    "infinity": lambda weights: weights["score.weight"][0, 3].fill_(-torch.inf),
    "too large for float32": lambda weights: weights.update(
        {"score.weight": torch.full((1, 32), 1e300, dtype=torch.float64)}
    ),
    "int8 in a layer": lambda weights: weights.update({LAYER: weights[LAYER].to(torch.int8)}),
    "NaN in a layer": lambda weights: weights[LAYER][0, 3].fill_(torch.nan),
    "a tensor without data": lambda weights: weights.update({"score.weight": torch.zeros(1, 32, device="meta")}),
}


@pytest.fixture(scope="module", params=[{}, INT8], ids=["float32", "int8"])
def refusing(request, two_folders, real_conversations):
    """A scorer that refuses weights, so that it is the same for all of them, and its state before."""
    scorer = gym_rm.load_scorer(two_folders("qwen3")[0], **request.param)
    (model,) = scorer.executor.models
    return scorer, bits(model), scorer.score(real_conversations[:3]).rewards, scorer.provenance


def assert_refused_without_a_change(refusing, weights, conversations, match=None):
    scorer, before, rewards, provenance = refusing
    with pytest.raises(ConfigError, match=match):
        scorer.update_weights(weights)
    assert_same_bits(bits(*scorer.executor.models), before)
    scorer.clear_cache()
    assert scorer.score(conversations[:3]).rewards.tolist() == rewards.tolist()
    assert scorer.provenance == provenance


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_with_an_invalid_tensor_change_nothing(wrong, refusing, real_conversations):
    weights = model_of("qwen3", 1).state_dict()
    WRONG[wrong](weights)
    assert_refused_without_a_change(refusing, weights, real_conversations, "do not fit")


@pytest.mark.parametrize(
    "other", ["one layer less", "another configuration", "another architecture", "no checkpoint", "no folder"]
)
def test_a_folder_that_does_not_fit_changes_nothing(other, refusing, tmp_path, saved_model, real_conversations):
    folder = {
        "one layer less": saved_model("qwen3", num_hidden_layers=1),
        "another configuration": saved_model("qwen3", rms_norm_eps=1e-3),
        "another architecture": saved_model("bert"),
        "no checkpoint": tmp_path,
        "no folder": tmp_path / "nowhere",
    }[other]
    assert_refused_without_a_change(refusing, folder, real_conversations)


def test_a_checkpoint_of_a_trainer_updates_the_weights(two_folders, tmp_path, real_conversations):
    old, new = two_folders("qwen3")
    scorer = gym_rm.load_scorer(old)
    model = AutoModelForSequenceClassification.from_pretrained(new)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1.0]]))  # sets config.problem_type
    model.config.pad_token_id, model.config.attention_dropout, model.config.use_cache = 0, 0.1, False
    model.config.id2label = {0: "reward"}
    model.bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(new).save_pretrained(tmp_path)
    scorer.update_weights(tmp_path)
    expected = gym_rm.load_scorer(str(tmp_path)).score(real_conversations).rewards
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=1e-5)


# --- sleep, close, copies


def test_a_closed_scorer_raises(two_folders, real_conversations):
    scorer = gym_rm.load_scorer(two_folders("qwen3")[0], **INT8)
    scorer.score(real_conversations)
    scorer.close()
    scorer.close()
    with pytest.raises(ConfigError, match="closed"):
        scorer.score(real_conversations)
    with pytest.raises(ConfigError, match="closed"):
        scorer.update_weights(two_folders("qwen3")[1])


@pytest.mark.parametrize("options", [{"prefix_cache_tokens": 4000}, INT8, {"tree": False}])
def test_a_pickled_scorer_does_not_share_weights_with_the_original(options, two_folders, real_conversations):
    old, new = two_folders("qwen3")
    scorer = gym_rm.load_scorer(old, **options)
    before = scorer.score(real_conversations).rewards
    scorer.sleep()
    copied = pickle.loads(pickle.dumps(scorer))
    copied.update_weights(new)
    expected = gym_rm.load_scorer(new, **options).score(real_conversations).rewards
    assert copied.score(real_conversations).rewards.tolist() == expected.tolist()
    assert scorer.score(real_conversations).rewards.tolist() == before.tolist()
