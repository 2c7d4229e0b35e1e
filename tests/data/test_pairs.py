from pathlib import Path

import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.pairs import pairs_of, pairs_of_row
from gym_rm.errors import ConfigError
from gym_rm.types import PreferencePair

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data beside the checkout")

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}


def load_pairs(rows):
    return tuple(pair for number, row in enumerate(rows) for pair in pairs_of_row(row, f"pairs[{number}]"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"},
        {"context": [USER], "completions": [{"rank": 1, "completion": [FIVE]}, {"rank": 0, "completion": [FOUR]}]},
        {"context": "2 + 2?", "completions": [{"rank": 0, "completion": "4"}, {"rank": 1, "completion": "5"}]},
        PreferencePair((USER,), (FOUR,), (FIVE,)),
    ],
)
def test_every_pair_shape_gives_the_same_pair(row):
    assert load_pairs([row]) == (PreferencePair((USER,), (FOUR,), (FIVE,)),)


def test_margin_and_metadata():
    pair, scored = load_pairs(
        [
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "margin": 2, "subset": "sums"},
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "score_rejected": 8.5},
        ]
    )
    assert (pair.margin, pair.metadata) == (2.0, {"subset": "sums"})
    assert scored.margin == 0.5


def test_equal_conversations_have_their_last_message_as_reply():
    (pair,) = load_pairs([{"chosen": [USER, FOUR], "rejected": [USER, FOUR]}])
    assert (pair.prompt, pair.chosen, pair.rejected) == ((USER,), (FOUR,), (FOUR,))


def test_more_than_two_ranks_give_every_pair_with_a_preference():
    completions = [{"rank": rank, "completion": text} for rank, text in [(2, "6"), (0, "4"), (1, "5"), (1, "5!")]]
    pairs = load_pairs([{"context": "2 + 2?", "completions": completions}])
    assert [(pair.chosen[0]["content"], pair.rejected[0]["content"]) for pair in pairs] == [
        ("4", "5"),
        ("4", "5!"),
        ("4", "6"),
        ("5", "6"),
        ("5!", "6"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", r"pairs\[0\]: expected a row with 'chosen' and 'rejected', got str 'text'"),
        ({"prompt": "a", "chosen": "b"}, r"the field 'rejected' is missing, got the fields \['chosen', 'prompt'\]"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, r"'rejected\[0\]' must be a message"),
        ({"chosen": "b", "rejected": "c"}, r"add the field 'prompt' or give whole conversations"),
        ({"prompt": "a", "chosen": [USER, FOUR], "rejected": "5"}, r"'chosen' begins with a user turn that is not"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, r"'margin' must be a number, got str 'x'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": "x", "score_rejected": 1},
            r"'score_chosen' must be a number, got str 'x'",
        ),
        ({"completions": []}, r"the field 'context' is missing"),
        ({"context": "a", "completions": []}, r"'completions' must be a list of at least two"),
        ({"context": "a", "completions": ["b", "c"]}, r"a pair needs two replies with different ranks, .* ranks None"),
        (
            {"context": "a", "completions": [{"completion": "b"}, {"rank": 0, "completion": "c"}]},
            r"'completions\[0\]' has no 'rank', but",
        ),
        ({"context": "a", "completions": [{"rank": 0, "completion": "b"}] * 2}, r"got the ranks \(0.0, 0.0\)"),
    ],
)
def test_an_invalid_pair_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        load_pairs([row])


@needs_data
def test_real_pairs():
    found = load_comparisons(DATA / "hh_harmless.jsonl.gz").comparisons
    pairs = [pair for each in found for pair in pairs_of(each)]
    assert len(pairs) == 1147
    assert max(len(pair.prompt) for pair in pairs) == 35
    assert all(pair.prompt[-1]["role"] == "user" for pair in pairs)
