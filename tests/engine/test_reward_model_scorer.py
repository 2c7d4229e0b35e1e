import copy
import logging
import pickle
import threading
import time

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gym_rm
from gym_rm.engine.schedule import CPU_BATCHED_TOKENS
from gym_rm.errors import ConfigError, ScoringError, warn_once
from gym_rm.engine.executors import LocalExecutor
from gym_rm.engine.text.renderer import InputFormat, Renderer
from gym_rm.testing import check_scorer
from gym_rm.engine.token_tree import PaddedBatch

TOLERANCE = 1e-5


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def dialogue(*texts):
    return [(assistant if k % 2 else user)(text) for k, text in enumerate(texts)]


class Watched:
    """An executor that fails where it is told to, and remembers what it was given."""

    def __init__(self, executor, *, fails=None):
        self.executor = executor
        self.fails = fails or (lambda batch, call: None)
        self.batches = []

    def run(self, batches):
        values = []
        for batch in batches:
            self.batches.append(batch)
            error = self.fails(batch, len(self.batches))
            if error is not None:
                raise error
            values.append(self.executor.run([batch]))
        return np.concatenate(values) if values else self.executor.run([])

    def sleep(self):
        self.executor.sleep()

    def wake(self):
        self.executor.wake()


def size_of(batch):
    return batch.input_ids.size


@pytest.fixture(scope="module")
def parts(saved_model):
    """A loaded model with its tokenizer, for scorers with an executor of the test's own."""
    folder = saved_model("qwen3")
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def watched_scorer(parts, *, fails=None, **options):
    model, tokenizer = parts
    scorer = gym_rm.RewardModelScorer(model, tokenizer, **options)
    scorer.executor = Watched(LocalExecutor(scorer.model), fails=fails)
    return scorer


@pytest.fixture
def logged(caplog):
    """What was logged in this test; warnings that are given once are given anew."""
    warn_once.cache_clear()
    caplog.set_level(logging.INFO, "gym_rm")
    return caplog


# --- the contract


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "bloom", "bert", "xlnet"])
def test_keeps_the_contract_of_scorers(architecture, scorer_of, real_conversations):
    check_scorer(scorer_of(architecture))
    check_scorer(scorer_of(architecture), conversations=real_conversations)


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"cache_size": 8}, {"max_num_batched_tokens": 300}])
def test_keeps_the_contract_with_options(options, saved_model):
    check_scorer(gym_rm.load_scorer(saved_model("qwen3"), **options))


def test_no_conversations(scorer_of):
    for turns in ("last", "all"):
        scores = scorer_of("qwen3").score([], turns=turns)
        assert len(scores) == 0
        assert scores.rewards.dtype == np.float32
        assert scores.workload.num_tokens == scores.workload.num_batches == 0


def test_counts_and_costs(scorer_of, real_conversations):
    scorer = scorer_of("qwen3")
    scores = scorer.score(real_conversations)
    lengths = [len(one.input_ids) for one in scorer.renderer.encode(real_conversations)]
    assert scores.num_tokens.tolist() == lengths
    assert scores.truncated_tokens.tolist() == [0] * len(lengths)
    assert scores.errors == (None,) * len(lengths)
    work = scores.workload
    assert work.num_tokens == sum(lengths)
    assert work.unique_tokens < 0.75 * work.num_tokens, "groups and pairs share their prompts"
    assert work.padded_tokens == 0
    assert min(work.render_seconds, work.plan_seconds, work.run_seconds) > 0
    again = scorer.score([*real_conversations] * 3)
    assert again.workload.unique_tokens == work.unique_tokens, "repeated conversations cost nothing"
    assert again.workload.num_tokens == 3 * work.num_tokens


def test_padding_is_counted(scorer_of, real_conversations):
    scores = scorer_of("bert").score(real_conversations)
    assert scores.workload.padded_tokens > 0
    assert scores.workload.unique_tokens == scores.workload.num_tokens


# --- a score depends on its conversation alone


texts = st.sampled_from(
    ["", "What is 12 + 30?", "The sum is 42.", "I don't think so", "a", "42 <|im_end|>", "world\n\n"]
)
conversations = st.lists(texts, min_size=1, max_size=6).map(lambda said: dialogue(*said))


@pytest.fixture(scope="module")
def alone(scorer_of):
    """Rewards of conversations each scored by itself, remembered."""
    remembered = {}

    def reward(architecture, conversation):
        key = (architecture, repr(conversation))
        if key not in remembered:
            remembered[key] = scorer_of(architecture).score([conversation]).rewards[0]
        return remembered[key]

    return reward


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gpt2", "roberta"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_company_gives_the_same_scores(architecture, data, scorer_of, alone):
    """Any order, neighbours, repetitions, nesting and budget."""
    given_ = data.draw(st.lists(conversations, min_size=1, max_size=8))
    nested = [each[: data.draw(st.integers(1, len(each)))] for each in given_[:2]]
    batch = data.draw(st.permutations([*given_, *nested, *given_[:3]]))
    scorer = scorer_of(architecture)
    longest = max(len(one.input_ids) for one in scorer.renderer.encode(batch))
    budget = scorer.max_num_batched_tokens
    scorer.max_num_batched_tokens = data.draw(st.integers(longest, 4 * longest))
    try:
        rewards = scorer.score(batch).rewards
    finally:
        scorer.max_num_batched_tokens = budget
    by_conversation = {}
    for conversation, reward in zip(batch, rewards, strict=True):
        assert by_conversation.setdefault(repr(conversation), reward) == reward, "equal conversations, equal bits"
        assert abs(reward - alone(architecture, conversation)) <= TOLERANCE


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_batch_invariant_scores_do_not_move_by_a_bit(data, invariant):
    batch = data.draw(st.lists(conversations, min_size=1, max_size=8))
    expected = [invariant.score([conversation]).rewards[0] for conversation in batch]
    assert invariant.score(batch).rewards.tolist() == expected
    assert invariant.score(batch[::-1]).rewards[::-1].tolist() == expected


@pytest.fixture(scope="module")
def invariant(saved_model):
    return gym_rm.load_scorer(saved_model("qwen3"), batch_invariant=True)


def test_batch_invariant_on_real_conversations(saved_model, real_conversations):
    for architecture in ("qwen3", "deberta_v2"):
        scorer = gym_rm.load_scorer(saved_model(architecture), batch_invariant=True)
        rewards = scorer.score(real_conversations).rewards
        alone = [scorer.score([conversation]).rewards[0] for conversation in real_conversations]
        assert rewards.tolist() == alone
        assert scorer.provenance.layout == "one_by_one"
        assert scorer.provenance.settings["batch_invariant"] is True


@pytest.mark.parametrize("budget", [450, 700, 1500, 100_000])
def test_every_batch_keeps_the_budget(budget, parts, real_conversations):
    for tree in (True, False):
        scorer = watched_scorer(parts, max_num_batched_tokens=budget, tree=tree)
        scores = scorer.score(real_conversations)
        assert all(size_of(batch) <= budget for batch in scorer.executor.batches)
        assert scores.workload.num_batches == len(scorer.executor.batches)
        assert {isinstance(batch, PaddedBatch) for batch in scorer.executor.batches} == {not tree}


def test_a_conversation_over_the_budget_is_an_error_of_its_row(parts):
    scorer = watched_scorer(parts, max_num_batched_tokens=60)
    short, long = dialogue("q", "a"), dialogue("q", "very long " * 60)
    reason = r"row 1: the conversation has \d+ tokens, over max_num_batched_tokens=60"
    with pytest.raises(ScoringError, match=reason) as caught:
        scorer.score([short, long, short])
    assert caught.value.rows == (1,)
    rewards = caught.value.scores.rewards
    assert rewards[0] == rewards[2] == scorer.score([short]).rewards[0]


def test_the_automatic_budget_stretches_for_a_long_conversation(parts):
    scorer = watched_scorer(parts, max_length=100_000)
    assert scorer.max_num_batched_tokens == CPU_BATCHED_TOKENS
    scores = scorer.score([dialogue("q", "very long " * 1500), dialogue("q", "a")])
    assert scores.num_tokens[0] > CPU_BATCHED_TOKENS
    assert np.isfinite(scores.rewards).all()


# --- every turn in one pass


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "bert", "bloom"])
def test_turns_equal_every_prefix_by_itself(architecture, scorer_of, hh_pairs):
    scorer = scorer_of(architecture)
    dialogues = [
        pair[0] for pair in hh_pairs if len(pair[0]) in (4, 6) and sum(len(m["content"]) for m in pair[0]) < 800
    ]
    dialogues = [
        *dialogues[:3],
        [*dialogues[3], user("and?")],
        dialogue("q", "<think>so</think>\nyes", "why?", "because"),
    ]
    scores = scorer.score(dialogues, turns="all")
    for conversation, turn_rewards, reward in zip(dialogues, scores.turn_rewards, scores.rewards, strict=True):
        stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        stops += [len(conversation)] * (conversation[-1]["role"] != "assistant")
        expected = [scorer.score([conversation[:stop]]).rewards[0] for stop in stops]
        np.testing.assert_allclose(turn_rewards, expected, atol=TOLERANCE, rtol=0)
        assert turn_rewards.dtype == np.float32
        assert turn_rewards[-1] == reward
    assert scorer.score(dialogues).turn_rewards is None


def test_turns_of_a_prefix_monotone_template_cost_nothing_more(scorer_of, hh_pairs):
    scorer = scorer_of("llama")
    conversation = max((pair[0] for pair in hh_pairs), key=len)[:12]
    last, every = scorer.score([conversation]), scorer.score([conversation], turns="all")
    assert every.workload.unique_tokens == last.workload.unique_tokens
    assert every.workload.num_tokens > last.workload.num_tokens


def test_turns_where_one_cannot_be_rendered(scorer_of):
    with pytest.raises(ScoringError) as caught:
        scorer_of("qwen3").score([dialogue("q", "a"), dialogue("q", "\udc00")], turns="all")
    assert caught.value.rows == (1,)
    assert [len(turns) for turns in caught.value.scores.turn_rewards] == [1, 0]


def test_turns_must_be_last_or_all(scorer_of):
    with pytest.raises(ConfigError, match="turns must be 'last' or 'all'; got 'each'"):
        scorer_of("qwen3").score([], turns="each")


# --- faults


def poisoned(parts, token):
    """The model with an embedding that is no number for one token."""
    model, tokenizer = parts
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.base_model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(token)] = float("nan")
    return model, tokenizer


@pytest.mark.parametrize("options", [{}, {"tree": False}, {"batch_invariant": True}])
def test_weights_that_are_no_numbers_cost_the_rows_that_read_them(parts, options):
    good, bad = dialogue("Tell me", "yes"), dialogue("Tell me", "no ~")
    scorer = watched_scorer(poisoned(parts, "~"), **options)
    expected = watched_scorer(parts, **options).score([good]).rewards[0]
    reason = "1 of 3 conversations could not be scored: row 1: the reward model gave nan"
    with pytest.raises(ScoringError, match=reason) as caught:
        scorer.score([good, bad, good])
    scores = caught.value.scores
    assert np.isnan(scores.rewards[1])
    np.testing.assert_allclose(scores.rewards[[0, 2]], expected, atol=TOLERANCE)
    assert scores.errors[0] is scores.errors[2] is None
    assert pickle.loads(pickle.dumps(caught.value)).rows == (1,)


def test_all_weights_that_are_no_numbers(parts, real_conversations):
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    with torch.no_grad():
        model.score.weight.fill_(float("inf"))
    with pytest.raises(ScoringError) as caught:
        gym_rm.RewardModelScorer(model, tokenizer).score(real_conversations)
    assert caught.value.rows == tuple(range(len(real_conversations)))
    assert np.isnan(caught.value.scores.rewards).all()
    assert "and 3 more" in str(caught.value)


def test_an_executor_that_always_fails_at_the_third_batch(parts, gsm8k_groups, logged):
    conversations = [conversation for group in gsm8k_groups[:6] for conversation in group]
    expected = watched_scorer(parts, max_num_batched_tokens=1200).score(conversations)
    assert expected.workload.num_batches >= 4
    broken = []

    def fails(batch, call):
        if call == 3:
            broken.append(batch)
        return RuntimeError("the device fell off") if any(batch is each for each in broken) else None

    scorer = watched_scorer(parts, fails=fails, max_num_batched_tokens=1200)
    with pytest.raises(ScoringError) as caught:
        scorer.score(conversations)
    scores = caught.value.scores
    assert 0 < len(caught.value.rows) < len(conversations) / 2
    assert {scores.errors[row] for row in caught.value.rows} == {"its batch failed: RuntimeError: the device fell off"}
    kept = [row for row in range(len(conversations)) if row not in caught.value.rows]
    assert scores.rewards[kept].tolist() == expected.rewards[kept].tolist()
    assert np.isnan(scores.rewards[list(caught.value.rows)]).all()
    assert "running the batches one by one" in logged.text
    assert scorer.score(conversations[:4]).failed_rows == (), "the scorer lives on"


def test_a_failure_that_passes_costs_nothing(parts, real_conversations):
    expected = watched_scorer(parts, max_num_batched_tokens=600).score(real_conversations).rewards
    scorer = watched_scorer(
        parts,
        max_num_batched_tokens=600,
        fails=lambda batch, call: ConnectionError("try again") if call == 2 else None,
    )
    assert scorer.score(real_conversations).rewards.tolist() == expected.tolist()


def out_of_memory_above(limit):
    return lambda batch, call: torch.OutOfMemoryError("CUDA out of memory") if size_of(batch) > limit else None


@pytest.mark.parametrize("tree", [True, False])
def test_out_of_memory_halves_the_budget_and_remembers_it(tree, parts, gsm8k_groups, logged):
    conversations = [conversation for group in gsm8k_groups[:6] for conversation in group]
    expected = watched_scorer(parts, tree=tree).score(conversations).rewards
    limit = max(len(one.input_ids) for one in Renderer(parts[1]).encode(conversations)) + 100
    scorer = watched_scorer(parts, tree=tree, fails=out_of_memory_above(limit), max_num_batched_tokens=100_000)
    rewards = scorer.score(conversations).rewards
    np.testing.assert_allclose(rewards, expected, atol=TOLERANCE, rtol=0)
    assert scorer.max_num_batched_tokens <= limit
    warned = [record.message for record in logged.records if record.levelno == logging.WARNING]
    assert len([message for message in warned if "out of memory" in message]) == 1
    assert f"continuing with {scorer.max_num_batched_tokens}" in warned[0]

    scorer.executor.batches.clear()
    assert scorer.score(conversations).rewards.tolist() == rewards.tolist()
    assert max(map(size_of, scorer.executor.batches)) <= limit, "nothing is tried that failed before"
    assert len(logged.records) == len([r for r in logged.records if "out of memory" not in r.message]) + 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 99 bytes")])
def test_out_of_memory_of_a_host(error, parts, real_conversations):
    expected = watched_scorer(parts).score(real_conversations).rewards
    scorer = watched_scorer(
        parts, max_num_batched_tokens=50_000, fails=lambda batch, call: error if size_of(batch) > 700 else None
    )
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE, rtol=0)


def test_a_conversation_too_long_for_the_memory_is_an_error_of_its_row(parts, real_conversations):
    lengths = [len(one.input_ids) for one in Renderer(parts[1]).encode(real_conversations)]
    longest = int(np.argmax(lengths))
    scorer = watched_scorer(
        parts, fails=out_of_memory_above(max(lengths) - 1), max_num_batched_tokens=50_000, tree=False
    )
    with pytest.raises(ScoringError, match="OutOfMemoryError") as caught:
        scorer.score(real_conversations)
    assert longest in caught.value.rows
    assert len(caught.value.rows) < len(real_conversations)


def test_interrupts_pass_through_and_leave_the_scorer_usable(parts, real_conversations):
    scorer = watched_scorer(parts, fails=lambda batch, call: KeyboardInterrupt() if call == 1 else None)
    with pytest.raises(KeyboardInterrupt):
        scorer.score(real_conversations)
    assert scorer.score(real_conversations).failed_rows == ()


def test_a_megabyte_and_ten_thousand_turns(scorer_of):
    scorer = scorer_of("qwen3")
    huge, endless = dialogue("q", "So it is. " * 100_000), dialogue(*["turn"] * 10_000)
    with pytest.raises(ScoringError, match="over max_length=32768") as caught:
        scorer.score([huge, dialogue("q", "a"), endless])
    assert caught.value.rows == (0, 2)
    assert caught.value.scores.rewards[1] == scorer.score([dialogue("q", "a")]).rewards[0]


@pytest.mark.parametrize("overlong", ["drop_turns", "truncate_left"])
def test_what_is_cut_is_counted_and_warned_of_once(overlong, saved_model, logged):
    scorer = gym_rm.load_scorer(saved_model("qwen3"), max_length=200, overlong=overlong)
    endless = dialogue(*["What is 12 + 30?", "It is 42."] * 5000)
    scores = scorer.score([endless, dialogue("q", "a"), endless])
    whole = len(Renderer(scorer.renderer.tokenizer).encode([endless])[0].input_ids)
    assert scores.num_tokens[0] <= 200
    assert scores.truncated_tokens.tolist() == [whole - scores.num_tokens[0], 0, whole - scores.num_tokens[0]]
    assert scores.provenance.settings["overlong"] == overlong
    scorer.score([endless])
    assert len([record for record in logged.records if "are cut" in record.message]) == 1


# --- remembering


def test_the_cache_answers_what_it_knows(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=100)
    first = scorer.score(real_conversations)
    scorer.executor.batches.clear()
    again = scorer.score(real_conversations[::-1])
    assert again.rewards.tolist() == first.rewards[::-1].tolist()
    assert again.workload.num_batches == again.workload.unique_tokens == 0
    assert again.num_tokens.tolist() == first.num_tokens[::-1].tolist()
    assert not scorer.executor.batches
    new = dialogue("q", "something new")
    mixed = scorer.score([real_conversations[0], new, real_conversations[1], new])
    assert [size_of(batch) for batch in scorer.executor.batches] == [mixed.num_tokens[1]]
    assert mixed.rewards[[0, 2]].tolist() == first.rewards[:2].tolist()


def test_the_cache_is_bounded_and_forgets_the_oldest(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=3)
    scorer.score(real_conversations)
    assert len(scorer._cache) == 3
    a, b, c, d = real_conversations[:4]
    scorer.clear_cache()
    scorer.score([a, b, c])
    scorer.score([a])  # a is younger than b now
    scorer.score([d])
    scorer.executor.batches.clear()
    scorer.score([a, c, d])
    assert not scorer.executor.batches
    scorer.score([b])
    assert scorer.executor.batches


def test_failures_are_not_remembered(parts):
    scorer = watched_scorer(parts, cache_size=10, fails=lambda batch, call: RuntimeError("x") if call <= 2 else None)
    with pytest.raises(ScoringError):
        scorer.score([dialogue("q", "a")])
    assert scorer.score([dialogue("q", "a")]).failed_rows == ()


def test_a_model_in_training(saved_model, real_conversations):
    folder = saved_model("qwen3", attention_dropout=0.5)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.train()
    scorer = gym_rm.RewardModelScorer(model, tokenizer, cache_size=100)
    assert scorer.layout == "tree"
    before = scorer.score(real_conversations).rewards
    np.testing.assert_allclose(before, tiny_models.plain_rewards(folder, real_conversations), atol=TOLERANCE)
    assert model.training
    assert all(part.training for part in model.modules())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tiny_models.plain_ids(tokenizer, real_conversations[0])
    model(**ids).logits.sum().backward()
    optimizer.step()
    assert scorer.score(real_conversations).rewards.tolist() == before.tolist(), "remembered until told otherwise"
    scorer.clear_cache()
    after = scorer.score(real_conversations).rewards
    assert np.abs(after - before).max() > 1e-3
    model.eval()
    with torch.inference_mode():
        expected = [model(**tiny_models.plain_ids(tokenizer, c)).logits.item() for c in real_conversations]
    np.testing.assert_allclose(after, expected, atol=TOLERANCE)


# --- company in the process


def test_threads_score_at_once(parts, real_conversations):
    scorer = watched_scorer(parts, cache_size=4)
    expected = scorer.score(real_conversations).rewards
    results, errors = {}, []

    def work(worker):
        try:
            rows = np.random.default_rng(worker).permutation(len(real_conversations))
            for _ in range(3):
                rewards = scorer.score([real_conversations[row] for row in rows]).rewards
                results.setdefault(worker, []).append(np.abs(rewards - expected[rows]).max())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert max(max(each) for each in results.values()) <= TOLERANCE
    assert len(results) == 6


def test_two_scorers_in_one_process(scorer_of, saved_model, real_conversations):
    """Of other architectures, taking turns; and two over the same model in two threads."""
    one, other = scorer_of("gemma2"), scorer_of("llama")
    for _ in range(2):
        for scorer, architecture in ((one, "gemma2"), (other, "llama")):
            expected = tiny_models.plain_rewards(saved_model(architecture), real_conversations[:3])
            np.testing.assert_allclose(scorer.score(real_conversations[:3]).rewards, expected, atol=TOLERANCE)


def test_two_scorers_over_one_model_in_two_threads(saved_model, real_conversations):
    folder = saved_model("gemma2")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scorers = [gym_rm.RewardModelScorer(model, tokenizer, tree=tree) for tree in (True, False)]
    expected = scorers[0].score(real_conversations).rewards
    worst, stop = [], time.monotonic() + 1.0

    def work(scorer):
        while time.monotonic() < stop:
            try:
                worst.append(np.abs(scorer.score(real_conversations[:4]).rewards - expected[:4]).max())
            except ScoringError as error:
                worst.append(str(error))

    threads = [threading.Thread(target=work, args=(scorer,)) for scorer in scorers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(each, np.floating) and each <= TOLERANCE for each in worst), worst[:3]


def test_sleeping_scorers_wake_by_themselves(saved_model, real_conversations):
    scorer = gym_rm.load_scorer(saved_model("qwen3"))
    before = scorer.score(real_conversations).rewards
    scorer.sleep()
    scorer.sleep()
    assert scorer.score(real_conversations).rewards.tolist() == before.tolist()
    scorer.sleep()
    scorer.wake()
    scorer.wake()
    assert scorer.score(real_conversations).rewards.tolist() == before.tolist()


def test_copies_are_the_same_scorer(scorer_of):
    assert copy.deepcopy(scorer_of("qwen3")) is scorer_of("qwen3")


# --- what made a score


def test_provenance(saved_model):
    folder = saved_model("qwen3")
    scorer = gym_rm.load_scorer(folder, max_length=512, overlong="drop_turns", pooling="last")
    made = scorer.score([dialogue("q", "a")]).provenance
    assert (made.scorer, made.model, made.dtype, made.device, made.layout) == (
        "RewardModelScorer",
        folder,
        "float32",
        "cpu",
        "tree",
    )
    assert made.template_hash == Renderer(tiny_models.tokenizer("qwen")).template_hash
    assert made.settings == {
        "kind": "decoder",
        "max_length": 512,
        "overlong": "drop_turns",
        "batch_invariant": False,
        "pooling": "last",
    }
    assert made.revision is None


def test_half_precision_is_said_and_its_head_is_exact(saved_model, real_conversations):
    """Scores of a bfloat16 head would come in steps of 2^-7 of their size; these do not."""
    scorer = gym_rm.load_scorer(saved_model("qwen3"), dtype="bfloat16")
    assert scorer.provenance.dtype == "bfloat16"
    rewards = scorer.score(real_conversations).rewards
    assert rewards.dtype == np.float32
    assert not np.array_equal(torch.from_numpy(rewards).bfloat16().float().numpy(), rewards)
    full = gym_rm.load_scorer(saved_model("qwen3")).score(real_conversations).rewards
    assert np.corrcoef(rewards, full)[0, 1] > 0.99


# --- what a user can get wrong


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be 'auto' or a positive integer; got 0"),
        ({"max_num_batched_tokens": "lots"}, "max_num_batched_tokens must be"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"overlong": "cut"}, "overlong must be"),
        ({"pooling": "mean"}, "pooling must be"),
        ({"kind": "oracle"}, "unknown kind"),
        ({"dtype": "float33"}, "dtype must be.*Did you mean 'float32'"),
        ({"device": "tpu"}, "device must be"),
        ({"batch_invariance": True}, "batch_invariance"),
        ({"cache_size": -1}, "cache_size"),
    ],
)
def test_options_that_cannot_be(options, reason, saved_model):
    with pytest.raises(ConfigError, match=reason):
        gym_rm.load_scorer(saved_model("qwen3"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(saved_model):
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        gym_rm.load_scorer(saved_model("qwen3"), device="cuda")


def test_a_head_of_another_width(saved_model):
    with pytest.raises(ConfigError, match="a head of 2 outputs"):
        gym_rm.load_scorer(saved_model("qwen3", num_labels=2))


def test_a_policy_is_no_reward_model(tmp_path):
    with pytest.raises(ConfigError):
        gym_rm.load_scorer(tiny_models.save_policy(tmp_path))


def test_a_checkpoint_without_a_template(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, "qwen3")
    tiny_models.tokenizer("qwen", chat_template=None).save_pretrained(folder)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no chat template"):
        gym_rm.load_scorer(folder)
    scores = gym_rm.load_scorer(folder, chat_template=tiny_models.QWEN).score([dialogue("q", "a")])
    expected = gym_rm.load_scorer(tiny_models.save_reward_model(tmp_path / "with", "qwen3")).score([dialogue("q", "a")])
    assert scores.rewards[0] == expected.rewards[0]


# --- where the head reads


@pytest.fixture(scope="module")
def padding_with_eos(tmp_path_factory):
    """A checkpoint that pads with EOS and a template that ends in EOS: the quirk of the Hugging Face head."""
    folder = tmp_path_factory.mktemp("padding_with_eos")
    template = tiny_models.CHATML.replace("<|im_end|>\\n' }}{% endfor", "<|im_end|>' }}{% endfor")
    tok = tiny_models.tokenizer(
        "chatml", chat_template=template.replace("<|im_end|>\n'", "<|im_end|>'"), pad_token="<|im_end|>"
    )
    model = tiny_models.reward_model("qwen3", pad_token_id=tok.eos_token_id, eos_token_id=tok.eos_token_id)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder


def test_pooling_where_the_text_ends_in_padding(padding_with_eos, real_conversations, logged):
    expected = tiny_models.plain_rewards(padding_with_eos, real_conversations)
    default = gym_rm.load_scorer(padding_with_eos)
    assert default.provenance.settings["pooling"] == "hf"
    np.testing.assert_allclose(default.score(real_conversations).rewards, expected, atol=TOLERANCE)
    assert "reads position -2 from the end, the last token is at -1" in logged.text
    assert len([record for record in logged.records if "padding token" in record.message]) == 1

    last = gym_rm.load_scorer(padding_with_eos, pooling="last")
    rewards = last.score(real_conversations).rewards
    assert np.abs(rewards - expected).min() > 1e-4
    model = AutoModelForSequenceClassification.from_pretrained(padding_with_eos)
    tok = AutoTokenizer.from_pretrained(padding_with_eos)
    with torch.inference_mode():
        hidden = [model.model(**tiny_models.plain_ids(tok, c)).last_hidden_state[0, -1] for c in real_conversations]
        at_the_end = model.score(torch.stack(hidden))[:, 0].numpy()
    np.testing.assert_allclose(rewards, at_the_end, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["hf", "last"])
def test_poolings_agree_where_the_text_ends_in_text(pooling, saved_model, real_conversations, logged):
    expected = tiny_models.plain_rewards(saved_model("qwen3"), real_conversations)
    scorer = gym_rm.load_scorer(saved_model("qwen3"), pooling=pooling)
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)
    assert "padding token" not in logged.text


def test_a_checkpoint_without_a_padding_token(tmp_path, real_conversations):
    folder = tiny_models.save_reward_model(tmp_path, "qwen3")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    tiny_models.tokenizer("qwen", pad_token=None).save_pretrained(folder)
    expected = tiny_models.plain_rewards(folder, real_conversations)
    for options in ({}, {"tree": False}):
        scorer = gym_rm.load_scorer(folder, **options)
        assert scorer.renderer.tokenizer.pad_token_id is None
        assert scorer.layout == ("tree" if not options else "padded")
        np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["bloom", "qwen3"])
@pytest.mark.parametrize("padding", [-1, 100_000])
def test_a_padding_token_without_an_embedding(architecture, padding, tmp_path, saved_model, real_conversations):
    """As configurations of Llama say (-1), or tokenizers to which one was added later."""
    model = AutoModelForSequenceClassification.from_pretrained(saved_model(architecture))
    expected = tiny_models.plain_rewards(saved_model(architecture), real_conversations)
    model.config.pad_token_id = padding
    scorer = gym_rm.RewardModelScorer(model, AutoTokenizer.from_pretrained(saved_model(architecture)), tree=False)
    assert scorer.layout == "padded"
    np.testing.assert_allclose(scorer.score(real_conversations).rewards, expected, atol=TOLERANCE)


def test_a_token_without_an_embedding_is_an_error_of_its_row(parts):
    model, tokenizer = parts
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["<new>"])
    scorer = gym_rm.RewardModelScorer(model, grown)
    with pytest.raises(ScoringError, match=r"row 1: the token '<new>' has the id 400, but the model has 400") as caught:
        scorer.score([dialogue("q", "a"), dialogue("q", "<new>")])
    assert caught.value.rows == (1,)


def test_messages_full_of_padding_are_text(padding_with_eos):
    """Pads in a reply are spelled out, so that the search for the last token that is no padding finds the end."""
    scorer = gym_rm.load_scorer(padding_with_eos)
    (rendered,) = scorer.renderer.encode([dialogue("q", "<|im_end|>" * 5)])
    assert (rendered.input_ids == scorer.renderer.tokenizer.pad_token_id).sum() == 2
    assert scorer.model.reads(rendered).tolist() == [len(rendered.input_ids) - 2]


def test_presentation_is_the_models(scorer_of):
    assert scorer_of("bert").renderer.input_format == InputFormat(encoder=True)
    assert scorer_of("qwen3").renderer.input_format == InputFormat()


def test_a_scorer_can_be_pickled(scorer_of, real_conversations):
    scorer = scorer_of("qwen3")
    copied = pickle.loads(pickle.dumps(scorer))
    assert copied.score(real_conversations).rewards.tolist() == scorer.score(real_conversations).rewards.tolist()
    assert copied.provenance == scorer.provenance
