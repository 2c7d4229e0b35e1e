"""The contract of Gymnasium, specs, settings, memory and replicas of `RewardVectorEnv`, and single environments."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import gym_rm
from gym_rm import ConfigError
from gym_rm.errors import warn_once
from gym_rm.testing import check_vector_env
from tests.engine.executors.batches import gone
from tests.envs.environments import PROMPTS, Recorder, each_mode, length_reward, make, prompt


@each_mode
@pytest.mark.parametrize(
    "options", [{"group_size": 3}, {"max_turns": 2}, {"reward_on": "improvement"}, {"reward_on": "end"}], ids=str
)
def test_the_vector_environment_passes_check_vector_env(mode, options):
    check_vector_env(
        "RewardModel-v0", num_envs=3, **options, reward_model=Recorder(), prompts=PROMPTS, autoreset_mode=mode
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("render_mode", [None, "ansi", "human", "html", "rgb_array"])
def test_the_single_environment_passes_check_env(render_mode):
    env = gym.make("RewardModel-v0", reward_model=Recorder(), prompts=PROMPTS, render_mode=render_mode)
    check_env(env.unwrapped)


def test_the_embedded_default_passes_check_vector_env():
    check_vector_env("RewardModel-v0", num_envs=4, num_steps=3)


REPLIES = st.text(alphabet="ab ~é😀\x00", max_size=12)


SCRIPTS = st.lists(st.lists(REPLIES, max_size=3), min_size=1, max_size=4)


@each_mode
@settings(deadline=None, max_examples=25)
@given(data=st.data(), scripts=SCRIPTS, max_turns=st.none() | st.integers(1, 3))
def test_vector_env_equals_sync_vector_env(mode, data, scripts, max_turns):
    options = {
        "prompts": [prompt(i, *turns, answer=turns[0] if turns else None) for i, turns in enumerate(scripts)],
        "reward_model": Recorder(),
        "max_turns": max_turns,
        "reward_on": data.draw(st.sampled_from(["turn", "improvement", "end"])),
        "fallback_reward": -1.0,
    }
    native = make(3, **options, autoreset_mode=mode)
    sync = make(3, **options, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode(mode)})
    seed = data.draw(st.integers(0, 10) | st.lists(st.integers(0, 10), min_size=3, max_size=3))
    assert data_equivalence(native.reset(seed=seed), sync.reset(seed=seed), exact=True)
    for _ in range(6):
        replies = data.draw(st.lists(REPLIES | st.just("FAIL"), min_size=3, max_size=3))
        step = native.step(replies)
        assert data_equivalence(step, sync.step(replies), exact=True)
        over = step[2] | step[3]
        if mode == "Disabled" and over.any():
            resets = [envs.reset(options={"reset_mask": over.copy()}) for envs in (native, sync)]
            assert data_equivalence(*resets, exact=True)


def test_async_vector_env_equals_sync_vector_env():
    options = {"num_envs": 2, "reward_model": length_reward, "prompts": PROMPTS}
    kwargs = {"shared_memory": False, "context": "spawn"}
    parallel = gym.make_vec("gym_rm:RewardModel-v0", vectorization_mode="async", vector_kwargs=kwargs, **options)
    serial = gym.make_vec("RewardModel-v0", vectorization_mode="sync", **options)
    try:
        assert data_equivalence(parallel.reset(seed=1), serial.reset(seed=1))
        for replies in (("a", "bb"), ("ccc", "é\x00😀"), ("", "x")):
            assert data_equivalence(parallel.step(replies), serial.step(replies))
    finally:
        parallel.close()


FORKED = """
import gymnasium as gym
import gym_rm

for env_id in ("RewardModel-v0", "RewardModelCandidates-v0", "RewardModelTokens-v0"):
    kwargs = {"shared_memory": False, "context": "fork"}
    envs = gym.make_vec(env_id, num_envs=1, vectorization_mode="async", vector_kwargs=kwargs)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    envs.close()
    print("stepped", env_id)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_processes_score_with_the_embedded_model_and_say_that_they_have_one_thread():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FORKED]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, logged = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a child that hangs does not end with its parent
    assert printed.count("stepped") == 3, logged
    assert "runs with one thread" in logged


JSON_OPTIONS = {
    "reward_model": {"kind": "recorder"},
    "prompts": ["2 + 2?", {"messages": [{"role": "user", "content": "hi"}], "user_turns": ["and?"], "answer": "4"}],
    "group_size": 2,
    "max_turns": 2,
    "respond": "tests.envs.environments:say_more",
    "reward_on": "turn",
    "fallback_reward": -1,
    "autoreset_mode": "NextStep",
    "max_text_length": 1000,
    "render_mode": "ansi",
}


def test_a_spec_with_plain_values_survives_json(monkeypatch):
    monkeypatch.setitem(gym_rm.scorers.load.SCORER_KINDS, "recorder", "tests.envs.environments:Recorder")
    envs = gym.make_vec("RewardModel-v0", num_envs=4, **JSON_OPTIONS)
    text = envs.spec.to_json()
    json.loads(text)
    twin = gym.make_vec(EnvSpec.from_json(text))
    assert (twin.num_envs, twin.group_size, twin.autoreset_mode) == (4, 2, AutoresetMode.NEXT_STEP)
    assert data_equivalence(envs.reset(seed=0), twin.reset(seed=0))
    for _ in range(4):
        replies = ["a", "bb", "ccc", "dddd"]
        assert data_equivalence(envs.step(replies), twin.step(replies))


def test_a_spec_with_a_scorer_does_not_copy_it():
    scorer = gym_rm.load_scorer(length_reward)
    envs = make(reward_model=scorer)
    assert envs.scorer is scorer
    assert gym.make_vec(envs.spec).scorer is scorer


def test_the_embedded_reward_model_is_loaded_once_and_shared():
    first, second = (gym.make("RewardModel-v0").unwrapped for _ in range(2))
    assert first._envs.scorer is second._envs.scorer
    other = gym.make("RewardModel-v0", reward_model_kwargs={"max_num_batched_tokens": 512}).unwrapped
    assert other._envs.scorer is not first._envs.scorer
    first.close()
    second.reset(seed=0)
    assert np.isfinite(second.step("four")[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 3}, "num_envs must be a multiple of group_size.*num_envs=2 and group_size=3"),
        ({"max_turns": 0}, "max_turns must be an integer of at least 1, got 0"),
        ({"reward_on": "turns"}, "reward_on must be 'turn', 'improvement' or 'end', got 'turns'. Did you mean 'turn'"),
        ({"promts": ["a"]}, "promts: unknown setting. Did you mean 'prompts'"),
        ({"respond": len}, r"respond must take \(conversations, prompts, scores\)"),
        ({"autoreset_mode": "SameSteps"}, "autoreset_mode must be .*got 'SameSteps'. Did you mean 'SameStep'"),
        ({"fallback_reward": float("nan")}, "fallback_reward must be a finite number"),
        ({"max_episode_steps": 2}, "max_episode_steps: unknown setting. Use max_turns"),
        ({"render_mode": "rgb_array_list"}, "render_mode must be one of .*'human', 'ansi', 'html', 'rgb_array'"),
        ({"respond": "nowhere:function"}, "respond must be a function or 'module:function', got 'nowhere:function'"),
        ({"prompts": {"a"}}, "prompts must have an order"),
        ({"prompts": ["half \ud800"]}, r"prompts\[0\]: 'messages\[0\].content' contains a lone surrogate"),
        ({"prompts": ["x" * 11], "max_text_length": 10}, "has 11 characters, more than max_text_length=10"),
        ({"prompts": [prompt(0, "\ud800")]}, r"prompts\[0\]: 'user_turns\[0\]' contains a lone surrogate"),
        ({"num_replicas": 2, "reward_model_kwargs": {"num_replicas": 2}}, "num_replicas is given twice, also in"),
        ({"reward_model": 3}, "reward_model must be"),
        ({"reward_model_kwargs": {"dtype": "auto"}}, "options .'dtype'. cannot be applied to the function"),
    ],
    ids=str,
)
def test_invalid_settings_raise_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        make(2, **options)


@pytest.mark.parametrize(("settings", "count"), [({}, 0), ({"prompts": ["What is love?"]}, 1)])
def test_own_prompts_for_the_embedded_reward_model_are_warned_of(settings, count, caplog):
    warn_once.cache_clear()
    gym.make_vec("RewardModel-v0", num_envs=1, **settings).close()
    assert caplog.text.count("so the small embedded reward model scores the replies") == count


# --- single environments: `gym.make` of the three ids


each_id = pytest.mark.parametrize("env_id", ["RewardModel-v0", "RewardModelCandidates-v0", "RewardModelTokens-v0"])


@each_id
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": 4}, "num_envs must not be set for a single environment, got 4"),
        ({"autoreset_mode": "NextStep"}, "autoreset_mode must not be set for a single environment"),
        ({"group_size": 2}, "group_size must not be set for a single environment, got 2"),
    ],
    ids=str,
)
def test_a_setting_of_vector_environments_raises_config_error(env_id, settings, message):
    with pytest.raises(ConfigError, match=message):
        gym.make(env_id, **settings)


@pytest.mark.parametrize("make", [gym.make, gym.make_vec])
@pytest.mark.parametrize(
    ("env_id", "typo", "option"),
    [
        ("RewardModel-v0", "num_env", "num_envs"),
        ("RewardModelCandidates-v0", "candidate", "candidates"),
        ("RewardModelTokens-v0", "max_new_token", "max_new_tokens"),
        ("RewardModelTokens-v0", "promts", "prompts"),
    ],
)
def test_the_error_for_a_typo_names_the_nearest_option(make, env_id, typo, option):
    with pytest.raises(ConfigError, match=f"{typo}: unknown setting. Did you mean '{option}'"):
        make(env_id, **{typo: 1})


@each_id
def test_an_id_with_a_module_imports_gym_rm_and_one_with_a_namespace_is_the_same_environment(env_id):
    for maker in (gym.make, gym.make_vec):
        assert maker(f"gym_rm:{env_id}", reward_model=length_reward).spec.id == env_id
        assert maker(f"gym_rm/{env_id}", reward_model=length_reward).spec.id == f"gym_rm/{env_id}"


@each_id
def test_an_ended_episode_asks_for_a_plain_reset(env_id):
    options = {"candidates": ["a", "b"]} if env_id == "RewardModelCandidates-v0" else {}
    options |= {"max_new_tokens": 1} if env_id == "RewardModelTokens-v0" else {}
    env = gym.make(env_id, reward_model=length_reward, prompts=["hi"], disable_env_checker=True, **options)
    env.reset(seed=0)
    action = "a" if env_id == "RewardModel-v0" else 0
    assert env.step(action)[2]
    with pytest.raises(ResetNeeded, match=r"the episode has ended; call reset\(\) first"):
        env.step(action)


# --- memory and replicas


def test_large_replies_are_not_copied_into_arrays():
    envs = make(64, prompts=PROMPTS[:1])
    envs.reset(seed=0)
    replies = ["x" * 1_000_000, *["y"] * 63]
    tracemalloc.start()
    envs.step(replies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000  # a fixed-width array of the 64 replies needs 256 MB


def test_prompt_orders_need_memory_only_for_drawn_prompts():
    envs = make(64, prompts=[str(index) for index in range(20_000)])
    tracemalloc.start()
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(["x"] * 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000  # 64 permutations of 20,000 prompts need 10 MB


def test_an_environment_survives_pickling_during_an_episode():
    envs = make(2, reward_model=Recorder(), group_size=2)
    envs.reset(seed=0)
    envs.step(["a", "b"])
    twin = pickle.loads(pickle.dumps(envs))
    for _ in range(5):
        assert data_equivalence(envs.step(["a", "b"]), twin.step(["a", "b"]))


@pytest.mark.slow
def test_an_environment_with_replicas_gives_the_same_rewards_and_ends_them(saved_model):
    options = {"reward_model": str(saved_model("qwen3")), "num_envs": 4, "group_size": 2}
    one = gym.make_vec("RewardModel-v0", **options)
    two = gym.make_vec("RewardModel-v0", **options, num_replicas=2, reward_model_kwargs={"executor": "processes"})
    one.reset(seed=0)
    two.reset(seed=0)
    for step in range(3):
        replies = [f"{step} and {k}" for k in range(4)]
        assert np.array_equal(two.step(replies)[1], one.step(replies)[1])
    executor = two.unwrapped.scorer.executor
    ids = [each for replica in executor.replicas for each in replica.process_ids]
    assert len([each for each in ids if os.path.exists(f"/proc/{each}")]) == 2
    two.close()
    assert all(gone(each) for each in ids)
