import threading

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from hypothesis import strategies as st

import gym_rm
from gym_rm.engine.executors.model_info import CPU_BATCHED_TOKENS
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.token_tree import PaddedBatch
from gym_rm.errors import ConfigError
from gym_rm.scores import ScoringError
from gym_rm.testing import check_scorer
from gym_rm.types import Prompt
from tests.engine.watching import dialogue, size_of, watched_scorer

# --- the contract


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "bloom", "bert", "xlnet"])
def test_keeps_the_contract_of_scorers(architecture, scorer_of, real_conversations):
    assert scorer_of(architecture).layout in tiny_models.layouts(architecture)
    check_scorer(scorer_of(architecture))
    check_scorer(scorer_of(architecture), conversations=real_conversations)


def test_tokens_and_their_cost_are_counted(scorer_of, real_conversations):
    scorer = scorer_of("qwen3")
    scores = scorer.score(real_conversations)
    lengths = [len(one.input_ids) for one in scorer.renderer.encode(real_conversations)]
    assert scores.num_tokens.tolist() == lengths
    assert scores.truncated_tokens.tolist() == [0] * len(lengths)
    assert scores.errors == (None,) * len(lengths)
    work = scores.workload
    assert work.num_tokens == sum(lengths)
    assert work.unique_tokens < 0.75 * work.num_tokens, "the prompts of groups and pairs are computed once"
    assert work.padded_tokens == 0
    assert min(work.render_seconds, work.plan_seconds, work.run_seconds) > 0
    again = scorer.score([*real_conversations] * 3)
    assert again.workload.unique_tokens == work.unique_tokens, "repeated conversations are computed once"
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


@pytest.mark.parametrize("budget", [450, 700, 1500, 100_000])
def test_every_batch_is_within_the_token_budget(budget, parts, real_conversations):
    for tree in (True, False):
        scorer = watched_scorer(parts, max_num_batched_tokens=budget, tree=tree)
        scores = scorer.score(real_conversations)
        assert all(size_of(batch) <= budget for batch in scorer.executor.batches)
        assert scores.workload.num_batches == len(scorer.executor.batches)
        assert {isinstance(batch, PaddedBatch) for batch in scorer.executor.batches} == {not tree}


def test_a_conversation_over_the_budget_is_an_error_of_its_row(parts):
    scorer = watched_scorer(parts, max_num_batched_tokens=60)
    short, long = dialogue("q", "a"), dialogue("q", "very long " * 60)
    reason = r"row 1: the conversation has \d+ tokens, more than max_num_batched_tokens=60; raise"
    with pytest.raises(ScoringError, match=reason) as caught:
        scorer.score([short, long, short])
    assert caught.value.rows == (1,)
    rewards = caught.value.scores.rewards
    assert rewards[0] == rewards[2] == scorer.score([short]).rewards[0]


def test_a_conversation_longer_than_the_automatic_budget_is_scored(saved_model):
    scorer = gym_rm.load_scorer(saved_model("qwen3"), device="cpu", max_length=100_000)
    assert scorer.max_num_batched_tokens == CPU_BATCHED_TOKENS
    scores = scorer.score([dialogue("q", "very long " * 1500), dialogue("q", "a")])
    assert scores.num_tokens[0] > CPU_BATCHED_TOKENS
    assert np.isfinite(scores.rewards).all()


# --- rewards of every turn


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "bert", "bloom"])
def test_turn_rewards_equal_the_scores_of_the_prefixes(architecture, scorer_of, hh_pairs):
    scorer = scorer_of(architecture)
    dialogues = [
        pair[0] for pair in hh_pairs if len(pair[0]) in (4, 6) and sum(len(m["content"]) for m in pair[0]) < 800
    ]
    dialogues = [
        *dialogues[:3],
        [*dialogues[3], {"role": "user", "content": "and?"}],
        dialogue("q", "<think>so</think>\nyes", "why?", "because"),
    ]
    scores = scorer.score(dialogues, turns="all")
    for conversation, turn_rewards, reward in zip(dialogues, scores.turn_rewards, scores.rewards, strict=True):
        stops = [k + 1 for k, message in enumerate(conversation) if message["role"] == "assistant"]
        stops += [len(conversation)] * (conversation[-1]["role"] != "assistant")
        expected = [scorer.score([conversation[:stop]]).rewards[0] for stop in stops]
        assert turn_rewards.tolist() == expected
        assert turn_rewards.dtype == np.float64
        assert turn_rewards[-1] == reward
    assert scorer.score(dialogues).turn_rewards is None


def test_turns_must_be_last_or_all(scorer_of):
    with pytest.raises(ConfigError, match="turns must be 'last' or 'all'; got 'each'"):
        scorer_of("qwen3").score([], turns="each")


# --- threads, and several scorers in one process


def test_threads_can_share_a_scorer(parts, real_conversations):
    scorer = watched_scorer(parts)
    expected = scorer.score(real_conversations).rewards
    results, errors = {}, []

    def work(worker):
        try:
            rows = np.random.default_rng(worker).permutation(len(real_conversations))
            for _ in range(3):
                rewards = scorer.score([real_conversations[row] for row in rows]).rewards
                results.setdefault(worker, []).append(rewards.tolist() == expected[rows].tolist())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(results) == list(range(6))
    assert all(all(each) for each in results.values())


# --- provenance and precision


def test_provenance(saved_model):
    folder = saved_model("qwen3")
    scorer = gym_rm.load_scorer(folder, device="cpu", max_length=512, overlong="drop_turns", pooling="last")
    made = scorer.score([dialogue("q", "a")]).provenance
    assert (made.scorer, made.model, made.dtype, made.device, made.layout) == (
        "RewardModelScorer",
        folder,
        "float32",
        "cpu",
        "tree",
    )
    assert (made.attention, made.batch_invariance) == ("tree", "bit-equal")
    assert (made.torch, made.transformers) == (torch.__version__, transformers.__version__)
    assert made.template_hash == Renderer(tiny_models.tokenizer("qwen")).template_hash
    assert made.settings == {
        "kind": "decoder",
        "family": "classifier",
        "not_tried_beyond_tokens": 113,
        "head": "score",
        "token_id": None,
        "max_length": 512,
        "overlong": "drop_turns",
        "dropped_text": "error",
        "pooling": "last",
    }
    assert made.revision.startswith("sha256:")


def test_provenance_names_the_attention(saved_model):
    padded = gym_rm.load_scorer(saved_model("qwen3"), tree=False, attn_implementation="eager", device_map="cpu")
    assert padded.provenance.attention == "eager"


def test_a_device_beside_a_device_map_is_refused(saved_model):
    with pytest.raises(ConfigError, match=r"device='cpu' and device_map='auto' both say where the model goes"):
        gym_rm.load_scorer(saved_model("qwen3"), device="cpu", device_map="auto")


@pytest.mark.parametrize("tokenizer", [None, 3, object()])
def test_a_value_that_is_not_a_tokenizer_is_refused(parts, saved_model, tokenizer):
    with pytest.raises(ConfigError, match="tokenizer must be a Hugging Face tokenizer, or the folder or hub id"):
        gym_rm.RewardModelScorer(parts[0], tokenizer)
    if tokenizer is not None:
        with pytest.raises(ConfigError, match="tokenizer must be a Hugging Face tokenizer, or the folder or hub id"):
            gym_rm.load_scorer(saved_model("qwen3"), tokenizer=tokenizer)


def test_a_tokenizer_can_be_given_by_its_folder(parts, saved_model):
    conversation = [dialogue("q", "a")]
    by_folder = gym_rm.RewardModelScorer(parts[0], saved_model("qwen3")).score(conversation)
    assert by_folder.rewards == gym_rm.RewardModelScorer(*parts).score(conversation).rewards


def test_provenance_has_the_turn_marks_that_a_message_can_forge(saved_model):
    made = gym_rm.load_scorer(saved_model("gpt_neox"), forged_turns="error").provenance
    assert made.settings["plain_turn_marks"] == ["assistant:", "user:"]
    assert made.settings["forged_turns"] == "error"


def test_dropped_characters_are_in_the_infos(saved_model):
    template = tiny_models.CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    rows = [dialogue("q", "<think>secret</think>four"), dialogue("q", "four")]
    scorer = gym_rm.load_scorer(saved_model("qwen2"), chat_template=template, dropped_text="warn")
    scores = scorer.score(rows)
    assert [dict(row.infos) for row in scores] == [{"dropped_characters": 13}, {}]
    assert scores.rewards[0] == scores.rewards[1]
    with pytest.raises(gym_rm.ScoringError, match="does not write 13 characters of message 1, the last one"):
        gym_rm.load_scorer(saved_model("qwen2"), chat_template=template).score(rows)
    assert "dropped_characters" not in scorer.score(rows[1:]).infos


# --- invalid options and models


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be an integer of at least 1, got 0"),
        ({"max_num_batched_tokens": "lots"}, "max_num_batched_tokens must be an integer"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens must be"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"overlong": "cut"}, "overlong must be"),
        ({"pooling": "mean"}, "pooling must be"),
        ({"executor": "locl"}, "executor must be one of .*, got 'locl'. Did you mean 'local'"),
        ({"kind": "oracle"}, "kind must be 'auto' or one of .*got 'oracle'"),
        ({"dtype": "float33"}, "dtype must be.*Did you mean 'float32'"),
        ({"device": "tpu"}, "device must be"),
        ({"batch_invariance": True}, "batch_invariance"),
        ({"prefix_cache_tokens": -1}, "prefix_cache_tokens"),
    ],
)
def test_an_invalid_option_is_refused(options, reason, saved_model):
    with pytest.raises(ConfigError, match=reason):
        gym_rm.load_scorer(saved_model("qwen3"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(saved_model):
    with pytest.raises(ConfigError, match="needs a GPU, but torch finds none"):
        gym_rm.load_scorer(saved_model("qwen3"), device="cuda")


def test_a_head_of_two_outputs_is_refused(saved_model):
    with pytest.raises(ConfigError, match="a head with 2 outputs"):
        gym_rm.load_scorer(saved_model("qwen3", num_labels=2))


def test_a_checkpoint_without_a_template_needs_one(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, "qwen3")
    tiny_models.tokenizer("qwen", chat_template=None).save_pretrained(folder)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no chat template"):
        gym_rm.load_scorer(folder)
    scores = gym_rm.load_scorer(folder, chat_template=tiny_models.QWEN).score([dialogue("q", "a")])
    expected = gym_rm.load_scorer(tiny_models.save_reward_model(tmp_path / "with", "qwen3")).score([dialogue("q", "a")])
    assert scores.rewards[0] == expected.rewards[0]


def test_tools_of_a_prompt_reach_the_template_with_and_without_the_prefix_cache(saved_model):
    own = gym_rm.load_scorer(saved_model("qwen3")).renderer.chat_template
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + own
    plain, cached = (
        gym_rm.load_scorer(saved_model("qwen3"), chat_template=template, prefix_cache_tokens=size) for size in (0, 4096)
    )
    talk = dialogue("q", "a", "r", "b")
    schemas = [{"type": "function", "function": {"name": name}} for name in ("now", "add")]
    prompts = [None, *(Prompt((), "p", tools=(schema,)) for schema in schemas)]
    rewards = plain.score([talk] * 3, prompts, turns="all").turn_rewards
    assert len({tuple(each) for each in rewards}) == 3
    for turns, prompt in zip(rewards, prompts, strict=True):
        assert [cached.score([talk[:stop]], [prompt]).rewards[0] for stop in (2, 4)] == turns.tolist()
