"""The one contract of the package: conversations in, `Scores` out. And what makes a scorer of what a user has."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from gym_rm.checks import load_object
from gym_rm.errors import ConfigError, GymRMError, ScoringError
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompts


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores conversations.

    `score` returns one entry per conversation, in order, and raises `ScoringError` (which carries the scores that
    succeeded) when a row has none. An empty list gives empty `Scores`. `gym_rm.testing.check_scorer` checks an
    implementation.
    """

    def score(self, conversations: Sequence[Conversation], prompts: Prompts = None) -> Scores:
        """Score N conversations.

        Args:
            conversations: N lists of messages.
            prompts: the rows that the conversations started from, a `Prompt` or None for each; None where there are
                none. A reward model ignores them, a verifier compares with their `answer`.
        """
        ...


RewardFunction: TypeAlias = Callable[..., Sequence[float | None]]
"""`(conversations)` or `(conversations, prompts)` to N numbers, None for "no score"."""

ScorerLike: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Scorer | RewardFunction | None"

# What `kind` can name besides the kinds of reward model (`gym_rm.engine.kinds.KINDS`), as entry points: nothing is
# imported until such a scorer is asked for.
SCORER_KINDS: dict[str, str] = {
    "pairwise": "gym_rm.scorers.pairwise:PairwiseScorer",
    "weighted": "gym_rm.scorers.combined:WeightedScorer",
    "ensemble": "gym_rm.scorers.combined:EnsembleScorer",
}
REWARD_MODEL = "gym_rm.engine.reward_model_scorer:load_reward_model"
FUNCTION = "gym_rm.scorers.function:FunctionScorer"
_OBJECT_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_scorer(reward_model: ScorerLike = None, **options: Any) -> Scorer:
    """Make a scorer from what a user has.

    Args:
        reward_model: None for the embedded reward model; a folder or hub id of a Hugging Face checkpoint; a dict
            `{"path": ..., "kind": ..., **options}`; a `Scorer`, returned as it is; a function from conversations, or
            from conversations and prompts, to numbers; or the name of either, `"module:name"`.
        **options: of the scorer (`dtype`, `device`, `max_num_batched_tokens`, ...). `kind` is one of `SCORER_KINDS` or
            of the kinds of reward model; a reward model's kind is detected where it is not given.

    Raises:
        ConfigError: unknown kind or option, invalid value, options for a scorer that already exists, or something that
            is not a scorer.

    Example:
        >>> import gym_rm
        >>> scorer = gym_rm.load_scorer(lambda conversations: [len(c[-1]["content"]) for c in conversations])
        >>> scorer.score([[{"role": "assistant", "content": "four"}]]).rewards.tolist()
        [4.0]
    """
    if _is_object_name(reward_model):
        reward_model = load_object("reward_model", str(reward_model))
        if isinstance(reward_model, type):
            return load_scorer(_instance(reward_model, options))
    if reward_model is None or isinstance(reward_model, str | os.PathLike):
        reward_model = {} if reward_model is None else {"path": os.fspath(reward_model)}
    if isinstance(reward_model, Mapping):
        return _make({**reward_model, **options})
    if options:
        raise ConfigError(
            f"options {sorted(options)} came with a ready-made scorer {type(reward_model).__name__}; "
            "give them to its constructor instead."
        )
    if isinstance(reward_model, type) and hasattr(reward_model, "score"):
        raise ConfigError(f"reward_model must be a scorer, got the class {reward_model.__name__}; pass an instance.")
    if isinstance(reward_model, Scorer):
        check_signature(reward_model)
        return reward_model
    if callable(reward_model):
        return _entry_point(FUNCTION)(reward_model)
    raise ConfigError(
        "reward_model must be None, a folder, a hub id, a dict, a Scorer or a function from conversations to numbers; "
        f"got {type(reward_model).__name__}: {reward_model!r:.200}."
    )


def try_score(scorer: Scorer, conversations: Sequence[Conversation], prompts: Prompts = None, **options: Any) -> Scores:
    """The scores of N conversations, with the reasons of failed rows in `errors` instead of an exception.

    A reward that is not finite and has no error gets one.

    Raises:
        ConfigError: the scorer returned something else than `Scores` of N rows.
    """
    try:
        scores = scorer.score(conversations, prompts, **options)
    except ScoringError as error:
        scores = error.scores
    name = type(scorer).__name__
    if not isinstance(scores, Scores):
        raise ConfigError(f"{name}.score returned {type(scores).__name__} {scores!r:.80}, expected gym_rm.Scores.")
    if not len(scores) == len(scores.rewards) == len(conversations):
        raise ConfigError(
            f"{name}.score returned {len(scores.rewards)} scores for {len(conversations)} conversations; a scorer "
            "returns one for each, in order."
        )
    return scores.mark_failures()


# --- a scorer that several users share ---------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Shared:
    scorer: Scorer
    users: int


_shared: dict[str, _Shared] = {}
_shared_lock = threading.RLock()


def acquire_scorer(reward_model: ScorerLike, options: Mapping[str, Any]) -> Scorer:
    """Like `load_scorer`, but equal plain settings return one scorer that all users in the process share.

    `SyncVectorEnv` makes one environment per row, other libraries make one per episode; the model is loaded only once.
    A folder whose files have changed is loaded again. Call `release_scorer` when done.
    """
    with _shared_lock:
        key = _key(reward_model, options) or _key_of(reward_model)
        if key not in _shared:
            scorer = load_scorer(reward_model, **options)
            if _belongs_to_user(scorer, reward_model):
                return scorer
            key = key or f"object {id(scorer)}"
            _shared[key] = _Shared(scorer, users=0)
        _shared[key].users += 1
        return _shared[key].scorer


def release_scorer(scorer: Scorer) -> None:
    """Return a scorer from `acquire_scorer`. The last user closes it; a user's own scorer object stays open."""
    with _shared_lock:
        key = _key_of(scorer)
        if key is None:
            return
        _shared[key].users -= 1
        if _shared[key].users > 0:
            return
        del _shared[key]
    if callable(close := getattr(scorer, "close", None)):
        close()


def _key_of(scorer: Any) -> str | None:
    """The key of a scorer that is shared already."""
    return next((key for key, entry in _shared.items() if entry.scorer is scorer), None)


def _belongs_to_user(scorer: Scorer, reward_model: ScorerLike) -> bool:
    """Whether the scorer is an object that was passed in, or that a module holds."""
    return scorer is reward_model or (_is_object_name(reward_model) and scorer is load_object("", str(reward_model)))


def _is_object_name(reward_model: Any) -> bool:
    return isinstance(reward_model, str) and _OBJECT_NAME.fullmatch(reward_model) is not None


def _key(reward_model: ScorerLike, options: Mapping[str, Any]) -> str | None:
    """Plain settings as text, with the state of the folders in them; None for settings that hold other objects."""
    if reward_model is not None and not isinstance(reward_model, str | os.PathLike | Mapping):
        return None
    named = dict(reward_model) if isinstance(reward_model, Mapping) else {"path": reward_model}
    try:
        return json.dumps([named, dict(options), _files([named, options])], sort_keys=True, default=os.fspath)
    except (TypeError, ValueError):
        return None


def _files(settings: Any) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the files in every folder that the settings name."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return [file for each in settings for file in _files(each)]
    if not isinstance(settings, str | os.PathLike) or not os.path.isdir(settings):
        return []
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in Path(settings).iterdir())


# --- from options to a scorer ------------------------------------------------------------------------------------


def _make(options: dict[str, Any]) -> Scorer:
    kind = options.get("kind", "auto")
    if not isinstance(kind, str):
        raise ConfigError(f"the kind of a scorer must be a text, got {type(kind).__name__} {kind!r}.")
    if kind not in SCORER_KINDS:
        return _entry_point(REWARD_MODEL)(**options)
    arguments = {name: value for name, value in options.items() if name != "kind"}
    try:
        return _entry_point(SCORER_KINDS[kind])(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, GymRMError):
            raise
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in options.items())
        raise ConfigError(f"invalid options for a scorer: {shown}: {error}.") from error


def _instance(scorer_class: type, options: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(scorer_class).bind(**options)
    except TypeError as error:
        raise ConfigError(f"invalid options for {scorer_class.__name__}: {error}.") from error
    return scorer_class(**options)


def _entry_point(name: str) -> Callable[..., Scorer]:
    module, _, attribute = name.partition(":")
    entry_point: Callable[..., Scorer] = getattr(importlib.import_module(module), attribute)
    return entry_point


def check_signature(scorer: Scorer) -> None:
    """Raise `ConfigError` if the scorer's `score` has no second parameter for the prompts."""
    try:
        inspect.signature(scorer.score).bind([], None)
    except TypeError as error:
        raise ConfigError(
            f"{type(scorer).__name__}.score must take (conversations, prompts=None): {error}; a scorer that does not "
            "need the prompts ignores them."
        ) from error
    except ValueError:  # a builtin does not tell
        return
