"""`load_scorer`, `try_score`, and scorers that several users in one process share."""

import functools
import importlib.util
import pkgutil
import re
import sys
import time
from types import ModuleType

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, Prompt, Scores, ScoringError
from gym_rm.engine.kinds import KINDS
from gym_rm.scorer import CALLS_THAT_WAIT, max_concurrent_calls, try_score
from gym_rm.scorers.function import FunctionScorer
from gym_rm.scorers.load import SCORER_KINDS, load_scorer
from tests import tiny_models

SAID = [[{"role": "user", "content": "say"}, {"role": "assistant", "content": text}] for text in ("one", "three", "")]
PROMPTS = [Prompt(({"role": "user", "content": "say"},), text, answer=text) for text in ("one", "two", "three")]


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


def right(conversations, prompts):
    return [float(c[-1]["content"] == prompt.answer) for c, prompt in zip(conversations, prompts, strict=True)]


class Lengths:
    """A user's scorer that counts how often it was created and closed."""

    made = closed = 0

    def __init__(self, scale=1.0):
        time.sleep(0.01)  # long enough for another thread to run
        type(self).made += 1
        self.scale = scale

    def score(self, conversations, prompts=None):
        return Scores.from_rewards([self.scale * value for value in length(conversations)])

    def close(self):
        self.closed += 1


class WithoutPrompts:
    def score(self, conversations):
        return Scores.from_rewards(length(conversations))


class FailsFirst(Lengths):
    def __init__(self):
        super().__init__()
        if self.made == 1:
            raise OSError("not there yet")


@pytest.fixture(autouse=True)
def user_module(monkeypatch):
    """The module `user_scorers`, as a user would write it."""
    module = ModuleType("user_scorers")
    module.__dict__.update(
        length=length,
        right=right,
        Lengths=Lengths,
        FailsFirst=FailsFirst,
        WithoutPrompts=WithoutPrompts,
        instance=Lengths(2.0),
        old_instance=WithoutPrompts(),
        number=3,
    )
    monkeypatch.setitem(sys.modules, "user_scorers", module)
    for kind in (Lengths, FailsFirst):
        monkeypatch.setattr(kind, "made", 0)
    return module


# --- existing scorers and functions


def test_an_existing_scorer_is_returned_unchanged_and_takes_no_options():
    scorer = load_scorer(length)
    assert load_scorer(scorer) is scorer
    with pytest.raises(
        ConfigError, match=r"options \['dtype'\] cannot be applied to an existing scorer, FunctionScorer"
    ):
        load_scorer(scorer, dtype="float32")


def test_a_function_becomes_a_scorer():
    scorer = load_scorer(length)
    assert isinstance(scorer, FunctionScorer)
    assert scorer.score(SAID).rewards.tolist() == [3, 5, 0]
    assert load_scorer(right).score(SAID, PROMPTS).rewards.tolist() == [1, 0, 0]


@pytest.mark.parametrize("thing", [3, 1.5, b"path"])
def test_other_types_are_refused(thing):
    with pytest.raises(ConfigError, match="must be None, a folder, a hub id, a dict, a Scorer or a function"):
        load_scorer(thing)


def test_the_class_of_a_scorer_is_not_a_scorer():
    with pytest.raises(ConfigError, match="Lengths"):
        load_scorer(Lengths)


@pytest.mark.parametrize("scorer", [WithoutPrompts(), "user_scorers:WithoutPrompts", "user_scorers:old_instance"])
def test_a_score_method_must_take_the_prompts(scorer):
    with pytest.raises(
        ConfigError, match=r"WithoutPrompts.score must take \(conversations, prompts=None\): .* ignores"
    ):
        load_scorer(scorer)


# --- by name: "module:name"


def test_a_function_by_name():
    assert load_scorer("user_scorers:length").score(SAID).rewards.tolist() == [3, 5, 0]
    assert load_scorer("user_scorers:right").score(SAID, PROMPTS).rewards.tolist() == [1, 0, 0]


def test_a_scorer_by_name(user_module):
    assert load_scorer("user_scorers:instance") is user_module.instance


def test_a_class_by_name_is_created_with_the_options():
    assert load_scorer("user_scorers:Lengths").score(SAID).rewards.tolist() == [3, 5, 0]
    assert load_scorer("user_scorers:Lengths", scale=2.0).score(SAID).rewards.tolist() == [6, 10, 0]


def test_options_that_a_class_does_not_take_are_refused():
    with pytest.raises(ConfigError, match=r"invalid options for Lengths: got an unexpected keyword argument 'scael'"):
        load_scorer("user_scorers:Lengths", scael=2.0)


def test_a_module_that_does_not_exist_is_an_error():
    with pytest.raises(ConfigError, match="'no_such_module:length': No module named 'no_such_module'"):
        load_scorer("no_such_module:length")


def test_the_error_of_an_unknown_name_suggests_a_similar_one():
    with pytest.raises(ConfigError, match=r"'user_scorers:lenght'.*Did you mean 'length'"):
        load_scorer("user_scorers:lenght")


def test_the_name_of_another_object_is_refused():
    with pytest.raises(ConfigError, match="a Scorer or a function from conversations to numbers; got int: 3"):
        load_scorer("user_scorers:number")


# --- by settings


def test_the_error_of_an_unknown_kind_suggests_a_similar_one():
    with pytest.raises(ConfigError, match="Did you mean 'weighted'"):
        load_scorer({"kind": "weigthed"})
    with pytest.raises(ConfigError, match="Did you mean 'process'"):
        load_scorer({"kind": "proces"})
    with pytest.raises(ConfigError, match="Did you mean 'process'"):
        load_scorer({"kind": "proces", "path": "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": 3}, "path must be a folder or a hub id, got int 3"),
        ({"kind": ["x"]}, r"^kind must be a text, got list \['x'\]"),
        ({"kind": None}, "^kind must be a text, got NoneType None"),
        ({"kind": "decoder", "max_length": "abc"}, "max_length must be an integer of at least 1, got str 'abc'"),
        ({"prefix_cache_tokens": "abc"}, "prefix_cache_tokens must be an integer of at least 0, got str 'abc'"),
        ({"prefix_cache_tokens": True}, "prefix_cache_tokens must be an integer of at least 0, got bool True"),
        ({"kind": "decoder", "batch_invariant": True}, "batch_invariant"),
        (
            {"kind": "weighted", "scorers": [length], "weights": {"scorer_0": "x"}},
            "weights.scorer_0 must be a finite number, got str 'x'",
        ),
        ({"kind": "weighted", "scorrs": [length]}, "invalid options for a scorer: kind='weighted', scorrs="),
    ],
)
def test_an_invalid_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_scorer(options)


def test_every_kind_can_be_imported_and_has_a_unique_name():
    missing = set() if importlib.util.find_spec("httpx") else {"nemo_gym"}  # a scorer at a URL
    for kind in SCORER_KINDS.keys() - missing:
        assert callable(pkgutil.resolve_name(SCORER_KINDS[kind]))
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}
    assert not KINDS.keys() & SCORER_KINDS.keys()


def test_path_and_kind_in_a_dict_or_as_options_give_equal_scores(tmp_path):
    folder = str(tiny_models.save_reward_model(tmp_path, num_labels=2, id2label={0: "a", 1: "b"}))
    options = {"kind": "multi_head", "weights": {"a": 1.0, "b": 2.0}}
    as_dict = gym_rm.load_scorer({"path": folder, **options}).score(SAID)
    as_options = gym_rm.load_scorer(folder, **options).score(SAID)
    np.testing.assert_array_equal(as_dict.rewards, as_options.rewards)


# --- try_score


class Returns:
    """A scorer that returns a given value, and records the arguments of the call."""

    def __init__(self, returned):
        self.returned, self.asked = returned, None

    def score(self, conversations, prompts=None, **options):
        self.asked = (conversations, prompts, options)
        return self.returned


def test_failed_rows_are_returned_instead_of_raised():
    scores = try_score(load_scorer(lambda conversations: [1.0, None, 2.0]), SAID)
    assert scores.errors == (None, "the reward function returned None", None)
    assert scores.rewards_or_none() == [1.0, None, 2.0]


def test_prompts_and_options_reach_the_scorer():
    scorer = Returns(Scores.from_rewards([1, 2, 3]))
    try_score(scorer, SAID, PROMPTS, turns="all")
    assert scorer.asked == (SAID, PROMPTS, {"turns": "all"})


def test_a_reward_that_is_not_finite_gets_an_error():
    scores = Scores.from_rewards([1, 2, 3])
    scores.rewards[1:] = [np.nan, -np.inf]
    assert try_score(Returns(scores), SAID).errors == (None, "the reward is nan", "the reward is -inf")


NOT_LISTS = {
    "a text": "hello",
    "bytes": b"hello",
    "nothing": None,
    "a generator": (one for one in SAID),
    "a set": {"hello"},
    "a message": SAID[0][1],
    "a row": {"messages": SAID[0]},
}
NOT_CONVERSATIONS = {
    "one conversation": SAID[0],
    "texts": ["hello", "there"],
    "an array of texts": np.array(["hello"]),
    "rows": [{"messages": SAID[0]}],
    "lists of texts": [["hello"]],
    "one too deep": [SAID],
    "a text among conversations": [SAID[0], "hello"],
}
SCORERS = {
    "model": None,
    "function": length,
    "math": {"kind": "math"},
    "code": {"kind": "code"},
    "rule": {"kind": "length", "max_length": 9},
    "weighted": {"kind": "weighted", "scorers": [length, {"kind": "length", "max_length": 9}]},
    "ensemble": {"kind": "ensemble", "scorers": [length]},
}


@pytest.mark.parametrize("given", NOT_LISTS.values(), ids=NOT_LISTS)
@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
def test_conversations_must_be_a_list(scorer, given):
    with pytest.raises(ConfigError, match="conversations must be a list of conversations, each a list of"):
        load_scorer(scorer).score(given)


@pytest.mark.parametrize("given", NOT_CONVERSATIONS.values(), ids=NOT_CONVERSATIONS)
@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
def test_each_conversation_must_be_a_list_of_messages(scorer, given):
    with pytest.raises((ConfigError, ScoringError), match=r"a list of (conversations|{'role')|must be {'role'"):
        load_scorer(scorer).score(given)


def test_other_exceptions_of_a_scorer_are_raised():
    def crash(conversations):
        raise OSError("the scorer crashed")

    with pytest.raises(OSError, match="the scorer crashed"):
        try_score(load_scorer(crash), SAID)


def test_several_error_messages_are_joined_to_one_sentence():
    error = ScoringError(gym_rm.Scores.from_rewards([1, 2, 3], errors=["too long.", None, "too bad."]))
    assert "scored: row 0: too long; row 2: too bad. The other scores are in" in str(error)


# --- calls at the same time


async def awaited(conversations):
    return length(conversations)


def with_alarm(conversations):
    return length(conversations)


with_alarm.max_concurrent_calls = 0


@pytest.mark.parametrize(
    ("scorer", "number"),
    [
        (length, 1),
        (awaited, CALLS_THAT_WAIT),
        (with_alarm, 0),
        (functools.partial(with_alarm), 0),
        (None, 0),
        ({"kind": "math"}, 1),
        ({"kind": "judge", "path": "embedded:judge", "style": "genrm"}, 0),
        pytest.param(
            {"kind": "judge", "path": "http://127.0.0.1:9"},
            CALLS_THAT_WAIT,
            marks=pytest.mark.skipif(importlib.util.find_spec("httpx") is None, reason="needs httpx"),
        ),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_scorers_say_how_many_calls_may_run_at_the_same_time(scorer, number):
    assert max_concurrent_calls(load_scorer(scorer)) == number


@pytest.mark.parametrize("number", [-1, 1.5, "many", None])
def test_a_number_of_calls_that_is_none_is_refused(number):
    def function(conversations):
        return length(conversations)

    function.max_concurrent_calls = number
    with pytest.raises(ConfigError, match="max_concurrent_calls of function must be"):
        load_scorer(function)
