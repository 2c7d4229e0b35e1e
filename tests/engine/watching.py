"""Scorers whose executor records its batches, and whose model fails if a test asks for it. Not a test."""

from __future__ import annotations

import contextlib

from torch import nn

import gym_rm
from gym_rm.engine.executors.local import LocalExecutor


def dialogue(*texts):
    """Return messages of user and assistant, alternating."""
    return [{"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(texts)]


def size_of(batch):
    """Tokens of a batch, padding included."""
    return batch.input_ids.size


@contextlib.contextmanager
def raising(model: nn.Module, error: BaseException | None):
    """Make the forward of the model raise this error, unless it is None."""
    if error is None:
        yield
        return

    def forward(*args, **kwargs):
        raise error

    embedding = model.get_input_embeddings()
    embedding.forward = forward
    try:
        yield
    finally:
        del embedding.forward


class WatchedExecutor(LocalExecutor):
    """Records the batches that it ran; its model raises the error that `fails(batch, number of the call)` returns."""

    def __init__(self, fails=None):
        super().__init__()
        self.fails = fails or (lambda batch, call: None)
        self.batches = []

    def run(self, batches):
        results = []
        for batch in batches:
            self.batches.append(batch)
            with raising(self.models[0], self.fails(batch, len(self.batches))):
                results += super().run([batch])
        return results


def watched_scorer(parts, *, fails=None, **options):
    """Return a scorer of `(model, tokenizer)` with a `WatchedExecutor`."""
    return gym_rm.RewardModelScorer(*parts, executor=WatchedExecutor(fails), **options)
