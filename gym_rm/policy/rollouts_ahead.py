"""Rollouts of the next step while the policy is updated, and their completions in checkpoints."""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.generation.completions import Completion, CompletionStream, Sampler, TokenIds
from gym_rm.policy.rollouts import RolloutTable
from gym_rm.training.phase_timer import PhaseTimer

THREAD = "gym_rm rollouts ahead"
SECONDS_TO_END = 10.0  # of a thread whose run has failed


class RolloutsAhead:
    """Plays a step in a thread of its own, with the weights that the sampler has when it begins.

    Args:
        play_step: plays a step and measures its phases; it must not wait for other ranks.
        kept: where the completions of the step are kept.

    Example:
        >>> ahead = RolloutsAhead(lambda step, timer: RolloutTable([]), KeptCompletions(None))
        >>> ahead.begin(2)
        >>> ahead.plays(2), ahead.take(PhaseTimer()).rollouts
        (True, [])
    """

    def __init__(self, play_step: Callable[[int, PhaseTimer], RolloutTable], kept: KeptCompletions) -> None:
        self._play_step, self._kept = play_step, kept
        self._timer = PhaseTimer()
        self._step: int | None = None
        self._future: Future[RolloutTable] = Future()

    def plays(self, step: int) -> bool:
        """Return whether this step was begun and not taken."""
        return self._step == step

    def begin(self, step: int) -> None:
        """Begin a step; the completions of the step before it are not needed any more."""
        self._kept.by_key.clear()
        future: Future[RolloutTable] = Future()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if used else None  # a thread has its own, the first

        def play() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                future.set_result(self._play_step(step, self._timer))
            except BaseException as error:  # raised by `take`
                future.set_exception(error)

        self._step, self._future = step, future
        threading.Thread(target=play, name=THREAD, daemon=True).start()

    def wait(self) -> None:
        """Wait until the step that was begun, if any, has been played or has failed."""
        if self._step is not None:
            self._future.exception()

    def close(self) -> None:
        """Wait a little for the thread to end, whose sampler and environments were closed.

        One that is inside of torch when the process ends would abort it.
        """
        if self._step is not None:
            concurrent.futures.wait([self._future], SECONDS_TO_END)

    def take(self, timer: PhaseTimer) -> RolloutTable:
        """Return the rollouts of the step that was begun, once; raise what its thread raised.

        The wait for it belongs to `generate`, and what had been done before to `generate_hidden` and `score_hidden`.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - started
        self._step, spent = None, self._timer.take()
        scored, written = spent.get("score", 0.0), spent.get("generate", 0.0)
        timer.add(waited, "generate")
        timer.add(0.0, "score")
        timer.add(max(0.0, written - max(0.0, waited - scored)), "generate_hidden")
        timer.add(max(0.0, scored - waited) + spent.get("score_hidden", 0.0), "score_hidden")
        return self._future.result()


class KeptCompletions:
    """A sampler's completions, so that a step that is played again gets the same ones for the same prompts.

    A run that plays steps ahead writes them into its checkpoints: the weights that wrote them are gone when it resumes.

    Args:
        sampler: samples completions that are not kept.

    Attributes:
        by_key: the completions by `key_of` their seed, which belongs to one reply of one step, and their prompt.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.by_key: dict[int, Completion] = {}

    def stream(self) -> CompletionStream:
        """Return a stream that keeps what it hands over, and hands over what is kept."""
        return _KeptStream(self._sampler.stream(calibrate=False), self.by_key)


def key_of(seed: int, prompt: TokenIds) -> int:
    """Return a number below 2**63 that a seed and a prompt have for themselves."""
    digest = hashlib.blake2b(prompt.tobytes(), digest_size=8, salt=seed.to_bytes(8)).digest()
    return int.from_bytes(digest) >> 1


def completion_tensors(by_key: Mapping[int, Completion]) -> dict[str, Tensor]:
    """Return completions as tensors for a file, without their texts; nothing if there are none."""
    if not by_key:
        return {}
    kept = by_key.values()
    columns: dict[str, NDArray[Any]] = {
        "keys": np.array([*by_key], dtype=np.int64),
        "lengths": np.array([len(each.token_ids) for each in kept]),
        "versions": np.array([each.version for each in kept]),
        "finished": np.array([each.finished for each in kept]),
        "token_ids": np.concatenate([each.token_ids for each in kept]),
        "log_probs": np.concatenate([each.log_probs for each in kept]),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def completions_of(tensors: Mapping[str, Tensor], tokenizer: Any) -> dict[int, Completion]:
    """Return the completions that `completion_tensors` wrote, by key."""
    if not tensors:
        return {}
    columns = {name: tensor.numpy() for name, tensor in tensors.items()}
    cuts = np.cumsum(columns["lengths"])[:-1]
    ids, log_probs = (np.split(columns[name], cuts) for name in ("token_ids", "log_probs"))
    ends = columns["finished"].tolist()
    texts = tokenizer.batch_decode(
        [each[: len(each) - end].tolist() for each, end in zip(ids, ends, strict=True)], skip_special_tokens=False
    )
    rows = map(Completion, ids, log_probs, ends, texts, columns["versions"].tolist())
    return dict(zip(columns["keys"].tolist(), rows, strict=True))


class _KeptStream:
    def __init__(self, stream: CompletionStream, kept: dict[int, Completion]) -> None:
        self._stream, self._kept = stream, kept
        self.in_waves = stream.in_waves
        self._keys: dict[int, int] = {}
        self._ready: dict[int, Completion] = {}

    @property
    def num_open(self) -> int:
        return self._stream.num_open + len(self._ready)

    def add(self, keys: Sequence[int], prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> None:
        own = dict(zip(keys, map(key_of, seeds, prompts), strict=True))
        self._keys |= own
        self._ready |= {key: self._kept[own[key]] for key in keys if own[key] in self._kept}
        fresh = [k for k, key in enumerate(keys) if own[key] not in self._kept]
        self._stream.add([keys[k] for k in fresh], [prompts[k] for k in fresh], seeds=[seeds[k] for k in fresh])

    def take(self, timeout: float | None = None) -> dict[int, Completion]:
        if self._ready:
            ready, self._ready = self._ready, {}
            return ready
        found = self._stream.take(timeout)
        self._kept |= {self._keys[key]: completion for key, completion in found.items()}
        return found

    def close(self) -> None:
        self._stream.close()
