"""The one contract of the package: conversations in, `Scores` out."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from gym_rm.errors import ConfigError, GymRMError, ScoringError, nearest
from gym_rm.envs.spaces import copy_conversation
from gym_rm.types import Conversation, Message, Provenance, Scores


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores conversations.

    `score` returns one entry per conversation, in order, and raises `ScoringError` (which carries the
    scores that succeeded) when any row has none. An empty list gives empty `Scores`.
    `gym_rm.testing.check_scorer` checks an implementation.
    """

    def score(self, conversations: Sequence[Conversation]) -> Scores:
        """Score N conversations."""
        ...


RewardFunction: TypeAlias = Callable[[Sequence[Conversation]], Sequence[float]]
ScorerLike: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Scorer | RewardFunction | None"

# Kinds of one checkpoint, all loaded by "reward_model"; `gym_rm.engine.kinds` holds a class for each.
REWARD_MODEL_KINDS = frozenset(
    {"decoder", "encoder", "multi_head", "gated", "process", "generative", "implicit", "pair_encoder"}
)
# Options of a reward model.
FLAGS = frozenset({"batch_invariant", "tree", "add_bos", "trust_remote_code"})
COUNTS = frozenset({"max_length", "cache_size", "prefix_cache_tokens"})
# Entry points, as in Gymnasium's registry: nothing is imported until a scorer of that kind is asked for.
SCORER_KINDS: dict[str, str] = {
    "reward_model": "gym_rm.engine.reward_model_scorer:load_reward_model",
    "pairwise": "gym_rm.scorers.pairwise:PairwiseScorer",
    "weighted": "gym_rm.scorers.combined:WeightedScorer",
    "ensemble": "gym_rm.scorers.combined:EnsembleScorer",
}


def load_scorer(reward_model: ScorerLike = None, **options: Any) -> Scorer:
    """Make a scorer from what a user has.

    Args:
        reward_model: None for the embedded reward model; a folder or hub id of a Hugging Face checkpoint;
            a dict `{"path": ..., "kind": ..., **options}`; a `Scorer`, returned as it is; or a function from
            conversations to numbers.
        **options: passed to the scorer's constructor (`dtype`, `device`, `max_num_batched_tokens`, ...). `kind` is one
            of `SCORER_KINDS` or of `REWARD_MODEL_KINDS`; a reward model's own is found out where it is not given.

    Raises:
        ConfigError: an unknown kind, options that cannot be, options for a scorer that already exists, or something
            that is no scorer.

    Example:
        >>> import gym_rm
        >>> scorer = gym_rm.load_scorer(lambda conversations: [len(c[-1]["content"]) for c in conversations])
        >>> scorer.score([[{"role": "assistant", "content": "four"}]]).rewards.tolist()
        [4.0]
    """
    if reward_model is None or isinstance(reward_model, str | os.PathLike):
        reward_model = {} if reward_model is None else {"path": os.fspath(reward_model)}
    if isinstance(reward_model, Mapping):
        return _make({**reward_model, **options})
    if options:
        raise ConfigError(
            f"options {sorted(options)} came with a ready-made scorer {type(reward_model).__name__}; "
            "give them to its constructor instead."
        )
    if isinstance(reward_model, Scorer):
        return reward_model
    if callable(reward_model):
        return FunctionScorer(reward_model)
    raise ConfigError(
        "reward_model must be None, a folder, a hub id, a dict, a Scorer or a function from conversations to numbers; "
        f"got {type(reward_model).__name__}: {reward_model!r}."
    )


def _make(options: dict[str, Any]) -> Scorer:
    kind = options.get("kind", "reward_model")
    if not isinstance(kind, str):
        raise ConfigError(f"the kind of a scorer must be a text, got {type(kind).__name__} {kind!r}.")
    if kind in REWARD_MODEL_KINDS or kind == "auto":
        make, arguments = _entry_point("reward_model"), options
    else:
        make, arguments = _entry_point(kind), {name: value for name, value in options.items() if name != "kind"}
    if kind in REWARD_MODEL_KINDS | {"auto", "reward_model", "pairwise"}:
        for name, value in options.items():
            _check_option(name, value)
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, GymRMError):
            raise
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in options.items())
        raise ConfigError(f"no scorer can be made of the options {shown}: {error}.") from error


def _check_option(name: str, value: Any) -> None:
    """What a reward model would take for something else, or notice only when it scores."""
    if value is None and name in ("path", "max_length", "add_bos"):
        return
    expected = None
    if name == "path" and not isinstance(value, str | os.PathLike):
        expected = "a folder or a hub id"
    elif name in FLAGS and not isinstance(value, bool | np.bool_):
        expected = "true or false"
    elif name in COUNTS and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
        expected = "an integer"
    if expected:
        raise ConfigError(f"{name} must be {expected}, got {type(value).__name__} {value!r}.")


def _entry_point(kind: str) -> Callable[..., Scorer]:
    if kind not in SCORER_KINDS:
        raise ConfigError(
            f"unknown kind of scorer {kind!r}; known: {sorted(SCORER_KINDS)}, and of one checkpoint "
            f"{sorted(REWARD_MODEL_KINDS)}.{nearest(kind, [*SCORER_KINDS, *REWARD_MODEL_KINDS])}"
        )
    module, _, name = SCORER_KINDS[kind].partition(":")
    entry_point: Callable[..., Scorer] = getattr(importlib.import_module(module), name)
    return entry_point


class FunctionScorer:
    """A plain function from conversations to numbers, as a `Scorer`; None from it means "no score"."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionScorer:
        # `gym.make_vec(spec)` copies its keywords in depth; what a function holds on to is not to be doubled.
        return self

    def score(self, conversations: Sequence[Conversation]) -> Scores:
        """Call the function once with all conversations, in copies of its own to work on.

        Raises:
            ConfigError: what is no list of conversations, or came back as no list with a number for each.
            ScoringError: rows that the function gave None or no finite number.
        """
        copies = _copies(conversations)
        values = self._numbers(self._function(copies), len(copies)) if copies else []
        scores = Scores.from_rewards(
            [float("nan") if value is None else value for value in values],
            errors=["the reward function returned None" if value is None else None for value in values],
            provenance=Provenance("FunctionScorer", getattr(self._function, "__qualname__", repr(self._function))),
        )
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores

    def _numbers(self, returned: Any, size: int) -> list[float | None]:
        """What the function returned, if it is a number or None for each conversation."""
        name = f"the reward function {self._function!r}"
        try:
            values = None if isinstance(returned, str | bytes | Mapping | Set) else iter(returned)
        except TypeError:
            values = None
        if values is None:
            raise ConfigError(
                f"{name} returned {type(returned).__name__} {returned!r:.80} for {size} conversations; "
                "it must return a list with one number, or None, per conversation."
            )
        listed = list(values)
        if len(listed) != size:
            raise ConfigError(
                f"{name} returned {len(listed)} values for {size} conversations; it must return one per conversation."
            )
        numbers: list[float | None] = []
        for row, value in enumerate(listed):
            try:
                numbers.append(None if value is None else float(value))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name} returned {type(value).__name__} {value!r:.80} for conversation {row}; "
                    "it must return a number, or None for no score."
                ) from error
        return numbers


def _copies(conversations: Sequence[Conversation]) -> list[list[Message]]:
    try:
        len(conversations)
        return [copy_conversation(conversation) for conversation in conversations]
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            "score takes a list of conversations, each a list of {'role', 'content'} messages; "
            f"got {type(conversations).__name__} {conversations!r:.80}."
        ) from error
