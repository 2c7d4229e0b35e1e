"""A scorer that tests can predict and that remembers what it was asked."""

import threading
import time

import numpy as np

from gym_rm import Scores, ScoringError


class RecordingScorer:
    """Scores by the length of the last message; a reply that holds FAIL has no score, one that holds CRASH raises."""

    def __init__(self, seconds=0.0):
        self.calls = []
        self.threads = set()
        self._seconds = seconds

    @property
    def num_conversations(self):
        return sum(map(len, self.calls))

    def __deepcopy__(self, memo):
        return self

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


def chat(*texts):
    """Messages of alternating user and assistant turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
