"""A plain function as a scorer: accepted signatures and the arguments of the call."""

import copy
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm import ConfigError, Prompt, ScoringError, load_scorer
from gym_rm.scorers.function import FunctionScorer
from gym_rm.testing import check_scorer


def said(text):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]


def prompt_of(answer, **fields):
    return Prompt(({"role": "user", "content": "2 + 2?"},), f"asks for {answer}", answer=answer, **fields)


SAID = [said("one"), said("three"), said("")]
PROMPTS = [prompt_of("one"), prompt_of("2"), prompt_of("")]


def length(conversations):
    return [len(conversation[-1]["content"]) for conversation in conversations]


def right(conversations, prompts):
    return [
        float(conversation[-1]["content"] == prompt.answer)
        for conversation, prompt in zip(conversations, prompts, strict=True)
    ]


class Verifier:
    """One reward function in several callable forms."""

    def __call__(self, conversations, prompts):
        return right(conversations, prompts)

    def method(self, conversations, prompts):
        return right(conversations, prompts)


# --- signatures of functions with and without prompts


def scaled(scale, conversations, prompts, *, offset=0.0):
    return [scale * value + offset for value in right(conversations, prompts)]


def keyword_only(conversations, *, prompts):
    return right(conversations, prompts)


def another_name(conversations, rows):
    return right(conversations, rows)


def with_a_default(conversations, prompts=None):
    return right(conversations, prompts)


def after_another_default(conversations, strict=True, prompts=None):
    assert strict is True
    return right(conversations, prompts)


WITH_PROMPTS = {
    "second parameter": right,
    "second parameter of another name": another_name,
    "keyword only": keyword_only,
    "default": with_a_default,
    "default after another one": after_another_default,
    "callable object": Verifier(),
    "bound method": Verifier().method,
    "partial": functools.partial(scaled, 1.0),
}


@pytest.mark.parametrize("form", WITH_PROMPTS)
def test_functions_that_receive_prompts(form):
    scorer = FunctionScorer(WITH_PROMPTS[form])
    assert scorer.score(SAID, PROMPTS).rewards.tolist() == [1, 0, 1]
    assert scorer.score([], []).rewards.shape == (0,)


def takes_more_keywords(conversations, **options):
    assert not options
    return length(conversations)


def has_a_setting(conversations, scale=1.0):
    assert scale == 1.0
    return length(conversations)


def scaled_length(scale, conversations):
    return [scale * value for value in length(conversations)]


class Lengths:
    def __call__(self, conversations):
        return length(conversations)

    def method(self, conversations):
        return length(conversations)


WITHOUT_PROMPTS = {
    "one parameter": length,
    "**kwargs": takes_more_keywords,
    "a setting with a default": has_a_setting,
    "callable object": Lengths(),
    "partial": functools.partial(scaled_length, 1),
    "lambda of any name": lambda c: length(c),
    "builtin": functools.partial(map, lambda conversation: len(conversation[-1]["content"])),
}


@pytest.mark.parametrize("form", WITHOUT_PROMPTS)
def test_functions_that_do_not_receive_prompts(form):
    scorer = FunctionScorer(WITHOUT_PROMPTS[form])
    assert scorer.score(SAID).rewards.tolist() == [3, 5, 0]
    assert scorer.score(SAID, PROMPTS).rewards.tolist() == [3, 5, 0]
    assert scorer.score([]).rewards.shape == (0,)


def no_parameter():
    return []


def one_too_many(conversations, prompts, tokenizer):
    return right(conversations, prompts)


def another_required_keyword(conversations, *, tokenizer):
    return length(conversations)


def only_keywords(*, conversations, prompts):
    return right(conversations, prompts)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (no_parameter, r"\[\]"),
        (one_too_many, r"\['conversations', 'prompts', 'tokenizer'\]"),
        (another_required_keyword, r"\['conversations', 'tokenizer'\]"),
        (only_keywords, r"\['conversations', 'prompts'\]"),
        (lambda **options: [], r"\['options'\]"),
    ],
)
def test_a_function_with_other_parameters_raises_config_error_at_load(function, parameters):
    name = getattr(function, "__qualname__", "")
    with pytest.raises(
        ConfigError, match=r"must take \(conversations\) or .*got the parameters " + parameters
    ) as caught:
        load_scorer(function)
    assert f"the reward function {name}" in str(caught.value)


# --- arguments of the call


def test_a_row_without_a_prompt_has_an_error_if_the_function_requires_prompts():
    with pytest.raises(ScoringError) as caught:
        FunctionScorer(right).score(SAID, [PROMPTS[0], None, PROMPTS[2]])
    assert caught.value.rows == (1,)
    assert caught.value.scores.rewards[[0, 2]].tolist() == [1, 1]
    reason = "the reward function right requires the prompt of this conversation, but it is missing; pass prompts="
    assert caught.value.scores.errors == (None, reason, None)


def test_a_function_that_requires_prompts_is_not_called_without_prompts():
    def crash(conversations, prompts):
        raise AssertionError("called without prompts")

    for prompts in (None, [None] * 3):
        with pytest.raises(ScoringError) as caught:
            FunctionScorer(crash).score(SAID, prompts)
        assert caught.value.rows == (0, 1, 2)


def test_a_function_with_optional_prompts_receives_none_for_missing_prompts():
    seen = []

    def optional(conversations, prompts=None):
        seen.append(prompts if prompts is None else [prompt and prompt.answer for prompt in prompts])
        return length(conversations)

    scorer = FunctionScorer(optional)
    scorer.score(SAID)
    scorer.score(SAID, [PROMPTS[0], None, None])
    assert seen == [None, ["one", None, None]]


@pytest.mark.parametrize("function", [length, right])
def test_the_number_of_prompts_must_equal_the_number_of_conversations(function):
    with pytest.raises(ConfigError, match="prompts must have one entry per conversation, got 2 entries for 3"):
        FunctionScorer(function).score(SAID, PROMPTS[:2])


def test_a_function_may_change_its_arguments():
    def strip(conversations, prompts):
        for conversation, prompt in zip(conversations, prompts, strict=True):
            conversation[-1]["content"] = conversation[-1]["content"].strip()
            del conversation[0]
            prompt.messages[0]["content"] = "other"
            prompt.metadata["seen"] = True
        conversations.reverse()
        prompts.pop()
        return length(reversed(conversations))

    conversations, prompts = [said(" one "), said("a")], [prompt_of("one", metadata={"level": "easy"}), prompt_of("a")]
    before = copy.deepcopy((conversations, prompts))
    assert load_scorer(strip).score(conversations, prompts).rewards.tolist() == [3, 1]
    assert (conversations, prompts) == before


@pytest.mark.parametrize("thing", [None, 3, (one for one in SAID), SAID[0], "text"])
def test_conversations_must_be_a_list_of_conversations(thing):
    with pytest.raises(ConfigError, match="conversations must be a list of conversations, each a list of"):
        load_scorer(length).score(thing)


@given(st.lists(st.tuples(st.text(max_size=3), st.none() | st.text(max_size=3)), max_size=8))
def test_every_row_is_scored_with_its_own_prompt(rows):
    conversations = [said(text) for text, _ in rows]
    prompts = [None if answer is None else prompt_of(answer) for _, answer in rows]
    try:
        scores = FunctionScorer(right).score(conversations, prompts)
    except ScoringError as error:
        scores = error.scores
    assert scores.rewards_or_none() == [None if answer is None else float(text == answer) for text, answer in rows]


# --- the scorer itself


def test_a_verifier_passes_check_scorer():
    check_scorer(FunctionScorer(lambda conversations, prompts: [float(p.answer == "4") for p in prompts]))
    check_scorer(FunctionScorer(right), SAID, PROMPTS)
    check_scorer(FunctionScorer(length))


def test_a_deep_copy_is_the_scorer_itself():
    scorer = FunctionScorer(length)
    assert copy.deepcopy(scorer) is scorer


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (length, "length"),
        (Lengths().method, "Lengths.method"),
        (Lengths(), "Lengths"),
        (functools.partial(length), "length"),
    ],
)
def test_the_provenance_names_the_function(function, name):
    provenance = FunctionScorer(function).score(SAID).provenance
    assert provenance.scorer == "FunctionScorer"
    assert provenance.model == f"{__name__}:{name}"


@pytest.mark.parametrize(
    "function",
    [
        lambda prompts, completions, **columns: [0.0],
        lambda conversations, prompts, /: [0.0],
    ],
)
def test_a_function_whose_prompts_are_not_second_is_refused(function):
    with pytest.raises(ConfigError, match=r"must take \(conversations\) or \(conversations, prompts\)"):
        FunctionScorer(function)


def test_the_user_simulator_of_a_callable_object_is_kept():
    class Verifier:
        def __call__(self, conversations):
            return [1.0] * len(conversations)

        def respond(self, conversations, prompts, scores):
            return [None] * len(conversations)

    verifier = Verifier()
    assert FunctionScorer(verifier).respond == verifier.respond
    assert FunctionScorer(length).respond is None


@pytest.mark.parametrize("function", [length, functools.partial(length), Verifier()])
def test_the_provenance_has_the_module_and_a_digest_of_its_source(function):
    provenance = FunctionScorer(function).score(SAID, PROMPTS).provenance
    assert provenance.model.startswith(f"{__name__}:")
    assert provenance.revision.startswith("sha256:")


def test_a_function_without_a_source_file_has_no_revision():
    namespace = {}
    exec("def reward(conversations): return [1.0]", namespace)
    assert FunctionScorer(namespace["reward"]).score(SAID[:1]).provenance.revision is None
