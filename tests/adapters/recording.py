"""Scorers that tests can predict and that remember what they were asked."""

import threading
import time

import numpy as np

from gym_rm import Scores, ScoringError


class RecordingScorer:
    """Scores by the length of the last message; a reply that holds FAIL has no score, one that holds CRASH raises."""

    def __init__(self, seconds=0.0):
        self.calls = []
        self.closed = False
        self.threads = set()
        self._seconds = seconds

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
        time.sleep(self._seconds)
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
            errors=tuple("asked to fail" if each else None for each in failed),
        )
        if scores.failed_rows:
            raise ScoringError(scores)
        return scores


class Verifier:
    """A reward function: 1.0 where the reply holds the row's answer, 0.0 elsewhere, no score without an answer.

    `rows` are the conversations that it was given, each with its prompt.
    """

    def __init__(self):
        self.rows = []

    def __deepcopy__(self, memo):
        return self  # `gym.make_vec` deep-copies its keywords

    def __call__(self, conversations, prompts):
        self.rows += zip(conversations, prompts, strict=True)
        return holds_answer(conversations, prompts)

    @property
    def prompts(self):
        return [prompt for _, prompt in self.rows]


def holds_answer(conversations, prompts):
    """The same without a memory, for settings that name a function: `"recording:holds_answer"`."""
    return [
        None if prompt.answer is None else float(prompt.answer in conversation[-1]["content"])
        for conversation, prompt in zip(conversations, prompts, strict=True)
    ]


def answer_must_be_text(conversations, prompts):
    """A verifier that does not expect a row without an answer."""
    return [float(p.answer.strip() in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]


NO_ANSWERS = [None, ["4"], {"value": "4"}, True, float("nan")]
"""What a broken row may hold in place of its answer: a verifier must be told that there is none."""


def chat(*texts):
    """Messages of alternating user and assistant turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
