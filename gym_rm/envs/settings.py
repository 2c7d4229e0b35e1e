"""The settings of `RewardModel-v0`: one record, from whichever constructor, registry entry or file they come."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from gymnasium.vector import AutoresetMode

from gym_rm.config import Config, Finite, PositiveInt
from gym_rm.envs.spaces import MAX_LENGTH
from gym_rm.errors import ConfigError, nearest


def parse_autoreset_mode(value: AutoresetMode | str) -> AutoresetMode:
    """The mode of any spelling: `"SameStep"`, `"SAME_STEP"`, `"same-step"`, ..."""
    if isinstance(value, AutoresetMode):
        return value
    spelled = str(value).replace("_", "").replace("-", "").lower()
    modes = {mode.value.lower(): mode for mode in AutoresetMode}
    if spelled not in modes:
        known = [mode.value for mode in AutoresetMode]
        raise ConfigError(f"autoreset_mode must be one of {known}, got {value!r}.{nearest(str(value), known)}")
    return modes[spelled]


class EnvSettings(Config):
    """Keywords of `gym.make_vec("RewardModel-v0", ...)`; each also takes a plain JSON value."""

    reward_model: Any = None
    """What `load_scorer` takes: None for the embedded reward model, a folder, a hub id, a dict, a `Scorer`, a function
    of the conversations, or of the conversations and their prompts."""
    reward_model_kwargs: dict[str, Any] = pydantic.Field(default={})
    """Options for `load_scorer` (`dtype`, `device`, ...)."""
    prompts: Any = None
    """What `load_prompts` takes: None for the embedded prompts, a file, a data set name, a list. Each environment draws
    them without replacement, in a new order every epoch."""
    group_size: PositiveInt = 1
    """Neighbours that answer the same prompts."""
    max_turns: PositiveInt | None = None
    """Replies after which an episode is truncated if the user has not ended it; None for no limit."""
    respond: Any = None
    """The user simulator: a function (or its name, `"module:function"`), sync or async, that is asked once a step for
    all rows that go on: `respond(conversations, prompts, scores) -> list[str | None]`, None to end an episode. None
    for the scorer's own `respond`, if it has one, or else the prompts' `user_turns`."""
    max_reply_length: PositiveInt | None = None
    """Characters; a longer reply is scored whole and truncates its episode."""
    reward_on: Literal["turn", "end"] = "turn"
    """Score every reply, or only the reply that ends the episode."""
    fallback_reward: Finite | None = None
    """Reward of a conversation that could not be scored, with `score_ok` False. None raises the `ScoringError`
    instead, and the step can be tried again."""
    autoreset_mode: Annotated[AutoresetMode, pydantic.BeforeValidator(parse_autoreset_mode)] = AutoresetMode.SAME_STEP
    """`"SameStep"`, `"NextStep"` or `"Disabled"`, or the enum."""
    max_text_length: PositiveInt = MAX_LENGTH
    """Characters that a message may hold, a bound of the spaces; a longer reply is an error."""
    render_mode: str | None = None
    """`"human"` prints the conversations after every reset and step, `"ansi"` has `render()` return them."""
