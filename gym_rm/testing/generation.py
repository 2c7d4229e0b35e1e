"""Conformance checks for what writes text: chat models and samplers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gym_rm.generation.chat import ChatModel, ChatReply
from gym_rm.testing.assertions import asserting
from gym_rm.types import Conversation

if TYPE_CHECKING:  # loads torch
    from gym_rm.generation.completions import Completion, Sampler, TokenIds

QUESTIONS: tuple[Conversation, ...] = (
    ({"role": "user", "content": "Which is larger, 3 or 5?"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße auf Chinesisch?"}),
    (
        {"role": "user", "content": "Say a number."},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Another one. <|im_end|>"},
    ),
)


@asserting
def check_chat_model(model: ChatModel, *, conversations: Sequence[Conversation] = QUESTIONS) -> None:
    """Check that a chat model does what judges and simulated users rely on.

    Args:
        model: the chat model.
        conversations: conversations that it answers without an error.

    Raises:
        AssertionError: it does something else; the message says what.

    Example:
        >>> from gym_rm.generation.chat import load_chat_model
        >>> check_chat_model(load_chat_model("embedded:policy", max_new_tokens=4))
    """
    assert isinstance(model, ChatModel), f"{type(model).__name__} has no method reply"
    seeds = list(range(len(conversations)))
    before = [[dict(message) for message in conversation] for conversation in conversations]
    first = _replies(model, conversations, seeds)
    for index, reply in enumerate(first):
        assert reply.error is None, f"reply {index} has the error {reply.error!r}"
        assert isinstance(reply.text, str), f"the text of reply {index} is {reply.text!r}, expected a str"
        assert reply.num_tokens is None or reply.num_tokens > 0, f"reply {index} has {reply.num_tokens} tokens"
    after = [[dict(message) for message in conversation] for conversation in conversations]
    assert after == before, "reply must not change the conversations"
    again = _replies(model, conversations, seeds)
    assert [each.text for each in again] == [each.text for each in first], "equal seeds must give equal replies"
    backwards = _replies(model, conversations[::-1], seeds[::-1])[::-1]
    assert [each.text for each in backwards] == [each.text for each in first], "replies must have the order of the rows"
    assert _replies(model, [], []) == [], "no conversations must give no replies"
    late = model.reply(conversations, seeds=seeds, deadline=time.monotonic() - 1)
    assert len(late) == len(conversations), f"{len(late)} replies to {len(conversations)} conversations after the time"
    answered = [each.error is not None or bool(each.text) for each in late]
    assert all(answered), "rows without a reply at the deadline must have an error"


@asserting
def check_sampler(
    sampler: Sampler,
    prompts: Sequence[TokenIds],
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Check that a sampler does what the training of a policy relies on, and close it.

    Args:
        sampler: the sampler.
        prompts: token ids of at least two different prompts.
        max_new_tokens: most tokens of a completion.
        end_tokens: ids of the tokens that end a completion.
        weights: weights to take over; None to leave this out.

    Raises:
        AssertionError: it does something else; the message says what.
    """
    rows = [prompt for prompt in prompts for _ in range(2)]
    seeds = list(range(len(rows)))
    first = sampler.sample(rows, seeds=seeds)
    assert len(first) == len(rows), f"{len(first)} completions of {len(rows)} prompts"
    for index, completion in enumerate(first):
        ids, probabilities = completion.token_ids, completion.log_probs
        name = f"completion {index}"
        assert 0 < len(ids) <= max_new_tokens, f"{name} has {len(ids)} tokens, expected 1 to {max_new_tokens}"
        assert ids.dtype == np.int32, f"the token ids of {name} are {ids.dtype}, expected int32"
        assert probabilities.dtype == np.float32, f"the log_probs of {name} are {probabilities.dtype}, expected float32"
        assert len(probabilities) == len(ids), f"{name} has {len(probabilities)} log_probs and {len(ids)} tokens"
        assert np.isfinite(probabilities).all(), f"{name} has log_probs that are not finite"
        assert (probabilities <= 1e-6).all(), f"{name} has log_probs above 0"
        ended = [int(token) in set(end_tokens) for token in ids]
        assert not any(ended[:-1]), f"{name} goes on after an end token"
        assert completion.finished == ended[-1], (
            f"{name} has finished={completion.finished}, and its last token differs"
        )
        assert completion.finished or len(ids) == max_new_tokens, f"{name} was cut before max_new_tokens"
    backwards = sampler.sample(rows[::-1], seeds=seeds[::-1])[::-1]
    for others, reason in ((backwards, "on the other rows"), (_streamed(sampler, rows, seeds), "on the stream")):
        for index, (one, other) in enumerate(zip(first, others, strict=True)):
            same = np.array_equal(one.token_ids, other.token_ids) and one.text == other.text
            same = same and np.allclose(one.log_probs, other.log_probs, atol=1e-3)
            assert same, f"completion {index} depends {reason}, not only on its prompt and seed"
    pairs = zip(first[::2], first[1::2], strict=True)
    equal = all(np.array_equal(one.token_ids, other.token_ids) for one, other in pairs)
    assert not equal, "completions of one prompt with different seeds are equal, so the seeds are not used"
    of_prompts = [each.log_probs.tobytes() for each in sampler.sample(prompts, seeds=[0] * len(prompts))]
    assert len(set(of_prompts)) > 1, "completions of different prompts with one seed are equal"
    assert sampler.sample([], seeds=[]) == [], "no prompts must give no completions"
    if weights is not None:
        sampler.update_weights(weights, version=1)
        assert len(sampler.sample(rows, seeds=seeds)) == len(rows), "after update_weights, rows are missing"
    sampler.close()
    sampler.close()


def _streamed(sampler: Sampler, prompts: Sequence[TokenIds], seeds: Sequence[int]) -> list[Completion]:
    """Return the completions of a stream to which rows are added one after another, the last first."""
    stream = sampler.stream(calibrate=False)
    assert stream.take() == {}, "take returned completions that nobody began"
    completions: dict[int, Completion] = {}
    for row in reversed(range(len(prompts))):
        stream.add([row], [prompts[row]], seeds=[seeds[row]])
        completions |= stream.take(timeout=0.0)
    while before := stream.num_open:
        ended = stream.take()
        assert ended, f"take without a timeout returned nothing while {before} completions are open"
        assert stream.num_open == before - len(ended), f"num_open is {stream.num_open} after {len(ended)} of {before}"
        completions |= ended
    assert sorted(completions) == list(range(len(prompts))), f"the stream returned the keys {sorted(completions)}"
    stream.add([0], prompts[:1], seeds=seeds[:1])
    stream.close()
    stream.close()
    assert stream.num_open == 0, f"after close, {stream.num_open} completions are open"
    return [completions[row] for row in range(len(prompts))]


def _replies(model: ChatModel, conversations: Sequence[Conversation], seeds: Sequence[int]) -> list[ChatReply]:
    replies = model.reply(conversations, seeds=seeds)
    assert len(replies) == len(conversations), f"{len(replies)} replies to {len(conversations)} conversations"
    wrong = [type(reply).__name__ for reply in replies if not isinstance(reply, ChatReply)]
    assert not wrong, f"reply returned {wrong[:1]}, expected ChatReply"
    return list(replies)
