"""State of `RewardVectorEnv`, and the observations and infos of a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.envs.episodes import Episode, PromptOrders
from gym_rm.envs.infos import Infos, Mask, StepScores, add_values
from gym_rm.types import Message, copy_conversation, copy_nested

Observations: TypeAlias = tuple[list[Message], ...]


@dataclass(frozen=True, slots=True)
class EnvState:
    """Everything that a reset or a step changes. The environment replaces it, and changes nothing in it.

    Attributes:
        orders: order of the prompts, and the position of each environment in it.
        episodes: `[N]`, the conversations in progress; empty before the first reset.
        over: bool `[N]`, environments whose episode has ended and that wait for a reset.
        scores: scores of the last step.
        transcripts: `[N]`, for rendering.
        calls: int64 `[N]` by name, of the last step of an environment with tools: `tool_calls` of the replies, and
            `tool_errors`, those that were answered with an error. Calls that could not be read count as both.
        view: state of a numeric view around the environment, or None.
    """

    orders: PromptOrders
    episodes: tuple[Episode, ...]
    over: Mask
    scores: StepScores
    transcripts: tuple[str, ...]
    calls: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    view: Any = None

    def observations(self) -> Observations:
        """Return copies of the N conversations."""
        return tuple([copy_conversation(episode.messages) for episode in self.episodes])

    def add_episodes(self, infos: Infos, rows: Mask) -> None:
        """Add the infos of the prompts of `rows`."""
        size, listed = len(self.episodes), np.flatnonzero(rows).tolist()
        prompts = [self.episodes[row].prompt for row in listed]
        add_values(infos, "prompt_id", [prompt.prompt_id for prompt in prompts], listed, size)
        answers = {row: prompt.answer for row, prompt in zip(listed, prompts, strict=True) if prompt.answer is not None}
        add_values(infos, "answer", list(answers.values()), list(answers), size)
        if self.orders.group_size > 1:
            numbers = np.array([self.episodes[row].number for row in listed], dtype=np.int64)
            groups = np.array(listed, dtype=np.int64) // self.orders.group_size
            add_values(infos, "group_id", groups + numbers * len(self.orders.orders), listed, size)

    def add_tools(self, infos: Infos, rows: Mask) -> None:
        """Add the tool schemas of the prompts of those `rows` that have some."""
        listed = [row for row in np.flatnonzero(rows).tolist() if self.episodes[row].prompt.tools]
        tools = [copy_nested(list(self.episodes[row].prompt.tools)) for row in listed]
        add_values(infos, "tools", tools, listed, len(self.episodes))

    def add_step(self, infos: Infos, rows: Mask) -> None:
        """Add the scores and tool calls of the last step in `rows`."""
        self.scores.add_to(infos, rows)
        for name, values in self.calls.items():
            add_values(infos, name, values[rows], np.flatnonzero(rows), len(rows))

    def add_final(self, infos: Infos, done: Mask) -> None:
        """Add the conversations and infos of the episodes in `done`, which have just ended."""
        if done.any():
            listed = np.flatnonzero(done).tolist()
            ended = [copy_conversation(self.episodes[row].messages) for row in listed]
            add_values(infos, "final_obs", ended, listed, len(done))
            final: Infos = {}
            self.add_episodes(final, done)
            self.add_step(final, done)
            infos["final_info"], infos["_final_info"] = final, done.copy()
