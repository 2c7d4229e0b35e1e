"""`Math-v0`, `Code-v0` and `Mixed-v0`: `RewardModel-v0` with another scorer.

Their keywords are the fields of `EnvSettings` and the options of the scorer, side by side:
`gym.make_vec("Math-v0", num_envs=8, prompts="questions.jsonl", style="boxed", max_turns=2)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gym_rm.checks import load_object
from gym_rm.envs.settings import RENDERING, VECTOR_ONLY, EnvSettings, divide_known, keywords
from gym_rm.envs.single import RewardEnv
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.errors import ConfigError
from gym_rm.scorers.load import SCORER_KINDS

REFUSED = ("reward_model", "plan")
NAMES = {"math": "Math-v0", "code": "Code-v0", "weighted": "Mixed-v0"}
PROMPTS = {"code": "embedded:code"}
"""Embedded prompts of the kinds that the usual ones do not fit."""


def make_vec(num_envs: int = 1, *, kind: str, **settings: Any) -> RewardVectorEnv:
    """Make a vector environment whose scorer is `load_scorer({"kind": kind, **options})`.

    Args:
        num_envs: number of environments.
        kind: a key of `SCORER_KINDS`; the registered environments set it.
        **settings: fields of `EnvSettings`, except `reward_model` and `plan`, and options of the scorer.

    Raises:
        ConfigError: a keyword is unknown or invalid.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> envs = gym.make_vec("Math-v0", num_envs=2, prompts=[{"prompt": "2 + 2?", "answer": 4}])
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = envs.step(["It is 4.", "It is 5."])
        >>> rewards.tolist(), infos["final_info"]["verdict"].tolist()
        ([1.0, 0.0], ['right', 'wrong'])
    """
    return RewardVectorEnv(num_envs, **_with_scorer(kind, settings))


def make(*, kind: str, **settings: Any) -> RewardEnv:
    """Make a single environment, see `make_vec`."""
    return RewardEnv(**_with_scorer(kind, settings, refused=(*REFUSED, *VECTOR_ONLY)))


make.metadata = RENDERING  # type: ignore[attr-defined]  # `gym.make` reads it for modes such as "rgb_array_list"


def _with_scorer(kind: str, settings: Mapping[str, Any], refused: Collection[str] = REFUSED) -> dict[str, Any]:
    """Return settings of `RewardVectorEnv`, with the scorer and its options as the reward model."""
    name = NAMES.get(kind, kind)
    for given in REFUSED:
        if settings.get(given) is not None:
            raise ConfigError(
                f"{given} must not be set for {name}, which has a scorer of its own; use RewardModel-v0, or combine "
                f"several scorers with Mixed-v0. Got {settings[given]!r:.100}."
            )
    if kind == "weighted" and not settings.get("scorers"):
        raise ConfigError(
            f"{name} needs scorers={{name: scorer}}, such as {{'math': {{'kind': 'math'}}, 'rm': 'my-rm'}}."
        )
    scorer = load_object("kind", SCORER_KINDS[kind])
    options = [each for each in keywords(scorer) if each not in EnvSettings.model_fields]
    own, rest = divide_known(settings, name, options, refused=refused)
    if rest.get("prompts") is None and kind in PROMPTS:
        rest["prompts"] = PROMPTS[kind]
    return {**rest, "reward_model": {"kind": kind, **own}}
