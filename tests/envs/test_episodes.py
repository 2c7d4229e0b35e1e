import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.envs.episodes import DialogueRules, Episode, PromptOrder
from gym_rm.types import Prompt


def episode(*user_turns):
    prompt = Prompt(({"role": "user", "content": "hi"},), "greeting", user_turns)
    return Episode(prompt, 0, list(prompt.messages))


def order(num_prompts, seed=0, num_readers=1):
    return PromptOrder(num_prompts, np.random.default_rng(seed), num_readers=num_readers)


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 4))
def test_every_epoch_holds_every_prompt_once(num_prompts, seed, epochs):
    walk = order(num_prompts, seed)
    for _ in range(epochs):
        assert sorted(walk.next()[1] for _ in range(num_prompts)) == list(range(num_prompts))


def test_epochs_differ_and_equal_seeds_agree():
    first, second = order(50), order(50)
    epochs = [[first.next()[1] for _ in range(50)] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert epochs[0] == [second.next()[1] for _ in range(50)]


def test_every_order_is_equally_likely():
    counts = {}
    generator = np.random.default_rng(0)
    for _ in range(6000):
        walk = PromptOrder(3, generator)
        key = tuple(walk.next()[1] for _ in range(3))
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())  # 1,000 expected, standard deviation 29


@given(st.lists(st.integers(0, 2), max_size=60))
def test_readers_walk_the_same_order_at_their_own_pace(reads):
    walk, alone = order(5, num_readers=3), order(5)
    expected = [alone.next() for _ in range(len(reads) + 1)]
    taken = [0, 0, 0]
    for reader in reads:
        assert walk.next(reader) == expected[taken[reader]]
        taken[reader] += 1


def test_only_what_a_slow_reader_still_needs_is_kept():
    walk = order(1000, num_readers=2)
    for _ in range(500):
        walk.next(0)
        walk.next(1)
    assert not walk._waiting


def test_aligned_readers_go_on_together():
    walk = order(10, num_readers=2)
    for _ in range(3):
        walk.next(0)
    walk.align()
    assert walk.next(0) == walk.next(1)
    assert not walk._waiting


def test_an_order_survives_pickling():
    walk = order(10)
    walk.next()
    twin = pickle.loads(pickle.dumps(walk))
    assert [walk.next() for _ in range(20)] == [twin.next() for _ in range(20)]


def test_a_scripted_user_ends_the_conversation_when_the_script_ends():
    rules, conversation = DialogueRules(), episode("and?")
    turn = rules.turn(conversation, "one")
    assert (turn.user, turn.terminated, turn.truncated) == ("and?", False, False)
    rules.commit(conversation, turn)
    turn = rules.turn(conversation, "two")
    assert (turn.user, turn.terminated, turn.truncated) == (None, True, False)
    assert [message["content"] for message in turn.messages] == ["hi", "one", "and?", "two"]


def test_a_turn_changes_nothing_until_it_is_committed():
    conversation = episode("and?")
    DialogueRules().turn(conversation, "one")
    assert conversation == episode("and?")


def test_what_was_scored_is_not_touched_afterwards():
    rules, conversation = DialogueRules(), episode("and?")
    turn = rules.turn(conversation, "one")
    rules.commit(conversation, turn)
    assert [message["content"] for message in turn.messages] == ["hi", "one"]
    assert [message["content"] for message in conversation.messages] == ["hi", "one", "and?"]


@pytest.mark.parametrize(
    ("user_turns", "max_turns", "terminated", "truncated"),
    [((), None, True, False), ((), 1, True, False), (("more?",), 1, False, True), (("more?",), 2, False, False)],
)
def test_the_turn_limit_truncates_a_user_who_would_go_on(user_turns, max_turns, terminated, truncated):
    turn = DialogueRules(max_turns=max_turns).turn(episode(*user_turns), "reply")
    assert (turn.terminated, turn.truncated) == (terminated, truncated)
    assert turn.messages[-1] == {"role": "assistant", "content": "reply"}


@pytest.mark.parametrize(("reply", "truncated"), [("x" * 5, False), ("x" * 6, True)])
def test_an_over_long_reply_truncates_and_stays_whole(reply, truncated):
    turn = DialogueRules(max_reply_length=5).turn(episode("more?"), reply)
    assert turn.truncated is truncated
    assert turn.messages[-1]["content"] == reply
    assert turn.user == (None if truncated else "more?")


def test_an_over_long_last_reply_is_terminated_and_truncated():
    turn = DialogueRules(max_reply_length=1).turn(episode(), "xx")
    assert (turn.terminated, turn.truncated) == (True, True)


def test_respond_takes_the_place_of_the_script():
    rules = DialogueRules(respond=lambda conversation: f"{len(conversation)} so far" if len(conversation) < 4 else None)
    conversation = episode("never said")
    turn = rules.turn(conversation, "one")
    assert turn.user == "2 so far"
    rules.commit(conversation, turn)
    assert rules.turn(conversation, "two").terminated


def test_respond_cannot_change_the_conversation():
    def respond(conversation):
        conversation[0]["content"] = "changed"
        return None

    conversation = episode()
    turn = DialogueRules(respond=respond).turn(conversation, "one")
    assert turn.messages[0]["content"] == "hi"
