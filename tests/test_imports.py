"""Floors of the package: a file imports only from its own floor or lower floors, and imports are never circular."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gym_rm"

# The floor of a folder applies to all of its files that are not listed separately.
FLOORS = {
    "types": 0,
    "errors": 0,
    "scores": 0,
    "score_columns": 0,
    "checks": 0,
    "plain_values": 0,
    "documents": 0,
    "config": 1,
    "lora_settings": 1,
    "plan_file": 1,
    "scorer": 1,
    "async_calls": 1,
    "data": 1,
    "planning": 1,
    "http_client": 1,
    "engine/debugging": 1,
    "engine/pages": 1,
    "engine/paths": 1,
    "engine/token_tree": 1,
    "engine/batch_planning": 1,
    "engine/text": 1,
    "engine/kernels": 2,
    "engine/kinds": 2,
    "engine/backbones": 2,
    "engine/loading": 2,
    "engine/executors": 3,
    "engine/schedule": 3,
    "engine": 4,
    "generation": 4,
    "sandbox": 4,
    "scorers": 4,
    "envs": 5,
    "training": 5,
    "policy": 5,
    "evaluation": 5,
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
    """Return `engine/kinds/decoder` for a file, and `engine/kinds` for the `__init__` of a folder."""
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
def imported(name: str, *, typing: bool = False) -> frozenset[str]:
    """Return the files of gym_rm that a file imports at runtime, and with `typing` those for type checking too."""
    tree = ast.parse(modules()[name].read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden and not typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import on line {node.lineno}"
            # `from gym_rm.engine import text` imports a file, `from gym_rm.types import Prompt` does not.
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    ours = {each.removeprefix("gym_rm").removeprefix(".").replace(".", "/") or "__init__" for each in found
            if each.split(".")[0] == "gym_rm"}  # fmt: skip
    if "__init__" in ours and any("/" not in each and each in modules() for each in ours - {"__init__"}):
        ours.discard("__init__")  # `from gym_rm import scorer` imports the file scorer.py
    return frozenset(ours & modules().keys() - {name})


def test_every_file_has_a_floor():
    for name in modules():
        assert floor_of(name) >= 0


def test_every_floor_belongs_to_an_existing_file():
    assert not [name for name in FLOORS if name not in modules() and not (PACKAGE / name).is_dir()]


def test_files_import_only_from_their_own_or_lower_floors():
    upward = [
        f"{name} imports {other}" for name in modules() for other in imported(name) if floor_of(other) > floor_of(name)
    ]
    assert not upward


def test_imports_are_not_circular():
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in finished:
            for other in imported(name):
                visit(other, (*trail, name))
            finished.add(name)

    for name in modules():
        visit(name, ())


def test_rooms_are_not_circular():
    rooms = {name: name.split("/")[0] for name in modules() if "/" in name}
    below = {room: set() for room in rooms.values()}
    for name, room in rooms.items():
        below[room] |= {rooms[other] for other in imported(name, typing=True) if other in rooms} - {room}
    finished: set[str] = set()

    def visit(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, " -> ".join((*trail, room))
        for other in below[room] - finished:
            visit(other, (*trail, room))
        finished.add(room)

    for room in below:
        visit(room, ())


def test_adapters_do_not_import_each_other():
    """Code that several adapters share is in `adapters/__init__.py` or in another package."""
    shared = {"adapters"}
    for name in modules():
        if name.startswith("adapters/"):
            assert not {each for each in imported(name) if each.startswith("adapters/")} - shared, name


def test_no_file_is_called_utils():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in {"utils", "common", "helpers", "util", "misc"}]


def test_import_loads_no_torch():
    heavy = {"torch", "transformers", "matplotlib", "pandas", "fastapi", "uvicorn", "ray"}
    code = f"import sys, gym_rm; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
