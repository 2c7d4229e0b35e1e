import pytest

from gym_rm.documents import parse_json, parse_yaml

LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 2000 + "]" * 2000, "nested more than 100 levels deep"),
        ("[" * 300 + "]" * 300, "nested more than 100 levels deep"),
        ("- " * 3000 + "a", "nested more than 100 levels deep"),
        ("a: &a [*a]", "nested more than 100 levels deep"),
        ("a: &a {b: *a}", "nested more than 100 levels deep"),
        (LAUGHS, "has 1,000,000 values or more, with those of each alias"),
        ("a: !!bool maybe", "a value does not fit its tag"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("a: *b", "found undefined alias 'b' at line 1, column 4"),
        ("a: \x00", "special characters are not allowed"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_cannot_be_walked_or_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["1e400", "[-1e999]", "NaN", "Infinity", "-Infinity", "[" * 101 + "]" * 101, b"\xff"])
def test_json_that_is_not_finite_or_too_deep_is_refused(text):
    with pytest.raises(ValueError, match=r"too large|not a number|nested more than|decode"):
        parse_json(text)
    assert parse_json("[" * 100 + "]" * 100)
