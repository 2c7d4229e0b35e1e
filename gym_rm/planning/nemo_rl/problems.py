"""All problems of a NeMo RL placement in words, before it starts, and the smallest change that solves them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from gym_rm.planning.nemo_rl.rules import (
    KEYS,
    NemoLayout,
    NemoRequest,
    nemo_answer,
    nemo_layout,
    reward_rows,
    short_of_memory,
    world_problem,
)

HARDWARE = ("num_nodes", "gpus_per_node")
_PARALLEL = tuple(name for name in KEYS if name.endswith("parallel_size"))


def nemo_problems(request: NemoRequest) -> tuple[str, ...]:
    """Return everything that NeMo RL would refuse, wait for in vain, or run out of memory with."""
    # with the nearest possible values, so that one impossible number does not hide the other problems
    possible, problems = _in_range(request)
    layout = list(_layout_problems(possible))
    others = _reward_problems(possible) if layout else (*_division_problems(possible), *short_of_memory(possible))
    return tuple(dict.fromkeys((*problems, *layout, *others)))


def _in_range(request: NemoRequest) -> tuple[NemoRequest, list[str]]:
    """Return the request with the nearest possible values, and what was not possible."""
    changes: dict[str, int] = {}
    problems = []
    nodes, gpus = max(1, request.num_nodes), max(1, request.gpus_per_node)

    def bound(name: str, most: int | None = None, why: str = "") -> None:
        value = getattr(request, name)
        if value is not None and value < 1:
            changes[name] = 1
            problems.append(f"{KEYS[name]} is {value}; it must be at least 1.")
        elif value is not None and most is not None and value > most:
            changes[name] = most
            problems.append(f"{KEYS[name]} is {value}, but {why}.")

    for name in (*HARDWARE, *_PARALLEL):
        bound(name)
    bound("reward_model_gpus_per_node", gpus, f"a node has {gpus} GPU{'s' if gpus > 1 else ''}")
    only_one = "the cluster has 1 node (NeMo RL does not look at this number then, but its reward model asks for it)"
    bound("reward_model_nodes", 1 if nodes == 1 else None, only_one)
    return replace(request, **changes), problems  # type: ignore[arg-type]


def _layout_problems(request: NemoRequest) -> Iterator[str]:
    """Yield where the counts of nodes and GPUs do not add up."""
    nodes, gpus = request.num_nodes, request.gpus_per_node
    reward = request.reward_model_gpus_per_node or 0
    if nodes > 1 and request.policy_nodes <= 0:
        yield (
            f"the reward model takes {request.reward_model_nodes} of {nodes} whole nodes"
            f"{f', though it uses {reward} of {gpus} GPUs on each' if reward < gpus else ''}: "
            "none is left for the policy."
        )
        return
    if request.colocated:
        if nodes == 1 and reward >= gpus:
            yield (
                f"the reward model takes {reward} of {gpus} GPU{'s' if gpus > 1 else ''} on the only node: none is "
                "left for policy and generation, which NeMo RL never lets share a GPU with a reward model."
            )
        return
    layout = nemo_layout(request)
    if layout.shared_node:
        yield from _shared_node_problems(request, layout)
        return
    policy_nodes, theirs = request.policy_nodes, request.generation_nodes
    if theirs is None or theirs <= 0:
        yield f"{KEYS['generation_nodes']} is {theirs}: generation apart from training needs at least 1 whole node."
    elif policy_nodes - theirs <= 0:
        yield (
            f"generation takes {theirs} of the {policy_nodes} nodes that the reward model leaves: none is left for "
            "training."
        )
    if request.generation_gpus_per_node != gpus:
        yield (
            f"{KEYS['generation_gpus_per_node']} is {request.generation_gpus_per_node}: on several nodes, generation "
            f"apart from training gets whole nodes, so it must be {gpus}."
        )


def _shared_node_problems(request: NemoRequest, layout: NemoLayout) -> Iterator[str]:
    gpus, nodes = request.generation_gpus_per_node, request.generation_nodes
    if nodes not in (None, 1):
        yield f"{KEYS['generation_nodes']} is {nodes}: there is one node for training and generation."
    reward = (request.reward_model_gpus_per_node or 0) if request.num_nodes == 1 else 0
    if gpus is None or gpus <= 0:
        yield (
            f"{KEYS['generation_gpus_per_node']} is {gpus}: generation apart from training needs at least 1 GPU of the "
            "node."
        )
        left = request.gpus_per_node - reward
        if left < 2:
            yield f"the reward model leaves {left} GPUs of the node; generation and training need 1 each."
    elif layout.train[1] <= 0:
        yield (
            f"generation takes {gpus} GPUs{f' and the reward model {reward}' if reward else ''} of the "
            f"{request.gpus_per_node} on the node: {layout.train[1]} are left for training."
        )


def _reward_problems(request: NemoRequest) -> Iterator[str]:
    """Yield where the reward model cannot be divided over its GPUs."""
    if not request.has_reward_model:
        return
    tensor, context = sizes = request.parallel_sizes["reward model"]
    if text := world_problem(request.reward_model_gpus, sizes):
        yield (
            f"the reward model has {request.reward_model_nodes} x {request.reward_model_gpus_per_node} GPUs, tensor x "
            f"context parallel = {tensor} x {context}: {text}."
        )
    elif text := reward_rows(request):
        yield f"{text}."


def _division_problems(request: NemoRequest) -> Iterator[str]:
    """Yield where a component cannot be divided over its GPUs."""
    yield from _reward_problems(request)
    layout = nemo_layout(request)
    train = layout.train[0] * layout.train[1]
    engines = train if request.colocated else layout.generation[0] * layout.generation[1]
    for name, gpus, words in (
        ("training", train, "tensor x context x pipeline"),
        ("generation", engines, "tensor x pipeline"),
    ):
        sizes = request.parallel_sizes[name]
        if text := world_problem(gpus, sizes):
            yield f"{name} has {gpus} GPUs, {words} parallel = {' x '.join(map(str, sizes))}: {text}."


# --- the smallest change ---------------------------------------------------------------------------------------------


def smallest_change(request: NemoRequest) -> dict[str, int | bool]:
    """Return the smallest change with which NeMo RL runs the request; empty if two numbers are not enough.

    Impossible values become the nearest possible ones. Then one number is changed, or two: first those that a problem
    names, then others; first those that need no other hardware, then by how far they move.
    """
    start, _ = _in_range(request)
    text = " ".join(nemo_problems(request))
    named = {name for name, key in KEYS.items() if key in text}
    choices = _choices(start)
    mentioned = {name: values for name, values in choices.items() if name in named}
    for change in itertools.chain([()], *(_by_cost(start, each, n) for each in (mentioned, choices) for n in (1, 2))):
        changed = replace(start, **dict(change))
        if nemo_answer(changed) is None and not nemo_problems(changed):
            before, after = asdict(request), asdict(changed)
            return {name: after[name] for name in KEYS if after[name] != before[name]}
    return {}


Change: TypeAlias = tuple[tuple[str, Any], ...]


def _by_cost(start: NemoRequest, choices: dict[str, list[Any]], count: int) -> Iterator[Change]:
    """Yield the changes of so many numbers, the smallest first; of two numbers, only their eight nearest values."""
    few = {name: values if count == 1 else values[:8] for name, values in choices.items()}
    sizes = {"num_nodes": start.gpus_per_node, "gpus_per_node": start.num_nodes}  # GPUs that one more of them adds

    def cost(change: Change) -> tuple[int, bool, int]:
        moved = sum(abs(int(value) - int(getattr(start, name) or 0)) * sizes.get(name, 1) for name, value in change)
        return sum(name in HARDWARE for name, _ in change), any(name == "colocated" for name, _ in change), moved

    changes = (
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(few, count)
        for values in itertools.product(*(few[name] for name in names))
    )
    yield from sorted(changes, key=cost)


def _choices(start: NemoRequest) -> dict[str, list[Any]]:
    """Return values that each number could have instead, the nearest first."""
    nodes, gpus = start.num_nodes, start.gpus_per_node
    values: dict[str, set[int]] = {}

    def up_to(name: str, most: int) -> None:
        now = getattr(start, name) or 1
        values[name] = {*range(max(1, now - 32), min(most, now + 32) + 1), most}

    if start.has_reward_model:
        up_to("reward_model_gpus_per_node", gpus)
        if nodes > 1:
            up_to("reward_model_nodes", nodes)
    if not start.colocated:
        up_to("generation_gpus_per_node", gpus)
        up_to("generation_nodes", nodes)
        values["colocated"] = {True}
    for name in _PARALLEL:
        values[name] = {size for size in (1, 2, 4, 8, 16) if size < getattr(start, name)}
    if start.reward_model_batch_size is not None:
        values["reward_model_batch_size"] = set(range(1, start.reward_model_batch_size))
    more = {*range(1, 9), 12, 16, 24, 32, 48, 64, 128, 256}
    values["gpus_per_node"] = {gpus + each for each in more}
    values["num_nodes"] = {nodes + each for each in more}

    def nearest(name: str) -> list[Any]:
        now = getattr(start, name)
        return sorted(values[name] - {now}, key=lambda value: (abs(value - (now or 0)), -value))[:32]

    return {name: nearest(name) for name in values}
