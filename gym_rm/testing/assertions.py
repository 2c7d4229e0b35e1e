"""What all checks do with the exceptions of what they check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

from gym_rm.errors import brief

Arguments = ParamSpec("Arguments")


def asserting(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Let a check raise an AssertionError for any exception of what it checks."""

    @functools.wraps(check)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{check.__name__}: an exception that nothing expects, {brief(error)}") from error

    return checked
