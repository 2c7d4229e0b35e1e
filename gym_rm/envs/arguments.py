"""What users hand to an environment, checked: masks and prompts of `reset`, replies of `step`, messages of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import describe, in_order
from gym_rm.envs.episodes import Episode
from gym_rm.envs.infos import Mask
from gym_rm.envs.spaces import ConversationSpace, ReplySpace, plain_text
from gym_rm.envs.tools.toolbox import Reply, Toolbox, as_message
from gym_rm.errors import ActionError, ConfigError, nearest
from gym_rm.types import Message, Prompt, copy_nested

RESET_OPTIONS = ("reset_mask", "prompt_indices")


def row_mask(name: str, mask: Any, num_envs: int) -> Mask:
    """Return a mask of rows, bool `[N]`; what is none raises a TypeError, another shape a ValueError."""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        got = f"dtype {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(f"{name} must be a numpy array of dtype bool, got {got}.")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have the shape ({num_envs},), got {mask.shape}.")
    return mask


def rows_to_reset(options: Mapping[str, Any], num_envs: int) -> Mask:
    """Return the rows that a reset with these options starts, all without `reset_mask`; see `row_mask`."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"options of reset must be a mapping with {RESET_OPTIONS}, got {describe(options)}.")
    unknown = [str(name) for name in options if name not in RESET_OPTIONS]
    if unknown:
        hint = nearest(unknown[0], RESET_OPTIONS)
        raise ConfigError(f"unknown reset options {unknown}; expected {RESET_OPTIONS}.{hint}")
    if "reset_mask" not in options:
        return np.ones(num_envs, dtype=np.bool_)
    mask = row_mask("options['reset_mask']", options["reset_mask"], num_envs)
    if not mask.any():
        raise ValueError(f"options['reset_mask'] must have at least one True, got {mask}.")
    return mask


def prompt_indices(options: Mapping[str, Any], num_envs: int) -> NDArray[Any] | None:
    """Return the indices of the prompts that a reset starts from, integers `[N]`; None for the next ones."""
    if options.get("prompt_indices") is None:
        return None
    indices = np.asarray(options["prompt_indices"])
    if indices.shape != (num_envs,) or indices.dtype.kind not in "iu":
        raise ConfigError(
            f"options['prompt_indices'] must be {num_envs} integers, one for each environment, got "
            f"{options['prompt_indices']!r:.100}."
        )
    return indices


def read_replies(
    rows: Sequence[int],
    actions: Sequence[str | Message],
    episodes: Sequence[Episode],
    space: ReplySpace,
    toolbox: Toolbox | None,
) -> dict[int, Reply]:
    """Return the replies of some rows, with the calls that they make.

    Args:
        rows: the rows that act.
        actions: `[N]`, a text or message for each environment; those of other rows are not read.
        episodes: `[N]`, what they answer.
        space: what a reply may be.
        toolbox: reads the calls of texts; None without tools.

    Raises:
        ActionError: there are not N actions, or one is not a valid text or message.
    """
    given = in_order(actions)
    if given is None or len(given) != len(episodes):
        raise ActionError(
            f"actions must be {len(episodes)} replies in a list, tuple or array, one for each environment, got "
            f"{actions!r:.100}."
        )
    replies: dict[int, Reply] = {}
    for row in rows:
        said = plain_text(given[row])
        if isinstance(said, Mapping):
            said = as_message(said)
        if fault := space.fault(said):
            raise ActionError(f"environment {row}: {fault}.")
        if isinstance(said, str):
            reply = toolbox.read(said) if toolbox else Reply(Message(role="assistant", content=said))
        else:
            reply = Reply(copy_nested(said))
        reply = reply.numbered(episodes[row].messages)
        if "tool_calls" in reply.message and space.fault(reply.message):
            reply = Reply(Message(role="assistant", content=str(said)), ["the calls are too long"])
        replies[row] = reply
    return replies


def check_messages(prompts: Iterable[Prompt], space: ConversationSpace) -> None:
    """Raise a ConfigError for the first prompt with a message or user turn that is not in the space."""
    text = space.content_space
    for prompt in prompts:
        fault = next(filter(None, map(space.fault, prompt.messages)), "")
        fault = fault or next((text.fault(turn) for turn in prompt.user_turns if turn not in text), "")
        if fault:
            raise ConfigError(f"prompt {prompt.prompt_id!r} has an invalid message: {fault}.")
