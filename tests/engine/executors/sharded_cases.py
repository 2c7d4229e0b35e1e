"""Run scorers in ranks: each rank is a process, and all cases of a size run in the same processes, one after another.

This is not a test file. `run_in_ranks(cases, conversations, size)` returns the results of every rank by case.
"""

from __future__ import annotations

import dataclasses
import pickle
import traceback
import unittest.mock
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

from gym_rm.engine.backbones.sharded import Ranks
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.ranks import Rank, start_rank
from gym_rm.engine.kinds.readouts import ModuleHead
from gym_rm.engine.loading.checkpoint import LoadOptions, load_model, open_checkpoint
from gym_rm.engine.reward_model_scorer import RewardModelScorer
from tests.private_memory import growth


@dataclasses.dataclass(frozen=True)
class Case:
    """One scorer and what to do with it.

    Attributes:
        folder: folder of the checkpoint.
        sharding: fields of `LoadSpec`.
        load, options: options of the checkpoint and of the scorer.
        act: function of this module, of scorer and conversations, that returns arrays and facts by name.
        argument: passed to `act`.
        wrong_sums: whether ranks do not add up what the others have computed, as with a wrong plan.
    """

    folder: str
    sharding: dict[str, int]
    load: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    act: str = "score"
    wrong_sums: bool = False
    argument: Any = None


def score(scorer: Any, conversations: Any, argument: Any) -> dict[str, Any]:
    scores = scorer.score(conversations)
    backwards = scorer.score([*conversations[::-1], conversations[0]])
    return {
        "rewards": scores.rewards,
        "again": scorer.score(conversations).rewards,
        "backwards": backwards.rewards[: len(conversations)][::-1],
        "same row twice": backwards.rewards[[len(conversations) - 1, len(conversations)]],
    }


def score_turns(scorer: Any, conversations: Any, argument: Any) -> dict[str, Any]:
    return {"rewards": np.concatenate(scorer.score(conversations, turns="all").turn_rewards)}


def score_turn_by_turn(scorer: Any, conversations: Any, argument: Any) -> dict[str, Any]:
    parts, reused = [], 0
    for stop in (2, 4, 6):
        scores = scorer.score([each[:stop] for each in conversations if len(each) >= stop])
        parts.append(scores.rewards)
        reused += scores.workload.reused_tokens
    return {"rewards": np.concatenate(parts), "reused tokens": reused}


def score_after_update(scorer: Any, conversations: Any, argument: Any) -> dict[str, Any]:
    before = scorer.score(conversations).rewards
    if isinstance(argument, str):
        scorer.update_weights(argument)
    else:
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(argument[0])
        scorer.update_weights(model.state_dict())
    scorer.sleep()
    return {"before": before, "rewards": scorer.score(conversations).rewards}


def facts_of(scorer: Any) -> dict[str, Any]:
    """Return what one can see of the shards: shapes and numbers of elements that this rank holds."""
    model = scorer.executor.models[0]
    tensors = {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in model.named_parameters()
    }
    return {
        "shapes": {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        "elements": sum(tensor.numel() for tensor in tensors.values()),
        "layout": scorer.layout,
        "fused": scorer.info.fused,
        "batch_invariance": scorer.provenance.batch_invariance,
    }


def run_in_ranks(
    cases: dict[str, Case], conversations: list[Any], size: int, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return the results of every rank, by case: what `act` returned and the facts, or `{"error": text}`."""
    stores = [open_store() for _ in cases]
    ports = [store.port for store in stores]
    multiprocessing.spawn(_rank, (cases, conversations, size, str(folder), ports), nprocs=size)
    of_ranks = [pickle.loads((folder / f"rank {index}").read_bytes()) for index in range(size)]
    return {name: [results[name] for results in of_ranks] for name in cases}


def open_store() -> Any:
    """Return a store at which ranks meet."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _rank(index: int, cases: dict[str, Case], conversations: list[Any], size: int, folder: str, ports: Any) -> None:
    results: dict[str, dict[str, Any]] = {}
    for port, (name, case) in zip(ports, cases.items(), strict=True):
        executor = start_rank(Rank(index, size, f"127.0.0.1:{port}"))
        load = executor.load
        executor.load = lambda spec, load=load, case=case: load(dataclasses.replace(spec, **case.sharding))
        try:
            checkpoint = open_checkpoint(LoadOptions(path=case.folder, **case.load))
            with unittest.mock.patch.object(Ranks, "sum", lambda ranks, x: x) if case.wrong_sums else nullcontext():
                scorer = RewardModelScorer.of_checkpoint(checkpoint, executor=executor, **case.options)
            results[name] = globals()[case.act](scorer, conversations, case.argument) | facts_of(scorer)
            scorer.close()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        if dist.is_initialized():
            dist.destroy_process_group()
    (Path(folder) / f"rank {index}").write_bytes(pickle.dumps(results))


def whole(case: Case, conversations: list[Any]) -> dict[str, Any]:
    """Return the result of the same case in this process, with the whole model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        checkpoint = open_checkpoint(LoadOptions(path=case.folder, **case.load))
        scorer = RewardModelScorer.of_checkpoint(checkpoint, **case.options)
        return globals()[case.act](scorer, conversations, case.argument) | facts_of(scorer)
    finally:
        torch.set_num_threads(before)


def peaks(folder: str, sharding: dict[str, int], tmp_path: Path) -> list[float]:
    """Return the largest private memory of each rank while it reads a model, in MiB, without what it had before.

    The activations of the trial after it are the same for a part and for the whole of a small model.
    """
    size = max(1, *sharding.values()) if sharding else 1
    place = tmp_path / f"peaks of {size}"
    place.mkdir()
    store = open_store()
    multiprocessing.spawn(_peak, (folder, sharding, size, str(place), store.port), nprocs=size)
    return [float((place / f"peak {index}").read_text()) for index in range(size)]


def _peak(index: int, folder: str, sharding: dict[str, int], size: int, place: str, port: int) -> None:
    executor = start_rank(Rank(index, size, f"127.0.0.1:{port}"))
    checkpoint = open_checkpoint(LoadOptions(path=folder))
    spec = LoadSpec(checkpoint, ModuleHead("score"), **sharding)
    peaks = []

    def read(*arguments: Any, **options: Any) -> Any:
        with growth() as largest:
            model = load_model(*arguments, **options)
        peaks.append(largest[0])
        return model

    with unittest.mock.patch("gym_rm.engine.executors.loaded_model.load_model", read):
        executor.load(spec)
    (Path(place) / f"peak {index}").write_text(str(peaks[0]))
