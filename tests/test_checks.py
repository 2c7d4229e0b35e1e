"""Objects by name: where they are looked for, and what the errors offer."""

import collections
import multiprocessing
import sys

import numpy as np
import pytest
import torch

from gym_rm.checks import in_order, load_object
from gym_rm.errors import ConfigError
from gym_rm.scorers.load import load_scorer

datasets, pandas, pyarrow = map(pytest.importorskip, ("datasets", "pandas", "pyarrow"))
SOURCE = "def brevity(conversation):\n    return -len(conversation[-1]['content'])\n\ndef politeness(row): ...\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Current folder with `own_rewards.py` and `sub/other_rewards.py`, whose modules are forgotten at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "sub" / "other_rewards.py").write_text("from sibling_of_rewards import scale\n" + SOURCE)
    (tmp_path / "sub" / "sibling_of_rewards.py").write_text("scale = 2\n")
    yield tmp_path
    for name in ("own_rewards", "other_rewards", "sibling_of_rewards"):
        sys.modules.pop(name, None)


def test_a_file_of_the_current_folder_is_one_module_by_any_name(folder):
    found = load_object("respond", "own_rewards:brevity")
    assert load_object("respond", "own_rewards.py:brevity") is found
    assert load_object("respond", f"{folder}/own_rewards.py:brevity") is found


def test_a_file_by_its_path_imports_its_neighbours_and_scores(folder):
    scorer = load_scorer("sub/other_rewards.py:brevity")
    assert scorer.score([[{"role": "assistant", "content": "four"}]]).rewards.tolist() == [-4.0]


def test_another_process_unpickles_a_function_by_its_name(folder):
    function = load_object("respond", "own_rewards.py:brevity")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(function, ([{"content": "four"}],)) == -4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("own_rewards.py", r"write own_rewards.py:brevity \(functions of the file: brevity, politeness\)"),
        ("own_rewards:brevty", "/own_rewards.py has no 'brevty'. Did you mean 'brevity'"),
        ("own_reward:brevity", "No module named 'own_reward' in .*Did you mean 'own_rewards'"),
        ("sub/missing.py:brevity", "there is no file '/.*/sub/missing.py'"),
        ("sub/broken.py:brevity", r"ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
        ("sub/lacks_module.py:brevity", r"No module named 'no_such_library' \(.*lacks_module.py, line 1\)"),
        ("sub/json.py:brevity", r"the name 'json' belongs to another module, '.*json/__init__.py'; rename the file"),
    ],
)
def test_errors_say_where_it_was_looked_for_and_offer_what_was_meant(value, message, folder):
    (folder / "sub" / "broken.py").write_text("x = 1\nx / 0\n")
    (folder / "sub" / "lacks_module.py").write_text("import no_such_library\n")
    (folder / "sub" / "json.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=message):
        load_scorer(value)


def test_a_python_file_in_place_of_a_model_offers_its_functions(folder):
    with pytest.raises(ConfigError, match=r"expected the folder that contains config.json. .* own_rewards.py:brevity"):
        load_scorer({"path": "own_rewards.py"})


TEXTS = ["a", "bb", "ccc"]


@pytest.mark.parametrize(
    "given",
    [
        tuple(TEXTS),
        collections.deque(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pandas.Series(TEXTS, index=[2, 1, 0]),
        pandas.Series(TEXTS, index=["columns", "ndim", "to_pylist"]),
        pandas.Index(TEXTS),
        pandas.Categorical(TEXTS),
        pyarrow.array(TEXTS),
        datasets.Dataset.from_dict({"t": TEXTS})["t"],
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_sequence_is_read_by_position(given):
    assert in_order(given) == TEXTS


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        "abc",
        b"abc",
        {0: "a"},
        {0: "a"}.keys(),
        {0: "a"}.values(),
        {"a"},
        frozenset("a"),
        iter(TEXTS),
        np.array("a"),
        torch.tensor(1),
        pandas.DataFrame({"a": TEXTS}),
        pyarrow.table({"a": TEXTS}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_has_no_positions_is_not_in_order(given):
    assert in_order(given) is None
