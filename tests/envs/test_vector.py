import copy
import json
import multiprocessing
import pickle
import tracemalloc

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as vector_wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

import gym_rm
from gym_rm import ActionError, ConfigError, Prompt, Scores, ScoringError
from gym_rm.envs.single import RewardEnv
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.testing import check_vector_env

MODES = ["SameStep", "NextStep", "Disabled"]
each_mode = pytest.mark.parametrize("mode", MODES)


def length_reward(conversations):
    return [len(conversation[-1]["content"]) / 4 for conversation in conversations]


def say_more(conversations, prompts, scores):
    return ["more?" if len(conversation) < 4 else None for conversation in conversations]


class Recorder:
    """Scores by length, keeps what it was asked, and fails for replies that say so."""

    def __init__(self):
        self.calls = []

    def score(self, conversations, prompts=None):
        self.calls.append(conversations)
        replies = [conversation[-1]["content"] for conversation in conversations]
        lengths = np.array([len(reply) for reply in replies], dtype=np.float32)
        failed = np.array(["FAIL" in reply for reply in replies])
        scores = Scores(
            rewards=np.where(failed, np.float32(np.nan), lengths),
            components={"length": lengths, "half": lengths / 2},
            num_tokens=np.array([sum(len(m["content"]) for m in c) for c in conversations], dtype=np.int64),
            truncated_tokens=np.array([reply.count("~") for reply in replies], dtype=np.int64),
            errors=tuple("asked to fail" if each else None for each in failed),
        )
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def prompt(index, *user_turns, answer=None):
    return Prompt(({"role": "user", "content": f"question {index}"},), f"p{index}", user_turns, answer)


PROMPTS = [
    prompt(0),
    prompt(1, "why?", answer="one"),
    prompt(2, "why?", "sure?"),
    prompt(3, answer="three"),
    prompt(4, "a", "b", "c", "d"),
]


def make(num_envs=2, **options):
    options = {"reward_model": length_reward, "prompts": PROMPTS, **options}
    return gym.make_vec("RewardModel-v0", num_envs=num_envs, **options)


def one_turn(num_envs=2, **options):
    return make(num_envs, prompts=[prompt(0), prompt(1), prompt(2)], **options)


# --- Gymnasium's contract ----------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("options", [{}, {"max_turns": 2}, {"max_turns": 1}, {"reward_on": "end"}], ids=str)
def test_the_vector_environment_conforms(mode, options):
    check_vector_env(
        "RewardModel-v0", num_envs=3, **options, reward_model=Recorder(), prompts=PROMPTS, autoreset_mode=mode
    )


@each_mode
def test_groups_conform(mode):
    check_vector_env(
        "RewardModel-v0", num_envs=6, group_size=3, reward_model=Recorder(), prompts=PROMPTS, autoreset_mode=mode
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("render_mode", [None, "ansi", "human"])
def test_the_single_environment_passes_check_env(render_mode):
    env = gym.make("RewardModel-v0", reward_model=Recorder(), prompts=PROMPTS, render_mode=render_mode)
    check_env(env.unwrapped)


REPLIES = st.text(alphabet="ab ~é😀\x00", max_size=12)
SCRIPTS = st.lists(st.lists(REPLIES, max_size=3), min_size=1, max_size=4)


@each_mode
@settings(deadline=None, max_examples=25)
@given(
    data=st.data(), scripts=SCRIPTS, max_turns=st.none() | st.integers(1, 3), max_length=st.none() | st.integers(1, 6)
)
def test_native_equals_sync(mode, data, scripts, max_turns, max_length):
    options = {
        "prompts": [prompt(i, *turns, answer=turns[0] if turns else None) for i, turns in enumerate(scripts)],
        "reward_model": Recorder(),
        "max_turns": max_turns,
        "max_reply_length": max_length,
        "reward_on": data.draw(st.sampled_from(["turn", "end"])),
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


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_async_vector_env_gives_what_sync_gives(context):
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {context}")
    options = {"num_envs": 2, "reward_model": length_reward, "prompts": PROMPTS}
    kwargs = {"shared_memory": False, "context": context}
    parallel = gym.make_vec("gym_rm:RewardModel-v0", vectorization_mode="async", vector_kwargs=kwargs, **options)
    serial = gym.make_vec("RewardModel-v0", vectorization_mode="sync", **options)
    try:
        assert data_equivalence(parallel.reset(seed=1), serial.reset(seed=1))
        for replies in (("a", "bb"), ("ccc", "é\x00😀"), ("", "x")):
            assert data_equivalence(parallel.step(replies), serial.step(replies))
    finally:
        parallel.close()


def test_async_vector_env_needs_shared_memory_off():
    with pytest.raises(TypeError, match="disable `shared_memory`"):
        gym.make_vec("RewardModel-v0", 2, "async", reward_model=length_reward, prompts=PROMPTS)


def test_the_id_brings_its_module():
    assert isinstance(
        gym.make_vec("gym_rm:RewardModel-v0", reward_model=length_reward, prompts=["hi"]), RewardVectorEnv
    )
    assert isinstance(
        gym.make("gym_rm:RewardModel-v0", reward_model=length_reward, prompts=["hi"]).unwrapped, RewardEnv
    )


JSON_OPTIONS = {
    "reward_model": {"kind": "recorder"},
    "prompts": ["2 + 2?", {"messages": [{"role": "user", "content": "hi"}], "user_turns": ["and?"], "answer": "4"}],
    "group_size": 2,
    "max_turns": 2,
    "respond": "test_vector:say_more",
    "max_reply_length": 100,
    "reward_on": "turn",
    "fallback_reward": -1,
    "autoreset_mode": "next_step",
    "max_text_length": 1000,
    "render_mode": "ansi",
}


@pytest.fixture
def recorder_kind(monkeypatch):
    monkeypatch.setitem(gym_rm.scorer.SCORER_KINDS, "recorder", f"{__name__}:Recorder")


@pytest.mark.usefixtures("recorder_kind")
def test_a_spec_of_plain_values_goes_through_json(monkeypatch):
    options = {**JSON_OPTIONS, "respond": f"{__name__}:say_more"}
    envs = gym.make_vec("RewardModel-v0", num_envs=4, **options)
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


@pytest.mark.parametrize("text", ["SameStep", "SAME_STEP", "same_step", "same-step", AutoresetMode.SAME_STEP])
def test_the_autoreset_mode_has_many_spellings(text):
    envs = make(autoreset_mode=text)
    assert envs.autoreset_mode is envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_metadata_belong_to_the_instance():
    first, second = make(autoreset_mode="NextStep"), make(autoreset_mode="Disabled")
    assert first.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert second.metadata["autoreset_mode"] is AutoresetMode.DISABLED


# --- the embedded default ----------------------------------------------------------------------------------------


@each_mode
def test_the_embedded_default_conforms(mode):
    check_vector_env("RewardModel-v0", num_envs=4, autoreset_mode=mode, num_steps=3)


def test_the_embedded_reward_model_is_loaded_once_while_it_is_used():
    first, second = (gym.make("RewardModel-v0").unwrapped for _ in range(2))
    assert first._envs.scorer is second._envs.scorer
    other = gym.make("RewardModel-v0", reward_model_kwargs={"max_num_batched_tokens": 512}).unwrapped
    assert other._envs.scorer is not first._envs.scorer
    first.close()
    second.reset(seed=0)
    assert np.isfinite(second.step("four")[1])


# --- wrappers ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(gym.__version__ < "1.4", reason="RecordEpisodeStatistics forgets the resets of SAME_STEP")
@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_episode_statistics(mode):
    envs = vector_wrappers.RecordEpisodeStatistics(make(2, autoreset_mode=mode))
    envs.reset(seed=0)
    returns, lengths = np.zeros(2), np.zeros(2)
    over = np.zeros(2, dtype=bool)
    for _ in range(12):
        _, rewards, terminations, truncations, infos = envs.step(["four", "eight888"])
        played = ~over if mode == "NextStep" else np.array([True, True])
        returns, lengths = returns + rewards, lengths + played
        done = terminations | truncations
        if done.any():
            assert infos["episode"]["r"][done].tolist() == returns[done].tolist()
            assert infos["episode"]["l"][done].tolist() == lengths[done].tolist()
        returns[done], lengths[done] = 0, 0
        over = done
    assert envs.episode_count > 0


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        (lambda envs: vector_wrappers.ClipReward(envs, 0.0, 1.5), [1.0, 1.5]),
        (lambda envs: vector_wrappers.TransformReward(envs, lambda rewards: -rewards), [-1.0, -2.0]),
        (lambda envs: vector_wrappers.TransformAction(envs, lambda actions: [a + a for a in actions]), [2.0, 4.0]),
    ],
    ids=["ClipReward", "TransformReward", "TransformAction"],
)
def test_reward_and_action_wrappers(mode, wrapper, expected):
    envs = wrapper(make(2, autoreset_mode=mode))
    envs.reset(seed=0)
    assert envs.step(["four", "eight888"])[1].tolist() == expected


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_normalised_rewards_stay_finite(mode):
    envs = vector_wrappers.NormalizeReward(make(2, autoreset_mode=mode))
    envs.reset(seed=0)
    for step in range(20):
        assert np.isfinite(envs.step(["x" * step, ""])[1]).all()


@each_mode
def test_infos_become_lists(mode):
    envs = vector_wrappers.DictInfoToList(one_turn(2, autoreset_mode=mode, reward_model=Recorder()))
    _, infos = envs.reset(seed=0)
    assert {info["prompt_id"] for info in infos} <= {"p0", "p1", "p2"}
    *_, infos = envs.step(["four", "eight888"])
    info = infos[1]["final_info"] if mode == "SameStep" else infos[1]
    assert info["components"] == {"length": 8.0, "half": 4.0}
    assert info["metrics"]["mean"] == 8.0


def test_observations_can_be_transformed_and_flattened():
    envs = make(2, autoreset_mode="NextStep", max_text_length=64)
    flat = vector_wrappers.FlattenObservation(envs)
    observations, _ = flat.reset(seed=0)
    assert observations in flat.observation_space
    box = gym.spaces.Box(0, np.inf, (1,))
    lengths = vector_wrappers.VectorizeTransformObservation(
        envs, gym.wrappers.TransformObservation, func=lambda c: np.array([len(c)], np.float32), observation_space=box
    )
    observations, _ = lengths.reset(seed=0)
    assert observations.tolist() == [[1.0], [1.0]]


def test_array_conversion_does_not_corrupt_text():
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    envs = vector_wrappers.NumpyToTorch(one_turn(2))
    observations, _ = envs.reset(seed=0)
    assert observations[0][0]["content"].startswith("question")
    observations, rewards, terminations, _, infos = envs.step(["four", "eight888"])
    assert rewards.tolist() == [1.0, 2.0]
    assert isinstance(terminations, torch.Tensor)
    assert infos["final_obs"][1][-1] == {"role": "assistant", "content": "eight888"}


# --- episodes ----------------------------------------------------------------------------------------------------


def test_a_one_turn_episode_ends_at_every_step_and_keeps_its_last_state():
    envs = one_turn(2)
    before, first = envs.reset(seed=0)
    after, rewards, terminations, truncations, infos = envs.step(["four", "eight888"])
    assert rewards.dtype == np.float64
    assert rewards.tolist() == [1.0, 2.0]
    assert terminations.all()
    assert not truncations.any()
    for row, reply in enumerate(["four", "eight888"]):
        assert infos["final_obs"][row] == [*before[row], {"role": "assistant", "content": reply}]
        assert infos["final_info"]["prompt_id"][row] == first["prompt_id"][row]
    assert [observation[-1]["role"] for observation in after] == ["user", "user"]


def test_a_scripted_dialogue():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=[prompt(0, "why?")])
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step("one1")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert [message["content"] for message in observation] == ["question 0", "one1", "why?"]
    observation, _, terminated, truncated, info = env.step("two2two2")
    assert (terminated, truncated) == (True, False)
    assert [message["content"] for message in observation] == ["question 0", "one1", "why?", "two2two2"]
    assert info["metrics"] == {"count": 2, "mean": 1.5, "std": 0.5, "min": 1.0, "max": 2.0}


def test_respond_gives_the_user_turns():
    envs = make(1, prompts=["hi"], respond=say_more)
    envs.reset(seed=0)
    (observation,), *_ = envs.step(["one"])
    assert observation[-1] == {"role": "user", "content": "more?"}
    _, _, terminations, _, _ = envs.step(["two"])
    assert terminations.all()


@pytest.mark.parametrize("answer", [3, "\ud800"])
def test_an_invalid_user_turn_is_refused_and_changes_nothing(answer):
    answers = [answer, "fine"]
    envs = make(2, respond=lambda conversations, prompts, scores: answers)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="environment 0: respond returned an invalid turn"):
        envs.step(["a", "b"])
    answers[0] = None
    observations, _, terminations, _, _ = envs.step(["a", "b"])
    assert terminations.tolist() == [True, False]
    assert [message["content"] for message in observations[1]][1:] == ["b", "fine"]


def test_the_turn_limit_truncates():
    envs = make(1, prompts=[prompt(0, "a", "b", "c")], max_turns=2)
    envs.reset(seed=0)
    assert [envs.step(["x"])[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_an_over_long_reply_truncates_and_is_scored_whole():
    envs = make(2, prompts=[prompt(0, "a")], max_reply_length=4)
    envs.reset(seed=0)
    _, rewards, terminations, truncations, infos = envs.step(["x" * 4, "x" * 40])
    assert (terminations.tolist(), truncations.tolist()) == ([False, False], [False, True])
    assert rewards.tolist() == [1.0, 10.0]
    assert infos["final_obs"][1][-1]["content"] == "x" * 40


@pytest.mark.parametrize("reply", ["", " padded \n", "nul\x00s\x00", "\x1b[31m", "<|im_end|>", "😀" * 1000])
def test_replies_are_never_edited(reply):
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    infos = envs.step(np.array([reply, "x"], dtype=object))[-1]
    assert recorder.calls[0][0][-1] == {"role": "assistant", "content": reply}
    assert infos["final_obs"][0][-1]["content"] == reply


@pytest.mark.parametrize("actions", [("a", "b"), ["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], dtype=object)])
def test_replies_come_in_any_array(actions):
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    envs.step(actions)
    assert [type(conversation[-1]["content"]) for conversation in recorder.calls[0]] == [str, str]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (["a", None], "environment 1: expected a text .str., got NoneType None"),
        (["a", b"b"], "environment 1: expected a text .str., got bytes"),
        (["a", "b\ud800c"], r"environment 1: the text holds a lone surrogate, '\\ud800' at character 1"),
        (["a", "x" * 101], "environment 1: expected a text of 0 to 100 characters, got 101"),
        ("ab", "expected 2 replies in a list, tuple or array, got 'ab'"),
        (["a"], r"expected 2 replies, one for each environment, got the shape \(1,\)"),
        (np.array("ab"), r"got the shape \(\)"),
        (np.array([["a", "b"]]), r"got the shape \(1, 2\)"),
        (iter("ab"), "expected 2 replies in a list"),
    ],
)
def test_what_is_no_reply_is_refused_by_row(actions, message):
    envs = one_turn(2, max_text_length=100)
    envs.reset(seed=0)
    with pytest.raises(ActionError, match=message):
        envs.step(actions)


def test_one_environment_refuses_too():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=["hi"])
    env.reset()
    with pytest.raises(ActionError, match="environment 0: expected a text"):
        env.step(3)


# --- seeds, prompts, groups --------------------------------------------------------------------------------------


def seen(envs, steps, seed):
    _, infos = envs.reset(seed=seed)
    rows = [infos["prompt_id"]]
    rows += [envs.step(["x"] * envs.num_envs)[-1]["prompt_id"] for _ in range(steps - 1)]
    return np.array(rows).T


def test_every_environment_sees_every_prompt_once_an_epoch():
    for order in seen(one_turn(4), 6, seed=0):
        assert sorted(order[:3]) == sorted(order[3:]) == ["p0", "p1", "p2"]


def test_environment_i_has_the_seed_plus_i():
    assert seen(one_turn(4), 6, seed=10)[2].tolist() == seen(one_turn(1), 6, seed=12)[0].tolist()
    assert (
        one_turn(3).reset(seed=[7, 8, 9])[1]["prompt_id"].tolist() == one_turn(3).reset(seed=7)[1]["prompt_id"].tolist()
    )


def test_no_seed_goes_on_with_the_order():
    envs = one_turn(1)
    prompts = [envs.reset(seed=0), envs.reset(), envs.reset()]
    assert sorted(infos["prompt_id"][0] for _, infos in prompts) == ["p0", "p1", "p2"]


def test_seeds_are_reported_as_sync_vector_env_does():
    envs = one_turn(3)
    assert len({*envs.np_random_seed}) == 3
    envs.reset(seed=4)
    assert envs.np_random_seed == (4, 5, 6)
    envs.reset(seed=[9, None, 2])
    assert envs.np_random_seed == (9, 5, 2)
    assert len(envs.np_random) == 3


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], []])
def test_a_list_of_seeds_has_one_for_each(seed):
    with pytest.raises(ValueError, match="one for each of the 2 environments"):
        one_turn(2).reset(seed=seed)


@pytest.mark.parametrize("seed", [1.5, "1", [1, 2.0], [None, "2"], {}.keys])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ConfigError, match="seed must be an integer or None, or a list of those; got "):
        one_turn(2).reset(seed=seed)
    with pytest.raises(ConfigError, match="seed must be an integer"):
        gym.make("RewardModel-v0", reward_model=length_reward).reset(seed=1.5)


def test_siblings_answer_the_same_prompts_and_groups_do_not_share():
    orders = seen(make(6, group_size=3, prompts=[prompt(i) for i in range(50)]), 20, seed=0)
    assert (orders[0] == orders[1]).all()
    assert (orders[0] == orders[2]).all()
    assert (orders[3] == orders[5]).all()
    assert (orders[0] != orders[3]).any()


def test_siblings_at_different_turns_still_walk_the_same_prompts():
    envs = make(2, group_size=2, prompts=[prompt(i, "a", "b", "c") for i in range(5)], max_reply_length=3)
    _, infos = envs.reset(seed=0)
    orders = [[prompt_id] for prompt_id in infos["prompt_id"]]
    ids = [[group_id] for group_id in infos["group_id"]]
    for _ in range(40):  # the first sibling ends an episode at every step, the other at every fourth
        _, _, terminations, truncations, infos = envs.step(["long", "x"])
        for row in np.flatnonzero(terminations | truncations):
            orders[row].append(infos["prompt_id"][row])
            ids[row].append(infos["group_id"][row])
    assert len(orders[0]) > 2 * len(orders[1]) > 10
    assert orders[0][: len(orders[1])] == orders[1]
    assert ids[0][: len(ids[1])] == ids[1]
    assert len({*ids[0]}) == len(ids[0])


def test_group_ids_are_of_one_group_and_one_episode():
    envs = one_turn(4, group_size=2)
    ids = [envs.reset(seed=0)[1]["group_id"]]
    ids += [envs.step(["x"] * 4)[-1]["group_id"] for _ in range(5)]
    assert ids[0].dtype == np.int64
    assert all(a == b and c == d for a, b, c, d in ids)
    assert len({int(number) for row in ids for number in row}) == 12
    assert "group_id" not in one_turn(4).reset(seed=0)[1]


def test_a_whole_reset_brings_siblings_together_again():
    envs = make(2, group_size=2, prompts=[prompt(i, "a", "b", "c") for i in range(9)], max_reply_length=3)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(["long", "x"])
    _, infos = envs.reset()
    assert infos["prompt_id"][0] == infos["prompt_id"][1]
    assert infos["group_id"][0] == infos["group_id"][1]


def test_a_part_of_a_group_cannot_be_seeded():
    envs = one_turn(4, group_size=2)
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="only a part of group 1"):
        envs.reset(seed=1, options={"reset_mask": np.array([True, True, True, False])})


@each_mode
def test_a_partial_reset_starts_only_its_rows(mode):
    envs = make(3, autoreset_mode=mode)
    before, _ = envs.reset(seed=0)
    after, infos = envs.reset(options={"reset_mask": np.array([False, True, False])})
    assert (after[0], after[2]) == (before[0], before[2])
    assert infos["_prompt_id"].tolist() == [False, True, False]


def test_the_first_reset_is_a_whole_one():
    with pytest.raises(ResetNeeded, match="the first reset starts every environment"):
        make(2).reset(options={"reset_mask": np.array([True, False])})


def test_reset_leaves_the_options_of_the_caller_alone():
    envs, options = make(2), {"reset_mask": np.array([True, True])}
    envs.reset(options=options)
    assert list(options) == ["reset_mask"]


def test_unknown_reset_options_are_refused():
    with pytest.raises(ConfigError, match=r"unknown reset options .'prompt'."):
        make(2).reset(options={"prompt": 3})


class Indexed(Recorder):
    """Remembers the prompts that came with the conversations."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def score(self, conversations, prompts=None):
        self.prompts.append(prompts)
        return super().score(conversations, prompts)


def test_every_conversation_is_scored_with_the_row_that_it_started_from():
    scorer = Indexed()
    envs = make(3, reward_model=scorer, autoreset_mode="NextStep")
    _, infos = envs.reset(seed=3)
    started = list(infos["prompt_id"])
    envs.step(["a", "b", "c"])
    assert [each.prompt_id for each in scorer.prompts[0]] == started
    for call, prompts in zip(scorer.calls, scorer.prompts, strict=True):
        for conversation, each in zip(call, prompts, strict=True):
            assert conversation[0] == each.messages[0]


def test_a_verifier_is_a_function_of_conversations_and_prompts():
    def verify(conversations, prompts):
        return [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]

    rows = [{"question": "2 + 2?", "answer": 4}, {"question": "3 + 3?", "answer": "6"}]
    envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=verify, prompts=rows)
    envs.reset(options={"prompt_indices": [1, 0]})
    assert envs.step(["It is 6.", "It is 6."])[1].tolist() == [1.0, 0.0]


def test_given_rows_start_at_given_prompts():
    envs = one_turn(3)
    observations, infos = envs.reset(seed=0, options={"prompt_indices": [2, 0, 2]})
    assert infos["prompt_id"].tolist() == ["p2", "p0", "p2"]
    assert [observation[0]["content"] for observation in observations] == ["question 2", "question 0", "question 2"]
    mask = np.array([False, True, False])
    _, infos = envs.reset(options={"prompt_indices": np.array([0, 1, 0]), "reset_mask": mask})
    assert (infos["prompt_id"][1], infos["_prompt_id"].tolist()) == ("p1", mask.tolist())


@each_mode
def test_given_prompts_do_not_change_the_order_of_the_others(mode):
    envs, plain = one_turn(2, autoreset_mode=mode), one_turn(2, autoreset_mode=mode)
    envs.reset(seed=5, options={"prompt_indices": [0, 0]})
    assert envs.reset()[1]["prompt_id"].tolist() == plain.reset(seed=5)[1]["prompt_id"].tolist()


def test_every_prompt_can_be_visited_exactly_once():
    prompts = [prompt(k) for k in range(7)]
    envs = make(7, prompts=prompts)
    _, infos = envs.reset(options={"prompt_indices": range(7)})
    assert infos["prompt_id"].tolist() == [f"p{k}" for k in range(7)]


def test_groups_start_at_given_prompts_together():
    envs = one_turn(4, group_size=2)
    _, infos = envs.reset(seed=0, options={"prompt_indices": [1, 1, 0, 0]})
    assert infos["prompt_id"].tolist() == ["p1", "p1", "p0", "p0"]
    assert infos["group_id"][0] == infos["group_id"][1] != infos["group_id"][2] == infos["group_id"][3]
    before = envs.reset(seed=1)[1]["prompt_id"].tolist()
    with pytest.raises(ConfigError, match="all 2 environments of group 0 at the same prompt"):
        envs.reset(options={"prompt_indices": [0, 1, 0, 0]})
    assert envs.reset(seed=1)[1]["prompt_id"].tolist() == before


def test_a_single_environment_starts_at_a_given_prompt():
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=PROMPTS)
    assert env.reset(options={"prompt_indices": [3]})[1]["prompt_id"] == "p3"


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 3], r"prompt_indices\[1\] must be an index into the 3 prompts, got 3"),
        ([0, -1], r"prompt_indices\[1\] must be an index into the 3 prompts, got -1"),
        ([0], "must be 2 integers, one for each environment, got .0."),
        ([0.0, 1.0], "must be 2 integers"),
        ("ab", "must be 2 integers"),
        ([True, False], "must be 2 integers"),
    ],
)
def test_invalid_prompt_indices_are_refused(indices, message):
    with pytest.raises(ConfigError, match=message):
        one_turn(2).reset(options={"prompt_indices": indices})


# --- the user ----------------------------------------------------------------------------------------------------


def test_the_user_is_asked_after_the_scores_once_for_all_rows_that_go_on():
    events = []

    class Scored(Recorder):
        def score(self, conversations, prompts=None):
            events.append(("score", [c[-1]["content"] for c in conversations]))
            return super().score(conversations, prompts)

    def respond(conversations, prompts, scores):
        events.append(("respond", [c[-1]["content"] for c in conversations], scores.rewards.tolist()))
        return ["more?" if reward < 3 else None for reward in scores.rewards]

    envs = make(3, reward_model=Scored(), respond=respond, prompts=[prompt(0)], autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, truncations, _ = envs.step(["a", "bb", "ccc"])
    assert events == [("score", ["a", "bb", "ccc"]), ("respond", ["a", "bb", "ccc"], [1.0, 2.0, 3.0])]
    assert terminations.tolist() == [False, False, True]
    assert not truncations.any()
    assert [o[-1]["content"] for o in observations] == ["more?", "more?", "ccc"]


def test_with_reward_on_end_the_user_is_asked_first_and_without_scores():
    events = []
    recorder = Recorder()

    def respond(conversations, prompts, scores):
        events.append((len(recorder.calls), scores))
        return [None if c[-1]["content"] == "done" else "go on" for c in conversations]

    envs = make(2, reward_model=recorder, respond=respond, reward_on="end", prompts=[prompt(0)])
    envs.reset(seed=0)
    _, rewards, terminations, _, _ = envs.step(["done", "not yet"])
    assert events == [(0, None)]
    assert (rewards.tolist(), terminations.tolist()) == ([4.0, 0.0], [True, False])
    assert [[c[-1]["content"] for c in call] for call in recorder.calls] == [["done"]]


def test_a_scorer_can_end_an_episode():
    class UntilRight(Recorder):
        def score(self, conversations, prompts=None):
            ends = ["right" in conversation[-1]["content"] for conversation in conversations]
            verdicts = np.array(["right" if each else "wrong" for each in ends], dtype=object)
            return Scores.from_rewards(ends, terminations=ends, infos={"verdict": verdicts})

    envs = make(2, reward_model=UntilRight(), prompts=[prompt(0, "again?", "and again?")], autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, _, infos = envs.step(["right", "wrong"])
    assert terminations.tolist() == [True, False]
    assert [o[-1]["content"] for o in observations] == ["right", "again?"]
    assert infos["verdict"].tolist() == ["right", "wrong"]


def test_a_scorer_that_responds_is_the_user_unless_another_is_given():
    class Talking(Recorder):
        def respond(self, conversations, prompts, scores):
            return [f"you said {conversation[-1]['content']}" for conversation in conversations]

    for options, said in (({}, "you said a"), ({"respond": say_more}, "more?")):
        envs = make(1, reward_model=Talking(), prompts=["hi"], **options)
        envs.reset(seed=0)
        (observation,), *_ = envs.step(["a"])
        assert observation[-1]["content"] == said


def test_an_async_user():
    async def respond(conversations, prompts, scores):
        return ["go on"] * len(conversations)

    envs = make(2, respond=respond, prompts=["hi"])
    envs.reset(seed=0)
    observations, *_ = envs.step(["a", "b"])
    assert [o[-1]["content"] for o in observations] == ["go on", "go on"]
    envs.close()


def test_a_user_who_fails_leaves_the_step_to_be_tried_again():
    answers = iter([RuntimeError("the simulator is down"), None])

    def respond(conversations, prompts, scores):
        answer = next(answers)
        if answer is not None:
            raise answer
        return ["go on"] * len(conversations)

    envs = make(1, respond=respond, prompts=["hi"])
    envs.reset(seed=0)
    with pytest.raises(RuntimeError, match="the simulator is down"):
        envs.step(["a"])
    (observation,), *_ = envs.step(["a"])
    assert [message["content"] for message in observation] == ["hi", "a", "go on"]


# --- autoreset ---------------------------------------------------------------------------------------------------


def test_next_step_ignores_the_reply_of_a_row_that_starts_anew():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, autoreset_mode="NextStep", prompts=[prompt(0), prompt(1)])
    envs.reset(seed=0)
    assert envs.step(["a", "bb"])[2].all()
    observations, rewards, terminations, _, infos = envs.step([None, "ignored"])
    assert rewards.tolist() == [0.0, 0.0]
    assert not terminations.any()
    assert [len(observation) for observation in observations] == [1, 1]
    assert "score_ok" not in infos
    assert len(recorder.calls) == 1


def test_next_step_scores_only_the_rows_that_play():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, autoreset_mode="NextStep", max_reply_length=3, prompts=[prompt(0, "a", "b")])
    envs.reset(seed=0)
    envs.step(["long", "x"])
    *_, infos = envs.step(["ignored", "yy"])
    assert [len(call) for call in recorder.calls] == [2, 1]
    assert infos["_score_ok"].tolist() == [False, True]
    assert infos["_metrics"].tolist() == [False, True]
    assert infos["_prompt_id"].tolist() == [True, True]


def test_disabled_wants_a_reset_of_the_rows_that_are_over():
    envs = one_turn(2, autoreset_mode="Disabled")
    envs.reset(seed=0)
    observations, _, terminations, _, infos = envs.step(["a", "b"])
    assert observations[0][-1] == {"role": "assistant", "content": "a"}
    assert "final_obs" not in infos
    with pytest.raises(ResetNeeded, match=r"environments \[0, 1\] are over"):
        envs.step(["c", "d"])
    envs.reset(options={"reset_mask": terminations})
    envs.step(["c", "d"])


@pytest.mark.parametrize("mode", MODES)
def test_step_needs_a_reset_first(mode):
    with pytest.raises(ResetNeeded, match="call reset"):
        make(2, autoreset_mode=mode).step(["a", "b"])


def test_rows_that_wait_stay_as_they_are():
    recorder = Recorder()
    envs = make(3, reward_model=recorder, prompts=[prompt(0, "why?")])
    before, _ = envs.reset(seed=0)
    after, rewards, _, _, infos = envs.step([None, "four", "x"], rows=np.array([False, True, False]))
    assert rewards.tolist() == [0.0, 4.0, 0.0]
    assert [len(call) for call in recorder.calls] == [1]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1][-1]["content"] == "why?"
    assert infos["_prompt_id"].tolist() == infos["_metrics"].tolist() == [False, True, False]


def test_in_next_step_a_row_that_is_over_waits_for_its_reset():
    envs = make(2, prompts=[prompt(0)], autoreset_mode="NextStep")
    envs.reset(seed=0)
    envs.step(["one", None], rows=np.array([True, False]))
    observations, _, terminations, _, _ = envs.step([None, "two"], rows=np.array([False, True]))
    assert (len(observations[0]), terminations.tolist()) == (2, [False, True])
    observations, _, terminations, _, _ = envs.step(["ignored", "ignored"])
    assert ([len(observation) for observation in observations], terminations.any()) == ([1, 1], False)


# --- scores ------------------------------------------------------------------------------------------------------


def test_one_call_a_step_holds_every_conversation():
    recorder = Recorder()
    envs = one_turn(5, reward_model=recorder)
    envs.reset(seed=0)
    envs.step(list("abcde"))
    assert [[c[-1]["content"] for c in call] for call in recorder.calls] == [list("abcde")]


class Shouter:
    """Edits the messages that it is given, and fails at the first call."""

    def __init__(self):
        self.calls = 0

    def score(self, conversations, prompts=None):
        self.calls += 1
        for conversation in conversations:
            for message in conversation:
                message["content"] = message["content"].upper()
            conversation.append({"role": "judge", "content": "loud"})
        errors = ["not now" if self.calls == 1 else None] * len(conversations)
        scores = Scores.from_rewards([1.0] * len(conversations), errors=errors)
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def test_a_scorer_that_edits_messages_changes_nothing_of_what_was_said():
    envs = make(1, reward_model=Shouter(), prompts=[prompt(0, "more?")])
    envs.reset(seed=0)
    with pytest.raises(ScoringError):
        envs.step(["four"])
    (observation,), *_ = envs.step(["four"])
    assert [message["content"] for message in observation] == ["question 0", "four", "more?"]
    *_, infos = envs.step(["five"])
    said = [message["content"] for message in infos["final_obs"][0]]
    assert said == ["question 0", "four", "more?", "five"]
    (observation,), _ = envs.reset()
    assert observation == [{"role": "user", "content": "question 0"}]


def test_reward_on_end_scores_only_what_ended():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, reward_on="end", max_reply_length=3, prompts=[prompt(0, "why?")])
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step(["x", "long"])
    assert rewards.tolist() == [0.0, 4.0]
    assert [len(call) for call in recorder.calls] == [1]
    assert infos["metrics"]["count"].tolist() == [0, 0]
    assert "mean" not in infos["metrics"]
    _, rewards, _, _, infos = envs.step(["yy", "x"])
    assert rewards.tolist() == [2.0, 0.0]
    assert infos["final_info"]["metrics"]["count"].tolist() == [1, 0]


def test_reward_on_end_makes_no_call_when_nothing_ended():
    recorder = Recorder()
    envs = make(2, reward_model=recorder, reward_on="end", prompts=[prompt(0, "why?")])
    envs.reset(seed=0)
    assert not envs.step(["a", "b"])[1].any()
    assert not recorder.calls
    assert envs.metrics.num_samples == 0


def test_reward_parts_and_token_counts_are_in_the_infos():
    envs = one_turn(2, reward_model=Recorder(), autoreset_mode="NextStep")
    envs.reset(seed=0)
    *_, infos = envs.step(["four", "~~"])
    assert infos["components"]["half"].tolist() == [2.0, 1.0]
    assert infos["_components"].tolist() == infos["components"]["_half"].tolist() == [True, True]
    assert infos["num_tokens"].tolist() == [len("question 0") + 4, len("question 0") + 2]
    assert infos["truncated_tokens"].tolist() == [0, 2]
    assert infos["truncated_tokens"].dtype == np.int64


def test_metrics_of_the_step_are_of_all_environments():
    envs = one_turn(4, reward_model=Recorder())
    envs.reset(seed=0)
    assert envs.metrics.num_samples == 0
    envs.step(["a", "bb", "ccc", "dddd"])
    metrics = envs.metrics
    assert (metrics.num_samples, metrics.mean, metrics.min, metrics.max) == (4, 2.5, 1.0, 4.0)
    assert metrics.length_correlation == pytest.approx(1.0)
    assert metrics.components == {"length": 2.5, "half": 1.25}


def test_a_failed_score_goes_up_and_the_same_step_can_be_tried_again():
    recorder = Recorder()
    envs, twin = (make(2, reward_model=scorer, autoreset_mode="Disabled") for scorer in (recorder, Recorder()))
    envs.reset(seed=4)
    twin.reset(seed=4)
    with pytest.raises(ScoringError, match="row 1: asked to fail") as failure:
        envs.step(["good", "FAIL"])
    assert failure.value.rows == (1,)
    assert failure.value.scores.rewards[0] == 4.0
    assert data_equivalence(envs.step(["good", "fine"]), twin.step(["good", "fine"]))


def test_the_error_names_environments_not_rows_of_the_call():
    envs = make(3, reward_model=Recorder(), autoreset_mode="NextStep", max_reply_length=4, prompts=[prompt(0, *"abcd")])
    envs.reset(seed=0)
    envs.step(["too long", "x", "x"])
    with pytest.raises(ScoringError, match="row 2: asked to fail") as failure:
        envs.step(["ignored", "ok", "FAIL"])
    assert failure.value.rows == (2,)


def test_a_fallback_is_declared_and_enters_no_statistic():
    envs = one_turn(3, reward_model=Recorder(), fallback_reward=-5, autoreset_mode="NextStep")
    envs.reset(seed=0)
    _, rewards, _, _, infos = envs.step(["aa", "FAIL", "bbbb"])
    assert rewards.tolist() == [2.0, -5.0, 4.0]
    assert infos["score_ok"].tolist() == [True, False, True]
    assert infos["_components"].tolist() == [True, False, True]
    assert infos["metrics"]["count"].tolist() == [1, 0, 1]
    assert (envs.metrics.num_samples, envs.metrics.num_failed, envs.metrics.mean) == (2, 1, 3.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_never_comes_out(value):
    envs = one_turn(2, reward_model=lambda conversations: [1.0, value])
    envs.reset(seed=0)
    with pytest.raises(ScoringError, match="row 1"):
        envs.step(["a", "b"])


def test_a_scorer_that_hides_a_nan_is_found_out():
    class Hiding(Recorder):
        def score(self, conversations, prompts=None):
            scores = super().score(conversations, prompts)
            scores.rewards[0] = np.nan
            return scores

    envs = one_turn(2, reward_model=Hiding())
    envs.reset(seed=0)
    with pytest.raises(ScoringError, match="row 0: the reward is nan"):
        envs.step(["a", "b"])


def test_a_scorer_that_loses_rows_is_found_out():
    class Losing(Recorder):
        def score(self, conversations, prompts=None):
            return super().score(conversations[1:])

    envs = one_turn(2, reward_model=Losing())
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="returned 1 scores for 2 conversations"):
        envs.step(["a", "b"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_can_be_tried_again(error):
    class Interrupted(Recorder):
        def score(self, conversations, prompts=None):
            super().score(conversations, prompts)
            if len(self.calls) == 2:
                raise error
            return Recorder().score(conversations)

    envs, twin = make(2, reward_model=Interrupted()), make(2, reward_model=Recorder())
    envs.reset(seed=0)
    twin.reset(seed=0)
    envs.step(["a", "b"])
    twin.step(["a", "b"])
    with pytest.raises(error):
        envs.step(["cc", "dd"])
    assert data_equivalence(envs.step(["cc", "dd"]), twin.step(["cc", "dd"]))


def test_what_the_scorer_was_given_is_not_changed_later():
    recorder = Recorder()
    envs = make(1, reward_model=recorder, prompts=[prompt(0, "why?", "sure?")])
    envs.reset(seed=0)
    envs.step(["a"])
    kept = copy.deepcopy(recorder.calls[0])
    (observation,), *_ = envs.step(["b"])
    observation[0]["content"] = "changed"
    assert recorder.calls[0] == kept
    (observation,), *_ = envs.step(["c"])
    assert recorder.calls[-1][0][0]["content"] == "question 0"


# --- large and many ----------------------------------------------------------------------------------------------


def test_a_thousand_environments():
    envs = one_turn(1024, group_size=8)
    envs.reset(seed=0)
    _, rewards, terminations, _, infos = envs.step([str(row) for row in range(1024)])
    assert rewards.tolist() == [len(str(row)) / 4 for row in range(1024)]
    assert terminations.all()
    assert len(set(infos["final_info"]["group_id"].tolist())) == 128


def test_a_conversation_of_ten_thousand_turns():
    turns = [{"role": role, "content": str(index)} for index in range(5_000) for role in ("user", "assistant")]
    envs = make(1, prompts=[[*turns, {"role": "user", "content": "and?"}]])
    (observation,), _ = envs.reset(seed=0)
    assert len(observation) == 10_001
    *_, infos = envs.step(["x"])
    assert len(infos["final_obs"][0]) == 10_002


def test_a_thousand_turns_are_taken_one_by_one():
    envs = make(1, prompts=[prompt(0, *map(str, range(1_000)))])
    envs.reset(seed=0)
    ends = [bool(envs.step(["x"])[2][0]) for _ in range(1_001)]
    assert ends == [False] * 1_000 + [True]


def test_a_reply_of_a_megabyte():
    recorder = Recorder()
    envs = one_turn(2, reward_model=recorder)
    envs.reset(seed=0)
    assert envs.step(["x" * 1_000_000, "é" * 500_000])[1].tolist() == [1_000_000, 500_000]


def test_large_replies_are_not_copied_into_arrays():
    envs = one_turn(64)
    envs.reset(seed=0)
    replies = ["x" * 1_000_000, *["y"] * 63]
    tracemalloc.start()
    envs.step(replies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000  # a fixed-width array of the 64 would be 256 MB


def test_orders_take_memory_for_what_was_drawn_not_for_every_prompt():
    tracemalloc.start()
    envs = make(64, prompts=[str(index) for index in range(20_000)])
    envs.reset(seed=0)
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(5):
        envs.step(["x"] * 64)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1_000_000  # 64 permutations of 20,000 would be 10 MB


def test_two_environments_do_not_disturb_each_other():
    first, second, alone = make(2), make(2), make(2)
    first.reset(seed=0)
    second.reset(seed=5)
    alone.reset(seed=0)
    for _ in range(5):
        second.step(["other", "words"])
        assert data_equivalence(first.step(["a", "b"]), alone.step(["a", "b"]))


def test_an_environment_survives_pickling_in_the_middle():
    envs = make(2, reward_model=Recorder(), group_size=2)
    envs.reset(seed=0)
    envs.step(["a", "b"])
    twin = pickle.loads(pickle.dumps(envs))
    for _ in range(5):
        assert data_equivalence(envs.step(["a", "b"]), twin.step(["a", "b"]))


# --- rendering and closing ---------------------------------------------------------------------------------------


def test_ansi_shows_the_last_scored_reply_also_after_an_autoreset():
    envs = make(2, prompts=[prompt(0)], render_mode="ansi")
    envs.reset(seed=0)
    assert envs.render()[1] == "--- environment 1, prompt p0\nuser: question 0"
    envs.step(["four", "\x1b[2Jgone"])
    first, second = envs.render()
    assert first.endswith("assistant: four\n--- reward 1, episode over")
    assert "\x1b" not in second
    assert "\\x1b[2Jgone" in second


def test_human_prints_after_reset_and_step(capsys):
    env = gym.make("RewardModel-v0", reward_model=length_reward, prompts=[prompt(0)], render_mode="human")
    env.reset(seed=0)
    assert "question 0" in capsys.readouterr().out
    env.step("[bold]four[/bold]")
    assert env.render() is None
    assert "assistant: [bold]four[/bold]" in capsys.readouterr().out


def test_human_prints_a_few_of_many(capsys):
    one_turn(100, render_mode="human").reset(seed=0)
    assert "and 92 more" in capsys.readouterr().out


def test_render_without_a_mode_warns():
    with pytest.warns(UserWarning, match="without a render_mode"):
        assert make(2).render() is None


def test_close_is_idempotent_and_final():
    envs = make(2)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="is closed"):
        envs.step(["a", "b"])
    with pytest.raises(ClosedEnvironmentError, match="is closed"):
        envs.reset()


class Closing(Recorder):
    closed = 0

    def close(self):
        Closing.closed += 1


@pytest.mark.parametrize("own", [True, False])
def test_only_a_scorer_that_the_environment_made_is_closed(own, monkeypatch):
    monkeypatch.setitem(gym_rm.scorer.SCORER_KINDS, "closing", f"{__name__}:Closing")
    Closing.closed = 0
    make(2, reward_model={"kind": "closing"} if own else Closing()).close()
    assert Closing.closed == own


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 3}, "num_envs must be a multiple of group_size.*num_envs=2 and group_size=3"),
        ({"group_size": 0}, "group_size must be an integer of at least 1, got 0"),
        ({"max_turns": 0}, "max_turns must be an integer of at least 1, got 0"),
        ({"max_turns": 1.5}, "max_turns must be an integer"),
        ({"max_reply_length": -1}, "max_reply_length must be an integer of at least 1"),
        ({"reward_on": "turns"}, "reward_on must be 'turn' or 'end', got 'turns'. Did you mean 'turn'"),
        ({"promts": ["a"]}, "promts: unknown setting. Did you mean 'prompts'"),
        ({"respond": lambda conversation: None}, r"respond must take \(conversations, prompts, scores\)"),
        ({"autoreset_mode": "SameSteps"}, "autoreset_mode must be one of .*Did you mean 'SameStep'"),
        ({"fallback_reward": float("nan")}, "fallback_reward must be a finite number"),
        ({"fallback_reward": "0"}, "fallback_reward must be a finite number"),
        ({"render_mode": "rgb_array"}, "render_mode must be one of"),
        ({"respond": "nowhere:function"}, "respond must be a function or 'module:function', got 'nowhere:function'"),
        ({"respond": "json"}, "respond must be a function"),
        ({"respond": "sys:path"}, "names a list, expected a function"),
        ({"prompts": []}, "expected at least one"),
        ({"prompts": ["half \ud800"]}, "prompt '0': expected messages of exactly a role and a content"),
        ({"prompts": ["x" * 11], "max_text_length": 10}, "at most max_text_length=10 characters"),
        ({"prompts": [prompt(0, "\ud800")]}, "prompt 'p0'.*user_turns"),
        ({"reward_model": 3}, "reward_model must be"),
        ({"reward_model_kwargs": {"dtype": "auto"}}, "options .'dtype'. came with a ready-made scorer"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(2, **options)


def test_a_single_environment_has_no_group():
    with pytest.raises(ConfigError, match="group_size=2 for a single environment"):
        gym.make("RewardModel-v0", reward_model=length_reward, prompts=["hi"], group_size=2)
