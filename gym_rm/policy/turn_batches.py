"""Micro-batches of a policy's turns: the prompt of a group, and all else that its turns share, is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gym_rm.engine.batch_planning import plan_padded, plan_trees
from gym_rm.engine.token_tree import Batch, BatchPlan, IntArray, Layout, TokenSequence
from gym_rm.policy.rollouts import RolloutTurn


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """Turns that run in one forward and backward pass. N sampled tokens, in the order of `turns`.

    A pair is a position of the batch and a token that follows it. Equal turns have the same pairs, so that the output
    layer computes P <= N of them.

    Attributes:
        turns: indices into the turns that were divided, increasing.
        batches: one tree, or one padded batch.
        value_index: int64 `[P]`, index of each pair's hidden state in those that the batch reads.
        targets: int64 `[P]`, token of each pair.
        token_index: int64 `[N]`, pair of each sampled token.
        rows: int64 `[N]`, index of each token's turn, one of `turns`.
    """

    turns: tuple[int, ...]
    batches: tuple[Batch, ...]
    value_index: IntArray
    targets: IntArray
    token_index: IntArray
    rows: IntArray

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens, N."""
        return len(self.rows)


def policy_batches(
    turns: Sequence[RolloutTurn],
    groups: Sequence[int] | IntArray,
    *,
    layout: Layout,
    max_num_batched_tokens: int,
    max_width: int | None = None,
    max_batchable_length: int | None = None,
    chosen: IntArray | None = None,
) -> list[PolicyBatch]:
    """Pack turns into trees or padded batches under a token budget; a turn that exceeds it runs alone.

    A group that exceeds the budget is divided, and its prompt is computed once in each part.

    Args:
        turns: M turns.
        groups: `[M]`, equal for the turns of one group.
        layout: layout of the model, from `choose_layout`.
        max_num_batched_tokens: token budget of a micro-batch, padding included.
        max_width: width that padding does not exceed.
        max_batchable_length: longest sequence that shares a batch; None for no limit.
        chosen: indices of the turns to pack, increasing; None for all.
    """
    at = range(len(turns)) if chosen is None else chosen.tolist()
    sequences = {k: sequence_of(turns[k]) for k in at}
    longest = min(max_num_batched_tokens, np.inf if max_batchable_length is None else max_batchable_length)
    alone = [k for k, each in sequences.items() if layout == "one_by_one" or len(each.input_ids) > longest]
    rest = sorted({*at} - {*alone})
    made: list[PolicyBatch] = []
    for members, single in ((alone, True), (rest, False)):
        if not members:
            continue
        packed = [sequences[k] for k in members]
        budget = max(max_num_batched_tokens, *(len(each.input_ids) for each in packed), 1)
        if layout == "tree":
            of_group = [int(groups[k]) for k in members]
            plan = plan_trees(packed, max_num_batched_tokens=budget, groups=None if single else of_group, alone=single)
        else:
            plan = plan_padded(packed, max_num_batched_tokens=budget, max_width=max_width, alone=single, exact=single)
        made += _of_plan(plan, turns, members)
    return made


def sequence_of(turn: RolloutTurn) -> TokenSequence:
    """Return what the model reads for a turn: all but its last token, read where the sampled tokens are predicted."""
    prompt, completion = turn.prompt, turn.completion.token_ids
    ids = np.concatenate([prompt, completion[:-1]]).astype(np.int32)
    return TokenSequence(ids, np.arange(len(prompt) - 1, len(ids)))


def _of_plan(plan: BatchPlan, turns: Sequence[RolloutTurn], members: Sequence[int]) -> list[PolicyBatch]:
    """Return each batch of a plan of these turns with the tokens that it predicts."""
    counts = np.array([len(turns[k].completion.token_ids) for k in members])
    batch_of = np.repeat(plan.batch_of, counts)
    rows = np.repeat(np.array(members, dtype=np.int64), counts)
    targets = np.concatenate([turns[k].completion.token_ids for k in members]).astype(np.int64)
    first_value = np.cumsum([0, *(batch.num_reads for batch in plan.batches)])
    made = []
    for number, batch in enumerate(plan.batches):
        at = np.flatnonzero(batch_of == number)
        pairs = np.stack([plan.value_index[at] - first_value[number], targets[at]])
        unique, inverse = np.unique(pairs, axis=1, return_inverse=True)
        inside = tuple(np.unique(rows[at]).tolist())
        made.append(PolicyBatch(inside, (batch,), unique[0], unique[1], inverse.reshape(-1), rows[at]))
    return made
