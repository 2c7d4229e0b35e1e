"""Metrics of the replies of a step or of a measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gym_rm.policy.rollouts import Rollout
from gym_rm.reports.metrics import correlation, mean_and_std
from gym_rm.scorers.rules import repetition


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the metrics by name; None where one is undefined."""
    rewards = np.array([each.reward for each in rollouts], dtype=np.float64)
    lengths = np.array([each.num_tokens for each in rollouts], dtype=np.float64)
    thinking = np.array([sum(turn.thinking_tokens for turn in each.turns) for each in rollouts], dtype=np.float64)
    parts = {"thinking_tokens": float(thinking.mean()), "answer_tokens": float((lengths - thinking).mean())}
    steps = [len(turn.step_rewards) for each in rollouts for turn in each.turns if turn.step_rewards]
    turns = [turn for each in rollouts for turn in each.turns if turn.tool_calls is not None]
    calls, errors = (sum(getattr(turn, name) for turn in turns) for name in ("tool_calls", "tool_errors"))
    scored = np.isfinite(rewards)
    known = [right for each in rollouts if (right := each.right) is not None]
    mean, std = mean_and_std(rewards)
    names = sorted({name for each in rollouts for name in each.components})
    components = {
        f"component/{name}": float(np.mean([each.components[name] for each in rollouts if name in each.components]))
        for name in names
    }
    verdicts = Counter(f"{name}/{value}" for each in rollouts for name, value in each.verdicts.items())
    return {
        "reward_mean": mean,
        "reward_std": std,
        **components,
        **{name: count / len(rollouts) for name, count in sorted(verdicts.items())},
        "accuracy": sum(known) / len(known) if known else None,
        "completion_tokens": float(lengths.mean()),
        "completion_tokens_max": int(lengths.max()),
        **(parts if thinking.any() else {}),
        **({"steps_per_reply": float(np.mean(steps))} if steps else {}),
        **({"tool_calls": calls / len(rollouts), "tool_errors": errors / calls if calls else None} if turns else {}),
        "finished": sum(each.finished for each in rollouts) / len(rollouts),
        "failed": float(1 - scored.mean()),
        "length_correlation": correlation(rewards[scored], lengths[scored]),
        "repetition": float(np.mean([repetition(each.reply) for each in rollouts])),
    }
