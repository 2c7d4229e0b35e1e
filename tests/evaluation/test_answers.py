import pytest

from gym_rm.evaluation.answers import is_right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        *[("The final score was 3-5", "5", True), ("The final score was 3-5", "-5", False), ("It is -5.", "-5", True)],
        *[
            ("x=-5", "-5", True),
            ("5 - 3 = 2", "2", True),
            ("It is .5", "0.5", True),
            ("It costs $1,234.", "1234", True),
        ],
        *[("Ask Nan.", "Nan", True), ("Ask Ann.", "Nan", False), ("It is Inf", "inf", True), ("Nancy", "Nan", False)],
        *[("5 or 6", "5", False), ("no number", "5", False)],
    ],
)
def test_a_number_must_be_the_last_and_any_other_answer_a_word(completion, answer, right):
    assert is_right(completion, answer) is right
