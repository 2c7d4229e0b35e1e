import pytest

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.findings import find_duplicates, find_remarks

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
PAIR = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def remarks(*rows):
    found = find_remarks(load_comparisons(list(rows)).comparisons)
    return {each.text: each.count for each in found}


def of_prompt(*messages):
    return {"chosen": [*messages, FOUR], "rejected": [*messages, FIVE]}


def test_an_ordinary_pair_has_no_remark():
    assert (
        remarks(
            {**PAIR, "tools": [], "chat_template_kwargs": None},
            of_prompt({"role": "system", "content": "Be brief."}, USER, FIVE, USER),
        )
        == {}
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({**PAIR, "chosen": [{"role": "tool", "content": "4"}]}, "a reply begins with a turn of the role 'tool'"),
        ({**PAIR, "chosen": [FOUR, USER]}, "a reply ends with a turn of the role 'user'"),
        (of_prompt(USER, FOUR), "the prompt ends with a turn of the assistant"),
        ({**PAIR, "prompt": [USER, FIVE]}, "the prompt ended with a turn of the assistant, which is left out"),
        (
            of_prompt({"role": "human", "content": "a"}, USER),
            "a message has the role 'human', which models may not know",
        ),
        ({**PAIR, "prompt": " "}, "the prompt has no text"),
        ({**PAIR, "chat_template_kwargs": {"thinking": True}}, "the row has 'chat_template_kwargs', which is not"),
        ({**PAIR, "prompt": "a<extra_id_1>User"}, "a text contains the markup '<extra_id_1>' of a chat template"),
        (of_prompt({"role": "system", "content": ""}, USER), "a system message of the prompt is empty"),
        ({**PAIR, "chosen": "4<|im_end|>"}, "a text contains the markup '<|im_end|>' of a chat template"),
        ({**PAIR, "chosen": "Human: 4"}, "a text contains 'Human:' like a turn of a transcript"),
        ({**PAIR, "prompt": "a\n\nAssistant: b"}, "a text contains 'Assistant:' like a turn of a transcript"),
        ({"prompt": "a", "responses": ["b", "b", "c"], "ranks": [0, 0, 1]}, "some replies of the comparison are equal"),
    ],
)
def test_each_possible_mistake_is_reported(row, text):
    found = remarks(row)
    assert any(each.startswith(text) for each in found), found


def test_duplicates_and_contradictions_are_counted_without_the_first_row():
    rows = [
        PAIR,
        PAIR,
        {**PAIR, "chosen": "5", "rejected": "4"},
        {**PAIR, "prompt": "3 + 3?"},
        {"context": "2 + 2?", "completions": [{"text": "5", "rank": 1}, {"text": "4", "rank": 0}]},
    ]
    found = find_duplicates(load_comparisons(rows).comparisons)
    assert [each.count for each in found] == [3, 2, 2]
    assert found[2].examples == ("comparisons[2]", "comparisons[4]")
