import importlib
import re
import sys

import pytest

from gym_rm.errors import GymRMError

NEEDS = {  # adapter: module that it imports, argument of pip install
    "sb3": ("stable_baselines3.common.vec_env", "gym-rm[sb3]"),
    "torchrl": ("torchrl.data", "gym-rm[torchrl]"),
    "rllib": ("ray.tune.registry", "gym-rm[rllib]"),
}


@pytest.mark.parametrize("adapter", NEEDS)
def test_a_missing_library_is_an_import_error_with_the_install_command(adapter, monkeypatch):
    module, install = NEEDS[adapter]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"gym_rm.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"pip install '{install}'")) as caught:
        importlib.import_module(f"gym_rm.adapters.{adapter}")
    assert isinstance(caught.value, GymRMError)


@pytest.mark.parametrize("adapter", ["trl", "verl"])
def test_the_other_adapters_import_no_library(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, adapter, None)
    monkeypatch.delitem(sys.modules, f"gym_rm.adapters.{adapter}", raising=False)
    importlib.import_module(f"gym_rm.adapters.{adapter}")


@pytest.mark.parametrize("module", ["uvicorn", "fastapi", "prometheus_client"])
def test_a_missing_library_of_the_server_is_an_import_error_with_the_install_command(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("gym_rm.server.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=re.escape("pip install 'gym-rm[server]'")) as caught:
        importlib.import_module("gym_rm.server.serve")
    assert isinstance(caught.value, GymRMError)
