"""Load a public generative reward model by its name or style: a forward pass of ours, or a chat with it."""

from __future__ import annotations

from typing import Any

from gym_rm.engine.reward_model_scorer import load_reward_model
from gym_rm.scorers.judge.scorer import JudgeScorer
from gym_rm.scorers.judge.styles import load_style
from gym_rm.scorers.reference import ReferenceScorer


def load_styled(path: Any, *, style: str, **options: Any) -> Any:
    """Return the scorer of a model of a known style.

    Args:
        path: folder or hub id, URL of a server, or what else `JudgeScorer` takes as its model.
        style: name of the style, or its file.
        **options: the options of the scorer. With `principle`, log-odds of two answers come from a forward pass of
            ours, by this principle for all rows.

    Raises:
        ConfigError: there is no such style, the model cannot be used, or an option is invalid.
    """
    found = load_style(style)
    served = isinstance(path, str) and path.lower().startswith(("http://", "https://"))
    forward = found.forward
    if forward is not None and forward.kind == "reference":
        return ReferenceScorer(path, text=forward.text, **options)
    if forward is None or served or not isinstance(path, str):
        return JudgeScorer(path, style=style, **options)
    if options.get("principle") is None:  # it is asked, with the principle of each data row
        return JudgeScorer(path, style=style, **options)
    principle = str(options.pop("principle"))
    question = forward.question.replace("{principle}", principle)
    return load_reward_model(path, kind="generative", question=question, answers=forward.answers, **options)
