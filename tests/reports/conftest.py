import pytest

from tests.reports.example_run import write_run


@pytest.fixture
def folder(tmp_path):
    """A run of 20 steps with answers, measured before, in the middle and after."""
    return write_run(tmp_path / "run")
