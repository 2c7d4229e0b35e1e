import pytest

from gym_rm.errors import ConfigError
from gym_rm.sandbox import Sandbox


@pytest.mark.parametrize(
    "limits",
    [
        {"wall_seconds": 0},
        {"wall_seconds": float("nan")},
        {"cpu_seconds": 1.5},
        {"memory_bytes": 1},
        {"cpu_seconds": True},
        {"memory": 1 << 30},
    ],
)
def test_values_that_limit_nothing_or_everything_are_refused(limits):
    (name,) = limits
    with pytest.raises(ConfigError, match=name):
        Sandbox(limits=limits)
