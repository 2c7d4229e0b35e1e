import pytest

from gym_rm.data.pairs import pairs_of_row
from gym_rm.errors import ConfigError

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}


def load_pairs(rows):
    return tuple(pair for number, row in enumerate(rows) for pair in pairs_of_row(row, f"pairs[{number}]"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", r"pairs\[0\]: expected a row with 'chosen' and 'rejected', got str 'text'"),
        ({"prompt": "a", "chosen": "b"}, r"the field 'rejected' is missing, got the fields \['chosen', 'prompt'\]"),
        ({"chosen": "b", "rejected": "c"}, r"add the field 'prompt' or give whole conversations"),
        ({"prompt": "a", "chosen": [USER, FOUR], "rejected": "5"}, r"'chosen' begins with a user turn that is not"),
        ({"completions": []}, r"the field 'context' is missing"),
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
