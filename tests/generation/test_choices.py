"""Probabilities of a few texts, from a language model whose probabilities are known."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_rm.generation.choices import masses_of, told_masses

TOKENS = ["1", "0", " ", "10", "A", "."]
TEXTS = ["1", "10", "A"]


def chances(seed, before):
    """Return the probabilities of all tokens after some others."""
    weights = np.random.default_rng([seed, *map(TOKENS.index, before)]).exponential(size=len(TOKENS)) ** 3
    return dict(zip(TOKENS, (weights / weights.sum()).tolist(), strict=True))


def probability(seed, tokens):
    return math.prod(chances(seed, tokens[:at])[token] for at, token in enumerate(tokens))


def true_masses(seed):
    """Return the probability of each text, with a space or without, as a tokenizer writes it."""
    written = {("1",): "1", (" ", "1"): "1", ("10",): "10", (" ", "10"): "10", ("A",): "A", (" ", "A"): "A"}
    return masses_of({tokens: (text, probability(seed, tokens)) for tokens, text in written.items()})


@given(seed=st.integers(0, 10**6), top=st.integers(1, len(TOKENS)), length=st.integers(1, 4))
def test_what_a_server_tells_bounds_the_probabilities(seed, top, length):
    told, path = [], []
    for _ in range(length):
        likely = sorted(chances(seed, path).items(), key=lambda each: -each[1])[:top]
        told.append((likely[0][0], {token: math.log(chance) for token, chance in likely}))
        path.append(likely[0][0])
    masses, unknown = told_masses(told, TEXTS)
    rest = {text: mass - masses[text] for text, mass in true_masses(seed).items()}
    assert min(rest.values()) > -1e-12
    assert sum(rest.values()) < unknown + 1e-12


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6, unique=True), st.integers(0, 99))
def test_texts_that_begin_each_other_share_the_probability_once(texts, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(32))
    replies = dict(zip(map("".join, itertools.product("ab", repeat=5)), weights.tolist(), strict=True))
    found = {
        tuple(map(ord, text)): (text, sum(p for each, p in replies.items() if each.startswith(text))) for text in texts
    }
    expected = dict.fromkeys(texts, 0.0)
    for reply, chance in replies.items():
        longest = max((text for text in texts if reply.startswith(text)), key=len, default=None)
        if longest is not None:
            expected[longest] += chance
    assert masses_of(found) == pytest.approx(expected, abs=1e-12)


def test_a_choice_that_goes_on_elsewhere_is_unknown():
    likely = {"2": math.log(0.6), "1": math.log(0.4)}
    assert told_masses([("2", likely)], ["1", "2"]) == ({"1": pytest.approx(0.4), "2": pytest.approx(0.6)}, 0.0)
    masses, unknown = told_masses([("2", likely)], ["1", "10", "2"])
    assert (masses["1"], masses["10"], unknown) == (0.0, 0.0, pytest.approx(0.4))
