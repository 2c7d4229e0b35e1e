"""Verify a loaded model: everything that is faster or smaller is compared with its plain forward, which runs once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gym_rm.engine.backbones.invariant_products import GemmRows
from gym_rm.engine.debugging import Switches, read_switches
from gym_rm.engine.loading.trial import (
    PLAIN,
    Candidate,
    Forward,
    Run,
    agreeing_forwards,
    check_invariance,
    difference_of,
    plain_values,
)
from gym_rm.errors import ConfigError


def verify(
    candidate: Candidate,
    run: Run,
    ladder: Callable[[], Iterable[GemmRows]],
    *,
    max_num_batched_tokens: int,
    quantize: Callable[[], str] | None = None,
    run_cached: Run | None = None,
) -> Forward:
    """Return the fastest forward with the values of the plain forward, which runs once; note all in the table.

    Args:
        candidate, run, max_num_batched_tokens: as for `check_invariance`.
        ladder: returns the numbers of rows of each matrix product to try.
        quantize: changes the products of the model to 8 bits and returns their name, after layouts were compared.
        run_cached: the same as `run`, with what plans before it left in the prefix cache.

    Raises:
        ConfigError: the plain forward fails or changes the model.
    """
    switches = read_switches()
    if switches.plain:
        candidate.note("GYM_RM_DEBUG", "the plain forward runs")
        return PLAIN
    if switches.rows is not None:
        forced = GemmRows(switches.rows)
        ladder = lambda: [forced]  # noqa: E731
    if switches.skip_trial:
        return _unchecked(candidate, switches, next(iter(ladder())))
    budget = {"max_num_batched_tokens": max_num_batched_tokens}
    with unchanged(candidate.modules):
        expected = plain_values(candidate, run)
        agreeing = [
            agreeing_forwards(candidate, run, ladder(), expected=expected, switches=switches, **budget)
            for _ in range(2 if switches.repeat_trial else 1)
        ]
        forward, *again = (next(forwards) for forwards in agreeing)
    if again not in ([], [forward]):
        raise ConfigError(f"the trial of {candidate.name} found {forward}, and then {again[0]}; expected the same.")
    if quantize is not None:
        candidate = replace(candidate, dtype=quantize())
        exact, expected = expected, plain_values(candidate, run)
        candidate.note(f"{candidate.dtype} products", f"{difference_of(expected[0], exact[0]):.1e} from full precision")
        forward = check_invariance(candidate, forward, run, ladder(), expected=expected, **budget)
        if forward == PLAIN:
            forward = next(agreeing_forwards(candidate, run, ladder(), expected=expected, switches=switches, **budget))
    if run_cached is not None:
        forward = check_invariance(candidate, forward, run_cached, [forward.rows], expected=expected, **budget)
        candidate.note("prefix cache", str(forward.batch_invariance))
    return forward


def _unchecked(candidate: Candidate, switches: Switches, rows: GemmRows) -> Forward:
    """Return the forward that would be tried first, without comparing it."""
    layout: Any = switches.layout or ("tree" if candidate.can_take_trees else "padded")
    candidate.note("GYM_RM_DEBUG", "nothing was compared with the plain forward")
    tree = layout == "tree"
    return Forward(layout, fuse=tree and candidate.can_fuse, kernels=tree and candidate.has_kernels, rows=rows)


@contextlib.contextmanager
def unchanged(models: Sequence[nn.Module]) -> Iterator[None]:
    """Undo what a forward changes in the modules of models, and refuse it: values would depend on earlier texts."""
    parts = [part for whole in models for part in whole.modules()]
    before = [(part, {k: v for k, v in vars(part).items() if isinstance(v, str)} | part._modules) for part in parts]
    changed: set[str] = set()
    try:
        yield
    finally:
        for part, state in before:
            for name, value in state.items():
                if getattr(part, name, None) != value:
                    changed.add(f"{type(part).__name__}.{name}")
                    setattr(part, name, value)
    if changed:
        raise ConfigError(
            f"the forward of {type(models[0]).__name__} changes {sorted(changed)[:3]}, so its values depend on the "
            "texts before; for a BigBird, load it with attention_type='original_full' in its config.json."
        )
