import pytest
from reward_servers import RewardApp, serve


@pytest.fixture
def app():
    return RewardApp()


@pytest.fixture
def url(app):
    with serve(app) as address:
        yield address
