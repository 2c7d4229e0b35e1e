"""verifiers: reward functions for its tasks (v1) and for the rubrics of its earlier releases.

v1 records an exception as a reward that is missing. The earlier rubrics turn it into 0.0, so the functions for them
return NaN instead, which no mean hides.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import join_reply, plain_content, prompt_messages
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.errors import ScoringError, logger
from gym_rm.scorer import ScorerLike
from gym_rm.scorers.batching import MicroBatchingScorer, shared_batching_scorer
from gym_rm.types import Prompt

GROUPED = ("answer", "info", "task")
"""What rubrics know of a rollout's row; functions of a group get the same in the plural."""


class TraceReward:
    """The reward of a trace, for a method marked `@vf.reward` of a `vf.Task`.

    Calls that arrive together are scored together. The task's data (`answer`, ...) goes to the scorer as a `Prompt`.

    Args:
        reward_model: what `load_scorer` takes, `options` with it.

    Example:
        >>> score = TraceReward("Skywork/Skywork-Reward-V2-Qwen3-0.6B")  # doctest: +SKIP
        >>> class ChatTask(vf.Task):  # doctest: +SKIP
        ...     @vf.reward(weight=1.0)
        ...     async def reward_model(self, trace) -> float:
        ...         return await score(trace)
    """

    def __init__(self, reward_model: ScorerLike = None, **options: Any) -> None:
        self.scorer = shared_batching_scorer(reward_model, options)

    async def __call__(self, trace: Any) -> float:
        """Score the messages of the trace's last branch.

        Raises:
            ScoringError: it has no score (tool calls, images, too long, ...).
        """
        messages = [_plain(message) for message in trace.messages]
        data = getattr(getattr(trace, "task", None), "data", None)
        columns = {} if data is None else data.model_dump(exclude={"prompt", "system_prompt"})
        before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
        prompt = prompt_of_columns(list(before), columns, columns.get("idx") or 0)
        scores = await asyncio.wrap_future(self.scorer.submit([messages], [prompt]))
        return float(scores.rewards[0])


def reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """A reward function for the earlier releases' `vf.Rubric(funcs=[...])`: one rollout, NaN if it has no score."""
    scorer = shared_batching_scorer(reward_model, options)

    async def function(prompt: Any, completion: Any, **kwargs: Any) -> float:
        return (await _rewards(scorer, [prompt], [completion], [kwargs]))[0]

    function.__name__ = name
    return function


def group_reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """The same for the rollouts of a group, in one score call; the rubric tells it by its plural parameters."""
    scorer = shared_batching_scorer(reward_model, options)

    async def function(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        columns = [
            {name: kwargs[f"{name}s"][row] for name in GROUPED if f"{name}s" in kwargs} for row in range(len(prompts))
        ]
        return await _rewards(scorer, prompts, completions, columns)

    function.__name__ = name
    return function


async def _rewards(
    scorer: MicroBatchingScorer,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Sequence[Mapping[str, Any]],
) -> list[float]:
    try:
        conversations = [join_reply(prompt, reply) for prompt, reply in zip(prompts, completions, strict=True)]
        rows = [_prompt(prompt, each, row) for row, (prompt, each) in enumerate(zip(prompts, columns, strict=True))]
        scores = await asyncio.wrap_future(scorer.submit(conversations, rows))
    except ScoringError as error:
        scores = error.scores
    except Exception as error:  # these rubrics would turn it into a reward of 0.0
        logger.error("no reward for %d rollouts: %s", len(prompts), error)
        return [math.nan] * len(prompts)
    return scores.rewards_or_fallback(math.nan)


def _prompt(prompt: Any, columns: Mapping[str, Any], index: int) -> Prompt:
    """The row of a rollout: its `answer`, and everything in `info` and the other columns."""
    info = columns.get("info")
    named = {name: columns[name] for name in GROUPED if name in columns and name != "info"}
    return prompt_of_columns(prompt_messages(prompt), {**(info if isinstance(info, Mapping) else {}), **named}, index)


def _plain(message: Any) -> Any:
    fields = message.model_dump(exclude_none=True)
    return {**fields, "content": plain_content(fields.get("content", ""))}
