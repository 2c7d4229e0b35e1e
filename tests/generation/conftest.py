"""CUDA graphs on a CPU, for the tests of this folder."""

import pytest
from generation.cpu_graphs import on_the_cpu


@pytest.fixture
def cpu_graphs(monkeypatch):
    return on_the_cpu(monkeypatch)
