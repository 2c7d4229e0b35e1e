"""Load a public generative reward model by its name or style: a forward pass of ours, or a chat with it."""

from __future__ import annotations

from typing import Any

from gym_rm.engine.reward_model_scorer import load_reward_model
from gym_rm.errors import ConfigError
from gym_rm.scorers.judge.scorer import JudgeScorer
from gym_rm.scorers.judge.styles import load_style
from gym_rm.scorers.reference import ReferenceScorer


def load_styled(path: Any, *, style: str, principle: str | None = None, **options: Any) -> Any:
    """Return the scorer of a model of a known style.

    Args:
        path: folder or hub id, URL of a server, or what else `JudgeScorer` takes as its model.
        style: name of the style, or its file.
        principle: what the model judges by. A model that answers by log-odds is then a forward pass of ours, with this
            principle for all rows; otherwise it is asked, with the principle of each data row.
        **options: the other options of the scorer.

    Raises:
        ConfigError: there is no such style, the model cannot be used, or an option is invalid.
    """
    forward = load_style(style).forward
    own = isinstance(path, str) and not path.lower().startswith(("http://", "https://"))
    if forward is not None and forward.kind == "reference":
        if not own:
            raise ConfigError(f"style={style!r} runs in this process; pass a folder or hub id, got {path!r:.100}.")
        return ReferenceScorer(path, text=forward.text, **options)
    if forward is None or not own or principle is None:
        return JudgeScorer(path, style=style, **options, **({} if principle is None else {"principle": principle}))
    question = forward.question.replace("{principle}", str(principle))
    return load_reward_model(path, kind="generative", question=question, answers=forward.answers, **options)
