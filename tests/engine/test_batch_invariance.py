"""A score has the same bits with any other conversations, in any order, and under any token budget.

`alone` scores each conversation by itself. All tests compare with it, on real conversations where it is about text, and
on random tokens where it is about lengths.
"""

import functools
import itertools

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.batch_planning import WIDTH_STEP
from gym_rm.engine.executors import loaded_model
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import ClassifierLogits, ModuleHead
from gym_rm.engine.schedule import Scheduler
from gym_rm.engine.token_tree import TokenSequence
from tests.checkpoints import HIDDEN, save_with_heads, tensor
from tests.engine.test_parity import VARIANTS
from tests.engine.watching import dialogue, size_of, watched_scorer

LONGEST = 1200  # more than the tokens of the longest conversation


@pytest.fixture(scope="module")
def some(real_conversations, hh_pairs):
    """16 conversations: a group, pairs with the same prompt, one that starts another, two short ones, a long one."""
    first, third = real_conversations[0], real_conversations[6]
    long = next(pair for pair in hh_pairs if 1000 < sum(len(m["content"]) for m in pair[0]) < 1200)
    short = [[*first[:1], {"role": "assistant", "content": text}] for text in ("18", "No.")]
    several = [*real_conversations, *short, third[:2], dialogue("q", "a"), dialogue("q", "b"), dialogue("?", ""), *long]
    assert len(several) == 16
    return several


def alone(scorer, conversations):
    """Return the reward of each conversation scored by itself."""
    return [scorer.score([each]).rewards[0] for each in conversations]


def bit_equal(scorer):
    return scorer.provenance.batch_invariance == "bit-equal"


def score_with_budget(scorer, conversations, budget):
    """Return scores of batches of at most so many tokens."""
    inner = getattr(scorer, "scorer", scorer)
    before, inner._scheduler.budget = inner.max_num_batched_tokens, budget
    try:
        return scorer.score(conversations)
    finally:
        inner._scheduler.budget = before


def batches(size):
    """Yield rows in any order, with repetition, and token budgets."""
    for seed, count in enumerate((24, 1, 3, 24, 24)):
        rows = np.random.default_rng(seed).integers(0, size, count).tolist()
        yield rows, (LONGEST, 3000, 10**6)[seed % 3]
    yield list(range(size)), 10**6


def assert_scores_do_not_depend_on_the_batch(scorer, conversations, expected=None):
    expected = alone(scorer, conversations) if expected is None else expected
    assert len(set(expected)) > 1
    for rows, budget in batches(len(conversations)):
        rewards = score_with_budget(scorer, [conversations[row] for row in rows], budget).rewards
        assert rewards.tolist() == [expected[row] for row in rows]


def others_slow(names, *fast):
    """Return the names as parameters; those that are not listed again are tested with the slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


EIGHT_BIT = {"quantization": "int8" if tiny_models.DEVICE.type == "cpu" else "fp8", "check": False}
OPTIONS = (
    {"tree": False},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {**EIGHT_BIT},
    {**EIGHT_BIT, "tree": False},
    {**EIGHT_BIT, "dtype": "bfloat16"},
    {"dtype": "bfloat16", "tree": False},
    {"attn_implementation": "eager", "tree": False},
)
LONGROPE = (*VARIANTS["longrope frequencies"][:2], {"max_length": 4096})
# The architecture, its configuration, and options of the scorer.
CASES = {name: (name, {}, {}) for name in tiny_models.ARCHITECTURES}
CASES |= {f"qwen3 {options}": ("qwen3", {}, options) for options in OPTIONS} | {"longrope": LONGROPE}
WITHIN = ("jamba",)  # whose convolutions have no rule


@pytest.mark.parametrize("case", others_slow(CASES, "qwen3", "bert", "bloom", "longrope", *list(CASES)[-9:]))
def test_a_score_does_not_depend_on_the_batch(case, saved_model, some):
    architecture, config, options = CASES[case]
    scorer = gym_rm.load_scorer(saved_model(architecture, **config), **options)
    assert scorer.layout in (tiny_models.layouts(architecture) if options.get("tree", True) else ("padded",))
    assert bit_equal(scorer) == (case not in WITHIN)
    if bit_equal(scorer):
        assert_scores_do_not_depend_on_the_batch(scorer, some)


def test_some_texts_are_longer_than_the_original_context(saved_model, some):
    architecture, config, options = LONGROPE
    scorer = gym_rm.load_scorer(saved_model(architecture, **config), **options)
    lengths = [len(each.input_ids) for each in scorer.renderer.encode(some)]
    assert min(lengths) < scorer.info.max_batchable_length == 128 < max(lengths)


# --- kinds of reward models


def classifier(folder):
    return tiny_models.save_reward_model(folder), {}


def multi_head(folder):
    names = {0: "helpful", 1: "honest", 2: "verbose"}
    return tiny_models.save_reward_model(folder, num_labels=3, id2label=names), {
        "kind": "multi_head",
        "weights": {"helpful": 1.0, "verbose": -0.5},
    }


def process(folder):
    heads = {"score.0.weight": tensor(2, HIDDEN, seed=2)}
    folder = save_with_heads(folder, heads, class_name="Qwen2ForProcessRewardModel", architecture="qwen2")
    return folder, {"step_token": "<|endoftext|>", "step_separator": ".", "reduction": "product"}


def generative(folder):
    folder = tiny_models.save_policy(folder, "gpt2", initializer_range=0.3)
    return folder, {"kind": "generative", "question": "Is it?", "answers": ("The", "N")}


def implicit(folder):
    policy, reference = (
        tiny_models.save_policy(folder / str(seed), seed=seed, initializer_range=0.3) for seed in (1, 2)
    )
    return policy, {"kind": "implicit", "reference": str(reference)}


KINDS = (classifier, multi_head, process, generative, implicit)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_score_of_every_kind_does_not_depend_on_the_batch(make, tmp_path, some):
    folder, options = make(tmp_path)
    scorer = gym_rm.load_scorer({"path": str(folder), **options})
    has_steps = [each for each in some if each[-1]["content"].strip(" .")]
    assert scorer.provenance.layout == "tree"
    assert bit_equal(scorer)
    expected = [scorer.score([each]) for each in has_steps]
    for rows, budget in batches(len(has_steps)):
        scores = score_with_budget(scorer, [has_steps[row] for row in rows], budget)
        assert scores.rewards.tolist() == [expected[row].rewards[0] for row in rows]
        for name, values in scores.components.items():
            assert values.tolist() == [expected[row].components[name][0] for row in rows]
        for row, steps in zip(rows, scores.step_rewards or (), strict=False):
            assert steps.tolist() == expected[row].step_rewards[0].tolist()


@pytest.mark.parametrize("tokens", [320, 1000, 50_000])
def test_scores_do_not_depend_on_what_is_in_the_prefix_cache(tokens, saved_model, scorer_of, some):
    """Without, with some, and with all of the prefixes."""
    scorer = gym_rm.load_scorer(saved_model("qwen3"), prefix_cache_tokens=tokens)
    assert_scores_do_not_depend_on_the_batch(scorer, some, alone(scorer_of("qwen3"), some))
    assert scorer.score(some).workload.reused_tokens > 0


@pytest.mark.parametrize("architecture", others_slow(["qwen3", "gemma2", "mixtral", "bert", "gpt2"], "qwen3"))
@pytest.mark.parametrize("rows", [GemmRows(64), GemmRows(64, in_chunks=True), GemmRows(512)], ids=str)
def test_scores_do_not_depend_on_the_batch_with_other_rows(architecture, rows, saved_model, some, monkeypatch):
    monkeypatch.setattr(loaded_model, "rows_to_try", lambda backbones: [rows])
    scorer = gym_rm.load_scorer(saved_model(architecture))
    assert scorer.provenance.rows == str(rows)
    assert scorer.layout in tiny_models.layouts(architecture)
    assert bit_equal(scorer)
    assert_scores_do_not_depend_on_the_batch(scorer, some)


@pytest.mark.parametrize("architecture", ["qwen3", "bert"])
def test_scores_of_a_model_in_training_do_not_depend_on_the_batch(architecture, saved_model, scorer_of, some):
    folder = saved_model(architecture)
    exact = tiny_models.attention(AutoModelForSequenceClassification.from_pretrained(folder).config)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=exact).train()
    model.to(tiny_models.DEVICE)
    scorer = gym_rm.RewardModelScorer(model, AutoTokenizer.from_pretrained(folder))
    assert_scores_do_not_depend_on_the_batch(scorer, some, alone(scorer_of(architecture), some))
    assert model.training


# --- failures


@pytest.mark.parametrize("tree", [True, False])
def test_scores_after_running_out_of_memory_have_the_same_bits(tree, parts, some, gsm8k_groups):
    several = [*some, *(each for group in gsm8k_groups[1:7] for each in group)]
    expected = alone(gym_rm.RewardModelScorer(*parts, tree=tree), several)
    too_large = torch.OutOfMemoryError("CUDA out of memory")
    scorer = watched_scorer(
        parts,
        tree=tree,
        fails=lambda batch, call: too_large if size_of(batch) > LONGEST else None,
        max_num_batched_tokens=10**6,
    )
    assert max(len(each.input_ids) for each in scorer.renderer.encode(several)) < LONGEST - WIDTH_STEP
    assert scorer.score(several).rewards.tolist() == expected
    for rows, _ in itertools.islice(batches(len(several)), 2):
        assert scorer.score([several[row] for row in rows]).rewards.tolist() == [expected[row] for row in rows]
    assert scorer.max_num_batched_tokens <= LONGEST


# --- lengths


def random_ids(length, seed=0):
    return np.random.default_rng(seed).integers(10, 150, length).astype(np.int32)


def values_of(executor, info, sequences, budget=10**6):
    result = Scheduler(info, layout=info.layout, budget=budget).run([sequences], executor)
    assert not result.failures
    return result.values


def ending(ids):
    return TokenSequence(ids, np.array([len(ids) - 1]))


def assert_values_do_not_depend_on_the_batch(architecture, model, sequences, **options):
    readout = ClassifierLogits() if architecture in tiny_models.ENCODERS else ModuleHead("score")
    executor = LocalExecutor()
    info = executor.load(LoadSpec(model.to(tiny_models.DEVICE), readout, **options))
    assert info.layout in (tiny_models.layouts(architecture) if options.get("tree", True) else ("padded",))
    assert info.batch_invariance == "bit-equal"
    expected = [values_of(executor, info, [each])[0] for each in sequences]
    longest = max(len(each.input_ids) for each in sequences)
    for rows, budget in batches(len(sequences)):
        budget = max(budget, longest)
        for row, values in zip(rows, values_of(executor, info, [sequences[k] for k in rows], budget), strict=True):
            assert np.array_equal(values, expected[row]), (len(sequences[row].input_ids), budget)


LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize(
    "architecture",
    others_slow(["qwen3", "mistral", "gpt2", "gemma3", "mixtral", "bert", "bloom", "deberta_v2"], "qwen3", "bert"),
)
def test_values_of_every_length_do_not_depend_on_the_batch(architecture):
    """One token, and lengths around those of pages, tiles and padded batches; with and without shared prefixes."""
    sequences = [ending(random_ids(length, seed)) for length in LENGTHS for seed in (0, length)]
    assert_values_do_not_depend_on_the_batch(architecture, tiny_models.reward_model(architecture), sequences)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("bert", {"max_position_embeddings": 64}), ("gpt2", {"n_positions": 64}), ("gpt2", {"n_positions": 50})],
)
@pytest.mark.parametrize("tree", [True, False])
def test_sequences_may_have_as_many_tokens_as_the_model_has_positions(architecture, config, tree):
    limit = next(iter(config.values()))
    model = tiny_models.reward_model(architecture, **config)
    lengths = [1, 31, 32, 33, limit - 1, limit, limit]
    sequences = [ending(random_ids(length, seed)) for seed, length in enumerate(lengths)]
    assert_values_do_not_depend_on_the_batch(architecture, model, sequences, tree=tree)


@pytest.mark.parametrize("architecture", others_slow(["qwen3", "gemma2", "gpt2", "bloom"], "qwen3"))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=st.sampled_from(LENGTHS), replies=st.lists(st.integers(1, 3), min_size=1, max_size=5), data=st.data())
def test_branches_of_few_tokens_do_not_depend_on_each_other(architecture, prompt, replies, data, executor_of):
    """A prompt by itself, and replies of one to three tokens; every position of a sequence may be read."""
    executor, info = executor_of(architecture)
    start = random_ids(prompt)
    sequences = [ending(start)]
    for seed, length in enumerate(replies):
        ids = np.r_[start, random_ids(length, 100 + seed)].astype(np.int32)
        first = data.draw(st.integers(0, len(ids) - 1))
        sequences.append(TokenSequence(ids, np.arange(first, len(ids))))
    expected = [values_of(executor, info, [each])[0] for each in sequences]
    for got, values in zip(values_of(executor, info, sequences), expected, strict=True):
        assert np.array_equal(got, values)


@pytest.fixture(scope="module")
def executor_of():
    """Function that returns a loaded executor and the properties of its model."""

    @functools.cache
    def load(architecture):
        executor, model = LocalExecutor(), tiny_models.reward_model(architecture).to(tiny_models.DEVICE)
        info = executor.load(LoadSpec(model, ModuleHead("score")))
        assert info.layout in tiny_models.layouts(architecture)
        return executor, info

    return load


# --- threads


@pytest.fixture
def threads():
    """Function that sets the number of torch's threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "sizes", [{}, {"hidden_size": 44, "intermediate_size": 77, "head_dim": 10}], ids=["even", "odd"]
)
def test_scores_have_the_same_bits_with_any_number_of_threads(sizes, some, threads):
    model = tiny_models.reward_model("qwen3", **sizes)
    scores = []
    for number in (1, 2, 3):
        threads(number)
        scorer = gym_rm.RewardModelScorer(model, tiny_models.tokenizer("chatml"))
        scores.append([*scorer.score(some[::3]).rewards, *scorer.score(some[:1]).rewards])
        assert scorer.provenance.batch_invariance == "bit-equal"
    assert scores == [scores[0]] * 3
