import contextlib
import gc
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_rm.sandbox.values import CrossingError, decode, encode

LIMIT = 1 << 22
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
plain = st.recursive(
    keys | st.complex_numbers(allow_nan=False) | st.text(st.characters(categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner, max_size=5) | st.sets(keys, max_size=5),
    max_leaves=20,
)


def types_of(value):
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(each) for each in value]
    return type(value)


@given(plain)
@settings(deadline=None, max_examples=60)
def test_plain_values_come_back_with_their_types(value):
    back = decode(encode(value, limit=LIMIT))
    assert back == value
    assert types_of(back) == types_of(value)


@given(st.binary() | plain.map(lambda value: encode(value, limit=LIMIT)), st.data())
@settings(deadline=None, max_examples=150)
def test_bytes_of_any_kind_give_a_value_or_a_crossing_error(data, source):
    changed = bytearray(data)
    for _ in range(source.draw(st.integers(0, 3)) if data else 0):
        changed[source.draw(st.integers(0, len(data) - 1))] = source.draw(st.integers(0, 255))
    with contextlib.suppress(CrossingError):
        decode(bytes(changed))


def test_nan_infinities_and_signed_zero_come_back():
    back = decode(encode([math.nan, -math.inf, -0.0], limit=LIMIT))
    assert math.isnan(back[0])
    assert back[1] == -math.inf
    assert math.copysign(1, back[2]) == -1


def test_long_integers_cross_without_the_limit_of_digits():
    assert decode(encode(-(10**100_000), limit=LIMIT)) == -(10**100_000)


def test_subclasses_become_their_base():
    import collections
    import enum

    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    point = collections.namedtuple("point", "x y")
    value = [Text("a"), enum.IntEnum("Color", "RED").RED, collections.Counter("aa"), point(1, 2)]
    back = decode(encode(value, limit=LIMIT))
    assert back == ["a", 1, {"a": 2}, (1, 2)]
    assert [type(each) for each in back] == [str, int, dict, tuple]


def test_other_objects_cannot_cross():
    with pytest.raises(CrossingError, match="type object cannot cross"):
        encode(object(), limit=LIMIT)


def test_size_and_depth_have_limits():
    doubled = [0]
    for _ in range(60):
        doubled = [doubled, doubled]
    with pytest.raises(CrossingError, match="longer than 1000 bytes"):
        encode(doubled, limit=1000)
    loop: list = []
    loop.append(loop)
    with pytest.raises(CrossingError, match="deeper than 100"):
        encode(loop, limit=LIMIT)
    with pytest.raises(CrossingError, match="longer"):
        encode(1 << 10_000_000, limit=1000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"i\xff\xff\xff\xff1",
        b"l\x00\x00\x00\x01" * 101 + b"N",
        b"NN",
        b"S\x00\x00\x00\x02TT",
        b"S\x00\x00\x00\x01l\x00\x00\x00\x00",
        b"s\x00\x00\x00\x01\xff",
        b"l\xff\xff\xff\xff",
        b"l\x00\x20\x00\x00" + b"N" * (1 << 21),
    ],
    ids=["empty", "cut", "deep", "left", "equal keys", "unhashable", "not utf-8", "count", "many items"],
)
def test_bytes_that_are_no_value_are_refused(data):
    with pytest.raises(CrossingError):
        decode(data)


def test_keys_made_to_collide_are_refused_in_linear_time():
    same = [number * ((1 << 61) - 1) for number in range(1, 30_000)]
    data = b"S" + len(same).to_bytes(4, "big") + b"".join(encode(each, limit=LIMIT) for each in same)
    start = time.process_time()
    with pytest.raises(CrossingError, match="one hash"):
        decode(data)
    assert time.process_time() - start < 2.0  # as a set: minutes


def test_the_largest_hostile_reply_is_decoded_quickly():
    gc.disable()  # a collection takes as long as the process has objects of other tests
    try:
        start = time.thread_time()
        decode(b"l\x00\x03\x00\x00" + b"S\x00\x00\x00\x00" * 196_608)
        assert time.thread_time() - start < 1.0
    finally:
        gc.enable()
