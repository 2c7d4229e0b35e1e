"""A plain function as a scorer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from gym_rm.errors import ConfigError
from gym_rm.scorer import RewardFunction, check_rows
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Conversation, Message, Prompt, Prompts, Provenance, copy_conversation, copy_prompt


class FunctionScorer:
    """`Scorer` that calls a plain function of conversations, or of conversations and prompts.

    The signature is read once: a second required parameter, or a parameter named `prompts`, receives the prompts.

    Args:
        function: takes `(conversations)` or `(conversations, prompts)` and returns one number per conversation, or
            None for a missing score. It may also return `Scores` (with components, infos or terminations), or raise
            a `ScoringError` with them.

    Raises:
        ConfigError: the function has another signature.

    Example:
        >>> def right(conversations, prompts):
        ...     return [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts)]
        >>> prompt = Prompt(({"role": "user", "content": "2 + 2?"},), "p0", answer="4")
        >>> FunctionScorer(right).score([[*prompt.messages, {"role": "assistant", "content": "4"}]], [prompt]).rewards
        array([1.])
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        name = _name_of(function)
        module = getattr(_code_of(function), "__module__", None)
        model = f"{module}:{name}" if module else name
        self._provenance = Provenance("FunctionScorer", model, revision=_revision_of(function))
        self._name = f"the reward function {name}"
        self._prompts = _prompts_parameter(function, self._name)
        self.respond = getattr(function, "respond", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionScorer:
        # `gym.make_vec(spec)` deep-copies its keywords; the objects that a function uses must not be copied.
        return self

    def __repr__(self) -> str:
        return f"FunctionScorer({_name_of(self._function)})"

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Call the function once with copies of all conversations, so that the function may change them.

        If the function requires prompts, a row without a prompt gets an error.

        Raises:
            ConfigError: the input or the return value is not a list of length N.
            ScoringError: the function returned None or a number that is not finite for some rows.
        """
        check_rows(conversations, prompts)
        copies = _copy_all(conversations)
        size = len(copies)
        required = self._prompts is not None and self._prompts.default is inspect.Parameter.empty
        given: Sequence[Prompt | None] = prompts if prompts is not None else [None] * size
        rows = [row for row in range(size) if given[row] is not None or not required]
        scores = self._scores(
            rows, [copies[row] for row in rows], None if prompts is None else [given[row] for row in rows]
        )
        spread = scores.scatter(rows, size)
        missing = f"{self._name} requires the prompt of this conversation, but it is missing; pass prompts="
        errors = list(spread.errors)
        for row in set(range(size)) - set(rows):
            errors[row] = missing
        scores = dataclasses.replace(spread, errors=tuple(errors), provenance=self._provenance)
        return scores.mark_failures().raise_for_errors()

    def _scores(
        self, rows: list[int], conversations: list[list[Message]], prompts: list[Prompt | None] | None
    ) -> Scores:
        """Call the function for these rows, and return their scores."""
        if not conversations:
            return Scores.from_rewards([])
        try:
            returned = self._call(conversations, prompts)
        except ScoringError as error:
            if len(error.scores) != len(conversations):  # raised by another scorer that the function called
                raise
            returned = error.scores
        if isinstance(returned, Scores) and len(returned) == len(conversations):
            return returned
        values = self._numbers(returned, rows)
        return Scores.from_rewards(
            [np.nan if value is None else value for value in values],
            errors=["the reward function returned None" if value is None else None for value in values],
        )

    def _call(self, conversations: list[list[Message]], prompts: list[Prompt | None] | None) -> Any:
        if self._prompts is None:
            return self._function(conversations)
        copies = None if prompts is None else [None if prompt is None else copy_prompt(prompt) for prompt in prompts]
        if self._prompts.kind is inspect.Parameter.POSITIONAL_ONLY:
            return self._function(conversations, copies)
        return self._function(conversations, **{self._prompts.name: copies})

    def _numbers(self, returned: Any, rows: list[int]) -> list[float | None]:
        """Check that the return value has one number or None for each of these rows, and return the numbers."""
        try:
            values = None if isinstance(returned, str | bytes | Mapping | Set) else iter(returned)
        except TypeError:
            values = None
        if values is None:
            raise ConfigError(
                f"{self._name} returned {type(returned).__name__} {returned!r:.80} for {len(rows)} conversations; "
                "it must return a list with one number or None per conversation."
            )
        listed = list(values)
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


def _revision_of(function: Any) -> str | None:
    """Return a digest of the source files of a function and of one that it wraps; None if they cannot be read."""
    try:
        code = _code_of(function)
        files = dict.fromkeys(inspect.getsourcefile(each) for each in (code, inspect.unwrap(code)))
        content = b"".join(Path(file or "").read_bytes() for file in files)
    except (TypeError, OSError):  # a builtin, or typed into an interpreter
        return None
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def _prompts_parameter(function: RewardFunction, name: str) -> inspect.Parameter | None:
    """Return the parameter that receives the prompts, or None if the function has none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    fixed = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    positional = [each for each in fixed if each.kind is not each.KEYWORD_ONLY]
    variadic = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    others = [each for each in fixed if each not in positional[:1]]
    named = next((each for each in others if each.name == "prompts"), None)
    second = next((each for each in positional[1:2] if each.default is each.empty), None)
    chosen = named or second
    lacking = [each for each in others if each.default is each.empty and each is not chosen]
    swapped = len(positional) > 1 and positional[0].name == "prompts"
    unreachable = chosen is not None and chosen.kind is chosen.POSITIONAL_ONLY and chosen not in positional[1:2]
    if lacking or swapped or unreachable or not (positional or variadic):
        raise ConfigError(
            f"{name} must take (conversations) or (conversations, prompts), got the parameters "
            f"{[each.name for each in parameters]}."
        )
    return chosen


def _copy_all(conversations: Sequence[Conversation]) -> list[list[Message]]:
    try:
        return [copy_conversation(conversation) for conversation in conversations]
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            "conversations must be a list of conversations, each a list of {'role', 'content'} messages; "
            f"got {type(conversations).__name__} {conversations!r:.80}."
        ) from error
