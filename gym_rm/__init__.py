"""gym_rm: reward-model rewards for any RL library, through Gymnasium's vector environments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium

from gym_rm.errors import ActionError, ConfigError, ConversationError, GymRMError, RemoteError
from gym_rm.scorer import Scorer
from gym_rm.scorers.load import load_scorer
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Comparison, Conversation, Message, PreferencePair, Prompt

if TYPE_CHECKING:
    from gym_rm.data.prompts import load_prompts
    from gym_rm.engine.reward_model_scorer import RewardModelScorer
    from gym_rm.scorers.code.scorer import CodeScorer
    from gym_rm.scorers.combined import EnsembleScorer
    from gym_rm.scorers.judge.scorer import JudgeScorer
    from gym_rm.scorers.math.scorer import MathScorer
    from gym_rm.scorers.remote.scorer import RemoteScorer
    from gym_rm.scorers.weighted import WeightedScorer

__version__ = "0.1.0"

__all__ = [
    "ActionError",
    "CodeScorer",
    "Comparison",
    "ConfigError",
    "Conversation",
    "ConversationError",
    "EnsembleScorer",
    "GymRMError",
    "JudgeScorer",
    "MathScorer",
    "Message",
    "PreferencePair",
    "Prompt",
    "RemoteError",
    "RemoteScorer",
    "RewardModelScorer",
    "Scorer",
    "Scores",
    "ScoringError",
    "WeightedScorer",
    "load_prompts",
    "load_scorer",
]

# Names that are imported on first use, so that `import gym_rm` is fast and loads no torch.
_LAZY = {
    "CodeScorer": "gym_rm.scorers.code.scorer",
    "EnsembleScorer": "gym_rm.scorers.combined",
    "JudgeScorer": "gym_rm.scorers.judge.scorer",
    "MathScorer": "gym_rm.scorers.math.scorer",
    "RemoteScorer": "gym_rm.scorers.remote.scorer",
    "RewardModelScorer": "gym_rm.engine.reward_model_scorer",
    "WeightedScorer": "gym_rm.scorers.weighted",
    "load_prompts": "gym_rm.data.prompts",
}

for _name, _single, _vector, _kind in (
    ("RewardModel", "single:RewardEnv", "vector:RewardVectorEnv", None),
    ("RewardModelCandidates", "numeric_views:CandidateEnv", "numeric_views:CandidateAction", None),
    ("RewardModelTokens", "numeric_views:TokenEnv", "numeric_views:TokenLevel", None),
    ("Math", "verifier_envs:make", "verifier_envs:make_vec", "math"),
    ("Code", "verifier_envs:make", "verifier_envs:make_vec", "code"),
    ("Mixed", "verifier_envs:make", "verifier_envs:make_vec", "weighted"),
):
    for _id in (f"{_name}-v0", f"gym_rm/{_name}-v0"):
        gymnasium.register(
            _id,
            entry_point=f"gym_rm.envs.{_single}",
            vector_entry_point=f"gym_rm.envs.{_vector}",
            kwargs={} if _kind is None else {"kind": _kind},
        )


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
