"""OpenRLHF: rewards for `--reward.remote_url`, from a Python file or from an HTTP endpoint (`gym-rm serve`).

OpenRLHF sends texts, not messages: `prompts` are the texts of its data set, and `query` is a prompt with its reply,
including special tokens. It requests one sample at a time, from many threads or connections, so concurrent calls are
merged into one batch. The `labels` become the prompts' `answer`, for verifiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gym_rm.adapters import check_fallback_reward
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.engine.batching import MicroBatchingScorer
from gym_rm.errors import ConversationError
from gym_rm.scorer import ScorerLike, load_scorer
from gym_rm.scores import Scores, ScoringError
from gym_rm.types import Conversation, Prompt


class RewardFunction:
    """The `reward_func` of a file given to OpenRLHF as `--reward.remote_url reward_func.py`.

    Args:
        reward_model, options: arguments of `load_scorer`.
        policy_tokenizer: the policy's tokenizer, or its folder or hub id. OpenRLHF decodes queries with it and keeps
            the end tokens.
        apply_chat_template: same as OpenRLHF's `--data.apply_chat_template`, but the default here is True.
        input_template: same as OpenRLHF's `--data.input_template`.
        fallback_reward: reward of a sample that cannot be scored; its `score_ok` log is 0. None raises ScoringError.
        max_batch_size, max_wait: see `MicroBatchingScorer`.

    Example:
        >>> import importlib.resources
        >>> policy = str(importlib.resources.files("gym_rm") / "assets" / "policy")
        >>> brevity = lambda conversations: [-len(c[-1]["content"]) for c in conversations]
        >>> reward_func = RewardFunction(brevity, policy_tokenizer=policy)
        >>> prompt = "<|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n"
        >>> reward_func([prompt + "4<|im_end|>"], [prompt], [""])["rewards"]
        tensor([-1.])
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        policy_tokenizer: Any,
        apply_chat_template: bool = True,
        input_template: str | None = None,
        fallback_reward: float | None = None,
        max_batch_size: int = 1024,
        max_wait: float = 0.005,
        **options: Any,
    ) -> None:
        self.fallback_reward = check_fallback_reward(fallback_reward)
        self.texts = PolicyTexts(
            policy_tokenizer, apply_chat_template=apply_chat_template, input_template=input_template
        )
        self.scorer = MicroBatchingScorer(
            load_scorer(reward_model, **options), max_batch_size=max_batch_size, max_wait=max_wait
        )

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return rewards and scores, float32 `[N]`, and logs `{name: [N]}`.

        Raises:
            ConversationError: a query does not begin with its prompt, or a prompt cannot be parsed; the message has
                the row.
            ScoringError: a sample has no score, and `fallback_reward` is None.
        """
        import torch

        conversations, rows = read_samples(self.texts, queries, prompts, labels)
        try:
            scores = self.scorer.score(conversations, rows)
        except ScoringError as error:
            scores = error.scores
        reply = lists_of(scores, self.fallback_reward)
        logs = {name: torch.tensor(values) for name, values in reply["extra_logs"].items()}
        return {**{name: torch.tensor(reply[name]) for name in ("rewards", "scores")}, "extra_logs": logs}


def read_samples(
    texts: PolicyTexts, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any] | None
) -> tuple[list[Conversation], list[Prompt]]:
    """Return the conversations and the data rows of OpenRLHF's samples.

    Raises:
        ConversationError: a query does not begin with its prompt, or a prompt cannot be parsed; the message has the
            row.
    """
    if len(prompts) != len(queries) or (labels is not None and len(labels) != len(queries)):
        raise ConversationError(
            f"expected one prompt and one label for each query, got {len(queries)} queries, {len(prompts)} prompts "
            f"and {'no' if labels is None else len(labels)} labels."
        )
    conversations, rows = [], []
    for row, (prompt, query) in enumerate(zip(prompts, queries, strict=True)):
        try:
            conversations.append(texts.conversation(prompt, query))
        except ConversationError as error:
            raise ConversationError(f"query {row}: {error}") from error
        columns = {} if labels is None else {"label": labels[row]}
        rows.append(prompt_of_columns(conversations[-1][:-1], columns, row, answer_column="label"))
    return conversations, rows


def lists_of(scores: Scores, fallback_reward: float | None) -> dict[str, Any]:
    """Return what OpenRLHF reads, as plain lists.

    `scores` is the sigmoid of the rewards, because OpenRLHF's dynamic filtering expects values between 0 and 1.

    Raises:
        ScoringError: a sample has no score, and `fallback_reward` is None.
    """
    rewards = scores.rewards_or_fallback(fallback_reward)
    logs = {
        "score_ok": [float(error is None) for error in scores.errors],
        "num_tokens": scores.num_tokens.astype(float).tolist(),
        "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
        **{f"component_{name}": values.tolist() for name, values in scores.components.items()},
    }
    return {"rewards": rewards, "scores": [_sigmoid(reward) for reward in rewards], "extra_logs": logs}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
