"""Ceilings: lines of the package by room, lines of the tests, words of the pages.

What is here is read by people. A change that needs more room takes out as much, or raises a ceiling in a commit of its
own that says what the lines buy.
"""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = {
    "top": 2_380,
    "adapters": 1_230,
    "cli": 1_855,
    "data": 2_670,
    "engine": 12_510,
    "envs": 3_480,
    "evaluation": 4_155,
    "generation": 1_830,
    "http_client": 420,
    "planning": 5_950,
    "policy": 2_870,
    "reports": 2_820,
    "sandbox": 1_630,
    "scorers": 8_995,
    "server": 1_725,
    "testing": 900,
    "training": 2_400,
}
"""Lines of a folder of `gym_rm/`, of its own files for `top`; `assets` are not counted."""

TESTS = 55_720
"""Lines of `tests/`."""

PAGES = 23_400
"""Words of `docs/` outside fenced code and comments."""


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def words(page: Path) -> int:
    prose = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    return len(prose.split())


def test_no_room_of_the_package_is_above_its_ceiling():
    found: Counter[str] = Counter()
    for path in (ROOT / "gym_rm").rglob("*.py"):
        room = path.relative_to(ROOT / "gym_rm").parts[0]
        if room != "assets":
            found["top" if room.endswith(".py") else room] += lines(path)
    assert not {room: (count, ROOMS.get(room)) for room, count in found.items() if count > ROOMS.get(room, 0)}


def test_the_tests_are_below_their_ceiling():
    assert sum(map(lines, (ROOT / "tests").rglob("*.py"))) <= TESTS


def test_the_pages_are_below_their_ceiling():
    assert sum(map(words, (ROOT / "docs").rglob("*.md"))) <= PAGES
