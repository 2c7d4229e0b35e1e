import subprocess
from types import SimpleNamespace

import huggingface_hub
import pytest

from gym_rm.cli import real_models
from gym_rm.errors import ConfigError


@pytest.fixture
def offline(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    failed = SimpleNamespace(returncode=1, stderr="no index")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)


def test_a_folder_in_the_cache_is_used_again(offline, tmp_path):
    folder = tmp_path / "all-MiniLM-L6-v2"
    folder.mkdir()
    (folder / "recipe").write_text(real_models.MODELS["minilm"][1])
    assert real_models.fetch("minilm", tmp_path) == folder


def test_without_a_network_the_error_says_what_was_tried_and_nothing_is_left(offline, tmp_path):
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    (folder / "recipe").write_text("an older one")
    with pytest.raises(ConfigError, match=r"pass the folder of a model\.\nhub: .*no route\npackage index: no index"):
        real_models.fetch("smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
