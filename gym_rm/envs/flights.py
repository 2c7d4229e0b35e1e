"""Replies that were sent to an environment and not received yet: what they wait for, and what comes back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import time
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gym_rm.engine.debugging import call_id
from gym_rm.engine.text.messages import CHARACTERS_PER_TOKEN
from gym_rm.envs.episodes import Episode
from gym_rm.envs.responders import UserSimulator, UserTurn
from gym_rm.envs.settings import EnvSettings
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.errors import ActionError, ConfigError, brief
from gym_rm.scorer import (
    Scorer,
    is_relative,
    lock_open_after_fork,
    max_concurrent_calls,
    route_of,
    try_score,
)
from gym_rm.scorers.batching import serial_calls
from gym_rm.scorers.merged_calls import MergedCalls
from gym_rm.scores import Scores
from gym_rm.types import Message

CALL_TOKENS = 65_536  # of the replies that are scored in one call, unless the scorer has a budget of its own
PATIENCE = 0.5  # seconds after which a wait looks again: a signal just before a lock is taken does not end its wait


@dataclass(frozen=True, slots=True)
class Outcome:
    """What replies lead to; the environment has not changed.

    Attributes:
        turns: the turn after the reply of each row that has one: a row whose score is missing may have none.
        scores, scored: scores of some rows `[K]`, and these rows.
        calls: number of calls of each reply in an environment with tools, and of those that were answered with an
            error.
    """

    turns: Mapping[int, UserTurn]
    scores: Scores
    scored: Sequence[int]
    calls: Mapping[int, tuple[int, int]]


@dataclass(slots=True)
class Landing:
    """Where the outcome of a flight comes down, without a lock, which Ctrl-C could leave locked.

    Attributes:
        put, begun: the process in which it was handed to the threads, and that in which it is being played or need
            not be any more; 0 before. A fork and a copy have no such threads.
        outcome: the outcome, or what was raised; None before.
        turns, calls: those of `Outcome`, once a score is all that is missing: nobody is asked, and no tool is called,
            a second time if it fails or is interrupted. None before.
    """

    put: int = 0
    begun: int = 0
    outcome: Outcome | BaseException | None = None
    turns: Mapping[int, UserTurn] | None = None
    calls: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Landing, (0, 0, self.outcome)


@dataclass(frozen=True, eq=False)
class Flight:
    """Rows that are scored together, with other flights that come at the same time.

    Attributes:
        rows: environments, rising.
        replies, said: the reply of each row, and its conversation with it; empty for rows that start an episode.
        episodes: the episodes of all environments before the reply.
        route: flights with another one are scored in other calls.
        complete: False while the scorer waits for other replies of the group.
        landing: gets the outcome.
    """

    rows: tuple[int, ...]
    replies: Mapping[int, Reply] = field(default_factory=dict)
    said: Mapping[int, list[Message]] = field(default_factory=dict)
    episodes: Sequence[Episode] = ()
    route: Hashable = None
    complete: bool = True
    landing: Landing = field(default_factory=Landing)

    @classmethod
    def of(cls, route: Hashable, replies: Mapping[int, Reply], episodes: Sequence[Episode], complete: bool) -> Flight:
        """Return the flight of these replies to the episodes of an environment."""
        said = {row: [*episodes[row].messages, reply.message] for row, reply in replies.items()}
        return cls(tuple(replies), replies, said, episodes, route, complete)

    @classmethod
    def restart(cls, rows: Sequence[int]) -> Flight:
        """Return the flight of rows that start an episode, which wait for nothing."""
        flight = cls(tuple(rows))
        flight.landing.outcome = Outcome({}, Scores.from_rewards([]), (), {})
        return flight

    def __deepcopy__(self, memo: dict[int, Any]) -> Flight:
        """Return what a copy of the environment has in flight, which it plays itself unless there is an outcome."""
        return self if self.is_ready else replace(self, landing=Landing())

    def without(self, rows: Collection[int]) -> Flight:
        """Return the flight without some rows, which shares the outcome."""
        left = tuple(row for row in self.rows if row not in rows)
        return replace(self, rows=left, said={row: self.said[row] for row in left if self.said})

    def begin(self) -> bool:
        """Return whether it is to be played now; see `MergedCalls`."""
        began, self.landing.begun = self.landing.begun == os.getpid() or self.is_ready, os.getpid()
        return not began

    def cancel(self) -> None:
        """Do not play it if it has not begun; who waits for it in another thread need not any more."""
        if not self.is_ready:
            self.landing.outcome = ActionError(f"what was sent to environments {list(self.rows)} was cancelled.")
        self.landing.begun = os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether it has an outcome, or raised."""
        return self.landing.outcome is not None

    @property
    def raised(self) -> BaseException | None:
        """What it raised."""
        return self.landing.outcome if isinstance(self.landing.outcome, BaseException) else None

    @property
    def outcome(self) -> Outcome:
        """Its outcome."""
        assert isinstance(self.landing.outcome, Outcome)
        return self.landing.outcome

    @property
    def size(self) -> int:
        """About the number of tokens of its conversations."""
        return sum(len(each["content"]) for said in self.said.values() for each in said) // CHARACTERS_PER_TOKEN


class FlightControl:
    """Scores what is in flight and asks for the next turns: in this thread, or in threads of its own.

    It does not know the state of the environment, whose rows are its only names for conversations.

    Args:
        settings: settings of the environment.
        num_envs: N.
        scorer, user, toolbox: its parts; no toolbox without tools.
    """

    def __init__(
        self, settings: EnvSettings, num_envs: int, scorer: Scorer, user: UserSimulator, toolbox: Toolbox | None
    ) -> None:
        self._settings, self._num_envs = settings, num_envs
        self._scorer, self._user, self._toolbox = scorer, user, toolbox
        self._relative = is_relative(scorer)
        if self._relative and settings.reward_on == "improvement":
            raise ConfigError(
                f"reward_on='improvement' with {type(scorer).__name__}, which compares the replies of a group: such "
                "scores of two turns have no difference; use reward_on='turn' or 'end', or another scorer."
            )
        self._max_calls = max_concurrent_calls(scorer)
        # Several environments, and a step beside what was sent, may call the same scorer.
        one_at_a_time = self._max_calls == 1
        self._try_score = serial_calls(scorer).try_score if one_at_a_time else functools.partial(try_score, scorer)
        self._responding = (
            lock_open_after_fork() if max_concurrent_calls(user.respond) < 2 else contextlib.nullcontext()
        )
        self._threads: dict[Hashable, MergedCalls[Flight]] = {}  # by route
        self._landed: queue.SimpleQueue[None] = queue.SimpleQueue()  # has something when a flight is ready

    def __reduce__(self) -> tuple[Any, ...]:
        return FlightControl, (self._settings, self._num_envs, self._scorer, self._user, self._toolbox)

    def divide(
        self, replies: Mapping[int, Reply], episodes: Sequence[Episode], playing: Sequence[int], old: Sequence[Flight]
    ) -> tuple[Flight, ...]:
        """Return the flights of an environment with some more replies: one for each route, or each group.

        Args:
            replies: the replies, by row.
            episodes: the episodes of all environments.
            playing: the rows that have not ended, for which a comparison waits.
            old: what is in flight.
        """
        size = self._settings.group_size if self._settings.group_size > 1 else self._num_envs
        routes: dict[Hashable, dict[int, Reply]] = {}
        route: Hashable
        for row, reply in replies.items():
            route = row // size if self._relative else route_of(self._scorer, episodes[row].prompt)
            routes.setdefault(route, {})[row] = reply
        flights = list(old)
        for route, own in routes.items():
            complete = True
            if self._relative:
                for waiting in [each for each in flights if each.route == route and not each.complete]:
                    flights.remove(waiting)
                    own = {row: waiting.replies[row] for row in waiting.rows} | own
                complete = own.keys() >= {row for row in playing if row // size == route}
            flights.append(Flight.of(route, dict(sorted(own.items())), episodes, complete))
        return tuple(flights)

    def start(self, flights: Sequence[Flight]) -> None:
        """Hand flights to the threads, unless the scorer must be called in the thread of the caller."""
        process = os.getpid()
        for flight in flights if self._max_calls else ():
            if flight.landing.put != process and flight.complete and not flight.is_ready:
                self._threads_of(flight.route).put(flight)
                flight.landing.put = process  # afterwards: what is put twice has one outcome, what is not put has none

    def wait(self, flights: Sequence[Flight], num_rows: int, timeout: float | None) -> list[Flight]:
        """Return the flights with an outcome once they have so many rows, or after some seconds.

        What no thread scores is scored here, unless `timeout` is 0.

        Raises:
            ActionError: the others wait for replies that were not sent.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.start(flights)  # if a send was interrupted
        while True:
            with contextlib.suppress(queue.Empty):
                while True:  # before looking: what these tell is seen now
                    self._landed.get_nowait()
            ready, waiting = list[Flight](), list[Flight]()
            for flight in flights:
                (ready if flight.is_ready else waiting).append(flight)
            if sum(len(flight.rows) for flight in ready) >= num_rows or timeout == 0:
                return ready
            if not any(flight.complete for flight in waiting):
                rows = sorted(row for flight in waiting for row in flight.rows)
                raise ActionError(
                    f"environments {rows} wait for the other replies of their group, because the scorer compares them; "
                    "send these too, or ask for fewer rows."
                )
            if not self._max_calls:
                self._answer([flight for flight in waiting if flight.complete])
                continue
            left = PATIENCE if deadline is None else min(PATIENCE, deadline - time.monotonic())
            if left <= 0:
                return ready
            with contextlib.suppress(queue.Empty):
                self._landed.get(timeout=left)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself, and nobody waits for it."""
        for threads in self._threads.values():
            threads.close(wait=False)

    def play(self, flights: Sequence[Flight], *, whole: bool) -> Outcome:
        """Return what replies lead to, with one call of the scorer, of the responder and of the tools.

        Args:
            flights: what is played.
            whole: do nothing more once a score is missing, instead of leaving out its row.

        Raises:
            ScoringError: a score is missing, `whole` is set, and there is no fallback reward.
        """
        replies: dict[int, Reply] = {}
        said: dict[int, list[Message]] = {}
        episodes: dict[int, Episode] = {}
        for flight in flights:
            replies |= flight.replies
            said |= flight.said
            episodes |= zip(flight.rows, map(flight.episodes.__getitem__, flight.rows), strict=True)
        rows, on_turn = sorted(replies), self._settings.reward_on != "end"
        turns: dict[int, UserTurn] = {}
        calls: dict[int, tuple[int, int]] = {}
        if not on_turn:
            asked = sorted(row for flight in flights if flight.landing.turns is None for row in flight.rows)
            turns, calls = self._next_turns(asked, replies, said, episodes, None)
            for flight in flights:
                if (known := flight.landing.turns) is None:
                    flight.landing.calls, flight.landing.turns = calls, turns
                else:
                    turns = turns | {row: known[row] for row in flight.rows}
                    calls = calls | {row: flight.landing.calls[row] for row in flight.rows if flight.landing.calls}
        scored = rows if on_turn else [row for row in rows if turns[row].ended]
        parts = self._calls(scored, episodes)
        results = []
        for part in parts:
            prompts = [episodes[row].prompt for row in part]
            results.append(self._try_score([said[row] for row in part], prompts))
        scores = self._joined(results, parts)
        failed = self.failed(scores, scored)
        if failed and whole:
            scores.scatter(scored, self._num_envs).raise_for_errors()
        if on_turn:
            kept = [row for row in rows if row not in failed]
            own = scores.take(np.isin(rows, kept)) if failed else scores
            turns, calls = self._next_turns(kept, replies, said, episodes, own)
        return Outcome(turns, scores, scored, calls)

    def failed(self, scores: Scores, scored: Sequence[int]) -> dict[int, int]:
        """Return the rows that have no score and no fallback reward, and their places among the scores."""
        if self._settings.fallback_reward is not None:
            return {}
        return {scored[k]: k for k in scores.failed_rows}

    def _calls(self, rows: Sequence[int], episodes: Mapping[int, Episode]) -> list[list[int]]:
        """Divide rows into calls of the scorer: a comparison never sees two groups with one prompt, whatever came."""
        size = self._settings.group_size
        if not self._relative or size == 1:
            return [list(rows)] if rows else []
        calls: list[tuple[set[str], list[int]]] = []
        for _, members in itertools.groupby(rows, lambda row: row // size):
            group = list(members)
            prompts = {episodes[row].prompt.prompt_id for row in group}
            seen, call = next((each for each in calls if not each[0] & prompts), (set(), []))
            if not call:
                calls.append((seen, call))
            seen |= prompts
            call += group
        return [call for _, call in calls]

    def _joined(self, results: Sequence[Scores], parts: Sequence[Sequence[int]]) -> Scores:
        """Return the scores of all calls in the order of their rows."""
        rows = [row for part in parts for row in part]
        return results[0] if len(results) == 1 else Scores.concatenate(results).take(np.argsort(rows).tolist())

    def _next_turns(
        self,
        rows: Sequence[int],
        replies: Mapping[int, Reply],
        said: Mapping[int, list[Message]],
        episodes: Mapping[int, Episode],
        scores: Scores | None,
    ) -> tuple[dict[int, UserTurn], dict[int, tuple[int, int]]]:
        """Return the turn after the reply of each row, and its numbers of tool calls and errors."""
        toolbox = self._toolbox
        calling = [toolbox is not None and replies[row].num_calls > 0 for row in rows]
        own = [episodes[row] for row in rows]
        with self._responding:
            found = self._user.next_turns(rows, own, [said[row] for row in rows], scores, calling)
        turns = dict(zip(rows, found, strict=True))
        if toolbox is None:
            return turns, {}
        calls = {row: (replies[row].num_calls, len(replies[row].problems)) for row in rows}
        # After the responder: a step that fails there can be repeated without executing the calls twice.
        asked = [row for row, calls_tools in zip(rows, calling, strict=True) if calls_tools and not turns[row].ended]
        answers = toolbox.answer(
            [replies[row] for row in asked], [said[row] for row in asked], [episodes[row].prompt for row in asked]
        )
        for row, (messages, num_errors) in zip(asked, answers, strict=True):
            turns[row] = replace(turns[row], messages=tuple(messages))
            calls[row] = calls[row][0], num_errors
        return turns, calls

    def _answer(self, flights: Sequence[Flight]) -> None:
        """Give flights their outcome; after an exception one by one, so that only the cause has it."""
        try:
            with call_id("step"):
                outcome = self.play(flights, whole=False)
        except BaseException as error:
            if not (self._max_calls or isinstance(error, Exception)):
                raise  # Ctrl-C in the thread of the caller
            for flight in flights if len(flights) > 1 else ():
                self._answer([flight])
            if not isinstance(error, Exception):  # such as SystemExit, which would end the thread
                failure = RuntimeError(f"the scorer, the responder or a tool raised {brief(error)}")
                failure.__cause__, error = error, failure
            if len(flights) == 1:
                flights[0].landing.outcome = error
        else:
            for flight in flights:
                flight.landing.outcome = outcome
        self._landed.put(None)

    def _threads_of(self, route: Hashable) -> MergedCalls[Flight]:
        key = None if self._relative else route
        if key not in self._threads:
            tokens = getattr(self._scorer, "max_num_batched_tokens", None) or CALL_TOKENS
            own = weakref.ref(self)  # the threads end with an environment that is not closed

            def answer(flights: Sequence[Flight]) -> None:
                if (control := own()) is not None:
                    control._answer(flights)

            threads: MergedCalls[Flight] = MergedCalls(
                answer,
                size_of=lambda flight: flight.size,
                max_size=tokens,
                max_wait=0.005,
                max_calls=self._max_calls,
                name="environment",
            )
            self._threads[key] = threads
            weakref.finalize(self, threads.close, wait=False)
        return self._threads[key]
