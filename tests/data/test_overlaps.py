import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.data.comparisons import load_comparisons
from gym_rm.data.overlaps import PromptSet, find_overlap, load_prompt_set, normal_text, prompts_of
from gym_rm.errors import ConfigError

STORY = "Janet's ducks lay sixteen eggs per day and she eats three of them for breakfast every single morning."


def prompts(name, *texts):
    rows = enumerate(texts, start=1)
    return PromptSet(name, tuple((f"{name} line {k}", ({"role": "user", "content": text},)) for k, text in rows))


def test_equal_prompts_are_found_in_spite_of_case_and_white_space():
    found = find_overlap(prompts("train", "What is 2 + 2?", "another"), prompts("test", "new", "  what IS\n2 + 2? "))
    assert (found.equal, found.near, found.examples) == (1, 0, (("train line 1", "test line 2"),))


@given(words=st.lists(st.sampled_from(STORY.split()), min_size=30, max_size=60), place=st.integers(0, 29))
def test_a_long_prompt_with_one_other_word_is_nearly_equal(words, place):
    words = [f"{word}{index}" for index, word in enumerate(words)]
    changed = [*words[:place], "another", *words[place + 1 :]]
    found = find_overlap(prompts("a", "new", " ".join(words)), prompts("b", " ".join(changed)))
    assert (found.equal, found.near, found.examples) == (0, 1, (("a line 2", "b line 1"),))


@pytest.mark.parametrize("other", ["", "a", STORY[::-1], " ".join(STORY.split()[:12]) + " in a barn."])
def test_other_prompts_are_not_reported(other):
    found = find_overlap(prompts("train", STORY), prompts("test", other))
    assert (found.equal, found.near, found.examples) == (0, 0, ())


def test_a_set_of_prompts_may_have_replies_or_not(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"question": "2 + 2?", "answer": "4"}, {"prompt": "3 + 3?", "chosen": "6", "rejected": ""}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = load_prompt_set(path, name="test")
    assert [normal_text(messages) for _, messages in found.prompts] == ["2 + 2?", "3 + 3?"]
    ours = prompts_of(load_comparisons([{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}], name="train"))
    assert find_overlap(ours, found).equal == 1


def test_a_row_without_a_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"against\[0\]: no replies to compare"):
        load_prompt_set([{"text": "a"}], name="test")
