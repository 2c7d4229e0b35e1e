"""Render modes of all environments, and Gymnasium's wrappers that use them."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import AddRenderObservation, HumanRendering, RecordVideo, RenderCollection
from gymnasium.wrappers import vector as vector_wrappers

from gym_rm.errors import RenderModeError
from gym_rm.reports.transcripts import Html, Transcript
from tests.envs.environments import length_reward, make, prompt

IDS = ["RewardModel-v0", "RewardModelCandidates-v0", "RewardModelTokens-v0", "Math-v0", "Code-v0"]
PICTURE = (480, 640, 3)
PROMPTS = [prompt(index, "more?") for index in range(4)]


def single(**settings):
    settings = {"render_mode": "rgb_array", "reward_model": length_reward, "prompts": PROMPTS} | settings
    return gym.make("gym_rm:RewardModel-v0", **settings)


def frames_of(path):
    reader = pytest.importorskip("moviepy").VideoFileClip(str(path))
    with reader:
        return list(reader.iter_frames()), reader.fps


# --- modes


@pytest.mark.parametrize("mode", ["ansi", "html", "rgb_array"])
@pytest.mark.parametrize("name", IDS)
def test_every_environment_renders_in_every_mode(name, mode):
    env, envs = gym.make(name, render_mode=mode), gym.make_vec(name, num_envs=2, render_mode=mode)
    env.reset(seed=0)
    envs.reset(seed=0)
    shown, both = env.render(), envs.render()
    assert isinstance(both, tuple)
    assert len(both) == 2
    assert isinstance(shown, {"ansi": str, "html": Html, "rgb_array": np.ndarray}[mode])
    assert np.array_equal(shown, both[0])


@pytest.mark.parametrize("mode", ["html", "rgb_array"])
def test_a_frame_is_the_conversation_with_its_reward(mode):
    envs = make(2, prompts=[prompt(0)], render_mode=mode)
    envs.reset(seed=0)
    envs.step(["four", "<i>four</i>"])
    messages = [{"role": "user", "content": "question 0"}, {"role": "assistant", "content": "<i>four</i>"}]
    expected = Transcript(messages, title="environment 1, prompt p0", reward=11.0 / 4, is_over=True)
    assert np.array_equal(envs.render()[1], expected.html() if mode == "html" else expected.picture())


def test_only_the_row_that_is_stepped_changes_its_frame():
    envs = make(2, prompts=PROMPTS, render_mode="rgb_array")
    envs.reset(seed=0)
    before = envs.render()
    envs.step(["four", ""], rows=np.array([True, False]))
    changed = [not np.array_equal(*pair) for pair in zip(before, envs.render(), strict=True)]
    assert changed == [True, False]


def test_there_is_nothing_to_render_before_the_first_reset():
    with pytest.raises(ResetNeeded, match="before render"):
        make(2, render_mode="rgb_array").render()


@pytest.mark.parametrize("name", IDS)
def test_unknown_modes_are_refused_with_a_list(name):
    with pytest.raises(RenderModeError, match="None, 'human', 'ansi', 'html', 'rgb_array'"):
        gym.make_vec(name, num_envs=2, render_mode="rgb_array_list")
    with pytest.warns(UserWarning, match="possible render_modes"), pytest.raises(RenderModeError, match="got 'gif'"):
        gym.make(name, render_mode="gif")


@pytest.mark.parametrize("name", IDS)
def test_make_collects_the_frames_of_a_list_mode(name):
    env = gym.make(name, render_mode="rgb_array_list")
    env.reset(seed=0)
    assert [frame.shape for frame in env.render()] == [PICTURE]


def test_the_frames_of_sync_vector_env_are_those_of_ours():
    settings = {"num_envs": 2, "reward_model": length_reward, "prompts": PROMPTS[:1], "render_mode": "html"}
    theirs = gym.make_vec("RewardModel-v0", vectorization_mode="sync", **settings)
    ours = gym.make_vec("RewardModel-v0", **settings)
    for envs in (theirs, ours):
        envs.reset(seed=0)
        envs.step(["four", "six"])
    assert [each.replace("environment 1", "environment 0") for each in ours.render()] == [*theirs.render()]


# --- wrappers


def test_add_render_observation():
    env = AddRenderObservation(single())
    observation, _ = env.reset(seed=0)
    after, *_ = env.step("four")
    assert observation in env.observation_space
    assert after in env.observation_space
    assert np.array_equal(after, env.render())
    assert not np.array_equal(observation, after)


def test_render_collection_has_a_frame_for_each_turn():
    env = RenderCollection(single())
    env.reset(seed=0)
    env.step("four")
    env.step("five")
    assert len({frame.tobytes() for frame in env.render()}) == 3


def test_record_video_shows_one_turn_a_second(tmp_path):
    pytest.importorskip("moviepy")
    env = RecordVideo(single(), str(tmp_path), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    env.step("four")
    last = env.step("five") and env.render()
    env.close()
    frames, fps = frames_of(tmp_path / "rl-video-episode-0.mp4")
    assert (len(frames), fps) == (3, 1)
    assert np.abs(frames[-1].astype(int) - last).mean() < 2


def test_vector_record_video_ends_with_the_reward_in_next_step_mode(tmp_path):
    pytest.importorskip("moviepy")
    envs = make(4, prompts=PROMPTS, autoreset_mode="NextStep", render_mode="rgb_array")
    recorded = vector_wrappers.RecordVideo(envs, str(tmp_path), episode_trigger=lambda episode: True)
    recorded.reset(seed=0)
    recorded.step(["a", "b", "c", "d"])
    recorded.step(["a", "b", "c", "d"])
    last = envs.render()
    recorded.step(["", "", "", ""])
    recorded.close()
    frames, _ = frames_of(tmp_path / "rl-video-episode-0.mp4")
    assert len(frames) == 3
    assert np.abs(frames[-1].astype(int) - np.vstack([np.hstack(last[:2]), np.hstack(last[2:])])).mean() < 2


def test_human_rendering_opens_a_window(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    env = HumanRendering(single())
    env.reset(seed=0)
    window = pygame.surfarray.array3d(pygame.display.get_surface()).transpose(1, 0, 2)
    assert np.array_equal(window, env.unwrapped.render())
    env.close()


def test_vector_human_rendering_opens_a_window(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    pytest.importorskip("cv2")
    envs = vector_wrappers.HumanRendering(make(4, prompts=PROMPTS, render_mode="rgb_array"))
    envs.reset(seed=0)
    assert pygame.display.get_surface().get_size() == (640, 480)
    envs.close()
