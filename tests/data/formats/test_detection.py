import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.formats.detection import comparison_of_row
from gym_rm.data.inspection import inspect_comparisons
from gym_rm.errors import ConfigError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
MORE = {"role": "user", "content": "And 3 + 3?"}
SIX = {"role": "assistant", "content": "6"}


def read(row):
    return comparison_of_row(row, "here")[1]


def refusal(row):
    with pytest.raises(ConfigError) as caught:
        comparison_of_row(row, "here")
    return str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        ("The sky is blue.", "The sky is black.", "The sky is"),
        ("Question?\nYes", "Question?\nNo", "Question?\n"),
        ("one two", "one two three", "one"),
    ],
)
def test_texts_without_a_prompt_are_divided_after_the_words_that_they_share(chosen, rejected, prompt):
    found = read({"chosen": chosen, "rejected": rejected})
    assert found.prompt == ({"role": "user", "content": prompt},)
    assert [prompt + reply[-1]["content"] for reply in found.replies] == [chosen, rejected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"score_chosen": 1.0, "score_rejected": 4.0}, "score_chosen 1 - score_rejected 4 must not be negative"),
        (
            {"score_chosen": 1, "score_rejected": 4, "margin": 1},
            "score_chosen 1 - score_rejected 4 must not be negative",
        ),
        ({"margin": -0.5}, "'margin' must not be negative, got -0.5"),
    ],
)
def test_a_negative_margin_is_refused(row, message):
    assert message in refusal({"prompt": "2 + 2?", "chosen": "4", "rejected": "5", **row})


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ("binary", {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}),
        ("binary", {"instruction": "2 + 2?", "chosen": [FOUR], "rejected": [FIVE]}),
        ("binary", {"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE], "messages": [USER, FOUR]}),
        ("binary", {"chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5"}),
        ("binary", {"prompt": "\n\nHuman: 2 + 2?\n\nAssistant:", "chosen": "4", "rejected": "5"}),
        (
            "binary",
            {
                "prompt": "\n\nHuman: 2 + 2?\n\nAssistant:",
                "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
            },
        ),
        ("binary", {"input": "2 + 2?", "chosen": "4", "rejected": "5"}),
        ("binary", {"input": [USER], "chosen": [FOUR], "rejected": [FIVE]}),
        ("signed", {"context": [USER], "response1": "4", "response2": "5", "overall_preference": -3}),
        ("signed", {"prompt": "2 + 2?", "response_1": "4", "response_2": "5", "preference_strength": -1}),
        ("ranks", {"context": [USER], "completions": [{"rank": 0, "completion": [FOUR]}, {"rank": 1, "text": "5"}]}),
        ("ranks", {"prompt": "2 + 2?", "responses": ["4", "5"], "ranks": [0, 1]}),
        ("ranks", {"question": "2 + 2?", "answers": [{"answer": "4", "rank": 0}, {"answer": "5", "rank": 1}]}),
        ("graded", {"question": "2 + 2?", "solutions": [{"text": "4", "correct": 1}, {"text": "5", "correct": False}]}),
        ("graded", {"prompt": "2 + 2?", "chosen": ["4"], "rejected": ["5"]}),
        ("ratings", {"prompt": "2 + 2?", "responses": [{**FOUR, "score": 3}, {**FIVE, "score": 1}]}),
        ("ratings", {"prompt": "2 + 2?", "completions": ["4", "5"], "scores": [0.5, 0.1]}),
    ],
)  # fmt: skip
def test_every_shape_of_a_preference_gives_the_same_comparison(shape, row):
    found_shape, found = comparison_of_row(row, "here")
    assert found_shape == shape
    assert (found.prompt, found.replies, found.ranks) == ((USER,), ((FOUR,), (FIVE,)), (0.0, 1.0))
    assert found.where == "here"


@pytest.mark.parametrize(
    ("preference", "ranks", "margin"), [(-3, (0, 1), 3), (-1, (0, 1), 1), (0, (0, 0), 0), (2, (1, 0), 2)]
)
def test_a_signed_preference_gives_ranks_and_a_margin(preference, ranks, margin):
    row = {"context": [USER], "response1": "4", "response2": "5", "overall_preference": preference, "domain": "stem"}
    found = read({**row, "individual_preference": [{"score": preference}]})
    assert (found.ranks, found.margin, found.source) == (ranks, margin, "stem")
    assert found.metadata == {"domain": "stem", "individual_preference": [{"score": preference}]}


def test_a_preference_outside_its_range_is_refused():
    row = {"context": [USER], "response1": "4", "response2": "5", "overall_preference": 5}
    assert "must be between -3 (the first reply is better) and 3, got 5" in refusal(row)


def test_a_row_of_tulu_has_all_shared_turns_as_its_prompt():
    shared = [SYSTEM, USER, FOUR, MORE]
    found = read({"source": "wildchat", "prompt": "2 + 2?", "chosen": [*shared, SIX], "rejected": [*shared, FIVE]})
    assert (found.prompt, found.replies) == (tuple(shared), ((SIX,), (FIVE,)))
    assert (found.source, found.metadata) == ("wildchat", {"source": "wildchat"})


def test_a_prompt_that_is_not_in_the_conversations_is_refused():
    row = {"prompt": "another one", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    assert "which they share, do not contain the prompt str 'another one'" in refusal(row)


def test_conversations_that_differ_before_the_last_turn_have_several_messages_in_a_reply():
    found = read({"chosen": [USER, FOUR, MORE, SIX], "rejected": [USER, FIVE, MORE, SIX]})
    assert (found.prompt, found.replies) == ((USER,), ((FOUR, MORE, SIX), (FIVE, MORE, SIX)))


def test_scores_of_a_pair_are_ratings_and_its_margin():
    found = read({"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": "9", "score_rejected": 7.5})
    assert (found.scores, found.margin) == ({"score": (9.0, 7.5)}, 1.5)


ULTRA = {
    "source": "sharegpt",
    "instruction": "2 + 2?",
    "completions": [
        {
            "model": name,
            "response": text,
            "overall_score": overall,
            "annotations": {"helpfulness": {"Rating": rating, "Rationale": "..."}, "honesty": [{"Rating": "N/A"}]},
        }
        for name, text, overall, rating in [("a", "five", 2.0, "1"), ("b", "4", 9.0, "5"), ("c", "5", 2.0, "2")]
    ],
}


def test_a_row_of_ultrafeedback_has_ranks_from_the_overall_score_and_ratings_by_objective():
    found = read(ULTRA)
    assert (found.ranks, found.margin, found.source) == ((1.0, 0.0, 1.0), 7.0, "sharegpt")
    assert found.scores["overall_score"] == (2.0, 9.0, 2.0)
    assert found.scores["helpfulness"] == (1.0, 5.0, 2.0)
    assert all(map(math.isnan, found.scores["honesty"]))
    assert [reply["model"] for reply in found.metadata["replies"]] == ["a", "b", "c"]


def test_a_reply_without_an_overall_score_leaves_only_the_ratings():
    completions = [{**ULTRA["completions"][0], "overall_score": None}, *ULTRA["completions"][1:]]
    found = read({**ULTRA, "completions": completions})
    assert found.ranks is None
    assert found.scores["helpfulness"] == (1.0, 5.0, 2.0)


def test_a_rated_reply_has_a_score_for_each_objective():
    row = {"prompt": "2 + 2?", "response": "4", "helpfulness": 4, "correctness": "3", "coherence": None, "note": 1}
    found = read(row)
    assert (found.replies, found.ranks) == (((FOUR,),), None)
    assert {name: scores[0] for name, scores in found.scores.items() if scores[0] == scores[0]} == {
        "helpfulness": 4.0,
        "correctness": 3.0,
    }
    assert math.isnan(found.scores["coherence"][0])
    assert found.metadata == {"note": 1}


STEPS = {"content": "Half of 8 is 4.\n\n4 + 4 is 9.", "role": "assistant"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "completions": ["Half of 8 is 4.", " 4 + 4 is 9.\n"], "labels": [True, False]},
        {"prompt": [USER], "completions": ["Half of 8 is 4.", "4 + 4 is 9."], "labels": [1, 0]},
    ],
)
def test_labels_of_steps_belong_to_one_reply(row):
    shape, found = comparison_of_row(row, "here")
    assert (shape, found.prompt, found.step_labels, found.ranks) == ("steps", (USER,), ((1.0, 0.0),), None)
    ((reply,),) = found.replies
    assert reply == STEPS


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completions": ["b"], "labels": [1, 0]}, "'labels' must be a list with one label for each step"),
        ({"completions": ["b", " "], "labels": [1, 0]}, "step 2 of 2 must be a text without an empty line, got str"),
        ({"completions": ["b\n\nc"], "labels": [1]}, "step 1 of 1 must be a text without an empty line"),
        ({"completions": ["b"], "labels": [2]}, "'labels[0]' must be 1 for a good step and 0 for a bad one, got int 2"),
        ({"completions": ["b"], "ranks": [1, 2]}, "'ranks' must be a list of 1 numbers, one per reply, got list"),
        ({"completions": [{"rank": 0}, {"rank": 1}]}, "'completions[0]' must have the reply in one of the fields"),
        ({"completions": [{"text": "b", "response": "c"}]}, "has a 'response' and another 'text'"),
        ({"solutions": [{"text": "b", "correct": "yes"}]}, "'solutions[0].correct' must be true or false, got str"),
        ({"responses": [{"text": "b", "score": "high"}]}, "'responses[0].score' must be a number, got str 'high'"),
        ({"response": "b", "helpfulness": True}, "'helpfulness' must be a number, got bool True"),
        ({"response1": "b", "overall_preference": 1}, "the field 'response2' is missing"),
    ],
)  # fmt: skip
def test_an_invalid_row_is_refused(row, message):
    found = refusal({"prompt": "a", **row})
    assert found.startswith("here: ")
    assert message in found


@pytest.mark.parametrize("others", [{"completions": ["a"], "labels": ["good"]}, {"answers": {"text": []}}])
def test_other_fields_beside_a_pair_do_not_change_its_shape(others):
    assert comparison_of_row({"prompt": "2 + 2?", "chosen": "4", "rejected": "5", **others}, "here")[0] == "binary"


def test_a_list_without_a_preference_is_not_used_beside_a_pair():
    found = read({"prompt": "2 + 2?", "responses": ["4", "5"], "chosen": "4", "rejected": "5"})
    assert (found.ranks, found.metadata) == ((0.0, 1.0), {"responses": ["4", "5"]})


VALID_ROWS = [
    {"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE], "margin": 1, "source": "sums"},
    {"prompt": "\n\nHuman: a\n\nAssistant:", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 1},
    {"context": [USER], "response1": "4", "response2": "5", "overall_preference": -3},
    {"context": [USER], "completions": [{"rank": 0, "completion": [FOUR]}, {"rank": 1, "completion": [FIVE]}]},
    {"question": "2 + 2?", "solutions": [{"text": "4", "correct": True}, {"text": "5", "correct": False}]},
    {"prompt": "2 + 2?", "chosen": ["4", "5"], "rejected": ["6"]},
    {"prompt": "2 + 2?", "responses": [FOUR, FIVE], "ranks": [0, 1], "scores": [1, 0.5]},
    {"prompt": "2 + 2?", "response": "4", "helpfulness": 4, "scores": {"safety": 1}},
    {"prompt": "2 + 2?", "completions": ["a", "b"], "labels": [True, None]},
    ULTRA,
]
VALUES = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        7,
        0.5,
        math.nan,
        math.inf,
        "",
        " ",
        "a",
        "\n\nHuman: a",
        [],
        {},
        ["a"],
        [None],
        [[]],
        [{}],
        [USER],
    ]
)


def places_of(value, path=()):
    """Yield the path of every part of a nested value."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_of(each, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_row_with_any_other_part_is_a_comparison_or_a_config_error(data):
    row = data.draw(st.sampled_from(VALID_ROWS))
    for _ in range(data.draw(st.integers(1, 2))):
        row = changed(row, data.draw(st.sampled_from(list(places_of(row)))), data.draw(VALUES))
    try:
        found = load_comparisons([row])
    except ConfigError:
        return
    (comparison,) = found.comparisons
    assert comparison.ranks is None or all(map(math.isfinite, comparison.ranks))
    assert comparison.margin is None or math.isfinite(comparison.margin)
    inspect_comparisons(found)
