"""verifiers: reward functions for its tasks (v1) and for the rubrics of its earlier releases.

v1 records an exception as a reward that is missing. The earlier rubrics turn it into 0.0, so the functions for them
return NaN instead, which no mean hides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from gym_rm.data.messages import conversation, plain_content, rewards_or_none
from gym_rm.scorers.batching import MicroBatchingScorer, shared_scorer
from gym_rm.errors import ScoringError, logger
from gym_rm.scorer import ScorerLike


class TraceReward:
    """The reward of a trace, for a method marked `@vf.reward` of a `vf.Task`.

    Traces that are scored at the same time are scored in one call.

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
        self.scorer = shared_scorer(reward_model, options)

    async def __call__(self, trace: Any) -> float:
        """Score the messages of the trace's last branch.

        Raises:
            ScoringError: it has no score (tool calls, images, too long, ...).
        """
        messages = [_plain(message) for message in trace.messages]
        scores = await asyncio.wrap_future(self.scorer.submit([messages]))
        return float(scores.rewards[0])


def reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """A reward function for the earlier releases' `vf.Rubric(funcs=[...])`: one rollout, NaN if it has no score."""
    scorer = shared_scorer(reward_model, options)

    async def function(prompt: Any, completion: Any, **kwargs: Any) -> float:
        return (await _rewards(scorer, [prompt], [completion]))[0]

    function.__name__ = name
    return function


def group_reward_function(reward_model: ScorerLike = None, *, name: str = "reward_model", **options: Any) -> Any:
    """The same for the rollouts of a group, in one score call; the rubric tells it by its plural parameters."""
    scorer = shared_scorer(reward_model, options)

    async def function(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return await _rewards(scorer, prompts, completions)

    function.__name__ = name
    return function


async def _rewards(scorer: MicroBatchingScorer, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    try:
        rows = [conversation(prompt, reply) for prompt, reply in zip(prompts, completions, strict=True)]
        scores = await asyncio.wrap_future(scorer.submit(rows))
    except ScoringError as error:
        scores = error.scores
    except Exception as error:
        logger.error("no reward for %d rollouts: %s", len(prompts), error)
        return [math.nan] * len(prompts)
    return [math.nan if reward is None else reward for reward in rewards_or_none(scores)]


def _plain(message: Any) -> Any:
    fields = message.model_dump(exclude_none=True)
    return {**fields, "content": plain_content(fields.get("content", ""))}
