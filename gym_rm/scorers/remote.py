"""A scorer whose model runs in a server: `gym-rm serve`, vLLM, or a reward server of OpenRLHF."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gym_rm.config import divide_settings
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scorer import acquire_scorer, check_rows, release_scorer, try_score
from gym_rm.scorers.remote_connections import Limits
from gym_rm.scorers.remote_options import RemoteOptions, check_options, parse_urls, read_key
from gym_rm.scorers.remote_protocols import OpenRLHFProtocol, Served, Turns
from gym_rm.scorers.remote_session import BUILT_IN, Expected, Session, expected_rewards
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts, Provenance

Value = TypeVar("Value")


class RemoteScorer:
    """Scores conversations with one or several servers; `gym_rm.load_scorer("http://...")` returns it.

    Requests are divided by the server's limits, sent to the least loaded server, and sent again after a failure. At
    the start, conversations with known rewards are scored and compared.

    Args:
        path: URL of a server; several in a list, or with commas between them. They must serve the same model.
        **options: the fields of `RemoteOptions`.

    Raises:
        ConfigError: an option is invalid, the key is refused, httpx is missing, or the server gives other rewards to
            known conversations.
        RemoteError: no server answers.

    Example:
        >>> scorer = RemoteScorer("http://127.0.0.1:8000", key="env:REWARD_KEY")  # doctest: +SKIP
        >>> scorer.score(conversations).rewards  # doctest: +SKIP
    """

    def __init__(self, path: str | Sequence[str], **options: Any) -> None:
        (self.options,) = divide_settings(options, RemoteOptions, owner="a scorer at a URL")
        check_options(self.options)
        self.urls, self._key = parse_urls(path, read_key(self.options.key))
        self.options = _with_protocol(self.options, self.urls)
        self.urls = [url.removesuffix("/get_reward").removesuffix("/classify") for url in self.urls]
        self._text_protocol = _text_protocol(self.options)
        self._served: Served | None = None
        self._expected: tuple[Expected, ...] = expected_rewards("calibration=", self.options.calibration)
        self._lock = threading.Lock()
        self._runner: _Runner | None = None
        self._closed = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self.options = self.options.model_copy(update={"local": None, "key": None})

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteScorer:
        """Return the scorer itself: `gym.make_vec` deep-copies its keywords, and connections are shared."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without connections; it has the key."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_runner")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _runner=None)

    def __repr__(self) -> str:
        return f"RemoteScorer({', '.join(self.urls)}, {self.provenance.model!r})"

    @property
    def provenance(self) -> Provenance:
        """The server's provenance, with its URL."""
        served = self._known()
        made = served.provenance
        url = self.urls[0] if len(self.urls) == 1 else list(self.urls)
        settings = {**made.settings, "url": url, "protocol": served.protocol, "server_scorer": made.scorer}
        return replace(made, scorer="RemoteScorer", settings=settings)

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None, *, turns: Turns = "last") -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: sent to the server (except to vLLM), for verifiers.
            turns: `"all"` also asks for the rewards after every assistant turn.

        Raises:
            ScoringError: some rows have no score; the error's `scores` has the scores of the other rows.
            RemoteError: the servers did not answer in time.
        """
        future = self._submit(conversations, prompts, turns)
        try:
            scores = future.result()
        except BaseException:  # also Ctrl-C
            future.cancel()
            raise
        return replace(scores, provenance=self.provenance).raise_for_errors()

    async def score_async(
        self, conversations: Sequence[Conversation], prompts: Prompts = None, *, turns: Turns = "last"
    ) -> Scores:
        """Score N conversations without blocking the event loop; see `score`."""
        scores = await asyncio.wrap_future(self._submit(conversations, prompts, turns))
        return replace(scores, provenance=self.provenance).raise_for_errors()

    def sleep(self) -> None:
        """Do nothing: the server manages its own device."""

    def wake(self) -> None:
        """Do nothing; see `sleep`."""

    def clear_cache(self) -> None:
        """Do nothing: no scores are kept here."""

    def close(self) -> None:
        """Close all connections; closing twice is allowed."""
        self._closed = True
        runner, self._runner = self._runner, None
        if runner is not None and runner.pid == os.getpid():
            runner.stop()

    # --- calls -----------------------------------------------------------------------------------------------------

    def _submit(
        self, conversations: Sequence[Conversation], prompts: Prompts, turns: Turns
    ) -> concurrent.futures.Future[Scores]:
        if turns not in ("last", "all"):
            raise ConfigError(f"turns must be 'last' or 'all'; got {turns!r}.")
        if self._closed:
            raise RuntimeError("this RemoteScorer is closed; make a new one.")
        check_rows(conversations, prompts)
        runner = self._running()
        protocol = runner.session.protocol(self._known())
        protocol.check_turns(turns)
        rows: list[Any] = []
        for row, conversation in enumerate(conversations):
            try:
                rows.append(protocol.encode(conversation, None if prompts is None else prompts[row]))
            except ConversationError as error:
                rows.append(error)
        return runner.call(runner.session.score(rows, turns))

    def _start(self) -> None:
        """Ask the servers what they serve, and compare rewards."""
        runner = self._running()
        self._served = runner.call(runner.session.start(self.options.startup_timeout)).result()
        if self.options.local is None:
            runner.call(runner.session.check()).result()
            return
        conversations = [one for one, _ in self._served.calibration] or list(BUILT_IN)
        local = acquire_scorer(self.options.local, {})
        try:
            scores = try_score(local, conversations)
        finally:
            release_scorer(local)
        known = zip(conversations, scores.rewards_or_none(), strict=True)
        mine = tuple(Expected(one, reward, "the local model") for one, reward in known if reward is not None)
        if not mine:
            raise ConfigError(f"local= gave no score to compare with: {scores.errors[0]}.")
        self._expected += mine
        runner.session.expected = self._expected
        runner.call(runner.session.check()).result()

    def _known(self) -> Served:
        served = self._runner.session.served if self._runner is not None else None
        if served is not None:
            self._served = served
        if self._served is None:
            raise RuntimeError("this RemoteScorer has not started.")
        return self._served

    def _running(self) -> _Runner:
        """Return the runner of this process: a fork copies neither threads nor connections."""
        if self._runner is not None and self._runner.pid != os.getpid():
            _inherited.append(self._runner)  # never collected, because its sockets belong to the parent process
            self._lock, self._runner = threading.Lock(), None
        with self._lock:
            if self._runner is None:
                options = self.options
                attempt = options.attempt_timeout or options.timeout / (1 if len(self.urls) == 1 else 4)
                session = Session(
                    self.urls,
                    key=self._key,
                    options=options,
                    limits=Limits(min(attempt, options.timeout), options.max_retries, options.max_connections),
                    text_protocol=self._text_protocol,
                    served=self._served,
                    expected=self._expected,
                )
                self._runner = _Runner(session)
                weakref.finalize(self, _stop, self._runner)
            return self._runner


class _Runner:
    """A thread with the event loop of a session."""

    def __init__(self, session: Session) -> None:
        self.pid = os.getpid()
        self.session = session
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gym_rm remote", daemon=True)
        self._thread.start()
        try:
            self.call(session.open()).result()
        except BaseException:
            self.stop()
            raise

    def call(self, coroutine: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel everything that runs, and end the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self.session.close())
        finally:
            self._loop.close()


_inherited: list[_Runner] = []


def _stop(runner: _Runner) -> None:
    if runner.pid == os.getpid():
        runner.stop()


def _with_protocol(options: RemoteOptions, urls: Sequence[str]) -> RemoteOptions:
    """Return the options with the protocol that the paths of the URLs imply."""
    for path, protocol in (("/get_reward", "openrlhf"), ("/classify", "vllm")):
        if options.protocol == "auto" and all(url.endswith(path) for url in urls):
            return options.model_copy(update={"protocol": protocol})
    return options


def _text_protocol(options: RemoteOptions) -> OpenRLHFProtocol | None:
    """Return the protocol that writes texts itself, if it was chosen."""
    if options.protocol != "openrlhf":
        return None
    if options.tokenizer is None:
        raise ConfigError("the protocol 'openrlhf' sends texts; pass tokenizer= with that of the reward model.")
    from gym_rm.engine.loading.files import check_tokenizer  # imports transformers, which is slow

    kwargs = dict(options.chat_template_kwargs or {})
    if options.chat_template is not None:
        kwargs["chat_template"] = options.chat_template
    return OpenRLHFProtocol(check_tokenizer(options.tokenizer), kwargs, options.max_length or 2048)
