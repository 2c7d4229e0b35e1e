"""What a policy wrote in a step: rollouts, which are episodes with the tokens sampled in them, and their metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.engine.text.thinking import Thinking
from gym_rm.evaluation.answers import is_right
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.reports.metrics import correlation, mean_and_std
from gym_rm.scorers.judge.training_rows import PLACES
from gym_rm.scorers.rules import repetition
from gym_rm.types import Conversation

THINKING = Thinking()


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """One reply in a rollout. The policy learns from exactly the tokens that it sampled, after what it saw then.

    Attributes:
        prompt: int32 `[P]`, what the policy saw: the conversation in its template.
        completion: what it replied.
        reward: reward of this reply: 0 if it was not scored, NaN if it is missing.
        reply: the whole reply, as the environment got it: with the tag of its thinking that the template wrote.
        thinking_tokens: sampled tokens before the answer; 0 for a reply without thinking.
        tool_calls: number of tools that it called; None in an environment without tools.
        tool_errors: number of its calls that failed or could not be read.
        step_rewards, step_ends: rewards of the steps `[S]`, and where each ends in the content of the message.
        step_lengths: number of sampled tokens of each step `[S]`; all belong to a step.
        score: with `reward_on="improvement"`, its score, of which the reward is a difference; None if it is missing.
    """

    prompt: TokenIds
    completion: Completion
    reward: float
    reply: str = ""
    thinking_tokens: int = 0
    tool_calls: int | None = None
    tool_errors: int = 0
    step_rewards: tuple[float, ...] = ()
    step_ends: tuple[int, ...] = ()
    step_lengths: tuple[int, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode of a step.

    Attributes:
        row: its number among the rollouts of the step on all ranks.
        group: number of its prompt in the step; the rollouts of a group are compared.
        prompt_id: id of the prompt.
        answer: reference answer, or None.
        conversation: the whole conversation.
        turns: the replies.
        components: sums of the components of the reward, by name; of improvements, those of the last score.
        attempt: number of times that its group was replaced, by dynamic sampling.
        verdicts: the verdict of each verifier on the last reply that it scored.
        lag: number of updates of the weights since its oldest reply was written, when it is learned from.
    """

    row: int
    group: int
    prompt_id: str
    answer: str | None
    conversation: Conversation
    turns: tuple[RolloutTurn, ...]
    components: Mapping[str, float]
    attempt: int = 0
    verdicts: Mapping[str, str] = field(default_factory=dict)
    lag: int = 0

    @property
    def reward(self) -> float:
        """Sum of the rewards of the turns, for improvements the last score, to the last bit; NaN if one is missing."""
        total, last = math.fsum(turn.reward for turn in self.turns), self.turns[-1].score
        return total if last is None or math.isnan(total) else last

    @property
    def reply(self) -> str:
        """The last reply."""
        return self.turns[-1].reply

    @property
    def right(self) -> bool | None:
        """Whether the last reply has the reference answer, checked without the reward model; None without an answer.

        Its thinking is not read, and a call of a tool is no answer.
        """
        if self.answer is None:
            return None
        _, said = THINKING.split({"content": self.reply})
        return said is not None and not self.turns[-1].tool_calls and is_right(said, self.answer)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def step_rewards(self) -> NDArray[np.float64]:
        """Rewards of the steps of all turns; empty if there are none, or a score is missing."""
        return np.array([reward for turn in self.turns for reward in turn.step_rewards if math.isfinite(self.reward)])

    @property
    def finished(self) -> bool:
        """Whether every reply ended with an end token."""
        return all(turn.completion.finished for turn in self.turns)


@dataclass(frozen=True)
class RolloutTable:
    """The rollouts of a step as columns: B rollouts, M turns, N tokens, one rollout after the other."""

    rollouts: Sequence[Rollout]

    @classmethod
    def joined(cls, tables: Iterable[RolloutTable]) -> RolloutTable:
        """Return the rollouts of several tables by their row; of two with the same row, the later one."""
        by_row = {rollout.row: rollout for table in tables for rollout in table.rollouts}
        return cls([by_row[row] for row in sorted(by_row)])

    def trained_at(self, version: int) -> RolloutTable:
        """Return the rollouts with their lags at weights after so many updates."""
        oldest = [min(turn.completion.version for turn in each.turns) for each in self.rollouts]
        return RolloutTable([replace(each, lag=version - at) for each, at in zip(self.rollouts, oldest, strict=True)])

    @cached_property
    def turns(self) -> list[RolloutTurn]:
        """The turns."""
        return [turn for rollout in self.rollouts for turn in rollout.turns]

    @cached_property
    def owners(self) -> NDArray[Any]:
        """Index of each turn's rollout `[M]`."""
        return np.repeat(np.arange(len(self.rollouts)), [len(rollout.turns) for rollout in self.rollouts])

    @cached_property
    def groups(self) -> NDArray[Any]:
        """Group of each turn `[M]`."""
        groups: NDArray[Any] = self.column("group")[self.owners]
        return groups

    @cached_property
    def lengths(self) -> NDArray[Any]:
        """Number of sampled tokens of each turn `[M]`."""
        return np.array([len(turn.completion.token_ids) for turn in self.turns])

    @cached_property
    def log_probs(self) -> NDArray[np.float32]:
        """Log-probabilities of the tokens as the sampler computed them `[N]`."""
        return np.concatenate([turn.completion.log_probs for turn in self.turns])

    @cached_property
    def steps(self) -> list[NDArray[np.float64]]:
        """Rewards of the steps of each rollout `[B]`."""
        return [rollout.step_rewards for rollout in self.rollouts]

    @cached_property
    def components(self) -> dict[str, NDArray[np.float64]]:
        """Components of the rewards `[B]` by name, sorted; NaN where a rollout has none."""
        names = sorted({name for rollout in self.rollouts for name in rollout.components})
        return {name: np.array([each.components.get(name, math.nan) for each in self.rollouts]) for name in names}

    def column(self, name: str) -> NDArray[Any]:
        """Return an attribute of the rollouts `[B]`."""
        return np.array([getattr(rollout, name) for rollout in self.rollouts])

    def spread_over_tokens(self, values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return values of the steps of each rollout for its tokens `[N]`; 0 for a rollout that has none.

        A turn that was not scored has the value of the step after it.
        """
        tokens = []
        for rollout, of_rollout in zip(self.rollouts, values, strict=True):
            rest = of_rollout
            for turn in rollout.turns:
                lengths = turn.step_lengths if len(of_rollout) else ()
                following = rest if len(rest) else of_rollout[-1:] if len(of_rollout) else np.zeros(1)
                tokens.append(np.repeat(following[: len(lengths) or 1], lengths or len(turn.completion.token_ids)))
                rest = rest[len(lengths) :]
        return np.concatenate(tokens)

    def tokens_of(self, turns: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """Return the indices of the tokens of some turns."""
        ends = np.cumsum(self.lengths)
        return np.concatenate([np.arange(ends[turn] - self.lengths[turn], ends[turn]) for turn in turns])

    def scatter(self, values: Iterator[tuple[Sequence[int], Tensor]]) -> NDArray[np.float32]:
        """Return the values of the tokens `[N]`, given those of the turns of each micro-batch; NaN for other turns."""
        ordered = np.full(self.lengths.sum(), np.nan, np.float32)
        for turns, of_turns in values:
            ordered[self.tokens_of(turns)] = of_turns.float().cpu().numpy()
        return ordered


def position_consistent(rollouts: Sequence[Rollout]) -> float | None:
    """Return the share of pairs (of `judgement_rows`) with the same verdict in both orders; None if none has two."""
    pairs: dict[str, list[str]] = {}
    for each in rollouts:
        name, _, place = each.prompt_id.rpartition("/")
        if place in PLACES and "unreadable" not in each.verdicts.values():
            pairs.setdefault(name, []).extend(each.verdicts.values())
    same = [verdicts[0] == verdicts[1] for verdicts in pairs.values() if len(verdicts) == len(PLACES)]
    return sum(same) / len(same) if same else None


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
