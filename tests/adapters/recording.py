"""Scorers with predictable rewards that record their calls."""

import dataclasses
import threading

import numpy as np

from gym_rm import Scores, ScoringError
from gym_rm.scorers.batching import MicroBatchingScorer


class RecordingScorer:
    """Reward = length of the reply / 4. A reply with FAIL has no score; a reply with CRASH raises OSError."""

    def __init__(self):
        self.calls = []
        self.closed = False
        self.threads = set()

    @property
    def num_conversations(self):
        return sum(map(len, self.calls))

    def __deepcopy__(self, memo):
        return self

    def close(self):
        self.closed = True

    def score(self, conversations, prompts=None):
        self.calls.append([list(conversation) for conversation in conversations])
        self.threads.add(threading.get_ident())
        replies = [conversation[-1]["content"] for conversation in conversations]
        if any("CRASH" in reply for reply in replies):
            raise OSError("the scorer crashed")
        lengths = np.array([len(reply) for reply in replies], dtype=np.float32)
        failed = ["FAIL" in reply for reply in replies]
        scores = Scores(
            rewards=np.where(failed, np.float32(np.nan), lengths / 4),
            components={"length": lengths},
            num_tokens=np.array([sum(len(m["content"]) for m in c) for c in conversations], dtype=np.int64),
            truncated_tokens=np.zeros(len(conversations), dtype=np.int64),
            errors=tuple("the reply contains FAIL" if each else None for each in failed),
        )
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


def merged(recorder, size):
    """Return a scorer that calls the recorder as soon as `size` conversations wait, however long that takes."""
    return MicroBatchingScorer(recorder, max_batch_size=size, max_wait=3600)


class Verifier:
    """Reward function: 1.0 if the reply contains the prompt's answer, else 0.0; None for a prompt without an answer.

    `rows` records the conversations of all calls, each with its prompt.
    """

    def __init__(self):
        self.rows = []

    def __deepcopy__(self, memo):
        return self  # `gym.make_vec` deep-copies its keywords

    def __call__(self, conversations, prompts):
        self.rows += zip(conversations, prompts, strict=True)
        return [
            None if prompt.answer is None else float(prompt.answer in conversation[-1]["content"])
            for conversation, prompt in zip(conversations, prompts, strict=True)
        ]

    @property
    def prompts(self):
        return [prompt for _, prompt in self.rows]


def answer_must_be_text(conversations, prompts):
    """Verifier that raises AttributeError for a prompt without an answer."""
    return [float(p.answer.strip() in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]


NO_ANSWERS = [None, ["4"], {"value": "4"}, True, float("nan")]
"""Invalid answers in a data set; the prompt's `answer` must be None for each of them."""

NO_FALLBACK_REWARDS = [float("nan"), float("-inf"), True, "0"]
"""Invalid fallback rewards: not a finite number."""


def chat(*texts):
    """Return messages of alternating user and assistant turns."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def rating_steps(conversations):
    """Rate the steps of replies; an empty reply has no score."""
    replies = [messages[-1]["content"] for messages in conversations]
    steps = tuple(np.array([len(step) / 10 for step in reply.split("\n\n")]) for reply in replies)
    ends = tuple(np.cumsum([len(step) + 2 for step in reply.split("\n\n")]) - 2 for reply in replies)
    scores = Scores.from_rewards([each.min() if reply else np.nan for each, reply in zip(steps, replies, strict=True)])
    return dataclasses.replace(scores, step_rewards=steps, step_ends=ends)
