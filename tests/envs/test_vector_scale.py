"""Many environments, long conversations, memory, and pickling."""

import pickle
import tracemalloc

from gymnasium.utils.env_checker import data_equivalence

from tests.envs.environments import Recorder, make, one_turn, prompt


def test_a_thousand_environments():
    envs = one_turn(1024, group_size=8)
    envs.reset(seed=0)
    _, rewards, terminations, _, infos = envs.step([str(row) for row in range(1024)])
    assert rewards.tolist() == [len(str(row)) / 4 for row in range(1024)]
    assert terminations.all()
    assert len(set(infos["final_info"]["group_id"].tolist())) == 128


def test_an_episode_of_a_thousand_turns():
    envs = make(1, prompts=[prompt(0, *map(str, range(1_000)))])
    envs.reset(seed=0)
    ends = [bool(envs.step(["x"])[2][0]) for _ in range(1_001)]
    assert ends == [False] * 1_000 + [True]


def test_large_replies_are_not_copied_into_arrays():
    envs = one_turn(64)
    envs.reset(seed=0)
    replies = ["x" * 1_000_000, *["y"] * 63]
    tracemalloc.start()
    envs.step(replies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000  # a fixed-width array of the 64 replies needs 256 MB


def test_prompt_orders_need_memory_only_for_drawn_prompts():
    tracemalloc.start()
    envs = make(64, prompts=[str(index) for index in range(20_000)])
    envs.reset(seed=0)
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(5):
        envs.step(["x"] * 64)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1_000_000  # 64 permutations of 20,000 prompts need 10 MB


def test_an_environment_survives_pickling_during_an_episode():
    envs = make(2, reward_model=Recorder(), group_size=2)
    envs.reset(seed=0)
    envs.step(["a", "b"])
    twin = pickle.loads(pickle.dumps(envs))
    for _ in range(5):
        assert data_equivalence(envs.step(["a", "b"]), twin.step(["a", "b"]))
