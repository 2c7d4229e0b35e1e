"""Scores: rows are taken, scattered and concatenated without losing values."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError, ConversationError, Scores, ScoringError
from gym_rm.errors import RowError
from gym_rm.types import Provenance, Workload

OPTIONAL = ("turn_rewards", "step_rewards", "step_ends", "terminations")


def floats(size):
    return st.lists(st.floats(-100, 100, width=32), min_size=size, max_size=size)


@st.composite
def scores(draw, size=None):
    size = draw(st.integers(0, 6)) if size is None else size
    errors = draw(st.lists(st.none() | st.just("too long"), min_size=size, max_size=size))
    values = np.array(draw(floats(size)), dtype=np.float32)
    values[[error is not None for error in errors]] = np.nan
    counts = np.arange(size, dtype=np.int64)
    rows = tuple(np.arange(row, dtype=np.float32) for row in range(size))
    has_steps = draw(st.booleans())
    names = draw(st.sets(st.sampled_from(["a", "b/c"])))
    return Scores(
        rewards=values,
        components={name: np.array(draw(floats(size)), dtype=np.float32) for name in sorted(names)},
        num_tokens=counts + 1,
        truncated_tokens=counts % 2,
        errors=tuple(errors),
        turn_rewards=rows if draw(st.booleans()) else None,
        step_rewards=rows[::-1] if has_steps else None,
        step_ends=rows[::-1] if has_steps and draw(st.booleans()) else None,
        terminations=counts % 3 == 0 if draw(st.booleans()) else None,
        infos={"verdict": np.array(list("abcdef")[:size], dtype=object)} if draw(st.booleans()) else {},
        provenance=Provenance("Test", "test"),
        workload=Workload(num_tokens=int(counts.sum())),
    )


def same(one, other):
    """Return whether two scores are equal in every field, including NaN."""
    return pickle.dumps(one.to_dict()) == pickle.dumps(other.to_dict())


@given(st.data())
def test_taking_all_rows_in_another_order_and_back(data):
    whole = data.draw(scores())
    order = data.draw(st.permutations(range(len(whole))))
    assert same(whole.take(order).take(np.argsort(order)), whole)
    assert same(whole[:], whole)


@given(st.data())
def test_concatenating_the_parts_gives_the_whole(data):
    whole = data.draw(scores())
    cut = data.draw(st.integers(0, len(whole)))
    joined = Scores.concatenate([whole[:cut], whole[cut:]])
    assert joined.to_dict() == {**whole.to_dict(), "workload": joined.to_dict()["workload"]}
    assert joined.workload.num_tokens == 2 * whole.workload.num_tokens


@given(st.data())
def test_take_is_the_inverse_of_scatter(data):
    whole = data.draw(scores())
    size = len(whole) + data.draw(st.integers(0, 3))
    rows = data.draw(st.permutations(range(size)))[: len(whole)]
    spread = whole.scatter(rows, size)
    assert len(spread) == size
    assert same(spread.take(rows), whole)
    others = [row for row in range(size) if row not in rows]
    assert np.isnan(spread.rewards[others]).all()
    assert {spread.errors[row] for row in others} <= {None}
    assert not spread.num_tokens[others].any()


@given(scores(), scores())
def test_columns_that_a_part_lacks_have_missing_values(one, other):
    joined = Scores.concatenate([one, other])
    assert joined.components.keys() == one.components.keys() | other.components.keys()
    for name, values in joined.components.items():
        assert values.dtype == np.float64
        if name not in one.components:
            assert np.isnan(values[: len(one)]).all()
    for name in OPTIONAL:
        present = getattr(one, name) is not None or getattr(other, name) is not None
        assert (getattr(joined, name) is not None) == present


def test_raise_for_errors_returns_the_scores_or_raises():
    good = Scores.from_rewards([1.0])
    assert good.raise_for_errors() is good
    with pytest.raises(ScoringError, match="row 1: too long") as caught:
        Scores.from_rewards([1.0, 2.0], errors=[None, "too long"]).raise_for_errors()
    assert caught.value.rows == (1,)


def test_the_repr_is_short():
    assert repr(Scores.from_rewards([1.0, np.nan])) == "Scores(rewards=[1, nan], 1 failed)"
    many = Scores.from_rewards(range(1000), components={"a": np.zeros(1000, np.float32)})
    assert repr(many) == "Scores(rewards=[0, 1, 2, 3, 4, 5, ...], of 1000 conversations, components=['a'])"


def test_rows_out_of_range_are_index_errors():
    scores = Scores.from_rewards([1.0, 2.0])
    assert scores[-1].reward == 2.0
    with pytest.raises(IndexError, match="row 2 is out of range for 2 scores"):
        scores[2]
    with pytest.raises(IndexError):
        scores.take([5])


@pytest.mark.parametrize(
    "columns",
    [
        {"rewards": [1.0]},
        {"errors": (None,)},
        {"num_tokens": np.zeros(3, np.int64)},
        {"terminations": [True]},
        {"components": {"a": np.zeros(1)}},
        {"infos": {"a": ["x", "y", "z"]}},
        {"step_rewards": ([1.0],)},
        {"step_rewards": ([1.0], [1.0]), "step_ends": ([4],)},
        {"components": {"a": np.zeros((2, 3))}},
        {"terminations": np.zeros((2, 1), bool)},
        {"rewards": np.zeros((2, 1))},
        {"rewards": 1.0},
    ],
)
def test_every_column_must_have_one_entry_per_reward(columns):
    with pytest.raises(ConfigError, match=r"must have one entry per reward \(\d\), got the shape"):
        dataclasses.replace(Scores.from_rewards([1.0, 2.0]), **columns)


def test_rows_without_an_info_are_known_after_scatter_take_and_concatenate():
    one = Scores.from_rewards([1.0, 2.0], infos={"n": [0, 5], "share": [0.5, np.nan], "said": [None, "b"]})
    joined = Scores.concatenate([one.scatter([2, 0], 3), Scores.from_rewards([3.0])]).take([0, 1, 2, 3])
    assert joined.infos["n"].tolist() == [5, None, 0, None]
    assert {name: joined.has_info(name).tolist() for name in joined.infos} == {
        "n": [True, False, True, False],
        "share": [False, False, True, False],
        "said": [True, False, False, False],
    }
    assert [dict(row.infos) for row in joined] == [{"n": 5, "said": "b"}, {}, {"n": 0, "share": 0.5}, {}]
    assert joined.to_dict()["infos"]["n"] == [5, None, 0, None]


def test_errors_have_a_kind_that_survives_every_change():
    given = [RowError("9 tokens", "too_long"), "gone", None]
    scores = Scores.from_rewards([0.0, 0.0, 1.0], errors=given).take([2, 1, 0]).scatter([0, 1, 3], 4)
    back = Scores.from_dict(json.loads(json.dumps(pickle.loads(pickle.dumps(scores)).to_dict())))
    for each in (scores, back):
        assert [error and error.kind for error in each.errors] == [None, "failed", None, "too_long"]
    assert back.errors == (None, "gone", None, "9 tokens")
    causes = {TimeoutError: "timed_out", ConversationError: "invalid", MemoryError: "out_of_memory", OSError: "failed"}
    assert [RowError.of(cause()).kind for cause in causes] == [*causes.values()]


def test_take_accepts_a_mask():
    scores = Scores.from_rewards([1.0, 2.0, 3.0])
    assert scores.take([True, False, True]).rewards.tolist() == [1.0, 3.0]
    assert scores.take(scores.rewards > 1.5).rewards.tolist() == [2.0, 3.0]
    assert scores.take(torch.tensor([False, True, False])).rewards.tolist() == [2.0]
    with pytest.raises(IndexError, match="a mask must have one entry for each of the 3 scores, got 2"):
        scores.take([True, False])


INFO_COLUMNS = st.sampled_from(
    [
        lambda size: np.linspace(-1.5, 2, size),
        lambda size: np.where(np.arange(size) % 2, np.nan, 0.5),
        lambda size: np.arange(size) - 1,
        lambda size: np.arange(size) % 2 == 0,
        lambda size: np.arange(3 * size).reshape(size, 3) / 4,
        lambda size: [["a", None, {"b": [row]}] for row in range(size)],
        lambda size: [None if row % 2 else "text" for row in range(size)],
        lambda size: [[0.5] * row for row in range(size)],
    ]
)


@given(scores(), st.lists(INFO_COLUMNS, max_size=3))
def test_from_dict_is_the_inverse_of_to_dict(whole, columns):
    named = {f"info {k}": column(len(whole)) for k, column in enumerate(columns)}
    whole = dataclasses.replace(whole, infos={**whole.infos, **named})
    plain = json.loads(json.dumps(whole.to_dict()))
    back = Scores.from_dict(plain)
    assert back.to_dict() == plain == whole.to_dict()
    assert (back.provenance, back.workload) == (whole.provenance, whole.workload)
    for name in ("rewards", "num_tokens", "truncated_tokens", "terminations"):
        assert np.array_equal(getattr(back, name), getattr(whole, name), equal_nan=name == "rewards")
        assert getattr(getattr(back, name), "dtype", None) == getattr(getattr(whole, name), "dtype", None)
    for name, column in whole.infos.items():
        has = whole.has_info(name)
        assert np.array_equal(back.has_info(name), has)
        assert not has.any() or back.infos[name].dtype == column.dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ["1"]}, r"rewards\[0\]: input should be a valid number, got str '1'"),
        ({"rewards": [float("inf")]}, "finite number"),
        ({"rewards": [True]}, "valid number"),
        ({"rewards": [10**400]}, "number"),
        ({"rewards": 1.0}, "rewards: input should be a valid list"),
        ({"rewards": []}, "one entry per reward"),
        ({"errors": [1]}, "valid string"),
        ({"num_tokens": [-1]}, "greater than or equal to 0"),
        ({"terminations": [0]}, "valid boolean"),
        ({"components": [1.0]}, "valid dictionary"),
        ({"turn_rewards": [1.0]}, r"turn_rewards\[0\]: input should be a valid list"),
        ({"reward": [1.0]}, "unknown field 'reward'. Did you mean 'rewards'"),
        ({"provenance": {"scorer": "a"}}, r"provenance\['model'\]"),
        ({"provenance": {"scorer": "a", "model": 3}}, "valid string"),
        ({"workload": {"num_tokens": "many"}}, "valid integer"),
        ({"errors": None}, "errors"),
    ],
)
def test_from_dict_refuses_what_to_dict_does_not_write(changes, message):
    with pytest.raises(ConfigError, match=message):
        Scores.from_dict({**Scores.from_rewards([1.0]).to_dict(), **changes})


def test_to_dict_can_be_written_as_json():
    infos = {"when": np.array(["2024-01-01"], "datetime64[D]"), "set": [{1}], "nested": [{"a": np.float32(1)}]}
    plain = Scores.from_rewards([np.nan], infos=infos).to_dict()
    assert json.loads(json.dumps(plain))["infos"] == {"when": ["2024-01-01"], "set": [[1]], "nested": [{"a": 1.0}]}


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [1, 1], [True, False, False]])
def test_scatter_needs_a_different_index_for_each_row(rows):
    with pytest.raises(ConfigError, match="a different index for each of the 2 scores"):
        Scores.from_rewards([1.0, 2.0]).scatter(rows, 3)


def test_the_error_counts_only_conversations_that_were_scored():
    spread = Scores.from_rewards([np.nan, 2.0], errors=["too long", None]).scatter([1, 3], 4)
    with pytest.raises(ScoringError, match="1 of 2 conversations could not be scored: row 1: too long"):
        spread.raise_for_errors()


@pytest.mark.parametrize(
    ("column", "value"),
    [("rewards", None), ("rewards", ["x"]), ("num_tokens", None), ("components", {"a": ["x"]}), ("errors", None)],
    ids=str,
)
def test_a_column_of_another_type_raises_config_error_with_its_name(column, value):
    columns = {"rewards": [1.0], "components": {}, "num_tokens": [0], "truncated_tokens": [0], "errors": [None]}
    with pytest.raises(ConfigError, match=f"{column}.* of Scores must be a list"):
        Scores(**{**columns, column: value})


# --- notebooks


def test_a_notebook_shows_the_first_rows_with_their_errors():
    html = Scores.from_rewards([0.5, np.nan, 2.0], errors=[None, "<b>no</b> \ud800", None])._repr_html_()
    assert "<td>0.5</td>" in html
    assert "<td>nan</td>" in html
    assert "&lt;b&gt;no&lt;/b&gt; \\ud800" in html
    assert "more rows" not in html


def test_a_notebook_is_told_how_many_rows_are_left():
    html = Scores.from_rewards([1.0] * 24 + [np.nan])._repr_html_()
    assert html.count("<tr>") == 21
    assert "and 5 more rows; 1 of all failed" in html


@given(st.lists(st.none() | st.text(), max_size=30))
def test_no_error_becomes_markup(errors):
    html = Scores.from_rewards([1.0] * len(errors), errors=errors)._repr_html_()
    assert set(re.findall(r"<(\w+)", html)) <= {"table", "tr", "th", "td", "p"}
