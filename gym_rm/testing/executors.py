"""A conformance check for executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gym_rm.engine.executors.executor import Executor, LoadSpec, Weights
from gym_rm.engine.token_tree import Batch
from gym_rm.errors import ConfigError
from gym_rm.scores import FloatArray
from gym_rm.testing.assertions import asserting


@asserting
def check_executor(
    make: Callable[[], Executor],
    spec: LoadSpec,
    batches: Sequence[Batch],
    *,
    broken: Batch | None = None,
    weights: Weights | None = None,
    exact: bool = True,
) -> None:
    """Check that an executor does what schedulers and scorers rely on, beside one in this process.

    Args:
        make: returns a new executor without a model.
        spec: the model to load; the executor may send it to other processes.
        batches: batches of the layout that the model has.
        broken: a batch whose forward fails, for example by ids that have no embedding; None to leave this out.
        weights: other weights for the model; None to leave this out.
        exact: whether the values must have the bits of one process; False for executors that divide products.

    Raises:
        AssertionError: it does something else; the message says what.

    Example:
        >>> check_executor(MyExecutor, spec, batches)  # doctest: +SKIP
    """
    from gym_rm.engine.executors.local import LocalExecutor  # loads torch

    local, executor = LocalExecutor(), make()
    try:
        expected_info, info = local.load(spec), executor.load(spec)
        for name in ("layout", "num_values", "dtype", "max_positions", "num_embeddings"):
            got, expected = getattr(info, name), getattr(expected_info, name)
            assert got == expected, f"ModelInfo.{name} is {got!r}, expected {expected!r} as in one process"
        assert executor.run([]) == [], "run([]) must return no results"
        before = _values(local, batches)
        _check_values(executor, batches, before, "the first run", exact=exact)
        _check_values(executor, batches[::-1], before[::-1], "batches in another order", exact=exact)
        if broken is not None:
            _check_broken(executor, [*batches, broken, *batches], before, exact=exact)
        executor.sleep()
        executor.sleep()
        executor.wake()
        _check_values(executor, batches, before, "sleep and wake", exact=exact)
        executor.sleep()
        _check_values(executor, batches, before, "sleep alone: run wakes the model", exact=exact)
        executor.clear_cache()
        _check_values(executor, batches, before, "clear_cache", exact=exact)
        _check_refused(executor)
        _check_values(executor, batches, before, "weights that were refused", exact=exact)
        if weights is not None:
            local.update_weights(weights)
            executor.update_weights(weights)
            after = _values(local, batches)
            assert any(not np.array_equal(*pair) for pair in zip(before, after, strict=True)), "pass other weights"
            _check_values(executor, batches, after, "update_weights", exact=exact)
    finally:
        executor.close()
        local.close()
    executor.close()
    try:
        executor.run(batches)
    except ConfigError:
        return
    raise AssertionError("run after close must raise ConfigError")


def _values(executor: Executor, batches: Sequence[Batch]) -> list[FloatArray]:
    results = executor.run(iter(batches))
    assert len(results) == len(batches), f"run returned {len(results)} results for {len(batches)} batches"
    values = [result.values for result in results]
    errors = [result.error for result in results if result.error is not None]
    assert not errors, f"a batch failed: {errors[0]}"
    return [each for each in values if each is not None]


def _check_values(
    executor: Executor, batches: Sequence[Batch], expected: Sequence[FloatArray], when: str, *, exact: bool
) -> None:
    got = _values(executor, batches)
    assert len(got) == len(expected), f"after {when}, {len(expected) - len(got)} results have no values and no error"
    for index, (values, wanted) in enumerate(zip(got, expected, strict=True)):
        _check_batch(values, wanted, f"after {when}, the values of batch {index}", exact=exact)


def _check_batch(values: FloatArray, expected: FloatArray, what: str, *, exact: bool) -> None:
    assert values.dtype == np.float32, f"{what} are {values.dtype}, expected float32"
    assert values.shape == expected.shape, f"{what} have the shape {values.shape}, expected {expected.shape}"
    same = np.array_equal(values, expected) if exact else np.allclose(values, expected, rtol=1e-4, atol=1e-4)
    difference = float(np.abs(values - expected).max(initial=0.0))
    assert same, f"{what} differ from those of one process by {difference:.1e}"


def _check_broken(executor: Executor, batches: Sequence[Batch], expected: Sequence[FloatArray], *, exact: bool) -> None:
    """Check that the batch in the middle has an error, and the others have their values."""
    results, middle = executor.run(batches), len(batches) // 2
    assert results[middle].error is not None, "the broken batch must have an error"
    assert results[middle].values is None, "the broken batch must have no values"
    others = [result for index, result in enumerate(results) if index != middle]
    for index, (result, wanted) in enumerate(zip(others, [*expected, *expected], strict=True)):
        assert result.values is not None, f"batch {index} fails because of the broken one: {result.error}"
        _check_batch(result.values, wanted, f"beside the broken batch, the values of batch {index}", exact=exact)


def _check_refused(executor: Executor) -> None:
    try:
        executor.update_weights({"no.such.tensor": np.zeros(1, dtype=np.float32)})
    except ConfigError:
        return
    raise AssertionError("update_weights must raise ConfigError for weights that do not fit the model")
