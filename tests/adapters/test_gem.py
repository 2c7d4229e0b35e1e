import importlib.util

import pytest
from recording import chat, merged

from gym_rm import ScoringError

NAME = "gym_rm:reward-model"
SUMS = [{"prompt": f"{n} + {n}?", "answer": str(2 * n), "user_turns": ["sure?"]} for n in range(1, 4)]


@pytest.fixture(scope="module")
def gem():
    """The library GEM with `RewardModelGemEnv` registered."""
    gem = pytest.importorskip("gem", reason="GEM is not installed")
    gem.register(NAME, "gym_rm.adapters.gem:RewardModelGemEnv")
    return gem


class Base:
    """Stand-in of the base class, with the methods that the environment calls."""

    def reset(self, seed=None):
        pass


@pytest.fixture
def make(import_adapter, request):
    """Function that makes environments with GEM's registry, or on a stand-in if GEM is not installed."""
    if importlib.util.find_spec("gem") is None:
        return import_adapter("gem", {"gem.core": {"Env": Base}}).RewardModelGemEnv
    gem = request.getfixturevalue("gem")
    return lambda **settings: gem.make(NAME, **settings)


def test_observations_and_actions_are_texts(make, recorder):
    env = make(reward_model=recorder, prompts=[{"prompt": "2 + 2?", "user_turns": ["sure?"]}])
    observation, info = env.reset(seed=3)
    assert observation == "2 + 2?"
    assert info["prompt_id"] == "0"
    observation, reward, terminated, truncated, info = env.step("four")
    assert (observation, reward, terminated, truncated) == ("sure?", 1.0, False, False)
    observation, reward, terminated, truncated, info = env.step("yes")
    assert (observation, reward, terminated, truncated) == ("", 0.75, True, False)
    assert recorder.calls[-1] == [chat("2 + 2?", "four", "sure?", "yes")]
    assert isinstance(env.sample_random_action(), str)


def test_gem_makes_a_vector_environment(gem, recorder):
    envs = gem.make_vec([NAME] * 3, vec_kwargs=[{"reward_model": recorder, "prompts": ["2 + 2?"]}] * 3)
    observations, _ = envs.reset(seed=0)
    assert list(observations) == ["2 + 2?"] * 3
    _, rewards, terminations, *_ = envs.step(["four", "4", "it is four"])
    assert list(rewards) == [1.0, 0.25, 2.5]
    assert all(terminations)


def test_gems_threads_are_scored_in_one_batch(gem, recorder):
    scorer = merged(recorder, 3)
    settings = [{"reward_model": scorer, "prompts": ["2 + 2?"]}] * 3
    envs = gem.make_vec([NAME] * 3, vec_kwargs=settings, async_mode=True)
    envs.reset(seed=0)
    assert list(envs.step(["four", "4", "it is four"])[1]) == [1.0, 0.25, 2.5]
    assert len(recorder.calls) == 1


def test_environments_of_one_folder_share_one_model(make, loads, model_folder):
    for _ in range(3):
        make(reward_model=model_folder)
    assert loads == [model_folder]


# --- prompts for verifiers -----------------------------------------------------------------------------------------


def test_a_verifier_compares_each_reply_with_the_answer_of_its_prompt(make, verifier):
    env = make(reward_model=verifier, prompts=SUMS)
    questions = set()
    for seed in range(8):
        question, info = env.reset(seed=seed)
        questions.add(question)
        assert info["answer"] == str(2 * int(question[0]))
        assert env.step("?")[1] == 0.0
        assert env.step(f"It is {info['answer']}.")[1:3] == (1.0, True)
    assert len(questions) > 1
    assert all(conversation[0] == prompt.messages[0] for conversation, prompt in verifier.rows)


def test_a_prompt_without_an_answer_is_an_error_for_a_verifier(make, verifier):
    env = make(reward_model=verifier, prompts=["2 + 2?"])
    env.reset(seed=0)
    with pytest.raises(ScoringError, match="row 0: the reward function returned None"):
        env.step("4")


def test_a_prompt_without_an_answer_gets_the_fallback_reward_and_score_ok_is_false(make, verifier):
    env = make(reward_model=verifier, prompts=["2 + 2?"], fallback_reward=-2.0)
    env.reset(seed=0)
    _, reward, _, _, info = env.step("4")
    assert (reward, info["score_ok"]) == (-2.0, False)


def test_an_answer_that_is_neither_text_nor_a_number_is_missing_for_a_verifier(make, verifier):
    env = make(reward_model=verifier, prompts=[{"prompt": "2 + 2?", "answer": ["4"]}])
    env.reset(seed=0)
    with pytest.raises(ScoringError):
        env.step("4")


def test_gems_vector_environment_passes_answers_to_a_verifier(gem, verifier):
    envs = gem.make_vec([NAME] * 3, vec_kwargs=[{"reward_model": verifier, "prompts": [row]} for row in SUMS])
    envs.reset(seed=0)
    _, rewards, *_ = envs.step(["It is 2.", "It is 5.", "It is 6."])
    assert list(rewards) == [1.0, 0.0, 1.0]
