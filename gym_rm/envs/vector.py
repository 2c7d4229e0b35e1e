"""`RewardModel-v0`: conversations are the observations, replies the actions, scores the rewards.

A step checks the replies, scores the conversations in one call, gets the user's next turns in one call, and computes
the next state and everything that it returns. Only then does it replace the state, in one assignment, so that an
exception or an interrupt leaves the environment unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from gym_rm.checks import finite, integer
from gym_rm.config import parse_settings
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.debugging import call_id
from gym_rm.envs.arguments import check_messages, prompt_indices, read_replies, row_mask, rows_to_reset
from gym_rm.envs.episodes import Episode, PromptOrder, PromptOrders, seed_of_each
from gym_rm.envs.flights import Flight, FlightControl, Outcome
from gym_rm.envs.infos import EnvState, Infos, Mask, Observations, StepScores, mask_of
from gym_rm.envs.responders import UserSimulator
from gym_rm.envs.settings import RENDERING, EnvSettings, divide_known, keywords, planned, same_step_statistics
from gym_rm.envs.spaces import ConversationSpace, ReplySpace
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.errors import ActionError, ConfigError, RenderModeError, warn_once
from gym_rm.reports.transcripts import Frame, Transcript, print_transcripts
from gym_rm.scorer import is_relative
from gym_rm.scorers.load import acquire_scorer, release_scorer
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Message, Workload

Actions: TypeAlias = Sequence[str | Message]
Step: TypeAlias = tuple[Any, NDArray[np.float64], Mask, Mask, Infos]


class RewardVectorEnv(VectorEnv[Observations, Actions, NDArray[Any]]):
    """N conversations whose replies are scored together, with one `Scorer.score` call per step.

    Observations are a tuple of N conversations (lists of `{"role", "content"}`). Actions are N texts or assistant
    messages. Rewards are float64 `[N]` and always finite. `infos` contain arrays `[N]` with masks, in the format of
    `SyncVectorEnv`:

    - `prompt_id`; `answer` if the prompt has one; with `group_size > 1` also `group_id` (int64), which is equal only
      for the episodes of one group that answer the same prompt;
    - `tools` at resets, the schemas of the tools that the policy may call; at steps of an environment with tools
      `tool_calls` and `tool_errors` (int64), the calls of the reply and those that were answered with an error;
    - for rows that were scored: `score_ok` (bool), `num_tokens`, `truncated_tokens` (int64), `components` (float64)
      and the scorer's own infos; with `reward_on="improvement"` also `turn_score` (float64), the score itself.

    Args:
        num_envs: N, the number of environments.
        **settings: the fields of `EnvSettings`: `reward_model`, `prompts`, `group_size`, `max_turns`, `respond`, ...

    Raises:
        ConfigError: a setting is unknown or invalid.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> brevity = lambda conversations: [-len(c[-1]["content"]) for c in conversations]
        >>> envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=brevity, prompts=["2 + 2?", "3 + 3?"])
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = envs.step(["4", "six"])
        >>> rewards.tolist(), terminations.tolist()
        ([-1.0, -3.0], [True, True])
    """

    metadata = RENDERING

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:
        self.num_envs = integer("num_envs", num_envs, minimum=1)
        divide_known(settings, type(self).__name__, keywords(type(self)))
        self.settings = parse_settings(EnvSettings, settings)
        self.group_size = self.settings.group_size
        if num_envs % self.group_size:
            raise ConfigError(
                "num_envs must be a multiple of group_size, so that every group is complete; "
                f"got num_envs={num_envs} and group_size={self.group_size}."
            )
        self.render_mode = self.settings.render_mode
        known = [None, *RENDERING["render_modes"]]
        if self.render_mode not in known:
            raise RenderModeError(f"render_mode must be one of {known}, got {self.render_mode!r}.")
        self.autoreset_mode = self.settings.autoreset_mode
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and not same_step_statistics():
            warn_once(
                f"RecordEpisodeStatistics and NormalizeReward of gymnasium {gym.__version__} are wrong in the mode "
                "SAME_STEP; install gymnasium>=1.4, or pass autoreset_mode='NextStep'."
            )

        self._conversations = ConversationSpace(self.settings.max_text_length)
        self._toolbox: Toolbox | None = None
        if self.settings.tools:
            self._toolbox = Toolbox(self.settings.tools, self.settings.tool_options, self.settings.max_text_length)
        names = [*self._toolbox.tools] if self._toolbox else []
        self._replies = ReplySpace(self.settings.max_text_length, tools=names)
        self._set_spaces(self._conversations, self._replies)

        self.prompts = load_prompts(self.settings.prompts, max_text_length=self.settings.max_text_length)
        check_messages(self.prompts, self._conversations)
        if self._toolbox is not None:  # rows with tools of their own name those that they may use
            schemas = self._toolbox.schemas
            self.prompts = tuple(each if each.tools else replace(each, tools=schemas) for each in self.prompts)
        if self.settings.reward_model is None and self.settings.plan is None and self.settings.prompts is not None:
            warn_once(
                "prompts are given without reward_model, so the small embedded reward model scores the replies. It "
                "only rates answers to questions like 'Which is the largest, 12, 30 or 27?'; pass reward_model=."
            )
        self.scorer = acquire_scorer(*planned(self.settings, self.num_envs))
        respond = self.settings.respond if self.settings.respond is not None else getattr(self.scorer, "respond", None)
        self._user = UserSimulator(respond, max_turns=self.settings.max_turns, space=self._conversations)
        self._flights = FlightControl(self.settings, self.num_envs, self.scorer, self._user, self._toolbox)

        self.state = EnvState(
            orders=PromptOrders.of(len(self.prompts), self.num_envs, self.group_size),
            episodes=(),
            over=np.zeros(self.num_envs, dtype=np.bool_),
            scores=StepScores.of(Scores.from_rewards([]), [], self.num_envs, None),
            transcripts=(Transcript([]),) * self.num_envs,
        )

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Infos]:
        """Start new episodes, in all rows or in the rows of `options["reset_mask"]` (bool `[N]`).

        Args:
            seed: an int (environment i gets `seed + i`), a list with an int or None for each environment, or None to
                continue the order of prompts. A group uses the seed of its first environment.
            options: `reset_mask`, as Gymnasium defines it; `prompt_indices`, integers `[N]`: row i starts from
                `envs.prompts[prompt_indices[i]]`. The order of prompts does not change and continues afterwards.

        Raises:
            ConfigError: an option is unknown or invalid, or a seed or prompt is set for only a part of a group.
            ResetNeeded: the mask of the first reset leaves out some rows.
        """
        state, result = self.next_reset(seed=seed, options=options)
        self.commit(state)
        return result

    def step(self, actions: Actions, *, rows: Mask | None = None) -> Step:
        """Append N replies to N conversations and score them in one call: `send` and `recv` of the same rows.

        In `NEXT_STEP` mode, rows whose episode ended in the last step start a new episode: their reply is ignored and
        their reward is 0.0. If the step raises, nothing has changed, and nothing of it is in flight.

        Args:
            actions: N replies: texts, whose calls are read if the environment has tools, or assistant messages
                `{"role": "assistant", "content": ..., "tool_calls": [...]}`, whose content is not read.
            rows: bool `[N]`, environments to step; None for all. Their replies are scored in one call. The other
                environments do not change: their action is ignored, their reward is 0.0, and `infos` have no values
                for them. Use this if replies end in different steps, for example with one token per step.

        Raises:
            ActionError: a reply is not a valid text or message (the error names the row), their number is wrong, or a
                row is in flight.
            ScoringError: scores are missing and `fallback_reward` is None; the error names the rows.
            ResetNeeded: `reset` was not called, or an episode has ended in `DISABLED` mode.
        """
        with call_id("step"):
            state, result = self.next_step(actions, rows=rows)
        self.commit(state)
        return result

    def send(self, actions: Actions, *, rows: Mask | None = None) -> None:
        """Send replies, which threads score while the caller goes on; `recv` takes the results.

        Replies that are sent within a few milliseconds are scored in one call. A row is played as by `step`, with the
        same rewards, whatever is sent beside it; a scorer that compares the replies of a group waits until all are
        sent. A scorer whose `max_concurrent_calls` is 0, such as a reward model on the CPU, runs in `recv`.

        Args:
            actions, rows: see `step`. Rows that wait for their next episode (`NEXT_STEP`) are received at once.

        Raises:
            ActionError: see `step`. Nothing was sent.
            ResetNeeded: see `step`.
        """
        state = self.next_send(actions, rows=rows)
        self.commit(state)
        self._flights.start(state.flights)

    def recv(self, min_rows: int = 1, timeout: float | None = None) -> Step:
        """Return what `step` returns, for the rows in flight that are ready; `infos["rows"]` (bool `[N]`) says which.

        The other environments do not change, as those that are left out of a step.

        Args:
            min_rows: number of rows to wait for.
            timeout: seconds after which the rows that are ready are returned, possibly none; None for no limit, 0 to
                look without waiting.

        Raises:
            ConfigError: `min_rows` or `timeout` is invalid.
            ActionError: fewer rows are in flight, or they wait for others of their group.
            ScoringError: scores are missing and `fallback_reward` is None. The error names these rows, which are not
                in flight any more and have not changed; the other rows can still be received.
        """
        self._require_open()
        rows = integer("min_rows", min_rows, minimum=1)
        if timeout is not None and finite("timeout", timeout) < 0:
            raise ConfigError(f"timeout must not be negative, got {timeout}.")
        flying = int(self.in_flight.sum())
        if rows > flying:
            raise ActionError(f"recv waits for {rows} rows, but {flying} are in flight; send replies first.")
        ready = self._flights.wait(self.state.flights, rows, timeout)
        self._raise_failures(ready)
        state, result = self.next_recv(self.state, ready)
        received = mask_of([row for flight in ready for row in flight.rows], self.num_envs)
        result[-1].update(rows=received, _rows=np.ones_like(received))
        self.commit(state)
        return result

    def cancel(self) -> None:
        """Take back all replies in flight, as if they had not been sent; what runs is not received."""
        flights = self.state.flights
        self.commit(replace(self.state, flights=()))
        for flight in flights:
            flight.cancel()

    @property
    def in_flight(self) -> Mask:
        """Rows that were sent and not received, bool `[N]`."""
        return mask_of([row for flight in self.state.flights for row in flight.rows], self.num_envs)

    @property
    def ready(self) -> Mask:
        """Rows in flight that `recv` returns at once, bool `[N]`."""
        flights = (flight for flight in self.state.flights if flight.is_ready)
        return mask_of([row for flight in flights for row in flight.rows], self.num_envs)

    def render(self) -> tuple[Frame, ...] | None:
        """Return N conversations as texts, blocks of HTML or pictures; None in `"human"` mode, which has printed them.

        With autoreset, an ended episode is shown until the next step.

        Raises:
            ResetNeeded: `reset` was not called.
        """
        if self.render_mode is None:
            gym.logger.warn(f"render() returns None without a render_mode, one of {RENDERING['render_modes']}.")
        if self.render_mode in (None, "human"):
            return None
        if not self.state.episodes:
            raise ResetNeeded("call reset() before render().")
        return tuple([each.shown(self.render_mode) for each in self.state.transcripts])

    def close_extras(self, **kwargs: Any) -> None:
        """Cancel what is in flight; release the scorer, the user simulator and the tools.

        A scorer object that was passed in stays open.
        """
        # Some versions of Gymnasium also close an environment whose constructor raised.
        if "_flights" in vars(self):
            self.cancel()
            self._flights.close()
        if "scorer" in vars(self):
            release_scorer(self.scorer)
        if "_user" in vars(self):
            self._user.close()
        if vars(self).get("_toolbox") is not None:
            self._toolbox.close()  # type: ignore[union-attr]

    @property
    def workload(self) -> Workload | None:
        """Cost of the last score call (tokens, batches, retries, seconds); None if the scorer does not measure it.

        It is not in `infos`, because equal steps must have equal infos.
        """
        return self.state.scores.scores.workload

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Random generator of each environment's prompt order; the environments of a group share one."""
        return tuple(order.generator for order in self._seeded_orders())

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """Seed of each environment's generator."""
        return tuple(order.seed for order in self._seeded_orders())

    def _seeded_orders(self) -> list[PromptOrder]:
        """Return the order of each environment; an order without a seed gets a random one."""
        every = np.ones(self.num_envs, dtype=np.bool_)
        self.state = replace(self.state, orders=self.state.orders.seeded([None] * self.num_envs, every))
        return self.state.orders.each()

    def next_reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvState, tuple[Any, Infos]]:
        """Return the state after `reset`, and its result; see `commit`."""
        self._require_open()
        options = {} if options is None else options
        rows = rows_to_reset(options, self.num_envs)
        if not self.state.episodes and not rows.all():
            raise ResetNeeded("reset_mask must include every environment in the first reset; call reset() without it.")
        self._require_received(rows)
        indices = prompt_indices(options, self.num_envs)
        old = self.state
        if indices is not None:
            old.orders.check(indices, rows)
        orders = old.orders.seeded(seed_of_each(seed, self.num_envs), rows).aligned(rows)
        state = self._restart(replace(old, orders=orders, over=old.over & ~rows, view=None), rows, indices)
        if self.render_mode is not None:
            state = state.transcribed(rows)
        infos: Infos = {}
        state.add_episodes(infos, rows)
        state.add_tools(infos, rows)
        return state, (state.observations(), infos)

    def next_step(self, actions: Actions, *, rows: Mask | None = None) -> tuple[EnvState, Step]:
        """Return the state after `step`, and its result; see `commit`."""
        state = self.next_send(actions, rows=rows, whole=True)
        ours = state.flights[len(self.state.flights) :]
        for flight in ours:
            if not flight.is_ready:
                flight.landing.outcome = self._flights.play([flight], whole=True)
        return self.next_recv(state, ours)

    def next_send(self, actions: Actions, *, rows: Mask | None = None, whole: bool = False) -> EnvState:
        """Return the state with these replies in flight, in one flight if they are a `whole` step; see `commit`."""
        starting, playing = self._rows_of_step(rows)
        replies = self._check_replies(np.flatnonzero(playing).tolist(), actions)
        old = self.state
        flights = old.flights
        if starting.any():
            flights = (*flights, Flight.restart(np.flatnonzero(starting).tolist()))
        if whole and replies:
            flights = (*flights, Flight.of(None, replies, old.episodes, complete=True))
        elif replies:
            flights = self._flights.divide(replies, old.episodes, np.flatnonzero(~old.over).tolist(), flights)
        return replace(old, flights=flights)

    def next_recv(self, state: EnvState, flights: Sequence[Flight]) -> tuple[EnvState, Step]:
        """Return the state after flights of it with an outcome were received, and what `step` returns for them."""
        old, size = state, self.num_envs
        said: dict[int, list[Message]] = {}
        shared: dict[int, tuple[Outcome, set[int]]] = {}  # flights that were scored together have one outcome
        for flight in flights:
            said |= flight.said
            shared.setdefault(id(flight.outcome), (flight.outcome, set()))[1].update(flight.rows)
        starting = mask_of([row for flight in flights if not flight.said for row in flight.rows], size)
        playing = mask_of(list(said), size)
        rows = starting | playing
        scores = self._scores_of([*shared.values()], old.episodes)
        terminations, truncations = np.zeros((2, size), dtype=np.bool_)
        counted = np.zeros((2, size), dtype=np.int64)
        episodes = list(old.episodes)
        for outcome, own in shared.values():
            for row in own & said.keys():
                before, turn, last = episodes[row], outcome.turns[row], float(scores.last[row])
                messages = [*said[row], *turn.messages]
                episodes[row] = Episode(before.prompt, before.number, messages, before.num_replies + 1, last)
                terminations[row], truncations[row] = turn.terminated, turn.truncated
                if self._toolbox is not None:
                    counted[:, row] = outcome.calls[row]
        done = terminations | truncations
        calls = dict(zip(("tool_calls", "tool_errors"), counted, strict=True)) if self._toolbox is not None else {}
        received = set(flights)
        left = tuple(flight for flight in old.flights if flight not in received)
        state = replace(old, episodes=tuple(episodes), scores=scores, calls=calls, flights=left, view=None)
        state = self._restart(state, starting)  # none in the mode SAME_STEP
        if self.render_mode is not None:
            state = state.transcribed(rows, done)
        infos: Infos = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            state.add_final(infos, done)
            state.add_step(infos, playing & ~done)
            state, started = self._restart(state, done), done
        else:
            state.add_step(infos, playing)
            state, started = replace(state, over=(old.over & ~starting) | done), starting
        state.add_episodes(infos, rows)
        state.add_tools(infos, started)
        return state, (state.observations(), scores.rewards.copy(), terminations, truncations, infos)

    def commit(self, state: EnvState) -> None:
        """Make a state from `next_reset` or `next_step` the state of the environment, and print its new transcripts."""
        old, self.state = self.state, state
        if self.render_mode == "human":
            print_transcripts(
                [new for new, seen in zip(state.transcripts, old.transcripts, strict=True) if new is not seen]
            )

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{self} is closed; make a new one.")

    def _require_received(self, rows: Mask) -> None:
        if self.state.flights and (flying := np.flatnonzero(rows & self.in_flight).tolist()):
            raise ActionError(
                f"environments {flying} are in flight; recv() them first, cancel() what was sent, or leave them out."
            )

    def _set_spaces(self, observation: Space[Any], action: Space[Any]) -> None:
        self.single_observation_space, self.single_action_space = observation, action
        self.observation_space = batch_space(observation, self.num_envs)
        self.action_space = batch_space(action, self.num_envs)

    def _rows_of_step(self, rows: Mask | None) -> tuple[Mask, Mask]:
        """Return the rows of a step that start a new episode, and those that take an action."""
        rows = np.ones(self.num_envs, dtype=np.bool_) if rows is None else row_mask("rows", rows, self.num_envs)
        self._require_open()
        if not self.state.episodes:
            raise ResetNeeded("call reset() before step().")
        self._require_received(rows)
        over = rows & self.state.over
        if self.autoreset_mode is AutoresetMode.DISABLED and over.any():
            if self.num_envs == 1:
                raise ResetNeeded("the episode has ended; call reset() first.")
            raise ResetNeeded(
                f"the episodes of environments {np.flatnonzero(over).tolist()} have ended and autoreset is "
                "disabled; call reset(options={'reset_mask': terminations | truncations}) first."
            )
        return over, rows & ~over

    def _check_replies(self, rows: list[int], actions: Actions) -> dict[int, Reply]:
        return read_replies(rows, actions, self.state.episodes, self._replies, self._toolbox)

    def _scores_of(
        self, outcomes: Sequence[tuple[Outcome, Collection[int]]], episodes: Sequence[Episode]
    ) -> StepScores:
        """Return the scores of some rows of each outcome; `episodes` are those of all environments before the reply."""
        parts, scored = list[Scores](), list[int]()
        for outcome, rows in outcomes:
            own = [k for k, row in enumerate(outcome.scored) if row in rows]
            parts.append(outcome.scores if len(own) == len(outcome.scored) else outcome.scores.take(own))
            scored += [outcome.scored[k] for k in own]
        scores = parts[0] if len(parts) == 1 else Scores.concatenate(parts)
        improves = self.settings.reward_on == "improvement"
        before = [episodes[row].score for row in scored] if improves else None
        return StepScores.of(scores, scored, self.num_envs, self.settings.fallback_reward, before)

    def _raise_failures(self, ready: Sequence[Flight]) -> None:
        """Raise what went wrong in flights, after taking its rows out of flight; the others stay."""
        for flight in ready:
            if (raised := flight.raised) is not None:
                self._land(flight.rows)
                raised.add_note(
                    f"environments {list(flight.rows)} can be sent again; recv() returns the others in flight."
                )
                raise raised
        failed, landed, parts = list[int](), list[int](), list[Scores]()
        for flight in ready:
            outcome = flight.outcome
            own = {
                row: k for row, k in self._flights.failed(outcome.scores, outcome.scored).items() if row in flight.rows
            }
            if own:
                failed += own
                landed += flight.rows if is_relative(self.scorer) else own  # a comparison needs the others again
                parts.append(outcome.scores.take(own.values()))
        if failed:
            self._land(landed)
            error = ScoringError(Scores.concatenate(parts).scatter(failed, self.num_envs))
            error.add_note(f"environments {sorted(landed)} can be sent again; recv() returns the others in flight.")
            raise error

    def _land(self, rows: Collection[int]) -> None:
        """Take rows out of flight without a change."""
        flights = (flight.without(rows) for flight in self.state.flights)
        self.commit(replace(self.state, flights=tuple(flight for flight in flights if flight.rows)))

    def _restart(self, state: EnvState, rows: Mask, indices: NDArray[Any] | None = None) -> EnvState:
        """Return the state with new episodes in `rows`, from the prompts with these indices or the next ones."""
        if not rows.any():
            return state
        orders, started = state.orders.next(rows, indices)
        # The first reset starts every row.
        episodes: list[Any] = list(state.episodes) or [None] * self.num_envs
        for row, (number, index) in zip(np.flatnonzero(rows).tolist(), started, strict=True):
            prompt = self.prompts[index]
            episodes[row] = Episode(prompt, number, list(prompt.messages))
        return replace(state, orders=orders, episodes=tuple(episodes))
