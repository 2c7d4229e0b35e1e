import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.engine.batch_planning import padded_width
from gym_rm.engine.executors.executor import BatchResult, ModelInfo
from gym_rm.engine.schedule import Scheduler
from gym_rm.engine.token_tree import TokenSequence, TokenTree

AUTOMATIC = 2048


class PlainExecutor:
    """Returns the sum of the ids up to each read; larger batches than `memory` tokens run out of memory.

    `fails(batch, number of the call)` returns the error of a batch, or None.
    """

    def __init__(self, memory=10**9, fails=lambda batch, call: None):
        self.memory, self.fails, self.batches = memory, fails, []

    def run(self, batches):
        return [self.run_one(batch) for batch in batches]

    def run_one(self, batch):
        self.batches.append(batch)
        if batch.input_ids.size > self.memory:
            return BatchResult(error=f"OutOfMemoryError: {batch.input_ids.size} tokens", out_of_memory=True)
        error = self.fails(batch, len(self.batches))
        if error is not None:
            return BatchResult(error=error)
        if isinstance(batch, TokenTree):
            sums = [batch.input_ids[batch.ancestors(read)].sum() for read in batch.read_indices]
        else:
            sums = [batch.input_ids[row, : position + 1].sum() for row, position in batch.read_positions]
        return BatchResult(np.array(sums, dtype=np.float32)[:, None])

    @property
    def sizes(self):
        return [batch.input_ids.size for batch in self.batches]


def info(**changes):
    values = {"layout": "tree", "fused": True, "num_values": 1, "dtype": "float32", "device": "cpu"}
    return ModelInfo(**{**values, "max_num_batched_tokens": AUTOMATIC, **changes})


def scheduler(budget="auto", layout="tree", **changes):
    return Scheduler(info(**changes), layout=layout, budget=budget)


def random_ids(length, seed):
    return np.random.default_rng(seed).integers(5, 300, length).astype(np.int32)


def ending(ids):
    return TokenSequence(ids, np.array([len(ids) - 1]))


def sums(sequences):
    return [[float(each.input_ids.sum())] for each in sequences]


def values_of(result):
    return [value for values in result.values for value in values.tolist()]


@pytest.fixture
def short_and_long():
    return [ending(random_ids(235, seed)) for seed in range(30)] + [ending(random_ids(5034, 99))]


@st.composite
def sequences(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=4))
    tails = st.lists(st.integers(0, 9), max_size=8)
    drawn = [[*draw(st.sampled_from(prompts)), *draw(tails)] for _ in range(draw(st.integers(0, 12)))]
    return [ending(np.array(ids, dtype=np.int32)) for ids in drawn]


@given(sequences(), st.integers(1, 60) | st.just("auto"), st.sampled_from(["tree", "padded", "one_by_one"]), st.data())
def test_every_sequence_gets_its_value_or_an_error(given_, budget, layout, data):
    """For any budget, memory and failures, a sequence has the right value or an error."""
    memory = data.draw(st.integers(1, 80))
    broken = data.draw(st.sets(st.integers(1, 6)))
    executor = PlainExecutor(memory, fails=lambda batch, call: "broken" if call in broken else None)
    result = scheduler(budget, layout).run([given_], executor)
    for m, (value, expected) in enumerate(zip(values_of(result), sums(given_), strict=True)):
        if m in result.failures:
            assert np.isnan(value[0])
            assert (
                "its batch failed: " in result.failures[m] or "more than max_num_batched_tokens" in result.failures[m]
            )
        else:
            assert value == expected
    limit = 10**9 if budget == "auto" else budget
    lengths = [len(each.input_ids) for each in given_]
    needed = [padded_width(length, None) if layout == "padded" else length for length in lengths]
    fits = [m for m, length in enumerate(lengths) if length <= limit and needed[m] <= memory]
    if not broken:
        assert not {*fits} & {*result.failures}, "sequences that fit the memory never fail"


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("budget", ["auto", 20_000, 6000])
def test_a_conversation_too_long_for_the_memory_fails_alone(budget, layout, short_and_long):
    runner = scheduler(budget, layout)
    result = runner.run([short_and_long], PlainExecutor(memory=1500))
    assert list(result.failures) == [30]
    tokens = {"tree": 5034, "padded": 5056}[layout]  # the width of a padded batch is a multiple of 32
    assert f"OutOfMemoryError: {tokens} tokens" in result.failures[30]
    assert values_of(result)[:30] == sums(short_and_long[:30])
    assert 256 < runner.budget <= 1500


def test_the_smaller_budget_is_kept_for_the_next_run(short_and_long):
    runner = scheduler(20_000)
    runner.run([short_and_long], PlainExecutor(memory=1500))
    again = PlainExecutor()
    assert not runner.run([short_and_long], again).failures
    assert sorted(again.sizes)[-1] == 5034
    assert sorted(again.sizes)[-2] <= 1500


def test_the_budget_is_kept_if_every_sequence_fails():
    runner = scheduler(1000)
    sequences = [ending(random_ids(50, seed)) for seed in range(4)]
    assert len(runner.run([sequences], PlainExecutor(memory=0)).failures) == 4
    assert runner.budget == 1000


def test_only_the_batches_that_ran_out_of_memory_are_run_again(short_and_long):
    executor = PlainExecutor(memory=1300)
    scheduler(1500).run([short_and_long[:30]], executor)
    done = sum(size for size in executor.sizes if size <= 1300)
    assert done <= 30 * 235


def test_a_prompt_longer_than_the_automatic_budget_is_still_shared():
    prompt = random_ids(AUTOMATIC + 500, 0)
    group = [ending(np.concatenate([prompt, random_ids(40, 1 + reply)])) for reply in range(8)]
    result = scheduler().run([group], PlainExecutor())
    assert not result.failures
    assert result.workload.unique_tokens <= len(prompt) + 8 * 40


@pytest.mark.parametrize("layout", ["tree", "padded", "one_by_one"])
def test_a_sequence_that_fails_does_not_affect_its_batch(layout):
    sequences = [ending(random_ids(100, seed)) for seed in range(6)]
    sequences[3].input_ids[50] = 999
    executor = PlainExecutor(fails=lambda batch, call: "broken" if (batch.input_ids == 999).any() else None)
    result = scheduler(layout=layout).run([sequences], executor)
    assert result.failures == {3: "its batch failed: broken"}
    kept = [0, 1, 2, 4, 5]
    assert [values_of(result)[m] for m in kept] == [sums(sequences)[m] for m in kept]


def test_a_nan_does_not_reach_the_other_sequences_of_its_batch():
    class Spreading(PlainExecutor):
        def run_one(self, batch):
            result = super().run_one(batch)
            return replace(result, values=result.values * np.nan) if (batch.input_ids == 999).any() else result

    sequences = [ending(random_ids(100, seed)) for seed in range(6)]
    sequences[3].input_ids[50] = 999
    executor = Spreading()
    result = scheduler().run([sequences], executor)
    assert not result.failures
    assert np.flatnonzero(np.isnan(values_of(result))).tolist() == [3]
    assert len(executor.batches) == 7, "one batch, then each sequence alone, once"


def shapes(batches):
    return sorted(batch.input_ids.shape for batch in batches)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("tree", [(11,), (60,), (70,)]),
        ("padded", [(1, 60), (1, 70), (2, 32)]),
        ("one_by_one", [(1, 5), (1, 6), (1, 60), (1, 70)]),
    ],
)
def test_only_texts_longer_than_the_shared_context_run_alone(layout, expected):
    sequences = [ending(random_ids(length, length)) for length in (5, 60, 6, 70)]
    executor = PlainExecutor()
    result = scheduler(layout=layout, max_batchable_length=50).run([sequences], executor)
    assert shapes(executor.batches) == expected
    assert values_of(result) == sums(sequences)


def test_scheduling_loads_no_torch():
    modules = "gym_rm.engine.schedule, gym_rm.engine.kinds"
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- several replicas


def groups(count, prompt, reply, size=8):
    """Return sequences of groups: a prompt of some tokens, and replies to it."""
    prompts = [random_ids(prompt, seed) for seed in range(count)]
    return [
        ending(np.r_[prompts[g], random_ids(reply, 1000 * g + k + 1)].astype(np.int32))
        for g in range(count)
        for k in range(size)
    ]


def batches_for(sequences, replicas, layout="tree", **changes):
    executor = PlainExecutor()
    result = scheduler(layout=layout, num_replicas=replicas, **changes).run([sequences], executor)
    assert values_of(result) == sums(sequences)
    return executor


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_batches_are_cut_so_that_every_replica_has_the_same_work(replicas, layout):
    sequences = groups(24, 40, 30)
    whole = sum(batches_for(sequences, 1, layout).sizes)
    sizes = batches_for(sequences, replicas, layout).sizes
    ends = [0] * replicas
    for size in sorted(sizes, reverse=True):
        ends[ends.index(min(ends))] += size
    assert max(ends) <= 1.25 * whole / replicas
    assert sum(sizes) <= 1.1 * whole


def test_groups_stay_together_if_there_are_enough_for_all_replicas():
    assert batches_for(groups(8, 100, 30), 2).sizes == [4 * 340, 4 * 340]


def test_a_single_group_is_divided_among_the_replicas():
    assert sorted(batches_for(groups(1, 40, 100), 2).sizes) == [440, 440]


def test_one_replica_gets_the_batches_of_the_budget():
    assert batches_for(groups(8, 100, 30), 1).sizes == [4 * 340 + 340 * 2, 2 * 340]


def test_a_group_with_a_long_prompt_is_not_divided_into_many_copies_of_the_prompt():
    sizes = batches_for(groups(1, 1500, 40), 2).sizes
    assert len(sizes) <= 2
    assert max(sizes) <= 1500 + 8 * 40
