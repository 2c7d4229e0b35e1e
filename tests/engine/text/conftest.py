import logging

import pytest

from gym_rm.errors import warn_once


@pytest.fixture
def warnings(caplog):
    """Log records of this test. `warn_once` is reset, so that earlier tests do not hide its warnings."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "gym_rm")
    return caplog
