"""Environments with a scorer of their own: Math-v0, Code-v0 and Mixed-v0."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import solutions

import gym_rm
from gym_rm.testing import check_vector_env

LENGTHS = {"length": "tests.envs.test_verifier_envs:length"}


def length(conversations):
    return [float(len(conversation[-1]["content"])) for conversation in conversations]


def mixed(num_envs=2, **settings):
    return gym.make_vec("Mixed-v0", num_envs=num_envs, **{"scorers": LENGTHS, "weights": {"length": 0.5}, **settings})


def test_options_of_the_scorer_and_of_the_environment_stand_side_by_side():
    envs = mixed(prompts=["a?", "b?"], max_turns=3)
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(["four", "nine nine"])
    assert rewards.tolist() == [2.0, 4.5]
    assert envs.unwrapped.settings.max_turns == 3


def test_a_single_environment_gives_the_reward_of_the_vector_environment():
    env = gym.make("Mixed-v0", scorers=LENGTHS, weights={"length": 0.5}, prompts=["a?"])
    env.reset(seed=0)
    assert env.step("four")[1] == 2.0


def judged(conversations):
    sizes = [len(conversation[-1]["content"]) for conversation in conversations]
    infos = {
        "size": sizes,
        "long": [size > 5 for size in sizes],
        "share": [size / 9 if size % 2 else np.nan for size in sizes],
        "said": [str(size) if size % 3 else None for size in sizes],
        "pair": np.array([[size, size] for size in sizes]),
    }
    return gym_rm.Scores.from_rewards(
        [np.nan if size % 5 == 0 else size for size in sizes],
        components={"half": [size / 2 if size % 4 else np.nan for size in sizes]},
        terminations=[size % 2 == 0 for size in sizes],
        infos=infos,
    )


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        (
            "SameStep",
            {"route": "task", "routes": {"math": ["math"], "style": ["style"], "both": ["math", "style"], "none": []}},
        ),
        ("NextStep", {"route": "task"}),  # some rows have no route, which is their error
        ("Disabled", {"gates": {"style": {"scorer": "math", "at_least": 1}}}),
        ("SameStep", {"reward_on": "end", "max_turns": 2}),
    ],
    ids=["routes", "unknown route", "gates", "last turn"],
)
def test_infos_are_masked_where_no_scorer_saw_the_row_as_in_single_environments(mode, settings):
    pytest.importorskip("math_verify")  # some of the random replies are formulas
    tasks = ["math", "style", "both", "none", "style"]
    prompts = [{"prompt": f"{n} + 1?", "task": task, "user_turns": ["And?"]} for n, task in enumerate(tasks)]
    for row in prompts[1:]:
        row["answer"] = "4"  # the first has none, which is an error of the scorer
    scorers = {"math": {"kind": "math"}, "style": judged}
    check_vector_env(
        "Mixed-v0",
        num_envs=4,
        autoreset_mode=mode,
        scorers=scorers,
        prompts=prompts,
        fallback_reward=-1,
        num_steps=3,
        **settings,
    )


@pytest.mark.parametrize("settings", [{}, {"scorers": None}, {"scorers": {}}], ids=["absent", "None", "empty"])
def test_a_mixture_without_scorers_says_what_it_needs(settings):
    for make in (gym.make, gym.make_vec):
        with pytest.raises(gym_rm.ConfigError, match=r"Mixed-v0 needs scorers=\{name: scorer\}"):
            make("Mixed-v0", **settings)


def test_an_unknown_keyword_names_the_nearest_one_of_both_kinds():
    with pytest.raises(gym_rm.ConfigError, match="Did you mean 'weights'"):
        mixed(weigths={"length": 1})
    with pytest.raises(gym_rm.ConfigError, match="Did you mean 'max_turns'"):
        mixed(max_turn=1)


@pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelTokens-v0", "Math-v0"])
def test_the_error_for_an_unknown_keyword_lists_what_the_environment_takes(env_id):
    vector_only = {"num_envs", "group_size", "autoreset_mode"}
    for make in (gym.make, gym.make_vec):
        with pytest.raises(gym_rm.ConfigError, match="nope: unknown setting") as error:
            make(env_id, nope=1)
        listed = str(error.value).rstrip(".").split(": ")[-1].split(", ")
        assert len(listed) == len(set(listed))
        assert "max_turns" in listed
        assert vector_only & set(listed) == (vector_only if make is gym.make_vec else set())
        assert ("reward_model" in listed) == (env_id != "Math-v0")


@pytest.mark.parametrize("name", ["reward_model", "plan"])
def test_another_reward_model_is_refused(name):
    with pytest.raises(gym_rm.ConfigError, match=f"{name} must not be set for Mixed-v0"):
        mixed(**{name: "somewhere"})


def test_code_v0_runs_the_embedded_tasks():
    envs = gym.make_vec("Code-v0", num_envs=4, num_workers=2, allow_unsafe=True)
    _, infos = envs.reset(seed=0)
    right = [solutions()[name] for name in infos["prompt_id"]]
    replies = [right[0], right[1], "pass", f"```python\n{right[3]}```"]
    _, rewards, _, _, infos = envs.step(replies)
    assert rewards.tolist() == [1, 1, 0, 1]
    assert infos["final_info"]["verdict"][2] in ("wrong_answer", "exception")
    envs.close()
