"""Scorers whose executor remembers its batches, and whose model fails where a test says so. Not a test."""

from __future__ import annotations

import contextlib

from torch import nn

import gym_rm
from gym_rm.engine.executors.local import LocalExecutor


def dialogue(*texts):
    """User and assistant take turns."""
    return [{"role": "assistant" if k % 2 else "user", "content": text} for k, text in enumerate(texts)]


def size_of(batch):
    """Tokens of a batch, padding included."""
    return batch.input_ids.size


@contextlib.contextmanager
def raising(model: nn.Module, error: BaseException | None):
    """The forward of the model raises this error, if there is one."""
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
    """Remembers the batches that it ran; its model raises what `fails(batch, number of the call)` returns."""

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
    """A scorer of `(model, tokenizer)` with a `WatchedExecutor`."""
    return gym_rm.RewardModelScorer(*parts, executor=WatchedExecutor(fails), **options)
