"""Checks of the embedded reward model, policy and prompts, and of the script that makes them."""

import json
import random
import re
from itertools import permutations
from pathlib import Path

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

import gym_rm
from agents import grpo, three_numbers
from benchmarks import runs
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.evaluation.answers import is_right
from gym_rm.generation.sampling import LocalSampler
from gym_rm.policy.trained_policy import open_policy
from gym_rm.reports.runs import read_run
from scripts import make_assets

ASSETS = Path(gym_rm.__file__).parent / "assets"


@pytest.fixture(scope="module")
def scorer():
    return gym_rm.load_scorer(None)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "policy")


def question(number=0):
    return three_numbers.sample_question(random.Random(f"test {number}"), held_out=True)


def scores(scorer, conversations):
    return scorer.score(conversations).rewards


def with_reply(asked, reply):
    return [{"role": "user", "content": asked.text}, {"role": "assistant", "content": reply}]


def test_the_assets_are_small_files_of_known_types():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jsonl", ".jinja", ".py", ".pyc"}


def test_all_assets_have_one_file_mode(tokenizer, tmp_path):
    assert len({path.stat().st_mode for path in ASSETS.rglob("*") if path.is_file()}) == 1
    make_assets.save(tiny_models.reward_model("qwen3"), tokenizer, tmp_path / "model")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}


def test_the_configurations_match_the_models_and_the_tokenizer(tokenizer):
    reward_model, policy = (AutoConfig.from_pretrained(ASSETS / name) for name in ("reward_model", "policy"))
    judge, its_tokenizer = (kind.from_pretrained(ASSETS / "judge") for kind in (AutoConfig, AutoTokenizer))
    assert judge.architectures == ["Qwen3ForCausalLM"]
    assert (judge.vocab_size, judge.eos_token_id) == (len(its_tokenizer), its_tokenizer.eos_token_id)
    assert reward_model.architectures == ["Qwen3ForSequenceClassification"]
    assert policy.architectures == ["Qwen3ForCausalLM"]
    assert reward_model.num_labels == 1
    assert reward_model.pad_token_id == policy.pad_token_id == tokenizer.pad_token_id
    assert policy.eos_token_id == tokenizer.eos_token_id
    assert min(reward_model.max_position_embeddings, policy.max_position_embeddings) >= 4096


@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_the_tokenizer_decodes_every_text_to_itself(text):
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "policy")
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.unk_token is None
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_script_makes_this_tokenizer_and_these_prompts(tmp_path):
    make_assets.make_tokenizer().save_pretrained(tmp_path)
    make_assets.make_prompts(tmp_path / "prompts.jsonl")
    made, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, ASSETS / "policy"))
    assert made | {"padding": None} == shipped | {"padding": None}  # padding is set when a tokenizer pads a batch
    assert (tmp_path / "prompts.jsonl").read_bytes() == (ASSETS / "prompts.jsonl").read_bytes()


def numbers_of(prompt):
    return tuple(map(int, re.findall(r"\d+", prompt.messages[0]["content"])))


def test_prompts_are_distinct_and_have_right_answers():
    prompts = load_prompts(None)
    assert len(prompts) >= 500
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        asks_for_most = re.search("larg|high|best", prompt.messages[0]["content"]) is not None
        assert int(prompt.answer) == (max if asks_for_most else min)(numbers_of(prompt)), prompt


def test_numbers_in_prompts_are_not_in_the_training_data():
    assert all(three_numbers.is_held_out(numbers_of(prompt)) for prompt in load_prompts(None))


def test_the_reward_model_ranks_held_out_pairs(scorer):
    wins = []
    for row in three_numbers.comparisons(150, seed="test", held_out=True):
        ranks = [each["rank"] for each in row["completions"]]
        rewards = scores(scorer, [row["context"] + each["completion"] for each in row["completions"]])
        wins += [rewards[i] > rewards[j] for i, j in permutations(range(len(ranks)), 2) if ranks[i] < ranks[j]]
    assert sum(wins) / len(wins) >= 0.97


BAD_REPLIES = (
    "",
    " ",
    "I do not know.",
    "It is.",
    "It is {wrong}.",
    "It is {right} or {wrong}.",
    "It is {right}. It is {wrong}.",
    "{right}{right}",
    "It is It is It is It is",
    "10 20 30 40 50 60",
    "{wrong}",
    "{question}",
)


DAMAGED_REPLIES = (
    "would say {right}.",
    " would say {right}.",
    "I say {right}.",
    "I would say {right}",
    "I would say {right}..",
    "I would would say {right}.",
    "i would say {right}.",
    " It is {right}.",
    "it is {right}.",
    "It {right}.",
    "is {right}.",
    "It is {right}!",
    "It is {right}. {right}",
    "The is {right}.",
    "That is {right}. That is {right}.",
    "Hmm, that is {right}.",
)


# The reward model does not notice a verb of another wording before the number: such replies score as proper ones do.
UNNOTICED = [
    pytest.param(bad, marks=pytest.mark.xfail(strict=True, reason="not noticed"))
    for bad in ("The answer say {right}.", "I would is {right}.")
]


@pytest.mark.parametrize("bad", [*BAD_REPLIES, *DAMAGED_REPLIES, *UNNOTICED])
def test_the_reward_model_prefers_right_replies_to_bad_ones(scorer, bad):
    questions = [question(number) for number in range(50)]
    rng = random.Random(0)
    good = [with_reply(q, f"It is {q.answer}.") for q in questions]
    other = [
        with_reply(q, bad.format(right=q.answer, wrong=three_numbers.wrong_number(q, rng), question=q.text))
        for q in questions
    ]
    assert (scores(scorer, good) > scores(scorer, other)).mean() >= 0.96


def test_no_right_wording_gains_over_another(scorer):
    questions = [question(number) for number in range(50)]
    means = [
        scores(scorer, [with_reply(q, wording.format(n=q.answer)) for q in questions]).mean()
        for wording in three_numbers.REPLIES
    ]
    assert max(means) - min(means) < 0.2


@pytest.mark.parametrize(
    "reply", ["", " would say 18.", "It is 18", "It is 18.\n", "It is 18. It is 18.", "It is 180."]
)
def test_other_replies_are_not_proper(reply):
    assert not three_numbers.is_proper(reply)


def test_the_policy_is_right_less_than_half_the_time():
    policy = open_policy(None)
    sampler = LocalSampler(policy.model, policy.tokenizer, max_new_tokens=24)
    prompts = load_prompts(None)[:512]
    seen = PolicyRenderer(policy.tokenizer).prompts([prompt.messages for prompt in prompts])
    completions = sampler.sample(seen, seeds=range(len(seen)))
    right = [is_right(each.text, p.answer) for each, p in zip(completions, prompts, strict=True)]
    assert 0.25 <= sum(right) / len(right) <= 0.5
    assert sum(each.finished for each in completions) / len(completions) > 0.97


@pytest.mark.slow
def test_a_policy_trained_on_the_reward_model_gives_right_and_proper_replies(tmp_path):
    settings = grpo.fill_defaults(grpo.GRPOSettings(output=str(tmp_path / "run")))
    grpo.train(settings, Console(quiet=True))
    after = runs.before_and_after(read_run(tmp_path / "run"))["after"]
    assert after["right"] >= 0.9
    assert after["proper"] >= 0.95
