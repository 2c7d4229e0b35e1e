import gzip
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.data.comparisons import DroppedRow, load_comparisons
from gym_rm.data.pairs import pairs_of
from gym_rm.errors import ConfigError
from gym_rm.types import Comparison, PreferencePair
from tests import real_data

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
BINARY = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
SIGNED = {"context": [USER], "response1": "4", "response2": "5", "overall_preference": -2}
RANKED = {"context": "2 + 2?", "completions": [{"rank": 0, "completion": "4"}, {"rank": 0, "completion": "5"}]}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.data
def test_real_ranked_rows_lose_only_those_with_an_empty_reply():
    found = load_comparisons(real_data.FOLDER / "hh_harmless.jsonl.gz", name="harmless")
    assert (found.name, len(found.comparisons), found.shapes) == ("harmless", 1147, {"ranks": 1147})
    assert Counter(each.reason for each in found.dropped) == {"reply 1 of 2 is empty": 3}
    assert all(each.where.endswith(f"line {each.where.split()[-1]}") for each in found.dropped)
    assert {each.ranks for each in found.comparisons} == {(0.0, 1.0)}


@pytest.mark.data
def test_real_graded_rows_have_their_grades_as_ranks_and_ties_where_all_are_equal():
    found = load_comparisons(real_data.FOLDER / "gsm8k_graded.jsonl.gz").comparisons
    with gzip.open(real_data.FOLDER / "gsm8k_graded.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert len(found) == len(rows) == 658
    for comparison, row in zip(found, rows, strict=True):
        correct = [solution["correct"] for solution in row["solutions"]]
        assert comparison.ranks == tuple(0.0 if each else 1.0 for each in correct)
        assert comparison.scores == {"correct": tuple(map(float, correct))}
        assert [reply[0]["content"] for reply in comparison.replies] == [each["text"] for each in row["solutions"]]
    assert sum(each.is_tie for each in found) == 303


@pytest.mark.data
def test_real_binary_rows_have_their_subset_as_source():
    found = load_comparisons(real_data.FOLDER / "rewardbench_slice.jsonl.gz")
    assert len(found.comparisons) == 300
    assert Counter(each.source for each in found.comparisons)["llmbar-natural"] == 100


def test_rows_of_several_shapes_in_one_file_are_read_and_counted(tmp_path):
    found = load_comparisons(write(tmp_path / "mixed.jsonl", [BINARY, SIGNED, RANKED, BINARY]))
    assert found.shapes == {"binary": 2, "signed": 1, "ranks": 1}
    assert {(each.prompt, each.replies) for each in map(_hashable, found.comparisons)} == {
        (("2 + 2?",), (("4",), ("5",)))
    }
    assert [each.where.rsplit("/")[-1] for each in found.comparisons] == [f"mixed.jsonl line {k}" for k in range(1, 5)]


def _hashable(comparison):
    prompt = tuple(message["content"] for message in comparison.prompt)
    replies = tuple(tuple(message["content"] for message in reply) for reply in comparison.replies)
    return Comparison(prompt, replies)


def test_ties_are_kept_as_ties():
    (ranked,) = load_comparisons([RANKED]).comparisons
    (signed,) = load_comparisons([{**SIGNED, "overall_preference": 0}]).comparisons
    assert ranked.is_tie
    assert signed.is_tie
    assert (ranked.margin, signed.margin) == (None, 0.0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**BINARY, "rejected": " \n"}, "reply 2 of 2 is empty"),
        ({**BINARY, "rejected": "4"}, "all 2 replies are equal"),
        ({**SIGNED, "overall_preference": None}, "no preference, rating or label is known"),
        ({"prompt": "a", "responses": ["b", "c"]}, "no preference, rating or label is known"),
        ({"prompt": "a", "response": "b", "helpfulness": None}, "no preference, rating or label is known"),
        ({"prompt": "a", "completions": [{"completion": "b", "rank": 1}]}, "a rank of a single reply says nothing"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_row_of_no_use_is_dropped_with_its_reason(row, reason, on_error):
    found = load_comparisons([BINARY, row], on_error=on_error)
    assert len(found.comparisons) == 1
    assert found.dropped == (DroppedRow("comparisons[1]", reason),)


def test_a_reply_that_only_calls_a_tool_is_not_empty():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert len(load_comparisons([{**BINARY, "chosen": [call]}]).comparisons) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
            "'margin' must be a finite number, got float nan",
        ),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": Infinity}', "Infinity is not a number in JSON"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e400}', "the number 1e400 is too large"),
        ('{"prompt": "a", "completions": [{"text": "b", "rank": NaN}, {"text": "c", "rank": 1}]}', "rank' must be"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"', "not valid JSON"),
        ('{"prompt": "a", "chosen": "\\ud800", "rejected": "c"}', "a message contains a lone surrogate"),
        ('["a"]', r"expected a row with 'chosen' and 'rejected', got list \['a'\]"),
        ('{"prompt": "a", "reply": "b"}', r"no replies to compare; expected .* got the fields \['prompt', 'reply'\]"),
        ('{"prompt": "a", "chosen": ["b"], "rejected": 3}', r"'chosen\[0\]' must be a message"),
    ],
)
def test_a_malformed_row_is_an_error_with_its_line_or_is_dropped(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", [BINARY, line, BINARY])
    with pytest.raises(ConfigError, match=rf"p\.jsonl line 2: .*{message}"):
        load_comparisons(path)
    found = load_comparisons(path, on_error="drop")
    assert len(found.comparisons) == 2
    (dropped,) = found.dropped
    assert dropped.where == f"{path} line 2"
    assert not dropped.reason.startswith(str(path))


def test_a_malformed_row_of_a_csv_file_is_dropped(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("prompt,chosen,rejected,margin\n2 + 2?,4,5,1.5\n2 + 2?,4\n2 + 2?,4,5,much\n")
    found = load_comparisons(path, on_error="drop")
    assert [each.margin for each in found.comparisons] == [1.5]
    assert [each.reason for each in found.dropped] == [
        "the row has fewer cells than the header, which has 4.",
        "'margin' must be a number, got str 'much'; leave it out (null) if it is not known.",
    ]


def test_a_file_where_every_row_is_dropped_is_an_error_that_says_why(tmp_path):
    path = write(tmp_path / "p.jsonl", [{**BINARY, "chosen": ""}] * 3)
    with pytest.raises(ConfigError, match=r"all 3 rows of .*p.jsonl' were dropped: .*3 x reply 1 of 2 is empty"):
        load_comparisons(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": (0.0,)}, "'ranks' must have one entry for each of 2 replies, got 1"),
        ({"ranks": (0.0, math.nan)}, "'ranks' must be a finite number"),
        ({"ranks": (0.0, 1.0), "margin": math.inf}, "'margin' must be a finite number"),
        ({"scores": {"helpfulness": (math.inf, 1.0)}}, "'helpfulness' must be finite or NaN"),
    ],
)
def test_an_invalid_comparison_is_refused(given, message):
    with pytest.raises(ConfigError, match=rf"comparisons\[0\]: .*{message}"):
        load_comparisons([Comparison((USER,), ((FOUR,), (FIVE,)), **given)])


def test_comparisons_and_pairs_pass_through():
    comparison = Comparison((USER,), ((FOUR,), (FIVE,)), (0.0, 1.0), 2.0, where="here", source="sums")
    pair = PreferencePair((USER,), (FOUR,), (FIVE,), 2.0, {"source": "sums"})
    first, second = load_comparisons([comparison, pair]).comparisons
    assert first is comparison
    assert (second.replies, second.ranks, second.margin, second.source) == (comparison.replies, (0.0, 1.0), 2.0, "sums")


TEXTS = st.text(min_size=1).filter(lambda text: text.strip() and not text.startswith("\n\nHuman:"))


@given(
    prompt=TEXTS,
    replies=st.lists(st.tuples(TEXTS, st.integers(-5, 5)), min_size=2, max_size=5, unique_by=lambda reply: reply[0]),
)
def test_ranked_replies_survive_a_round_trip_through_a_line(prompt, replies):
    row = {"context": prompt, "completions": [{"completion": text, "rank": rank} for text, rank in replies]}
    (found,) = load_comparisons([json.loads(json.dumps(row))]).comparisons
    assert found.prompt == ({"role": "user", "content": prompt},)
    assert [reply[0]["content"] for reply in found.replies] == [text for text, _ in replies]
    assert found.ranks == tuple(float(rank) for _, rank in replies)
    ranks = [rank for _, rank in replies]
    if len(set(ranks)) > 1:
        expected = sum(a != b for k, a in enumerate(ranks) for b in ranks[k + 1 :])
        assert len(pairs_of(found)) == expected


def test_columns_of_other_names():
    rows = [{"Question": "2 + 2?", "good": "4", "bad": "5"}]
    columns = {"prompt": "Question", "chosen": "good", "rejected": "bad"}
    assert load_comparisons(rows, columns=columns).comparisons[0].ranks == (0.0, 1.0)
