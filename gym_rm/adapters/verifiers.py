"""verifiers: reward functions for its tasks (v1) and for the rubrics of earlier releases.

v1 records an exception as a missing reward. Earlier rubrics record it as 0.0, so the functions for them return NaN
instead, which makes the mean of a batch NaN too.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import join_reply, prompt_messages
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.engine.batching import MicroBatchingScorer, shared_batching_scorer
from gym_rm.engine.text.messages import plain_content
from gym_rm.errors import logger
from gym_rm.scorer import ScorerLike
from gym_rm.scores import ScoringError
from gym_rm.types import Prompt

GROUPED = ("answer", "info", "task")
"""Columns that rubrics pass to a reward function; a group function gets them as `answers`, `infos` and `tasks`."""


class TraceReward:
    """Reward of a trace, for a method of a `vf.Task` marked with `@vf.reward`.

    Concurrent calls are scored in one batch. The task's data (`answer`, ...) reaches the scorer as a `Prompt`.

    Args:
        reward_model, options: arguments of `load_scorer`.

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
        """Return the score of the messages in the trace's last branch.

        Raises:
            ScoringError: the conversation has no score (tool calls, images, too long, ...).
        """
        messages = [_plain(message) for message in trace.messages]
        data = getattr(getattr(trace, "task", None), "data", None)
        columns = {} if data is None else data.model_dump(exclude={"prompt", "system_prompt"})
        before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
        prompt = prompt_of_columns(list(before), columns, columns.get("idx") or 0)
        scores = await asyncio.wrap_future(self.scorer.submit([messages], [prompt]))
        return float(scores.rewards[0])


def reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """Return a reward function for `vf.Rubric(funcs=[...])` of earlier releases: one rollout, NaN without a score."""
    scorer = shared_batching_scorer(reward_model, options)

    async def function(prompt: Any, completion: Any, **kwargs: Any) -> float:
        return (await _rewards(scorer, [prompt], [completion], [kwargs]))[0]

    function.__name__ = name
    return function


def group_reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """Return a reward function for all rollouts of a group, scored in one call.

    Rubrics recognise a group function by its plural parameter names.
    """
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
    except Exception as error:  # the rubric would record a reward of 0.0
        logger.error("%d rollouts have no reward: %s", len(prompts), error)
        return [math.nan] * len(prompts)
    return scores.rewards_or_fallback(math.nan)


def _prompt(prompt: Any, columns: Mapping[str, Any], index: int) -> Prompt:
    """Make the prompt of a rollout; the keys of `info` and the columns except `answer` are metadata."""
    info = columns.get("info")
    named = {name: columns[name] for name in GROUPED if name in columns and name != "info"}
    return prompt_of_columns(prompt_messages(prompt), {**(info if isinstance(info, Mapping) else {}), **named}, index)


def _plain(message: Any) -> Any:
    fields = message.model_dump(exclude_none=True)
    return {**fields, "content": plain_content(fields.get("content", ""))}
