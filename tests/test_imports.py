"""The floors: a file imports from its own floor or from below, never from above, and never in a circle."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gym_rm"

# A folder stands for every file in it that is not named itself.
FLOORS = {
    "types": 0,
    "errors": 0,
    "scores": 0,
    "checks": 0,
    "config": 1,
    "scorer": 1,
    "data": 1,
    "engine/token_tree": 1,
    "engine/text": 1,
    "engine/kinds": 2,
    "engine/backbones": 2,
    "engine/loading": 2,
    "engine/executors": 3,
    "engine/schedule": 3,
    "engine": 4,
    "scorers": 4,
    "envs": 5,
    "training": 5,
    "reports": 5,
    "testing": 5,
    "server": 6,
    "adapters": 6,
    "cli": 6,
    "__init__": 6,
    "__main__": 6,
}


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts]


def name_of(path: Path) -> str:
    """`engine/kinds/decoder` for a file, `engine/kinds` for the `__init__` of a folder."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    folder = relative.name == "__init__" and len(relative.parts) > 1
    return (relative.parent if folder else relative).as_posix()


def floor_of(name: str) -> int:
    parts = name.split("/")
    known = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(FLOORS[prefix] for prefix in known if prefix in FLOORS)


@functools.cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in sources()}


@functools.cache
def imported(name: str) -> frozenset[str]:
    """Files of gym_rm that a file imports when it runs; imports for type checking alone do not count."""
    tree = ast.parse(modules()[name].read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import on line {node.lineno}"
            # `from gym_rm.engine import text` names a file, `from gym_rm.types import Scores` does not.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    ours = {each.removeprefix("gym_rm").removeprefix(".").replace(".", "/") or "__init__" for each in found
            if each.split(".")[0] == "gym_rm"}  # fmt: skip
    if "__init__" in ours and any("/" not in each and each in modules() for each in ours - {"__init__"}):
        ours.discard("__init__")  # `from gym_rm import scorer` wants the file
    return frozenset(ours & modules().keys() - {name})


def test_every_file_has_a_floor():
    for name in modules():
        assert floor_of(name) >= 0


def test_every_floor_is_of_a_file_that_exists():
    assert not [name for name in FLOORS if name not in modules() and not (PACKAGE / name).is_dir()]


def test_imports_point_down():
    upward = [
        f"{name} imports {other}" for name in modules() for other in imported(name) if floor_of(other) > floor_of(name)
    ]
    assert not upward


def test_no_circles_between_files():
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in finished:
            for other in imported(name):
                visit(other, (*trail, name))
            finished.add(name)

    for name in modules():
        visit(name, ())


def test_the_adapters_stand_apart():
    """One file per library: what two of them share is a room's of its own."""
    shared = {"adapters"}
    for name in modules():
        if name.startswith("adapters/"):
            assert not {each for each in imported(name) if each.startswith("adapters/")} - shared, name


def test_nothing_is_called_utils():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in {"utils", "common", "helpers", "util", "misc"}]


def test_import_loads_no_torch():
    code = "import sys, gym_rm; assert not {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
