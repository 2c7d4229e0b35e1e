import logging

import pytest

from gym_rm.errors import warn_once


@pytest.fixture
def warnings(caplog):
    """What was warned of in this test, whatever was said before."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "gym_rm")
    return caplog
