"""State of `RewardVectorEnv`, and its values as Gymnasium's vector `infos`: arrays `[N]`, each with a mask `_name`.

The format is the one that `SyncVectorEnv` builds from the infos of single environments. Rows outside the mask are zero
(None in arrays of objects). A name without a value in any row is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_rm.envs.episodes import Episode, PromptOrders
from gym_rm.errors import ConfigError, RowError, logger, warn_once
from gym_rm.reports.transcripts import Transcript
from gym_rm.score_columns import info_array
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Message, copy_conversation, copy_nested

if TYPE_CHECKING:
    from gym_rm.envs.flights import Flight

Infos: TypeAlias = dict[str, Any]
Mask: TypeAlias = NDArray[np.bool_]
Observations: TypeAlias = tuple[list[Message], ...]


def add_values(
    infos: Infos, name: str, values: NDArray[Any] | Sequence[Any], rows: Sequence[int] | NDArray[Any], num_envs: int
) -> None:
    """Store values under a name, unless there are none.

    Args:
        infos: where they are stored.
        name: their name.
        values: `[K, ...]`; the entries of a list are objects.
        rows: `[K]`, indices of their environments.
        num_envs: N.
    """
    if len(rows):
        found = values if isinstance(values, np.ndarray) else np.fromiter(values, object, len(values))
        column = np.full((num_envs, *found.shape[1:]), None if found.dtype == object else 0, dtype=found.dtype)
        column[rows] = found
        infos[name], infos[f"_{name}"] = column, mask_of(rows, num_envs)


def mask_of(rows: Sequence[int] | NDArray[Any], num_envs: int) -> Mask:
    """Return the mask (bool `[N]`) of rows."""
    mask = np.zeros(num_envs, dtype=np.bool_)
    mask[rows] = True
    return mask


def infos_of_row(infos: Mapping[str, Any], row: int) -> Infos:
    """Return the infos of one row as a single environment returns them, with Python scalars."""
    found: Infos = {}
    for name, values in infos.items():
        mask = infos.get(f"_{name}")
        if mask is not None and mask[row]:
            if isinstance(values, Mapping):
                found[name] = infos_of_row(values, row)
            else:
                value = values[row]
                found[name] = value.item() if isinstance(value, np.generic) else value
    return found


RESERVED = frozenset(
    {"prompt_id", "answer", "group_id", "score_ok", "num_tokens", "truncated_tokens", "components"}
    | {"step_rewards", "step_ends", "rows", "turn_score"}
    | {"tools", "tool_calls", "tool_errors", "final_obs", "final_info", "episode"}
)
"""Names of infos that the environment and Gymnasium's wrappers set themselves."""


def improvements(scores: Scores, before: Sequence[float]) -> Scores:
    """Return rewards that are scores `[M]` less those of the replies `before`, and the scores as the info `turn_score`.

    Potential-based shaping (Ng, Harada and Russell, 1999) without discount, from the potential 0: the rewards of an
    episode add up to its last score. A score after a missing one (NaN) has no difference, which is an error.
    """
    errors = list(scores.errors)
    for row in np.flatnonzero(np.isnan(before)).tolist():
        score = scores.rewards[row]
        errors[row] = errors[row] or RowError(f"the score is {score:.6g}, but the turn before has none to improve on")
    infos = {**scores.infos, "turn_score": scores.rewards}
    rewards = scores.rewards - np.array(before)
    return replace(scores, rewards=rewards, errors=tuple(errors), infos=infos).mark_failures()


@dataclass(frozen=True, slots=True)
class StepScores:
    """The scores of one step.

    Attributes:
        scores: `[M]`, of the rows that were passed to the scorer; its rewards are `improvements` if these are paid.
        rows: int64 `[M]`, their environments.
        rewards: float64 `[N]`, always finite: the score, the fallback reward if the score is missing, or 0.0 for
            environments that were not scored.
        scored, ok: bool `[N]`, environments that were scored, and those that have a reward.
        last: float64 `[N]`, the score of each environment itself, NaN if it is missing, 0.0 if it was not scored.
    """

    scores: Scores
    rows: NDArray[np.int64]
    rewards: NDArray[np.float64]
    scored: Mask
    ok: Mask
    last: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        scores: Scores,
        rows: Sequence[int],
        num_envs: int,
        fallback_reward: float | None,
        before: Sequence[float] | None = None,
    ) -> StepScores:
        """Build the scores of one step from the scores of the environments `rows`.

        The rewards are improvements on the scores `before`, if they are given.

        Raises:
            ConfigError: an info of the scorer has a reserved name.
            ScoringError: scores are missing and there is no fallback reward; the error names the environments.
        """
        for name in scores.infos:
            if name in RESERVED or name.startswith("_"):
                raise ConfigError(
                    f"infos[{name!r}] of the scorer has a name that the environment uses (names with an underscore "
                    "are masks); rename it."
                )
        place = np.array(rows, dtype=np.int64)
        rewards, last = np.zeros((2, num_envs))
        last[place] = scores.rewards
        if before is not None:
            scores = improvements(scores, before)
        if scores.failed_rows:
            failure = ScoringError(scores.scatter(rows, num_envs))
            if fallback_reward is None:
                raise failure
            warn_once(
                "some conversations could not be scored and got the fallback_reward; their info score_ok is False."
            )
            logger.info("fallback_reward=%s: %s", fallback_reward, failure)
        finite = np.isfinite(scores.rewards)
        rewards[place] = np.where(finite, scores.rewards, fallback_reward or 0.0)
        return cls(scores, place, rewards, mask_of(place, num_envs), mask_of(place[finite], num_envs), last)

    def add_to(self, infos: Infos, rows: Mask) -> None:
        """Add the values of those `rows` that were scored to `infos`."""
        taken, size, scores = rows[self.rows], len(rows), self.scores
        good = taken & np.isfinite(scores.rewards)

        def add(to: Infos, name: str, values: NDArray[Any], chosen: Mask) -> None:
            add_values(to, name, values[chosen], self.rows[chosen], size)

        add(infos, "score_ok", good, taken)
        add(infos, "num_tokens", scores.num_tokens, taken)
        add(infos, "truncated_tokens", scores.truncated_tokens, taken)
        components: Infos = {}
        for name, values in scores.components.items():
            add(components, name, values, good & np.isfinite(values))
        if components:
            infos["components"] = components
            masks = [components[f"_{name}"] for name in scores.components if name in components]
            infos["_components"] = np.logical_or.reduce(masks)
        for name in ("step_rewards", "step_ends"):
            if (steps := getattr(scores, name)) is not None:
                lengths = np.array([len(each) for each in steps], dtype=np.int64)
                add(infos, name, np.fromiter(steps, object, len(steps)), good & (lengths > 0))
        for name, values in scores.infos.items():
            has = taken & scores.has_info(name)
            # Integers with missing rows are objects in `Scores`, but a masked array of integers here.
            found = values[has]
            if found.dtype == object:
                found = info_array(found.ravel().tolist()).reshape(found.shape)
            add_values(infos, name, found, self.rows[has], size)


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
        flights: what was sent and not received.
    """

    orders: PromptOrders
    episodes: tuple[Episode, ...]
    over: Mask
    scores: StepScores
    transcripts: tuple[Transcript, ...]
    calls: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    view: Any = None
    flights: tuple[Flight, ...] = ()

    def observations(self) -> Observations:
        """Return copies of the N conversations."""
        return tuple([copy_conversation(episode.messages) for episode in self.episodes])

    def transcribed(self, rows: Mask, done: Mask | None = None) -> EnvState:
        """Return the state with new transcripts of `rows`; `done` is None after a reset."""
        transcripts, scores = list(self.transcripts), self.scores
        for row in np.flatnonzero(rows).tolist():
            episode, scored = self.episodes[row], done is not None and bool(scores.scored[row])
            title = f"environment {row}, prompt {episode.prompt.prompt_id}"
            reward = float(scores.rewards[row]) if scored else None
            over = done is not None and bool(done[row])
            transcripts[row] = Transcript(episode.messages, title, reward, scored and not scores.ok[row], over)
        return replace(self, transcripts=tuple(transcripts))

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
