"""The commands on the page about evaluation print what the page says (written by scripts/make_evaluation_docs.py)."""

import importlib.util
from pathlib import Path

import pytest

from tests import real_data

spec = importlib.util.spec_from_file_location(
    "make_evaluation_docs", Path(__file__).parents[2] / "scripts" / "make_evaluation_docs.py"
)
docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs)

COMMANDS = docs.BLOCK.findall(docs.PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return docs.prepare(tmp_path_factory.mktemp("page"), real_data.FOLDER)


@pytest.mark.data
def test_two_rewards_are_compared_as_the_page_says(folder):
    command, expected = next(each for each in COMMANDS if "-o outputs/two" in each[0])
    assert docs.output_of(command, folder) == expected


@pytest.mark.data
@pytest.mark.slow
def test_all_commands_print_what_the_page_says(folder):
    assert COMMANDS
    for command, expected in COMMANDS:
        assert docs.output_of(command, folder) == expected
