"""A function as a scorer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gym_rm.async_calls import AsyncCalls
from gym_rm.checks import in_order
from gym_rm.errors import ConfigError, RowError, brief
from gym_rm.scorer import CALLS_THAT_WAIT, NeverCopied, RewardFunction, check_conversations, max_concurrent_calls
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt, Prompts, Provenance, copy_conversation, copy_prompt

LIMITS = {"max_concurrency", "timeout"}


class FunctionScorer(NeverCopied):
    """`Scorer` that calls a function, which may be `async def`.

    The signature is read once. A function of `(conversations)` or `(conversations, prompts)` is called once. One whose
    first parameter is named `conversation` is called once for each row, as `(conversation)` or `(conversation,
    prompt)`; if it raises or is over its time, this row has an error. A second required parameter, or one named
    `prompts` or `prompt`, receives the data row.

    Args:
        function: returns one number per conversation, or None for a missing score. It may also return `Scores` (with
            components, infos or terminations).
        **limits: of a function that is `async def`: `max_concurrency` rows (64) are awaited at a time, each call for
            `timeout` seconds (60; None for no limit). All calls share one event loop, in a thread of its own.

    A plain function is called by one thread at a time, which need not be that of the caller, unless it has an attribute
    `max_concurrent_calls` (see `gym_rm.scorer.max_concurrent_calls`).

    Raises:
        ConfigError: the function has another signature, or a limit is invalid.

    Example:
        >>> def right(conversations, prompts):
        ...     return [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts)]
        >>> prompt = Prompt(({"role": "user", "content": "2 + 2?"},), "p0", answer="4")
        >>> FunctionScorer(right).score([[*prompt.messages, {"role": "assistant", "content": "4"}]], [prompt]).rewards
        array([1.])
    """

    def __init__(self, function: RewardFunction, **limits: Any) -> None:
        self._function = function
        asynchronous = is_async(function)
        if limits.keys() - (LIMITS if asynchronous else set()):
            raise ConfigError(
                f"options {sorted(limits)} cannot be applied to the function {_name_of(function)}; a function that is "
                f"`async def` has the options {sorted(LIMITS)}, other functions have none."
            )
        self._calls: AsyncCalls[Any] | None = AsyncCalls(**limits) if asynchronous else None
        name = _name_of(function)
        module = getattr(_code_of(function), "__module__", None)
        model = f"{module}:{name}" if module else name
        self._provenance = Provenance("FunctionScorer", model, revision=revision_of_function(function))
        self._name = f"the reward function {name}"
        self._by_row, self._prompts = _read_signature(function, self._name)
        self.respond = getattr(function, "respond", None)
        owner = function if hasattr(function, "max_concurrent_calls") else _code_of(function)  # what a partial calls
        self.max_concurrent_calls = max_concurrent_calls(owner, CALLS_THAT_WAIT if asynchronous else 1)

    def __repr__(self) -> str:
        return f"FunctionScorer({_name_of(self._function)})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Call the function with copies of the conversations, so that it may change them.

        If the function requires prompts, a row without a prompt gets an error.

        Raises:
            ConfigError: the input or the return value is not a list of length N.
            ScoringError: the function returned None or a number that is not finite for some rows.
            RuntimeError: the function is `async def`, and this scorer is closed.
        """
        check_conversations(conversations, prompts)
        size = len(conversations)
        given: Sequence[Prompt | None] = prompts if prompts is not None else [None] * size
        required = self._prompts is not None and self._prompts.default is inspect.Parameter.empty
        rows = [row for row in range(size) if not required or given[row] is not None]
        own = None
        if self._prompts is not None and prompts is not None:
            own = [prompt and copy_prompt(prompt) for prompt in map(prompts.__getitem__, rows)]
        scores = self._scores(rows, [copy_conversation(conversations[row]) for row in rows], own)
        if len(rows) < size:
            text = f"{self._name} requires the prompt of this conversation, but it is missing; pass prompts="
            scores = scores.scatter(rows, size)
            errors = [RowError(text, "invalid") if given[row] is None else scores.errors[row] for row in range(size)]
            scores = dataclasses.replace(scores, errors=tuple(errors), provenance=self._provenance)
        return scores.mark_failures().raise_for_errors()

    def close(self) -> None:
        """Cancel the calls of an async function that run, and end their thread; a plain function needs no close."""
        if self._calls is not None:
            self._calls.close()

    def _scores(
        self, rows: list[int], conversations: list[list[Message]], prompts: list[Prompt | None] | None
    ) -> Scores:
        """Call the function for these rows, and return their scores."""
        if not rows:
            return Scores.from_rewards([], provenance=self._provenance)
        pairs: Sequence[Any] = [(conversations, prompts)]
        if self._by_row:
            pairs = list(zip(conversations, [None] * len(rows) if prompts is None else prompts, strict=True))
        name = self._prompts and self._prompts.name
        calls = [functools.partial(self._function, said, **({name: row} if name else {})) for said, row in pairs]
        results = [_caught(each) for each in calls] if self._calls is None else self._calls.run(calls)
        if not self._by_row:
            (returned,) = results
            if isinstance(returned, TimeoutError) and self._calls is not None:
                return self._failed(returned, len(rows))
            if isinstance(returned, Exception):
                raise returned
            return self._read(returned, rows)
        return Scores.concatenate(
            self._failed(result, 1)
            if isinstance(result, Exception)
            else self._read(result if isinstance(result, Scores) else [result], [row])
            for row, result in zip(rows, results, strict=True)
        )

    def _failed(self, error: Exception, size: int) -> Scores:
        errors = [RowError.of(error, brief(error))] * size
        return Scores.from_rewards([np.nan] * size, errors=errors, provenance=self._provenance)

    def _read(self, returned: Any, rows: list[int]) -> Scores:
        if isinstance(returned, Scores) and len(returned) == len(rows):
            return dataclasses.replace(returned, provenance=self._provenance)
        values = self._numbers(returned, rows)
        errors = None
        if None in values:
            errors = ["the reward function returned None" if value is None else None for value in values]
        return Scores.from_rewards(np.array(values, dtype=np.float64), errors=errors, provenance=self._provenance)

    def _numbers(self, returned: Any, rows: list[int]) -> list[float | None]:
        """Check that the return value has one number or None for each row, and return the numbers."""
        listed = list(returned) if isinstance(returned, Iterator) else in_order(returned)
        if listed is None:
            raise ConfigError(
                f"{self._name} returned {type(returned).__name__} {returned!r:.80} for {len(rows)} conversations; "
                "it must return a list with one number or None per conversation."
            )
        if len(listed) != len(rows):
            raise ConfigError(
                f"{self._name} must return one value per conversation, got {len(listed)} values for {len(rows)}."
            )
        numbers: list[float | None] = []
        for row, value in zip(rows, listed, strict=True):
            try:
                if isinstance(value, str | bytes):
                    raise TypeError("expected a number, got a text")
                numbers.append(None if value is None else float(value))
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"{self._name} returned {type(value).__name__} {value!r:.80} for conversation {row}; "
                    "it must return a number, or None for a missing score."
                ) from error
        return numbers


def _name_of(function: Any) -> str:
    """Return a name that is equal in every process: no addresses of objects."""
    return str(_code_of(function).__qualname__)


def _code_of(function: Any) -> Any:
    """Return what has the source code: the function itself, that of a partial, or the class of another callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def revision_of_function(function: Any) -> str | None:
    """Return a digest of the source files of a function and of one that it wraps; None if they cannot be read."""
    try:
        code = _code_of(function)
        files = dict.fromkeys(inspect.getsourcefile(each) for each in (code, inspect.unwrap(code)))
        content = b"".join(Path(file or "").read_bytes() for file in files)
    except (TypeError, OSError):  # a builtin, or typed into an interpreter
        return None
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def is_async(function: Any) -> bool:
    """Return whether a function, or what a partial or another callable calls, is `async def`."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _caught(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def _read_signature(function: RewardFunction, name: str) -> tuple[bool, inspect.Parameter | None]:
    """Return whether the function takes one row, and the parameter that receives the prompts (None: it has none)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return False, None
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    by_row = [each.name for each in positional[:1]] == ["conversation"]
    named = next((each for each in parameters[1:] if each.name == ("prompt" if by_row else "prompts")), None)
    chosen = named or next((each for each in positional[1:2] if each.default is each.empty), None)
    swapped = len(positional) > 1 and positional[0].name == "prompts"
    try:
        signature.bind(None, **({} if chosen is None or swapped else {chosen.name: None}))
    except TypeError as error:
        raise ConfigError(
            f"{name} must take (conversations) or (conversations, prompts), or for each row (conversation) or "
            f"(conversation, prompt); got the parameters {[each.name for each in parameters]}."
        ) from error
    return by_row, chosen
