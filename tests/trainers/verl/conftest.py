import pytest
from recording import RecordingScorer


@pytest.fixture
def recorder():
    return RecordingScorer()
