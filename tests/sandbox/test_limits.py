import pytest

from gym_rm.errors import ConfigError
from gym_rm.sandbox import SandboxLimits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_seconds", 0),
        ("wall_seconds", float("nan")),
        ("cpu_seconds", 1.5),
        ("memory_bytes", 1),
        ("cpu_seconds", True),
    ],
)
def test_values_that_limit_nothing_or_everything_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} of the sandbox must be"):
        SandboxLimits(**{name: value})
