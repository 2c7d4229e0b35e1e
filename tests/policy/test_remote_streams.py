"""Completions that come as they end, of a server."""

import signal
import threading
import time

import pytest

pytest.importorskip("httpx")

from generation.sampled_models import prompts

from gym_rm.errors import ConfigError, RemoteError
from tests.policy import test_remote_sampler
from tests.policy.test_remote_sampler import trainer

engine, connect = test_remote_sampler.engine, test_remote_sampler.connect


def of(completion):
    return completion.token_ids.tolist(), completion.log_probs.tolist(), completion.finished, completion.text


def until(condition):
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def gated(engine, connect):
    """Return a function that begins completions with the seeds 0, 1, ... as rows 10, 11, ..., which wait for gates."""

    def begin(lengths=(5, 7, 9), **options):
        engine.gates = {seed: threading.Event() for seed in range(len(lengths))}
        sampler = connect(temperature=0.8, **options)
        stream = sampler.stream()
        rows = prompts(engine.tokenizer, lengths)
        stream.add([10 + seed for seed in range(len(rows))], rows, seeds=range(len(rows)))
        return sampler, stream, rows

    yield begin
    for gate in engine.gates.values():
        gate.set()


def test_a_stream_hands_completions_over_as_they_end(engine, gated):
    sampler, stream, rows = gated()
    assert stream.take(timeout=0.0) == {}
    engine.gates[2].set()
    taken = [stream.take()]
    stream.add([12], rows[:1], seeds=[5])
    taken.append(stream.take())
    assert [list(each) for each in taken] == [[12], [12]]
    assert stream.num_open == 2
    with pytest.raises(ConfigError, match="a completion of key 11 is open"):
        stream.add([11], rows[:1], seeds=[5])
    for gate in engine.gates.values():
        gate.set()
    while stream.num_open:
        taken.append(stream.take())
    assert stream.take() == {}
    expected = sampler.sample([rows[2], rows[0], rows[0], rows[1]], seeds=[2, 5, 0, 1])
    rest = taken[2] | taken[-1]
    assert [of(each) for each in (taken[0][12], taken[1][12], rest[10], rest[11])] == [of(each) for each in expected]


def test_closing_a_stream_drops_its_connections(engine, gated):
    sampler, stream, rows = gated()
    until(lambda: len(engine.begun) == 3)
    stream.close()
    stream.close()
    assert (stream.num_open, stream.take()) == (0, {})
    until(lambda: sorted(engine.dropped) == [0, 1, 2])
    assert len(sampler.sample(rows, seeds=[3, 4, 5])) == 3


def test_the_first_error_of_a_stream_cancels_the_others(engine, gated):
    _, stream, _ = gated()
    until(lambda: len(engine.begun) == 3)
    engine.faults = [400]
    engine.gates[1].set()
    with pytest.raises(ConfigError, match=r"row 11 \(7 tokens\): http.* refused it: status 400"):
        stream.take()
    assert stream.num_open == 0
    until(lambda: sorted(engine.dropped) == [0, 2])


def test_a_stream_may_be_used_after_an_interrupt(engine, gated):
    _, stream, _ = gated()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            stream.take()
    finally:
        signal.signal(signal.SIGALRM, before)
    for gate in engine.gates.values():
        gate.set()
    completions = {}
    while stream.num_open:
        completions |= stream.take()
    assert sorted(completions) == [10, 11, 12]


@pytest.mark.parametrize("lost", [False, True])
def test_the_last_completion_of_a_stream_comes_with_the_weights_that_the_first_had(engine, gated, lost):
    model, _ = trainer(1)
    sampler, stream, rows = gated()
    for gate in engine.gates.values():
        gate.set()
    sampler.sample(rows, seeds=[0, 1, 2])
    stream.close()
    sampler.update_weights(dict(model.named_parameters()), version=1)
    engine.gates = {1: threading.Event()}
    stream.add([0, 1], rows[:2], seeds=[0, 1])
    (completion,) = stream.take().values()
    assert completion.version == 1
    if lost:
        engine.restart()
    else:
        sampler.update_weights(dict(model.named_parameters()), version=2)
    engine.gates[1].set()
    with pytest.raises(RemoteError, match=r"has weights of version .* instead of '.*version-00000001'"):
        stream.take()
    if lost:
        with pytest.raises(RemoteError, match="it was restarted"):
            stream.add([0], rows[:1], seeds=[0])


def test_a_stream_compares_the_completions_that_ended_first(engine, connect):
    calls = []
    _, calibrate = trainer(0)
    sampler = connect(temperature=0.8, calibrate=lambda *given: calls.append(given) or calibrate(*given))
    rows = prompts(engine.tokenizer, (5,) * 10)
    for compares in (False, True):
        stream = sampler.stream(calibrate=compares)
        stream.add(range(10), rows, seeds=range(10))
        completions = {}
        while stream.num_open:
            completions |= stream.take()
    first = list(completions.values())[:8]
    assert [[of(each) for each in given] for _, given in calls] == [[of(each) for each in first]]
