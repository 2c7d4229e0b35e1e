"""Turns of a policy for tests: real groups, random trees, and their log-probabilities by the plain forward."""

import conftest
import numpy as np
import torch
from hypothesis import strategies as st

from gym_rm.generation.completions import Completion
from gym_rm.policy.rollouts import RolloutTurn


def turn(prompt, completion):
    ids = np.array(completion, dtype=np.int32)
    sampled = Completion(ids, np.zeros(len(ids), np.float32), True, "")
    return RolloutTurn(prompt=np.array(prompt, dtype=np.int32), completion=sampled, reward=0.0)


def gsm8k_turns(tokenizer, *, problems, length, first=0):
    """Return the turns of GSM8K problems with their graded answers, cut at a length, and the group of each."""
    turns, groups = [], []
    for group, row in enumerate(conftest.rows("gsm8k_graded")[first : first + problems]):
        question = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for solution in row["solutions"]:
            ids = tokenizer(solution["text"], add_special_tokens=False)["input_ids"][:length]
            turns.append(turn(prompt, ids))
            groups.append(group)
    return turns, groups


@st.composite
def random_turns(draw):
    """Return turns of random trees: groups of one prompt, duplicates, replies that share a start, further turns."""
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    turns, groups = [], []
    for group in range(draw(st.integers(1, 3))):
        prompt = random.integers(5, 350, random.integers(1, 15))
        for _ in range(draw(st.integers(1, 4))):
            reply = random.integers(5, 350, random.integers(1, 10))
            if groups and groups[-1] == group and draw(st.booleans()):
                before = turns[-1].completion.token_ids
                reply = np.concatenate([before[: random.integers(0, len(before) + 1)], reply[: random.integers(1, 10)]])
            copies = draw(st.integers(1, 2))
            turns += [turn(prompt, reply)] * copies
            groups += [group] * copies
        if draw(st.booleans()):  # another turn after the last reply
            seen = np.concatenate([prompt, reply, random.integers(5, 350, 3)])
            turns.append(turn(seen, random.integers(5, 350, random.integers(1, 10))))
            groups.append(group)
    return turns, groups


def plain(model, each, temperature=1.0):
    """Return the log-probabilities and the entropies of one turn, by the model's own forward and log_softmax."""
    ids = torch.from_numpy(np.concatenate([each.prompt, each.completion.token_ids]).astype(np.int64))[None]
    count = len(each.completion.token_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1].float() / temperature
    log_probs = logits.log_softmax(dim=1)
    return log_probs.gather(1, ids[0, -count:, None])[:, 0], -(log_probs.exp() * log_probs).sum(dim=1)


def factors(turns):
    """Return random factors of the log-probabilities and of the entropies of each turn: gradients of a loss."""
    random = np.random.default_rng(0)
    return [random.standard_normal((2, len(each.completion.token_ids))).astype(np.float32) for each in turns]


def plain_loss(model, turns, temperature=1.0):
    total = torch.zeros(())
    for each, (first, second) in zip(turns, factors(turns), strict=True):
        log_probs, entropy = plain(model, each, temperature)
        total = total + (log_probs * torch.from_numpy(first) + entropy * torch.from_numpy(second)).sum()
    return total


def batched_loss(policy, batches, turns):
    total = torch.zeros(())
    for batch in batches:
        log_probs, entropy = policy(batch)
        chosen = factors(turns)
        first, second = (torch.from_numpy(np.concatenate([chosen[turn][k] for turn in batch.turns])) for k in (0, 1))
        total = total + (log_probs * first + entropy * second).sum()
    return total


def gradients(loss, model):
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def difference(got, expected):
    """Return the largest difference of gradients, relative to the largest gradient."""
    assert got.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(float((got[name] - expected[name]).abs().max()) for name in expected) / largest
