import pytest

from gym_rm.data.scored_rows import RowToScore, row_to_score
from gym_rm.errors import ConfigError
from gym_rm.types import Prompt

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
NAMES = ("completions", "solutions", "responses")
BOTH = ((USER, FOUR), (USER, FIVE))


@pytest.mark.parametrize("prompt", [{"prompt": "2 + 2?"}, {"context": [USER]}, {"question": "2 + 2?"}])
@pytest.mark.parametrize(
    "replies",
    [
        {"completions": ["4", "5"]},
        {"solutions": [[FOUR], [FIVE]]},
        {"responses": [{"text": "4"}, {"text": "5"}]},
        {"completions": [{"rank": 1, "completion": "4"}, {"rank": 0, "completion": [FIVE]}]},
    ],
)
def test_a_list_of_replies_gives_one_conversation_per_reply(prompt, replies):
    found = row_to_score({**prompt, **replies}, "here", 3)
    assert found == RowToScore(BOTH, (0, 1), Prompt((USER,), "3"))


def test_a_pair_is_scored_whatever_its_margin_is():
    row = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": 1, "score_rejected": 4, "margin": -3}
    found = row_to_score(row, "here")
    assert found.prompt.metadata == {"score_chosen": 1, "score_rejected": 4, "margin": -3}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"},
    ],
)
def test_a_pair_gives_both_conversations(row):
    assert row_to_score(row, "here", 3) == RowToScore(BOTH, ("chosen", "rejected"), Prompt((USER,), "3"))


@pytest.mark.parametrize("prompt", [{"prompt": "2 + 2?"}, {}])
@pytest.mark.parametrize("replies", [{"response": "5"}, *({name: ["5"]} for name in NAMES)])
def test_a_reply_is_not_scored_after_the_reply_in_messages(prompt, replies):
    found = row_to_score({"messages": [USER, FOUR], **prompt, **replies}, "here")
    assert found.conversations == BOTH[1:]
    assert found.prompt.metadata["reference_reply"] == "4"


def test_a_reply_may_continue_after_an_assistant_turn_with_another_role():
    tool = {"role": "tool", "content": "4"}
    row = {"messages": [USER, FIVE], "response": [tool, FOUR]}
    assert row_to_score(row, "here").conversations == ((USER, FIVE, tool, FOUR),)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, FOUR]},
        {"prompt": "2 + 2?", "response": "4"},
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"question": "2 + 2?", "solutions": ["4", "5"]},
    ],
)
def test_the_other_fields_become_the_prompt(row):
    fields = {"id": "sum-1", "answer": 4, "level": "easy"}
    assert row_to_score({**row, **fields}, "here", 3).prompt == Prompt(
        (USER,), "sum-1", answer="4", metadata={"level": "easy"}
    )


@pytest.mark.parametrize(
    ("without", "conversations", "labels"),
    [
        ([], [(USER, FIVE)], (0,)),
        (["completions"], [(USER, FOUR), (USER, FIVE)], ("chosen", "rejected")),
        (["completions", "chosen", "rejected"], [(USER, FOUR)], None),
        (["completions", "chosen", "rejected", "response"], [(USER,)], None),
    ],
)
def test_replies_take_precedence_over_pair_response_and_messages(without, conversations, labels):
    pair = {"chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    row = {"messages": [USER], "completions": ["5"], "response": "4", **pair}
    found = row_to_score({name: value for name, value in row.items() if name not in without}, "here")
    assert (list(found.conversations), found.labels) == (conversations, labels)


def test_whole_conversations_of_a_pair_may_be_repeated_in_messages():
    row = {"messages": [USER, FOUR], "prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    assert row_to_score(row, "here").conversations == BOTH


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r"here: nothing to score; expected 'messages', .* got the fields \['prompt'\]"),
        ({}, r"here: nothing to score; .* got the fields \[\]"),
        ({"prompt": "a", "completions": "b"}, "here: 'completions' must be a list of replies, got str 'b'"),
        ({"prompt": "a", "solutions": []}, r"here: 'solutions' must be a list of replies, got list \[\]"),
        ({"prompt": "a", "responses": [3]}, r"here: 'responses\[0\]' must be a text or a list of messages, got int 3"),
        ({"prompt": "a", "completions": [{"text": 3}]}, r"here: 'completions\[0\].text' must be a text or a list"),
        (
            {"prompt": "a", "completions": [{"text": "b", "completion": "c"}]},
            r"here: 'completions\[0\]' has a 'completion' and another 'text'",
        ),
        ({"response": "b"}, "here: expected one of the fields .*'prompt'"),
        (
            {"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]},
            "here: 'chosen' and 'rejected' must be one reply each",
        ),
        ({"prompt": "a", "chosen": "b"}, "here: the field 'rejected' is missing"),
        ({"messages": []}, r"here: 'messages' must be a text or a list of messages, got list \[\]"),
    ],
)
def test_an_invalid_row_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        row_to_score(row, "here")
