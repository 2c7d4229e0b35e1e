"""Gates, routes and concurrency of weighted sums."""

import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import gym_rm
from gym_rm import ConfigError, Prompt, ScoringError, WeightedScorer
from gym_rm.scorer import route_of
from gym_rm.testing import check_scorer
from tests.scorers.test_combined import length, right, said

QUESTION = {"role": "user", "content": "say"}


def row(task, answer=None):
    return Prompt((QUESTION,), f"{task} {answer}", answer=answer, metadata={} if task is None else {"task": task})


def polite(conversations):
    return [float("please" in each[-1]["content"]) for each in conversations]


class Seen:
    """Scorer of lengths that keeps what it was asked."""

    def __init__(self):
        self.texts = []

    def score(self, conversations, prompts=None):
        self.texts += [each[-1]["content"] for each in conversations]
        return gym_rm.Scores.from_rewards(
            length(conversations), components={"half": np.array(length(conversations)) / 2}
        )


ROUTES = {"math": ["right", "polite"], "chat": ["length"]}


def routed(**settings):
    scorers = {"right": right, "polite": polite, "length": length}
    return WeightedScorer(scorers, **{"route": "task", "routes": ROUTES, **settings})


def test_each_row_is_scored_by_the_scorers_of_its_route():
    texts, prompts = ["4", "please", "hello", "5"], [row("math", "4"), row("math", "4"), row("chat"), row("math", "4")]
    scores = routed(weights={"right": 1, "polite": 0.5, "length": 0.1}).score([said(each) for each in texts], prompts)
    np.testing.assert_allclose(scores.rewards, [1.0, 0.5, 0.5, 0.0])
    np.testing.assert_array_equal(scores.components["right"], [1.0, 0.0, np.nan, 0.0])
    np.testing.assert_array_equal(scores.components["length"], [np.nan, np.nan, 5.0, np.nan])


def test_a_scorer_gets_only_its_rows():
    chat = Seen()
    scorer = WeightedScorer({"math": right, "chat": chat}, route="task")
    scorer.score([said("4"), said("hello"), said("5")], [row("math", "4"), row("chat"), row("math", "5")])
    assert chat.texts == ["hello"]


def test_a_batch_without_rows_for_a_scorer_has_its_component_without_values():
    scorer = WeightedScorer({"math": right, "chat": Seen()}, weights={"math": 1, "chat/half": 2}, route="task")
    scores = scorer.score([said("4")], [row("math", "4")])
    assert scores.rewards.tolist() == [1.0]
    assert np.isnan(scores.components["chat"]).all()


@pytest.mark.parametrize("prompt", [row("code"), row(None), None], ids=["other value", "no field", "no prompt"])
def test_a_row_without_a_route_fails_and_names_its_value(prompt):
    with pytest.raises(
        ScoringError, match=r"row 1: the data row has task=.*expected one of \['math', 'chat'\]"
    ) as info:
        routed().score([said("4"), said("4")], [row("math", "4"), prompt])
    assert info.value.scores.rewards_or_none() == [1.0, None]


def test_a_star_routes_all_other_values():
    scorer = routed(routes={"math": ["right"], "*": ["length"]})
    assert scorer.score([said("four"), said("4")], [row("poem"), row("math", "4")]).rewards.tolist() == [4.0, 1.0]


def test_a_closed_gate_keeps_its_scorer_from_being_called():
    model = Seen()
    scorer = WeightedScorer(
        {"format": polite, "model": model}, weights={"model": 1}, gates={"model": {"scorer": "format"}}
    )
    scores = scorer.score([said("please"), said("rude"), said("please!")])
    assert model.texts == ["please", "please!"]
    assert scores.rewards.tolist() == [6.0, 0.0, 7.0]
    assert scores.infos["model/gate_open"].tolist() == [True, False, True]


def test_a_gate_has_a_threshold_and_a_value():
    gates = {"polite": {"scorer": "length", "at_least": 5, "otherwise": -2}}
    scores = WeightedScorer({"polite": polite, "length": length}, weights={"polite": 1}, gates=gates).score(
        [said("please"), said("no")]
    )
    assert scores.rewards.tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gates": {"length": {"scorer": "formt"}}}, r"'formt' is not one of the scorers"),
        ({"gates": {"nothing": {"scorer": "length"}}}, r"'nothing' is not one of the scorers"),
        ({"gates": {"length": {"scorer": "polite"}, "polite": {"scorer": "length"}}}, "'polite' has a gate itself"),
        ({"gates": {"length": {"scorer": "length"}}}, "'length' has a gate itself"),
        ({"gates": {"length": {"at_least": 1}}}, "scorer"),
        ({"gates": {"length": {"scorer": "polite", "at_least": float("nan")}}}, "must be a finite number"),
        ({"gates": ["length"]}, "gates must be a mapping"),
        ({"gates": {"length": {"scorer": "polite"}}, "weights": {"length/part": 1}}, "only its reward"),
        ({"route": None}, "routes needs route"),
        ({"routes": {"math": 3}}, "routes.math must be a list"),
        ({"routes": {"math": ["wrong"]}}, "'wrong' is not one of the scorers"),
    ],
)
def test_invalid_gates_and_routes_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        routed(**settings)


def test_the_route_of_a_row_is_the_key_of_its_scorers():
    scorer = routed(routes={"math": ["right"], "*": ["length"]})
    assert [route_of(scorer, each) for each in (row("math"), row("poem"), row(None), None)] == ["math", "*", "*", "*"]
    assert route_of(WeightedScorer([length]), row("math")) == "*"
    assert route_of(scorer.scorers["right"], row("math")) is None


def test_scorers_wait_at_the_same_time():
    """Each waits until the other has begun, which never happens if they run one after the other."""
    meeting = threading.Barrier(2, timeout=20)

    def wait(conversations):
        meeting.wait()
        return [1.0] * len(conversations)

    scores = WeightedScorer({"one": wait, "two": lambda conversations: wait(conversations)}).score([said("a")])
    assert scores.rewards.tolist() == [2.0]


def test_an_exception_is_an_error_of_the_rows_of_its_scorer_when_no_scorer_runs_any_more(caplog):
    running = threading.Event()

    def slow(conversations):
        running.set()
        time.sleep(0.2)
        running.clear()
        return [1.0] * len(conversations)

    def broken(conversations):
        running.wait(20)
        raise RuntimeError("no")

    scorer = WeightedScorer({"broken": broken, "slow": slow}, route="task", routes={"a": ["broken"], "b": ["slow"]})
    with pytest.raises(ScoringError, match=r"1 of 2 .* row 0: broken: raised RuntimeError: no") as caught:
        scorer.score([said("a"), said("a")], [row("a"), row("b")])
    assert not running.is_set()
    assert caught.value.scores.rewards.tolist()[1] == 1.0
    assert 'raise RuntimeError("no")' in caplog.text


def test_a_component_that_a_row_lacks_is_an_error_of_the_row_and_not_a_zero():
    def parts(conversations):
        halves = [size / 2 if size > 1 else np.nan for size in length(conversations)]
        return gym_rm.Scores.from_rewards(length(conversations), components={"half": halves})

    with pytest.raises(ScoringError, match="1 of 2 conversations") as caught:
        WeightedScorer({"parts": parts}, weights={"parts/half": 2.0}).score([said("four"), said("4")])
    assert caught.value.scores.rewards_or_none() == [4.0, None]


def test_one_scorer_under_two_names_is_not_called_by_two_threads():
    busy = threading.Lock()

    class Alone:
        def score(self, conversations, prompts=None):
            assert busy.acquire(blocking=False)
            time.sleep(0.05)
            busy.release()
            return gym_rm.Scores.from_rewards([1.0] * len(conversations))

    scorer = Alone()
    assert WeightedScorer({"a": scorer, "b": scorer, "c": length}).score([said("x")]).rewards.tolist() == [3.0]


def test_a_mixture_passes_the_checks_of_scorers():
    check_scorer(WeightedScorer({"polite": polite, "length": length}, gates={"length": {"scorer": "polite"}}))


def test_an_environment_of_two_sorts_of_rows_from_json():
    tests = "tests.scorers.test_weighted"
    settings = {
        "scorers": {"right": f"{tests}:right", "length": f"{tests}:length", "polite": f"{tests}:polite"},
        "weights": {"right": 1.0, "length": 0.1, "polite": 0.5},
        "route": "task",
        "routes": ROUTES,
    }
    rows = [{"prompt": "2 + 2?", "answer": "4", "task": "math"}, {"prompt": "Hi", "task": "chat"}]
    envs = gym.make_vec("Mixed-v0", num_envs=2, prompts=rows, **settings)
    envs.reset(seed=0, options={"prompt_indices": [0, 1]})
    _, rewards, _, _, infos = envs.step(["4", "hello"])
    np.testing.assert_allclose(rewards, [1.0, 0.5])
    components = infos["final_info"]["components"]
    assert components["_right"].tolist() == [True, False]
    assert components["_length"].tolist() == [False, True]
