import pytest
from conftest import rows as raw

from gym_rm.errors import ConfigError
from gym_rm.evaluation.audit_rows import AuditRow, load_audit_rows, other_replies
from gym_rm.types import Prompt
from tests import real_data


def row(good, bad=(), answer=None):
    user = {"role": "user", "content": f"What is {good}?"}
    return AuditRow(Prompt((user,), "p", answer=answer), (user,), good, bad)


@pytest.mark.data
def test_a_pair_is_audited_by_its_chosen_reply():
    found = load_audit_rows(real_data.FOLDER / "rewardbench_slice.jsonl.gz", limit=300)
    rows = {each["prompt"]: each for each in raw("rewardbench_slice")}
    assert len(found.rows) > 250
    for each in found.rows[:50]:
        source = rows[each.messages[0]["content"]]
        assert each.good == (source["chosen"],)
        assert each.bad == (source["rejected"],)


@pytest.mark.data
def test_right_solutions_are_good_and_wrong_ones_bad():
    found = load_audit_rows(real_data.FOLDER / "gsm8k_graded.jsonl.gz", limit=1000)
    rows = {each["question"]: each for each in raw("gsm8k_graded")}
    assert len(found.rows) + found.dropped == 658
    for each in found.rows:
        solutions = {one["text"]: one["correct"] for one in rows[each.messages[0]["content"]]["solutions"]}
        assert all(solutions[text] for text in each.good)
        assert not any(solutions[text] for text in each.bad)
        assert 1 <= len(each.bad) <= len(each.good)
        assert each.prompt.answer == rows[each.messages[0]["content"]]["answer"]


def test_the_embedded_prompts_have_right_answers_in_four_wordings():
    for each in load_audit_rows(limit=5).rows:
        assert len(each.good) == 4
        assert all(each.prompt.answer in text for text in each.good)


def test_an_assistant_turn_at_the_end_is_the_reply():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    (found,) = load_audit_rows([{"messages": messages}]).rows
    assert found.good == ("It is 4.",)
    assert list(found.messages) == messages[:1]


def test_the_sample_has_the_limit_and_depends_on_the_seed():
    samples = [load_audit_rows(limit=50, seed=seed).rows for seed in (0, 0, 1)]
    assert {len(sample) for sample in samples} == {50}
    assert samples[0] == samples[1] != samples[2]


def test_rows_without_a_reply_are_an_error_that_says_what_is_expected():
    with pytest.raises(ConfigError, match=r"no row with a good reply to audit\. Expected 'chosen' and 'rejected'"):
        load_audit_rows([{"prompt": "Hello?"}])


def test_ties_are_counted_and_not_audited():
    rows = [
        {"prompt": "a?", "completions": [{"rank": 0, "completion": "x"}, {"rank": 0, "completion": "y"}]},
        {"prompt": "b?", "chosen": "x", "rejected": "y"},
    ]
    found = load_audit_rows(rows)
    assert (len(found.rows), found.dropped) == (1, 1)


def test_the_other_reply_has_another_answer():
    rows = [row(("It is 4.",), answer="4"), row(("That is 4.",), answer="4"), row(("It is 5.",), answer="5")]
    assert other_replies(rows) == [("It is 5.",), ("It is 5.",), ("It is 4.",)]


def test_another_reply_to_the_same_question_is_not_a_worse_one():
    user = {"role": "user", "content": "2 + 2?"}
    rows = [AuditRow(Prompt((user,), "p"), (user,), (text,)) for text in ("It is 4.", "Four.")]
    assert other_replies(rows) == [(), ()]
