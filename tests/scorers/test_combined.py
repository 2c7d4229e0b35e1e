"""Weighted sums and ensembles: arithmetic, names of components, and missing scores."""

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, Prompt, Scores, ScoringError
from gym_rm.scorer import CALLS_THAT_WAIT, max_concurrent_calls
from gym_rm.scorers.combined import EnsembleScorer
from gym_rm.scorers.weighted import WeightedScorer
from gym_rm.testing import check_scorer
from tests import tiny_models


def said(text):
    return [{"role": "user", "content": "say"}, {"role": "assistant", "content": text}]


def prompt_of(answer):
    return Prompt(({"role": "user", "content": "say"},), f"say {answer}", answer=answer)


CONVERSATIONS = [said("one"), said("three"), said(""), said("seventeen")]
PROMPTS = [prompt_of(answer) for answer in ("one", "two", "", "4")]


class PromptRecorder:
    """Scorer that stores the prompts of every call, and ends an episode if the reply starts with a letter of `ends`."""

    def __init__(self, ends=""):
        self.asked, self.ends = [], ends

    def score(self, conversations, prompts=None):
        self.asked.append(prompts)
        replies = [conversation[-1]["content"] for conversation in conversations]
        return Scores.from_rewards(
            [1.0] * len(conversations),
            terminations=[bool(reply) and reply[0] in self.ends for reply in replies] if self.ends else None,
            infos={"first": np.array([reply[:1] for reply in replies], dtype=object)},
        )


def length(conversations):
    return [float(len(c[-1]["content"])) for c in conversations]


def vowels(conversations):
    return [float(sum(letter in "aeiou" for letter in c[-1]["content"])) for c in conversations]


def right(conversations, prompts):
    return [float(c[-1]["content"] == prompt.answer) for c, prompt in zip(conversations, prompts, strict=True)]


def unless_three(conversations):
    return [None if c[-1]["content"] == "three" else 1.0 for c in conversations]


def test_a_weighted_sum_returns_its_components_by_name():
    scores = WeightedScorer({"length": length, "vowels": vowels}, weights={"length": 1, "vowels": -2}).score(
        CONVERSATIONS
    )
    assert scores.rewards.tolist() == [3 - 4, 5 - 4, 0, 9 - 8]
    assert scores.components["length"].tolist() == [3, 5, 0, 9]
    assert scores.components["vowels"].tolist() == [2, 2, 0, 4]
    assert scores.provenance.settings["weights"] == {"length": 1.0, "vowels": -2.0}
    assert set(scores.provenance.settings["scorers"]) == {"length", "vowels"}


def test_weights_of_components_of_a_scorer(tmp_path):
    folder = tiny_models.save_reward_model(tmp_path, num_labels=2, id2label={0: "helpful", 1: "safe"})
    model = {"path": str(folder), "kind": "multi_head", "weights": [1, 1]}
    scorer = WeightedScorer({"model": model, "length": length}, weights={"model/safe": 3.0, "length": 1.0})
    scores = scorer.score(CONVERSATIONS)
    np.testing.assert_allclose(
        scores.rewards, 3 * scores.components["model/safe"] + scores.components["length"], rtol=1e-6
    )
    with pytest.raises(ConfigError, match=r"'model/saef' is not returned by any scorer.*Did you mean 'model/safe'"):
        WeightedScorer({"model": model}, weights={"model/saef": 1.0}).score(CONVERSATIONS)


def test_the_name_of_a_scorer_may_contain_a_slash():
    scorer = WeightedScorer({"Skywork/RM": length, "vowels": vowels})
    assert scorer.score(CONVERSATIONS).rewards.tolist() == [5, 7, 0, 13]
    nested = WeightedScorer({"a/b": scorer}, weights={"a/b/Skywork/RM": 2.0})
    assert nested.score(CONVERSATIONS).rewards.tolist() == [6, 10, 0, 18]
    with pytest.raises(ConfigError, match=r"'Skywork/MR' is not a component.*Did you mean 'Skywork/RM'"):
        WeightedScorer({"Skywork/RM": length}, weights={"Skywork/MR": 1.0})


def test_two_components_with_the_same_name_raise_config_error():
    inner = WeightedScorer({"b": vowels})
    with pytest.raises(ConfigError, match=r"two of them return the component 'a/b'; rename one of \['a', 'a/b'\]"):
        WeightedScorer({"a": inner, "a/b": length}).score(CONVERSATIONS)


@pytest.mark.parametrize("combine", [WeightedScorer, EnsembleScorer])
def test_a_missing_score_of_one_scorer_is_a_missing_score_of_the_row(combine):
    with pytest.raises(ScoringError) as caught:
        combine({"length": length, "picky": unless_three}).score(CONVERSATIONS)
    scores = caught.value.scores
    assert caught.value.rows == (1,)
    assert scores.errors[1] == "picky: the reward function returned None"
    assert np.isnan(scores.rewards[1])
    assert scores.components["length"].tolist() == [3, 5, 0, 9]
    assert np.isfinite(scores.rewards[[0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.5, 3.5, 0, 6.5]),
        ({"reduction": "min"}, [2, 2, 0, 4]),
        ({"reduction": "mean_minus_std"}, [2.0, 2.0, 0.0, 4.0]),
        ({"reduction": "mean_minus_std", "coefficient": 2}, [1.5, 0.5, 0.0, 1.5]),
        ({"reduction": "mean_minus_variance"}, [2.25, 1.25, 0.0, 0.25]),
        ({"reduction": "mean_minus_variance", "coefficient": 0.5}, [2.375, 2.375, 0.0, 3.375]),
    ],
    ids=str,
)
def test_ensemble_reductions(options, expected):
    scores = EnsembleScorer({"a": length, "b": vowels}, **options).score(CONVERSATIONS)
    assert scores.rewards.tolist() == expected
    assert scores.components["b"].tolist() == [2, 2, 0, 4]
    assert scores.infos["disagreement"].tolist() == [0.5, 1.5, 0.0, 2.5]


def test_calls_of_several_threads_reach_scorers_that_accept_them_and_one_at_a_time_the_others():
    meeting, at_work = threading.Barrier(4, timeout=60), threading.Lock()

    async def judge(conversations):
        await asyncio.to_thread(meeting.wait)
        return length(conversations)

    def alone(conversations):
        assert at_work.acquire(blocking=False)
        time.sleep(0.01)
        at_work.release()
        return vowels(conversations)

    scorer = WeightedScorer({"judge": judge, "alone": alone})
    assert max_concurrent_calls(scorer) == CALLS_THAT_WAIT
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda each: scorer.score([each]).rewards.tolist(), CONVERSATIONS))
    assert found == [[5.0], [7.0], [0.0], [13.0]]


def test_a_combined_scorer_accepts_as_many_calls_as_any_of_its_scorers(tmp_path):
    model = str(tiny_models.save_reward_model(tmp_path))
    assert max_concurrent_calls(EnsembleScorer([model])) == 0
    assert max_concurrent_calls(EnsembleScorer([model, length])) == CALLS_THAT_WAIT


def test_a_copy_by_pickling_takes_turns_of_its_own():
    copy = pickle.loads(pickle.dumps(WeightedScorer({"a": length})))
    assert copy.score(CONVERSATIONS).rewards.tolist() == [3, 5, 0, 9]
    assert copy._serial["a"].scorer is copy.scorers["a"]


class Simulator:
    def score(self, conversations, prompts=None):
        return Scores.from_rewards([1.0] * len(conversations))

    def respond(self, conversations, prompts, scores):
        return ["go on"] * len(conversations)


def test_the_user_simulator_of_one_scorer_is_that_of_the_whole():
    simulator = Simulator()
    assert WeightedScorer({"a": simulator, "b": length}).respond == simulator.respond
    assert WeightedScorer({"b": length}).respond is None
    assert WeightedScorer({"a": simulator, "b": simulator}).respond == simulator.respond
    with pytest.raises(ConfigError, match=r"scorers \['a', 'b'\] each have one; pass respond="):
        _ = WeightedScorer({"a": Simulator(), "b": Simulator()}).respond


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightedScorer({}), "scorers of WeightedScorer must be .* of at least one; got dict {}"),
        (lambda: WeightedScorer(5), "must be a dict of scorers by name, or a list, of at least one; got 5"),
        (lambda: WeightedScorer("org/name"), "must be a dict of scorers by name, or a list, .*; got str 'org/name'"),
        (lambda: WeightedScorer({"a": length}, weights={"b": 1.0}), "'b' is not a component of the scorers"),
        (lambda: EnsembleScorer([length], reduction="median"), "reduction must be one of"),
        (lambda: EnsembleScorer([length], coefficient=2), "coefficient=2 has no effect with reduction='mean'"),
        (lambda: WeightedScorer({1: length}), "must be a dict of scorers by name"),
        (lambda: WeightedScorer({"a": length}, weights={}), "weights: .* at least 1 item"),
        (lambda: WeightedScorer({"a": length}, weights=[1.0]), "weights must be a mapping"),
        (lambda: WeightedScorer({"a": length}, weights={"a": "x"}), r"weights\.a must be a finite number, got str 'x'"),
    ],
)
def test_an_invalid_setting_raises_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# --- prompts, terminations and infos


@pytest.mark.parametrize("combine", [WeightedScorer, EnsembleScorer])
@pytest.mark.parametrize("prompts", [None, [*PROMPTS[:3], None]])
def test_every_scorer_receives_the_prompts(combine, prompts):
    one, other, inner = PromptRecorder(), PromptRecorder(), PromptRecorder()
    combine({"one": one, "other": other, "nested": combine([inner])}).score(CONVERSATIONS, prompts)
    assert one.asked == other.asked == inner.asked == [prompts]


def test_an_episode_ends_if_any_scorer_ends_it():
    scorers = {"one": PromptRecorder(ends="o"), "other": PromptRecorder(ends="s"), "silent": PromptRecorder()}
    assert WeightedScorer(scorers).score(CONVERSATIONS).terminations.tolist() == [True, False, False, True]
    assert WeightedScorer({"silent": PromptRecorder()}).score(CONVERSATIONS).terminations is None


# --- the scorers themselves


def test_combined_scorers_pass_check_scorer():
    check_scorer(WeightedScorer({"length": length, "vowels": vowels}, weights={"length": 1, "vowels": 1}))
    check_scorer(EnsembleScorer([length, vowels], reduction="min"))
    check_scorer(WeightedScorer({"length": length, "right": right}))


@pytest.mark.parametrize(
    ("kind", "settings"), [("weighted", {"weights": {"wrong": 1.0}}), ("ensemble", {"reduction": "maximum"})], ids=str
)
def test_invalid_settings_load_no_model(saved_model, kind, settings):
    before = dict(gym_rm.scorers.load._shared)
    with pytest.raises(ConfigError):
        gym_rm.load_scorer({"kind": kind, "scorers": {"model": saved_model(), "length": length}, **settings})
    assert gym_rm.scorers.load._shared == before


def test_a_scorer_that_cannot_be_loaded_releases_the_others(saved_model):
    before = dict(gym_rm.scorers.load._shared)
    with pytest.raises(ConfigError):
        gym_rm.load_scorer({"kind": "weighted", "scorers": {"model": saved_model(), "other": 3}})
    assert gym_rm.scorers.load._shared == before


def test_clear_cache_reaches_every_scorer_that_has_one():
    class Cached:
        cleared = 0

        def score(self, conversations, prompts=None):
            return Scores.from_rewards([1.0] * len(conversations))

        def clear_cache(self):
            self.cleared += 1

    cached = Cached()
    EnsembleScorer([cached, length]).clear_cache()
    assert cached.cleared == 1


@pytest.mark.parametrize(
    "combine",
    [
        EnsembleScorer,
        lambda scorers: EnsembleScorer(scorers, reduction="mean_minus_std"),
        lambda scorers: EnsembleScorer(scorers, reduction="mean_minus_variance", coefficient=0.1),
        lambda scorers: WeightedScorer(scorers, weights={name: 0.1 * k for k, name in enumerate(scorers)}),
    ],
)
def test_a_combined_score_has_the_same_bits_alone_and_in_a_batch(combine):
    """Numpy adds nine numbers or more in another order if they are contiguous."""
    table = np.random.default_rng(0).standard_normal((12, 50))

    def scorer(row):
        return lambda conversations: [float(table[row, int(each[-1]["content"])]) for each in conversations]

    combined = combine({f"s{row}": scorer(row) for row in range(12)})
    conversations = [said(str(number)) for number in range(50)]
    alone = [combined.score([each]).rewards[0] for each in conversations]
    assert combined.score(conversations).rewards.tolist() == alone
