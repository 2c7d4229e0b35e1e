"""Settings of `RewardModel-v0`, the same for every constructor, registry entry and configuration file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import gymnasium as gym
import pydantic
from gymnasium.vector import AutoresetMode

from gym_rm.config import Finite, PositiveInt
from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.envs.spaces import MAX_LENGTH
from gym_rm.envs.tools.tool import ToolOptions
from gym_rm.errors import ConfigError, nearest
from gym_rm.plan_file import planned_scorer

VECTOR_ONLY = ("num_envs", "group_size", "autoreset_mode")
"""Settings that a single environment does not take."""

RENDERING: dict[str, Any] = {"render_modes": ["human", "ansi", "html", "rgb_array"], "render_fps": 1}
"""Metadata of the environments. A video shows one turn a second."""


def same_step_statistics() -> bool:
    """Return whether the installed Gymnasium has the vector wrappers that are right in the mode `SAME_STEP`.

    `RecordEpisodeStatistics` (pull request 1624 of Gymnasium) and `NormalizeReward` (1668) were mended in 1.4.
    """
    return tuple(int(part) for part in gym.__version__.split(".")[:2]) >= (1, 4)


class EnvSettings(ParallelOptions):
    """Keyword arguments of `gym.make_vec("RewardModel-v0", ...)`; each also accepts a plain JSON value.

    Those of `ParallelOptions`, such as `num_replicas`, are options of the reward model.
    """

    reward_model: Any = None
    """Argument of `load_scorer`: None for the embedded reward model, a folder, a hub id, a URL, a dict, a `Scorer`,
    or a function of `(conversations)` or `(conversations, prompts)`."""
    reward_model_kwargs: dict[str, Any] = pydantic.Field(default={})
    """Options of `load_scorer` (`dtype`, `device`, ...)."""
    plan: Any = None
    """A plan of `gym-rm plan`: its file, its values, or a `Plan`. The reward model, its replicas, parallelism, dtype
    and token budget come from it; a setting that exceeds the plan is an error. `"plan.json#name"` names one of several
    reward models."""
    prompts: Any = None
    """Argument of `load_prompts`: None for the embedded prompts, a file, a data set name, or a list. Each environment
    draws the prompts without replacement, in a new order every epoch."""
    group_size: PositiveInt = 1
    """Number of consecutive environments that answer the same prompts."""
    max_turns: PositiveInt | None = None
    """Number of replies after which an episode is truncated if the user has not ended it; None for no limit."""
    respond: Any = None
    """User simulator: a function, or its name `"module:function"`. It is called once per step for all rows that
    continue: `respond(conversations, prompts, scores)`. It returns a list with a text, a message, a list of messages,
    or None, which ends an episode, for each. `{"model": ..., "instructions": ...}` is a chat model that plays the user,
    see `SimulatedUser`. By default, the method `respond` of the scorer if it has one, else the `user_turns` of the
    prompts."""
    tools: Any = None
    """Tools that the policy may call: a list of functions with type hints, `Tool` objects, names `"module:function"`,
    `"calculator"` or `"python"`. The results of calls follow the reply, and `respond` is asked only after a reply
    without calls."""
    tool_options: ToolOptions = ToolOptions()
    """`{"call_format": "hermes" | "llama3" | "mistral" | a function, "max_calls": 16, "timeout": 10.0,
    "max_result_length": 10_000}`, see `ToolOptions`."""
    reward_on: Literal["turn", "improvement", "end"] = "turn"
    """`"turn"` rewards every reply by its score; `"improvement"` by its score less that of the reply before, the first
    one by its score, so that the rewards of an episode add up to its last score; `"end"` scores only its last reply."""
    fallback_reward: Finite | None = None
    """Reward of a conversation with a missing score; its `score_ok` is False. None raises `ScoringError` instead, and
    the same step can be repeated."""
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP
    """`"SameStep"`, `"NextStep"`, `"Disabled"`, or an `AutoresetMode`. Before Gymnasium 1.4, its vector wrappers
    `RecordEpisodeStatistics` and `NormalizeReward` are wrong in `"SameStep"`."""
    max_text_length: PositiveInt = MAX_LENGTH
    """Maximum characters of a message in the spaces; a longer reply raises `ActionError`."""
    render_mode: str | None = None
    """`"human"` prints the conversations after every reset and step. `render()` returns each as a text with `"ansi"`,
    as a block for notebooks with `"html"`, as a picture, uint8 `[480, 640, 3]`, with `"rgb_array"`."""


def planned(settings: EnvSettings, num_envs: int) -> tuple[Any, dict[str, Any]]:
    """Return the reward model and its options, which follow the plan if there is one.

    Raises:
        ConfigError: an option is given twice, or a setting exceeds the plan.
    """
    own = {name: getattr(settings, name) for name in ParallelOptions.model_fields if name in settings.model_fields_set}
    for name in own:
        if name in settings.reward_model_kwargs:
            raise ConfigError(f"{name} is given twice, also in reward_model_kwargs; leave one out.")
    options = {**settings.reward_model_kwargs, **own}
    if settings.plan is None:
        return settings.reward_model, options
    return planned_scorer(settings.plan, settings.reward_model, options, conversations=num_envs)


def keywords(of: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of a function or class, without `**settings`."""
    return [name for name, each in inspect.signature(of).parameters.items() if each.kind is not each.VAR_KEYWORD]


def divide_known(
    settings: Mapping[str, Any], owner: str, options: Collection[str] = (), *, refused: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keywords that are among the `options`, and the others; the error does not list those `refused`.

    Raises:
        ConfigError: one of the others is no field of `EnvSettings`.
    """
    names = dict.fromkeys(["num_envs", *options, *EnvSettings.model_fields])
    known = [name for name in names if name not in refused]
    for name in settings:
        if name not in names:
            hint = " Use max_turns to limit replies." if name == "max_episode_steps" else nearest(name, names)
            raise ConfigError(f"{name}: unknown setting.{hint} Known settings of {owner}: {', '.join(known)}.")
    own = {name: value for name, value in settings.items() if name in options}
    return own, {name: value for name, value in settings.items() if name not in options}
