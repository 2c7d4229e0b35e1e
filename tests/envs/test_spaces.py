import copy
import json
import pickle

import gymnasium as gym
import pytest
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from gymnasium.wrappers.utils import create_zero_array
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.envs.spaces import ConversationSpace, ReplySpace, UnicodeText

TEXTS = st.text(max_size=40)  # text() generates no surrogates by default
ROLES = st.text(min_size=1, max_size=10)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": ROLES, "arguments": st.dictionaries(TEXTS, TEXTS | st.integers())}
            )
        },
        optional={"id": TEXTS, "type": st.just("function")},
    ),
    max_size=2,
)
FIELDS = {"tool_calls": CALLS, "reasoning_content": TEXTS, "tool_call_id": TEXTS, "name": TEXTS}
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": TEXTS}, optional=FIELDS)
CONVERSATIONS = st.lists(MESSAGES, max_size=5)
SPACES = [
    UnicodeText(64),
    ConversationSpace(64),
    ReplySpace(64),
    ReplySpace(300, tools=["f", "g"]),
    gym.spaces.Tuple((UnicodeText(64), gym.spaces.Discrete(3))),
    gym.spaces.Dict({"chat": ConversationSpace(64), "note": UnicodeText(64)}),
]
each_space = pytest.mark.parametrize("space", SPACES, ids=repr)
LONE_SURROGATE = "\ud800"


@given(TEXTS)
def test_every_text_up_to_the_maximum_length_is_a_member(text):
    assert text in UnicodeText(40)
    assert text in UnicodeText(len(text))


@pytest.mark.parametrize("value", [LONE_SURROGATE, "a" + LONE_SURROGATE, "x" * 17, b"bytes", 3, None, ["a"]])
def test_invalid_texts_are_not_members(value):
    assert value not in UnicodeText(16)


@given(CONVERSATIONS)
def test_conversations_are_members_as_list_and_as_tuple(conversation):
    space = ConversationSpace(10_000)
    assert conversation in space
    assert tuple(conversation) in space


@pytest.mark.parametrize(
    "value",
    [
        "user: hi",
        {"role": "user", "content": "hi"},
        [{"role": "user"}],
        [{"role": "", "content": "hi"}],
        [{"role": "user", "content": "hi", "weight": 1}],
        [{"role": "user", "content": "hi", "name": None}],
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "now"}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]}],
        [{"role": "user", "content": LONE_SURROGATE}],
        [{"role": "user", "content": None}],
        [("user", "hi")],
        None,
    ],
)
def test_invalid_conversations_are_not_members(value):
    assert value not in ConversationSpace()


@each_space
def test_samples_are_members_and_equal_for_equal_seeds(space):
    one, other = copy.deepcopy(space), copy.deepcopy(space)
    one.seed(7)
    other.seed(7)
    samples = [one.sample() for _ in range(100)]
    assert samples == [other.sample() for _ in range(100)]
    assert all(sample in space for sample in samples)


@pytest.mark.parametrize("space", [UnicodeText(), ConversationSpace()], ids=repr)
@pytest.mark.parametrize("arguments", [{"mask": (3, None)}, {"probability": (3, None)}])
def test_masks_raise_value_error(space, arguments):
    with pytest.raises(ValueError, match="mask and probability must be None for"):
        space.sample(**arguments)


@each_space
def test_copies_and_pickles_are_equal_and_give_the_same_samples(space):
    space = copy.deepcopy(space)
    space.seed(1)
    twins = [copy.deepcopy(space), pickle.loads(pickle.dumps(space))]
    sample = space.sample()
    for twin in twins:
        assert twin == space
        assert twin.sample() == sample


@each_space
def test_samples_survive_json(space):
    samples = [space.sample() for _ in range(10)]
    rebuilt = space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples))))
    assert list(rebuilt) == samples


def test_samples_call_tools_only_if_there_are_some():
    def called(space):
        space.seed(0)
        samples = [space.sample() for _ in range(50)]
        return {call["function"]["name"] for each in samples if isinstance(each, dict) for call in each["tool_calls"]}

    assert called(ReplySpace(300, tools=["f", "g"])) == {"f", "g"}
    assert called(ReplySpace(300)) == called(ReplySpace(20, tools=["f"])) == set()


def test_spaces_are_equal_if_type_and_bounds_are_equal():
    assert UnicodeText(5) == UnicodeText(5)
    assert UnicodeText(5) != UnicodeText(6)
    assert UnicodeText(5) != gym.spaces.Text(5)
    assert ReplySpace(5) == ReplySpace(5)
    assert ReplySpace(5) != ReplySpace(5, tools=["f"])
    assert UnicodeText(5) != ReplySpace(5)
    assert ConversationSpace(5) == ConversationSpace(5)
    assert ConversationSpace(5) != ConversationSpace(6)
    assert ConversationSpace(5) != gym.spaces.Sequence(ConversationSpace(5).feature_space)


@each_space
def test_texts_cannot_be_flattened(space):
    with pytest.raises(NotImplementedError):
        flatten(space, space.sample())


@each_space
def test_batched_samples_are_members_and_differ(space):
    batched = batch_space(space, 4)
    batched.seed(0)
    items = list(iterate(batched, batched.sample()))
    assert len(items) == 4
    assert all(item in space for item in items)
    assert not all(item == items[0] for item in items)


@pytest.mark.parametrize("space", [UnicodeText(), ConversationSpace(), ReplySpace(tools="f")], ids=repr)
def test_batching_is_deterministic_and_equals_gymnasiums(space):
    space.seed(5)
    ours, general = batch_space(space, 5), batch_space.dispatch(gym.Space)(space, 5)
    assert ours == general
    if isinstance(space, UnicodeText):  # Gymnasium also seeds the inner space of a sequence, which is not used here
        assert ours.sample() == general.sample()
    assert batch_space(space, 5).sample() == batch_space(space, 5).sample()


@each_space
def test_concatenate_and_iterate_are_inverse(space):
    samples = [space.sample() for _ in range(3)]
    batch = concatenate(space, samples, create_empty_array(space, 3))
    assert batch in batch_space(space, 3)
    assert create_zero_array(space) in space
    assert list(iterate(batch_space(space, 3), batch)) == samples
