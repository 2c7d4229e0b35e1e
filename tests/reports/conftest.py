import pytest

from tests.reports.example_run import write_run


@pytest.fixture
def folder(tmp_path):
    """Folder of a run of 20 steps with measurements at steps 0, 10 and 20."""
    return write_run(tmp_path / "run")
