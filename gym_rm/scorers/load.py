"""Load scorers: a reward model, a server, a judge, a verifier or a function, by what the user names; and share them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gym_rm.checks import describe, load_object
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.scorer import Scorer, ScorerLike, check_signature, lock_open_after_fork

# Values of `kind` in addition to the kinds of reward model (`gym_rm.engine.kinds.KINDS`). They are imported on first
# use, because some import torch, and because scorers of several scorers import this file.
SCORER_KINDS: dict[str, str] = {
    "weighted": "gym_rm.scorers.weighted:WeightedScorer",
    "ensemble": "gym_rm.scorers.combined:EnsembleScorer",
    "math": "gym_rm.scorers.math.scorer:MathScorer",
    "code": "gym_rm.scorers.code.scorer:CodeScorer",
    "judge": "gym_rm.scorers.judge.scorer:JudgeScorer",
    "verdict": "gym_rm.scorers.judge.verdict_scorer:VerdictScorer",
    "nemo_gym": "gym_rm.scorers.remote.nemo_gym:NemoGymScorer",
    "format": "gym_rm.scorers.rules:FormatScorer",
    "length": "gym_rm.scorers.rules:LengthScorer",
    "repetition": "gym_rm.scorers.rules:RepetitionScorer",
}
STYLED = "gym_rm.scorers.judge.by_name:load_styled"
_OBJECT_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.+\.py(:\w*)?")


def load_scorer(reward_model: ScorerLike = None, **options: Any) -> Scorer:
    """Load a scorer, or create one from a function.

    Args:
        reward_model: None for the embedded reward model; a folder or hub id of a Hugging Face checkpoint; a dict
            `{"path": ..., "kind": ..., **options}`; the URL of a server, or a list of URLs; a `Scorer`, which is
            returned unchanged; a `RewardFunction`; or the name of a scorer, a scorer class or a function,
            `"module:name"` or `"path/file.py:name"`, see `gym_rm.checks.load_object`.
        **options: options of the scorer (`dtype`, `device`, `max_num_batched_tokens`, ...); those of a function that is
            `async def` are `max_concurrency` and `timeout`, see `FunctionScorer`. `kind` is one of
            `SCORER_KINDS` or a kind of reward model. If it is not given, the kind of a reward model is detected, and
            public generative reward models are known by their names; `style` names one of their forms.

    Raises:
        ConfigError: unknown kind or option, invalid value, options for an existing scorer, or a value that is not a
            scorer.

    Example:
        >>> import gym_rm
        >>> scorer = gym_rm.load_scorer(lambda conversations: [len(c[-1]["content"]) for c in conversations])
        >>> scorer.score([[{"role": "assistant", "content": "four"}]]).rewards.tolist()
        [4.0]
    """
    if _is_object_name(reward_model):
        reward_model = load_object("reward_model", str(reward_model))
        if isinstance(reward_model, type):
            try:
                inspect.signature(reward_model).bind(**options)
            except TypeError as error:
                raise ConfigError(f"invalid options for {reward_model.__name__}: {error}.") from error
            reward_model, options = reward_model(**options), {}
    if reward_model is None or isinstance(reward_model, str | os.PathLike):
        reward_model = {} if reward_model is None else {"path": os.fspath(reward_model)}
    elif isinstance(reward_model, list | tuple) and _is_url(reward_model):
        reward_model = {"path": list(reward_model)}
    if isinstance(reward_model, Mapping):
        scorer: Scorer = _make({**reward_model, **options})
        return scorer
    if _is_model(reward_model):
        raise ConfigError(
            f"reward_model must be a scorer or a path, got the model {type(reward_model).__name__}; pass "
            "gym_rm.RewardModelScorer(model, tokenizer), or the folder that the model was loaded from."
        )
    if callable(reward_model) and not hasattr(reward_model, "score"):
        from gym_rm.scorers.function import FunctionScorer

        return FunctionScorer(reward_model, **options)
    if options:
        raise ConfigError(
            f"options {sorted(options)} cannot be applied to an existing scorer, {type(reward_model).__name__}; "
            "pass them to its constructor instead."
        )
    if isinstance(reward_model, type) and hasattr(reward_model, "score"):
        raise ConfigError(f"reward_model must be a scorer, got the class {reward_model.__name__}; pass an instance.")
    if isinstance(reward_model, Scorer):
        check_signature(reward_model)
        return reward_model
    raise ConfigError(
        "reward_model must be None, a folder, a hub id, a dict, a Scorer or a function from conversations to numbers; "
        f"got {type(reward_model).__name__}: {reward_model!r:.200}."
    )


# --- creating scorers --------------------------------------------------------------------------------------------


def _make(options: dict[str, Any]) -> Any:
    if wrong := [name for name in options if not isinstance(name, str)]:
        raise ConfigError(f"options of a scorer must have texts as names, got {describe(wrong[0])}.")
    kind = options.get("kind", "auto")
    if not isinstance(kind, str):
        raise ConfigError(f"kind must be a text, got {type(kind).__name__} {kind!r}.")
    path = options.get("path")
    if kind == "auto" and isinstance(path, str) and path in SCORER_KINDS and not os.path.exists(path):
        raise ConfigError(f"{path!r} is a kind of scorer, not a model; write {{'kind': {path!r}}}.")
    style = options.get("style")
    if not isinstance(style, str | None):
        raise ConfigError(f"style must be a text, got {describe(style)}.")
    named = options.get("model", path) if kind == "judge" else path
    own = {"rubric", "mode", "scale", "marked"} & options.keys() if kind == "judge" else kind != "auto"
    if style is None and not own and isinstance(named, str) and not _is_url(named):
        from gym_rm.scorers.judge.styles import style_of_model

        style = style_of_model(named)
    if style is not None and kind in ("auto", "judge"):
        given = {name: value for name, value in options.items() if name not in ("kind", "path", "style", "model")}
        return pkgutil.resolve_name(STYLED)(options.get("model", path), style=style, **given)
    if kind not in SCORER_KINDS:
        return _load_remote(options) if _is_url(path) else _load_reward_model(options)
    arguments = {name: value for name, value in options.items() if name != "kind"}
    scorer = pkgutil.resolve_name(SCORER_KINDS[kind])
    try:
        inspect.signature(scorer).bind(**arguments)
        return scorer(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, GymRMError):
            raise
        shown = ", ".join(f"{name}={value!r:.80}" for name, value in options.items())
        raise ConfigError(f"invalid options for a scorer: {shown}: {error}.") from error


def _is_url(value: Any) -> bool:
    """Return whether this is the URL of a server, or a list of URLs."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(each, str) and _is_url(each) for each in value)
    return isinstance(value, str) and value.strip().lower().startswith(("http://", "https://"))


def _load_remote(options: dict[str, Any]) -> Any:
    from gym_rm.scorers.remote.scorer import RemoteScorer

    return RemoteScorer(**{name: value for name, value in options.items() if (name, value) != ("kind", "auto")})


def _load_reward_model(options: dict[str, Any]) -> Any:
    from gym_rm.engine.kinds import check_kind
    from gym_rm.engine.reward_model_scorer import load_reward_model

    check_kind(options.get("kind", "auto"), others=SCORER_KINDS)
    return load_reward_model(**options)


def _is_model(reward_model: Any) -> bool:
    """Return whether this is a Hugging Face model, whose `score` is at most a layer; torch is not imported for it."""
    layer = getattr(reward_model, "score", None)
    is_module = hasattr(reward_model, "state_dict") and hasattr(reward_model, "config")
    return is_module and (layer is None or hasattr(layer, "state_dict"))


def _is_object_name(reward_model: Any) -> bool:
    is_text = isinstance(reward_model, str) and not reward_model.startswith("embedded:")
    return is_text and _OBJECT_NAME.fullmatch(reward_model) is not None


def _key(reward_model: ScorerLike, options: Mapping[str, Any]) -> str | None:
    """Return plain settings and the state of their folders as text; None if the settings contain other objects."""
    if reward_model is not None and not isinstance(reward_model, str | os.PathLike | Mapping | list | tuple):
        return None
    named = dict(reward_model) if isinstance(reward_model, Mapping) else {"path": reward_model}
    try:
        return json.dumps([named, dict(options), _files([named, options])], sort_keys=True, default=os.fspath)
    except (TypeError, ValueError):
        return None


def _files(settings: Any) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of the files in every folder in the settings."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return [file for each in settings for file in _files(each)]
    if not isinstance(settings, str | os.PathLike) or not os.path.isdir(settings):
        return []
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in Path(settings).iterdir())


# --- shared scorers --------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Shared:
    scorer: Scorer
    users: int


_shared: dict[str, _Shared] = {}
_shared_lock = lock_open_after_fork()


def acquire_scorer(reward_model: ScorerLike, options: Mapping[str, Any]) -> Scorer:
    """Load a scorer, or return the one that this process has already loaded with equal plain settings.

    `SyncVectorEnv` creates one environment per row, other libraries create one per episode. All of them share one
    model. If the files in its folder have changed, the model is loaded again. Call `release_scorer` when done.
    """
    with _shared_lock:
        key = _key(reward_model, options) or _key_of(reward_model)
        if key not in _shared:
            scorer = load_scorer(reward_model, **options)
            named = _is_object_name(reward_model) and scorer is load_object("", str(reward_model))
            if named or scorer is reward_model:  # it belongs to the user
                return scorer
            key = key or f"object {id(scorer)}"
            _shared[key] = _Shared(scorer, users=0)
        _shared[key].users += 1
        return _shared[key].scorer


def release_scorer(scorer: Scorer) -> None:
    """Release a scorer from `acquire_scorer`. The last release closes it, unless the user created the object."""
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
    """Return the key of a shared scorer, or None if it is not shared."""
    return next((key for key, entry in _shared.items() if entry.scorer is scorer), None)
